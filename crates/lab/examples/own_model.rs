//! A model and data of one's own, trained by the lab: runs that resume to the same bits, the best epoch, reports, a comparison.
//!
//! The task: a sequence of pairs of a key and a value, then a key alone; what is its value? The model has to look the key up, and learns
//! by itself how sharp its answers are to be: a scalar of its own that the report follows by name.
//!
//! `cargo run --release --example own_model -- [FOLDER]`; the same again goes on with a run that was stopped.

use std::{path::PathBuf, sync::Arc};

use burn::{
    module::{Module, Param},
    nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, loss::CrossEntropyLossConfig},
    tensor::{Device, Int, Tensor, TensorData},
};
use rand::{RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use resolvent::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use resolvent_lab::{
    Recipe, Result,
    checkpoint::DataIdentity,
    compare::{self, CompareOptions, CompareOutcome},
    data::{BatchPlan, Batches},
    evaluation::{Evaluation, Tally},
    progress,
    report::{write_comparison, write_run},
    train::{self, Outcome, Part, Resume, Task, TaskData, TrainOptions, device_of},
};
use serde::Deserialize;

/// The mechanism is any that the library has; `[model]` has whatever fields the model reads.
pub const RECIPE: &str = "
name = 'lookup'
mechanism = 'infsa'
model = { kind = 'own', width = 64, heads = 4 }
optimiser = { lr = 3e-3 }
schedule = { epochs = 8, batch_size = 64, warmup_epochs = 1 }
regularisation = { label_smoothing = 0 }
";

/// Keys, values, and pairs in a sequence.
const SYMBOLS: usize = 8;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sizes {
    width: usize,
    heads: usize,
}

/// Tokens are the sum of a key's and a value's vector; the asked key has value number `SYMBOLS`, which means none.
#[derive(Module, Debug)]
pub struct Lookup {
    keys: Embedding,
    values: Embedding,
    attention: MultiHeadAttention,
    classes: Linear,
    sharpness: Param<Tensor<1>>,
}

impl Lookup {
    /// The logits of the value, `[batch, SYMBOLS]`, for keys and values `[batch, SYMBOLS + 1]`, the asked key last.
    fn forward(&self, [keys, values]: [Tensor<2, Int>; 2]) -> Result<Tensor<2>> {
        let tokens = self.keys.forward(keys) + self.values.forward(values);
        let context = self.attention.try_forward(MhaInput::self_attn(tokens))?.context;
        let logits = self.classes.forward(context.narrow(1, SYMBOLS, 1).squeeze_dim::<2>(1));
        Ok(logits * self.sharpness.val().unsqueeze())
    }
}

/// Keys and values, and the value of the asked key.
pub type Question = ([Vec<i32>; 2], u32);

/// Questions that are generated, each by its number: how many there are to learn from, to watch and to test on.
#[derive(Debug, Clone)]
pub struct Questions(pub [usize; 3]);

impl Questions {
    fn question(number: usize) -> Question {
        let mut rng = ChaCha8Rng::seed_from_u64(number as u64);
        let mut keys: Vec<i32> = (0..SYMBOLS as i32).collect();
        keys.shuffle(&mut rng);
        let mut values: Vec<i32> = keys.iter().map(|_| rng.random_range(0..SYMBOLS as i32)).collect();
        let asked = rng.random_range(0..SYMBOLS);
        let answer = values[asked] as u32;
        keys.push(keys[asked]);
        values.push(SYMBOLS as i32);
        ([keys, values], answer)
    }

    fn tensors(batch: &[Question], device: &Device) -> [Tensor<2, Int>; 2] {
        [0, 1].map(|side| {
            let ids: Vec<i32> = batch.iter().flat_map(|(sides, _)| sides[side].clone()).collect();
            Tensor::from_data(TensorData::new(ids, [batch.len(), SYMBOLS + 1]), device)
        })
    }
}

impl TaskData for Questions {
    type Task = Self;

    fn identity(&self) -> DataIdentity {
        DataIdentity::new("lookup", self.0.iter().fold(0, |hash, &count| 31 * hash + count as u64))
    }

    fn task(&self, _recipe: &Recipe) -> Result<Self> {
        Ok(self.clone())
    }
}

impl Task for Questions {
    type Model = Lookup;
    type Batch = Vec<Question>;
    type Inputs = ([Tensor<2, Int>; 2], Tensor<1, Int>);

    fn train_len(&self) -> usize {
        self.0[0]
    }

    /// The best epoch is chosen by questions that are not those of the test.
    fn brings_validation(&self) -> bool {
        true
    }

    fn model(&self, recipe: &Recipe, device: &Device) -> Result<Lookup> {
        let Sizes { width, heads } = recipe.model.own()?;
        let attention = MultiHeadAttentionConfig::new(width, heads, recipe.mechanism.clone());
        Ok(Lookup {
            keys: EmbeddingConfig::new(SYMBOLS, width).init(device),
            values: EmbeddingConfig::new(SYMBOLS + 1, width).init(device),
            attention: attention.try_init(device)?,
            classes: LinearConfig::new(width, SYMBOLS).init(device),
            sharpness: Param::from_tensor(Tensor::ones([1], device)),
        })
    }

    /// What the attention learns in scalars is reported, as the gamma of `infsa`.
    fn attentions(model: &mut Lookup) -> Vec<(String, &mut MultiHeadAttention)> {
        vec![("attention".into(), &mut model.attention)]
    }

    fn scalars(model: &Lookup) -> Vec<(String, f64)> {
        vec![("sharpness".into(), f64::from(model.sharpness.val().into_scalar::<f32>()))]
    }

    fn epoch(&self, recipe: &Recipe, epoch: u64, first: usize) -> Result<Batches<Vec<Question>>> {
        let plan = BatchPlan::training(recipe.schedule.batch_size, recipe.seed);
        let batch = |_, numbers: &[usize]| Ok(numbers.iter().map(|&number| Self::question(number)).collect());
        Ok(plan.epoch(self.train_len(), epoch, first, batch))
    }

    fn len_of(batch: &Vec<Question>) -> usize {
        batch.len()
    }

    fn inputs(&self, _recipe: &Recipe, batch: Vec<Question>, device: &Device) -> Self::Inputs {
        let answers: Vec<i32> = batch.iter().map(|(_, answer)| *answer as i32).collect();
        (Self::tensors(&batch, device), Tensor::from_ints(answers.as_slice(), device))
    }

    fn loss(&self, model: &Lookup, (asked, answers): Self::Inputs) -> Result<Tensor<1>> {
        let logits = model.forward(asked)?;
        Ok(CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, answers))
    }

    fn evaluate(&self, model: &Lookup, part: Part) -> Result<Evaluation> {
        let [train, watched, test] = self.0;
        let (first, count) = if part == Part::Test { (train + watched, test) } else { (train, watched) };
        let classes: Vec<String> = (0..SYMBOLS).map(|symbol| symbol.to_string()).collect();
        let (mut tally, device) = (Tally::new(&classes), device_of(model));
        let questions: Vec<Question> = (first..first + count).map(Self::question).collect();
        for batch in questions.chunks(256) {
            let answers: Vec<u32> = batch.iter().map(|(_, answer)| *answer).collect();
            tally.add_batch(model.forward(Self::tensors(batch, &device))?, &answers)?;
        }
        Ok(tally.finish())
    }
}

fn main() -> Result<()> {
    let folder = PathBuf::from(std::env::args().nth(1).unwrap_or("runs/own_model".into()));
    let (recipe, data) = (Recipe::from_toml(RECIPE, "own_model")?, Questions([4096, 512, 1024]));
    let observer = progress::for_stderr(false);
    let options = TrainOptions {
        resume: Resume::IfPresent,
        observer,
        report: Some(Arc::new(write_run)),
        ..TrainOptions::new(folder.join("run"))
    };
    if let Outcome::Finished(summary) = train::run(&recipe, &data, &options)? {
        println!("{}", summary.line());
        summary.learned.0.iter().for_each(|(name, value)| println!("{name}: {value:.3}"));
    }
    let options = CompareOptions {
        observer: options.observer,
        report: Some(Arc::new(write_comparison)),
        ..CompareOptions::new(folder.join("comparison"))
    };
    if let CompareOutcome::Finished(comparison) = compare::run(&recipe, &data, &options)? {
        println!("{}{}", comparison.table(), comparison.headline());
    }
    Ok(())
}
