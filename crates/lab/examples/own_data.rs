//! Data of one's own for a model of the library: pictures from memory, trained, evaluated and reported like any other data set.
//!
//! Stripes in noise; which way do they run? The pictures could as well be read from files: the lab asks for bytes and labels.
//!
//! `cargo run --release --example own_data -- [FOLDER]`; the same again goes on with a run that was stopped.

use std::{path::PathBuf, sync::Arc};

use burn::tensor::Device;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use resolvent_lab::{
    Recipe, Result,
    data::{self, PictureDataset, PictureShape, PictureSplit},
    eval, progress,
    report::write_run,
    train::{self, Outcome, Resume, TrainOptions},
};

/// A small vision transformer. A tenth of the training pictures is held out and chooses the best epoch.
pub const RECIPE: &str = "
name = 'stripes'
mechanism = 'infsa'
model = { kind = 'vit', patch = 4, dim = 32, depth = 2, heads = 2, mlp_dim = 64 }
optimiser = { lr = 2e-3 }
schedule = { epochs = 6, batch_size = 32, warmup_epochs = 1 }
regularisation = { hold_out = 0.1 }
";

const DIRECTIONS: [&str; 4] = ["across", "rising", "down", "falling"];
const SHAPE: PictureShape = PictureShape { channels: 1, height: 16, width: 16 };

/// The bytes `[1, height, width]` of picture `number`, whose label is `number % 4`: stripes in one of the directions, at some place and of
/// some width, in noise.
fn picture(number: usize) -> Vec<u8> {
    let mut rng = ChaCha8Rng::seed_from_u64(number as u64);
    let (width, place) = (rng.random_range(2.0..4.0), rng.random_range(0.0..8.0));
    let (sin, cos) = ((number % DIRECTIONS.len()) as f64 * std::f64::consts::FRAC_PI_4).sin_cos();
    let mut value = |row: usize, column: usize| {
        let stripe = ((sin * column as f64 + cos * row as f64 + place) / width).sin();
        (128.0 + 60.0 * stripe + rng.random_range(-60.0..60.0)) as u8
    };
    let places = (0..SHAPE.height).flat_map(|row| (0..SHAPE.width).map(move |column| (row, column)));
    places.map(|(row, column)| value(row, column)).collect()
}

/// The pictures with these numbers.
fn split(numbers: std::ops::Range<usize>) -> data::Result<PictureSplit> {
    let labels = numbers.clone().map(|number| (number % DIRECTIONS.len()) as u32).collect();
    PictureSplit::new(SHAPE, numbers.flat_map(picture).collect(), labels)
}

/// So many pictures to learn from, and to be tested on.
pub fn stripes(train: usize, test: usize) -> Result<PictureDataset> {
    Ok(PictureDataset {
        name: "stripes".into(),
        classes: DIRECTIONS.map(String::from).to_vec(),
        shape: SHAPE,
        train: split(0..train)?,
        validation: None,
        test: split(train..train + test)?,
    })
}

fn main() -> Result<()> {
    let folder = PathBuf::from(std::env::args().nth(1).unwrap_or("runs/own_data".into()));
    let recipe = Recipe::from_toml(RECIPE, "own_data")?;
    let observer = progress::for_stderr(false);
    let options = TrainOptions {
        resume: Resume::IfPresent,
        observer,
        report: Some(Arc::new(write_run)),
        ..TrainOptions::new(&folder)
    };
    if let Outcome::Finished(summary) = train::run(&recipe, &stripes(2000, 400)?, &options)? {
        println!("{}", summary.line());
        // Pictures 3000 to 3999, which it was neither trained nor tested on; their names, classes and shape are the same.
        let (_, evaluation) = eval::run(&folder, &stripes(3000, 1000)?, &Device::flex())?;
        println!("on others: {}", evaluation.metric().words(evaluation.accuracy.unwrap_or_default()));
        println!("the report is {}", folder.join("report.html").display());
    }
    Ok(())
}
