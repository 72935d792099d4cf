//! What the benchmark of whole models found.

use std::{fmt, path::Path};

use resolvent_kernels::Mechanism;
use serde::{Deserialize, Serialize};

use super::{milliseconds, three_digits};
use crate::{
    Error, Recipe, Result,
    columns::{
        Align::{Left, Right},
        Columns,
    },
    disk::write_atomically,
    environment::{Environment, Load},
    page::megabytes,
    stats::median,
};

/// The file in a benchmark's folder that holds its [`ModelReport`].
pub const MODEL_RESULTS: &str = "models.json";

/// What a benchmark of whole models found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelReport {
    /// The recipe: the model, its precision and how it is trained. What the benchmark chooses itself is as it was given.
    pub recipe: Recipe,
    /// Pictures of a batch.
    pub batch: usize,
    /// Turns of every point.
    pub rounds: usize,
    /// Whether it was stopped before all sizes were measured.
    pub interrupted: bool,
    /// How busy the machine was before anything ran, where it told.
    pub load: Option<Load>,
    /// By size, and at each size in the order of the mechanisms.
    pub points: Vec<ModelPoint>,
    /// Machine and program.
    pub environment: Environment,
    /// Commands that repeat it.
    pub commands: Vec<String>,
}

/// A model at one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelPoint {
    /// What the mechanism is called.
    pub name: String,
    /// The mechanism.
    pub mechanism: Mechanism,
    /// Side of the square pictures.
    pub pixels: usize,
    /// Weights, without those of decays and kernels' widths.
    pub parameters: u64,
    /// Multiply-adds of the logits of one picture, as [`resolvent::models::VitConfig::multiply_adds`] counts them.
    pub multiply_adds: u64,
    /// A forward pass of the batch; the memory is what it holds beside the weights.
    pub inference: Option<Cost>,
    /// A training step of the batch: forward, backward, optimiser; the memory is all that the model, its optimiser and the step hold.
    pub training: Option<Cost>,
    /// Why the training step was not measured although the forward pass was.
    pub left_out: Option<String>,
    /// Why nothing was measured.
    pub skipped: Option<String>,
}

/// What a pass costs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Seconds of the batch, the median turn.
    pub seconds: f64,
    /// Pictures a second.
    pub pictures_per_second: f64,
    /// Most bytes held, where the program counts them.
    pub peak_bytes: Option<u64>,
    /// Joules of a picture, of all that the processor did meanwhile, the median turn; absent where it was not asked for.
    pub joules: Option<f64>,
}

impl Cost {
    /// Of the turns of a pass over `batch` pictures.
    pub(super) fn new(seconds: &mut [f64], joules: &mut [f64], peak_bytes: Option<u64>, batch: usize) -> Self {
        let seconds = median(seconds);
        let joules = (!joules.is_empty()).then(|| median(joules) / batch as f64);
        Self { seconds, pictures_per_second: batch as f64 / seconds, peak_bytes, joules }
    }
}

impl ModelPoint {
    pub(super) fn new(name: &str, mechanism: &Mechanism, pixels: usize) -> Self {
        let (name, mechanism) = (name.to_owned(), mechanism.clone());
        let [parameters, multiply_adds] = [0; 2];
        let (inference, training, left_out, skipped) = (None, None, None, None);
        Self { name, mechanism, pixels, parameters, multiply_adds, inference, training, left_out, skipped }
    }
}

impl fmt::Display for ModelPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |cost: &Option<Cost>| cost.map_or("–".into(), |cost| milliseconds(cost.seconds));
        write!(f, "{} at {} pixels: ", self.name, self.pixels)?;
        match (&self.skipped, &self.left_out) {
            (Some(why), _) => f.write_str(why),
            (None, Some(why)) => write!(f, "inference {} ms; {why}", time(&self.inference)),
            (None, None) => write!(f, "inference {} ms, training {} ms", time(&self.inference), time(&self.training)),
        }
    }
}

impl ModelReport {
    /// Writes `models.json` to a folder, whole or not at all.
    ///
    /// # Errors
    /// [`Error::Io`] where it cannot be written, [`Error::Damaged`] where the results cannot be put as JSON.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let file = folder.join(MODEL_RESULTS);
        let json = serde_json::to_value(self).map_err(|e| Error::damaged(&file, e.to_string()))?;
        write_atomically(&file, format!("{json:#}\n").as_bytes())
    }

    /// Names of the mechanisms, in order.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for point in &self.points {
            if !names.contains(&point.name.as_str()) {
                names.push(&point.name);
            }
        }
        names
    }

    /// Whether anything was measured.
    pub fn has_measured(&self) -> bool {
        self.points.iter().any(|point| point.inference.is_some())
    }

    /// Whether energy was measured.
    pub fn has_joules(&self) -> bool {
        self.points.iter().any(|point| point.inference.is_some_and(|cost| cost.joules.is_some()))
    }

    /// The headings of [`ModelReport::rows`].
    pub(crate) fn headings(&self) -> Vec<&'static str> {
        let joules = self.has_joules();
        let pass = |names: [&'static str; 3]| names.into_iter().take(if joules { 3 } else { 2 });
        let first = ["mechanism", "pixels", "parameters, M", "multiply-adds, G"];
        let inference = pass(["inference, ms", "memory", "J"]);
        first.into_iter().chain(inference).chain(pass(["training, ms", "memory", "J"])).collect()
    }

    /// A row per point that was measured, beginning with its name.
    pub(crate) fn rows(&self) -> Vec<Vec<String>> {
        let joules = self.has_joules();
        let pass = |cost: &Option<Cost>| {
            let of = |value: Option<f64>, text: fn(f64) -> String| value.map_or("–".to_owned(), text);
            let bytes = cost.and_then(|cost| cost.peak_bytes);
            let cells = [
                of(cost.map(|cost| cost.seconds), milliseconds),
                bytes.map_or("–".into(), megabytes),
                of(cost.and_then(|cost| cost.joules), three_digits),
            ];
            cells.into_iter().take(if joules { 3 } else { 2 })
        };
        let row = |point: &ModelPoint| {
            let counts = [point.parameters as f64 / 1e6, point.multiply_adds as f64 / 1e9].map(three_digits);
            let first = [point.name.clone(), point.pixels.to_string()].into_iter().chain(counts);
            first.chain(pass(&point.inference)).chain(pass(&point.training)).collect()
        };
        self.points.iter().filter(|point| point.skipped.is_none()).map(row).collect()
    }

    /// The points as text, and what was left out.
    pub fn table(&self) -> String {
        let aligns = std::iter::once(Left).chain(std::iter::repeat(Right));
        let mut table = Columns::new(aligns.zip(self.headings()));
        self.rows().into_iter().for_each(|row| table.row(row));
        let mut text = table.to_string();
        for point in self.points.iter().filter(|point| point.skipped.is_some() || point.left_out.is_some()) {
            text += &format!("\n{point}");
        }
        if let Some(load) = self.load.filter(Load::is_busy) {
            text += &format!("\nwarning: {load}");
        }
        text + "\n"
    }

    /// Which mechanism is the fastest at the largest size, and what it is beside softmax.
    pub fn headline(&self) -> String {
        let measured = || self.points.iter().filter_map(|point| Some((point, point.inference?.seconds)));
        let Some(pixels) = measured().map(|(point, _)| point.pixels).max() else {
            return format!("{}: nothing was measured.", self.recipe.name);
        };
        let at = || measured().filter(|(point, _)| point.pixels == pixels);
        let Some((first, seconds)) = at().min_by(|a, b| a.1.total_cmp(&b.1)) else { return String::new() };
        let alone = format!(
            "{} at {pixels} x {pixels} pixels: {} answers first, {} ms for {} picture{}",
            self.recipe.name,
            first.name,
            milliseconds(seconds),
            self.batch,
            if self.batch == 1 { "" } else { "s" }
        );
        match at().find(|(point, _)| point.mechanism.id() == "softmax" && point.name != first.name) {
            Some((_, softmax)) => format!("{alone}, softmax takes {} times that.", three_digits(softmax / seconds)),
            None => alone + ".",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(name: &str, pixels: usize, seconds: f64) -> ModelPoint {
        let cost = |seconds: f64, joules| Cost::new(&mut [seconds], &mut [joules], Some(2_000_000), 2);
        let costs = (Some(cost(seconds, 3.0)), Some(cost(4.0 * seconds, 9.0)));
        ModelPoint {
            parameters: 5_000_000,
            multiply_adds: 1_250_000_000,
            inference: costs.0,
            training: costs.1,
            ..ModelPoint::new(name, &Mechanism::preset("softmax").unwrap(), pixels)
        }
    }

    #[test]
    fn rows_have_what_was_measured_and_the_rest_says_why() {
        let mut left = ModelPoint::new("infsa", &Mechanism::preset("softmax").unwrap(), 512);
        left.skipped = Some("it would hold about 9 GB".into());
        let points = vec![point("softmax", 224, 0.1), point("infsa", 224, 0.05), point("softmax", 512, 0.5), left];
        let environment = Environment::current();
        let report = ModelReport {
            recipe: Recipe { name: "vit".into(), ..Recipe::default() },
            batch: 2,
            rounds: 3,
            interrupted: false,
            load: None,
            points,
            environment,
            commands: vec![],
        };
        assert_eq!(
            report.rows()[0],
            ["softmax", "224", "5.00", "1.25", "100", "2.0 MB", "1.50", "400", "2.0 MB", "4.50"]
        );
        assert_eq!((report.rows().len(), report.headings().len()), (3, 10));
        assert!(report.table().contains("infsa at 512 pixels: it would hold about 9 GB"), "{}", report.table());
        assert_eq!(report.headline(), "vit at 512 x 512 pixels: softmax answers first, 500 ms for 2 pictures.");
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<ModelReport>(&text).unwrap(), report);
    }
}
