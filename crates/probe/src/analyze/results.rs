//! What an analysis found.

use std::fmt::Write;

use resolvent_kernels::{Mechanism, Shape};
use resolvent_lab::{
    columns::{
        Align::{Left, Right},
        Columns,
    },
    environment::Environment,
};
use serde::Serialize;

use super::{
    GraphReport,
    tally::{DistanceTally, Tally},
    verdict::Verdict,
};

/// The result of an analysis.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Analysis {
    /// The file analysed.
    pub input: String,
    /// Its layers.
    pub layers: Vec<LayerSummary>,
    /// Names of tensors that belong to no layer.
    pub unread: Vec<String>,
    /// Texts that were cut to what the model reads.
    pub cut: usize,
    /// Whether tokens saw earlier ones only.
    pub causal: bool,
    /// Whether everything was asked for, in place of thirteen numbers.
    pub full: bool,
    /// One per mechanism, softmax first.
    pub verdicts: Vec<Verdict>,
    /// The machine.
    pub environment: Environment,
    /// Commands that repeat it.
    pub commands: Vec<String>,
    /// One per mechanism, softmax first: what of all heads is left in memory. The heads one by one, the calls and the
    /// distances stand behind these fields in `results.json`, where they were written as they came.
    #[serde(skip)]
    pub tallies: Vec<Tally>,
    /// One per layer.
    #[serde(skip)]
    pub distances: Vec<DistanceTally>,
    /// The first [`super::LISTED`] heads, without the lists of `--full`.
    #[serde(skip)]
    pub listed: Vec<HeadResult>,
    /// The diffusion maps that are drawn: of the first head of the first and the last layer's first sequence.
    #[serde(skip)]
    pub maps: Vec<DiffusionMap>,
    /// How many heads there are, each once per mechanism.
    #[serde(skip)]
    pub heads: usize,
}

/// A layer of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerSummary {
    /// Its name.
    pub name: String,
    /// Sequences analysed.
    pub sequences: usize,
    /// Heads.
    pub heads: usize,
    /// Query tokens.
    pub tokens: usize,
    /// Key tokens.
    pub keys: usize,
    /// Whether these are the most of a sequence, and a mask says which there are.
    pub masked: bool,
    /// Channels of a query or key.
    pub head_dim: usize,
    /// Whether the keys are the queries.
    pub tied: bool,
    /// Whether the file has values; else they are white noise.
    pub values: bool,
}

impl LayerSummary {
    pub(super) fn new(layer: &super::dump::Layer, sequences: usize) -> Self {
        let Shape { heads, seq_q: tokens, seq_kv: keys, head_dim, .. } = layer.shape;
        let (tied, values, masked) = (layer.tied(), layer.has_values(), layer.masked());
        Self { name: layer.name.clone(), sequences, heads, tokens, keys, masked, head_dim, tied, values }
    }
}

/// One mechanism on all heads of one sequence of one layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CallResult {
    /// The layer's name.
    pub layer: String,
    /// The sequence.
    pub sequence: usize,
    /// What the mechanism is called here.
    pub name: String,
    /// The mechanism, with all its fields.
    pub mechanism: Mechanism,
    /// Why it cannot be applied here.
    pub refused: Option<String>,
    /// Seconds of a forward pass.
    pub seconds: Option<f64>,
    /// Most bytes that the pass held beside its tensors.
    pub peak_bytes: Option<u64>,
}

impl CallResult {
    pub(super) fn new(layer: &str, sequence: usize, name: &str, mechanism: &Mechanism) -> Self {
        let (layer, name, mechanism) = (layer.to_owned(), name.to_owned(), mechanism.clone());
        Self { layer, sequence, name, mechanism, refused: None, seconds: None, peak_bytes: None }
    }
}

/// One mechanism on one head.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HeadResult {
    /// The layer's name.
    pub layer: String,
    /// The sequence.
    pub sequence: usize,
    /// The head.
    pub head: usize,
    /// What the mechanism is called here.
    pub name: String,
    /// Its id.
    pub mechanism: &'static str,
    /// Its output beside dense softmax's; absent where one of them is not finite, or softmax's is zero.
    pub output: Option<OutputError>,
    /// Whether softmax has an output that others can be compared with.
    pub comparable: bool,
    /// The error after one factor of the mean of all values (causal: of those so far), which no attention is needed for.
    pub mean_of_values: Option<f64>,
    /// What there is to say of the outputs.
    pub notes: Vec<String>,
    /// Its token graph; absent in cross-attention.
    pub graph: Option<GraphReport>,
}

/// The tokens of one head's graph, placed by diffusion.
#[derive(Debug, Clone, PartialEq)]
pub struct DiffusionMap {
    /// The layer's name.
    pub layer: String,
    /// What the mechanism is called here.
    pub name: String,
    /// Where each token is, on the first two coordinates.
    pub places: Vec<[f64; 2]>,
    /// The tokens' words; empty where they are not known.
    pub words: Vec<String>,
}

impl DiffusionMap {
    /// Takes the map out of a head's graph; `None` where it has none.
    pub(super) fn taken(head: &mut HeadResult, words: &[String]) -> Option<Self> {
        let places = std::mem::take(&mut head.graph.as_mut()?.diffusion_map);
        let (layer, name) = (head.layer.clone(), head.name.clone());
        let words = if words.len() == places.len() { words.to_vec() } else { Vec::new() };
        (!places.is_empty()).then_some(Self { layer, name, places, words })
    }
}

/// How far an output is from dense softmax's, `|out - softmax| / |softmax|` over a head.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct OutputError {
    /// As it is.
    pub relative: f64,
    /// After the best single factor for the head, which an output projection can absorb.
    pub scaled: f64,
    /// Mean over the tokens of the cosine with softmax's output.
    pub cosine: f64,
}

impl OutputError {
    /// Of `out` beside `reference`, rows of `channels`. `None` where `out` is not finite, or `reference` has no norm that
    /// an error could be a share of.
    pub fn new(out: &[f32], reference: &[f32], channels: usize) -> Option<Self> {
        let sums = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum::<f64>();
        let (own, both, wanted) = (sums(out, out), sums(out, reference), sums(reference, reference));
        if !own.is_finite() || !wanted.is_finite() || wanted <= 0.0 {
            return None;
        }
        let share = |part: f64, all: f64| if all > 0.0 { part / all } else { 0.0 };
        let error = |factor: f64| {
            let difference = |(&x, &y): (&f32, &f32)| (factor * f64::from(x) - f64::from(y)).powi(2);
            (out.iter().zip(reference).map(difference).sum::<f64>() / wanted).sqrt()
        };
        let rows = || out.chunks(channels.max(1)).zip(reference.chunks(channels.max(1)));
        let cosines = rows().map(|(x, y)| share(sums(x, y), (sums(x, x) * sums(y, y)).sqrt()));
        Some(Self {
            relative: error(1.0),
            scaled: error(share(both, own)),
            cosine: cosines.sum::<f64>() / rows().count().max(1) as f64,
        })
    }
}

impl Analysis {
    /// The verdicts as text.
    pub fn table(&self) -> String {
        let numbers = ["error", "worst", "cosine", "ms", "x softmax", "MB", "rows"].map(|name| (Right, name));
        let mut table = Columns::new([(Left, "mechanism")].into_iter().chain(numbers).chain([(Left, "verdict")]));
        let ranked = || self.ranking().into_iter().map(|at| &self.verdicts[at]);
        for verdict in ranked() {
            let n = &verdict.numbers;
            let among = |some: usize, all: usize| match (1..all).contains(&some) {
                true => format!(" of {some}"),
                false => String::new(),
            };
            let of = |x: Option<f64>, digits: usize| x.map_or_else(|| "-".into(), |x| format!("{x:.digits$}"));
            table.row([
                verdict.name.clone(),
                of(n.error_median.map(|x| 100.0 * x), 1),
                of(n.error_worst.map(|x| 100.0 * x), 1),
                of(n.cosine, 3),
                of(n.seconds.map(|x| 1e3 * x), 3),
                of(n.time_ratio, 2),
                of(n.peak_bytes.map(|x| x / 1e6), 2),
                of(n.perplexity, 1) + &among(n.perplexity_heads, n.heads + n.incomparable),
                verdict.finding.label().to_string(),
            ]);
        }
        let mut text = table.to_string();
        text.push_str(
            "error: percent of softmax's output, after one factor per head; rows: tokens that a row attends to, of so many heads where not of all\n",
        );
        for verdict in ranked() {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "\n{}", verdict.sentence);
        }
        let _ = writeln!(text, "\n{}", self.headline());
        text + &self.paths_table()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_with_and_without_a_factor() {
        let reference = [1.0, 2.0, 0.0, 2.0];
        let half = OutputError::new(&[0.5, 1.0, 0.0, 1.0], &reference, 2).unwrap();
        assert!((half.relative - 0.5).abs() < 1e-12 && half.scaled < 1e-12 && (half.cosine - 1.0).abs() < 1e-12);
        let none = OutputError::new(&[0.0; 4], &reference, 2).unwrap();
        assert_eq!((none.relative, none.scaled, none.cosine), (1.0, 1.0, 0.0));
        let across = OutputError::new(&[2.0, -1.0, 2.0, 0.0], &reference, 2).unwrap();
        assert!((across.scaled - 1.0).abs() < 1e-12 && across.cosine.abs() < 1e-12);
    }

    /// Nothing is a share of zero, and no error is that of a number that is none.
    #[test]
    fn what_has_no_error() {
        assert_eq!(OutputError::new(&[0.0; 2], &[0.0; 2], 2), None);
        assert_eq!(OutputError::new(&[1.0, f32::NAN], &[1.0; 2], 2), None);
        assert_eq!(OutputError::new(&[1.0; 2], &[1.0, f32::INFINITY], 2), None);
    }
}
