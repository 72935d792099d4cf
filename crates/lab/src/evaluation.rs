//! What a model does on examples: accuracy, loss, confusion and speed.

use std::time::Instant;

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::{Error, Result, bleu::Bleu};

/// Pictures per batch. Accuracy does not depend on it, but of mechanisms that draw by the place in a batch (`ssa`, `routed`, random landmarks).
pub(crate) const BATCH: usize = 250;

/// What a model does on labelled examples.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Number of examples.
    pub examples: usize,
    /// Share of examples whose highest logit is the label's; absent for models of one's own that give no such answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// Share of examples whose label is among the five highest logits; absent for five classes or fewer.
    pub top5: Option<f64>,
    /// Mean cross-entropy, or what else a model of one's own makes small.
    pub loss: f64,
    /// Names of the classes.
    pub classes: Vec<String>,
    /// Accuracy on the examples of each class; absent for a class without any.
    pub per_class: Vec<Option<f64>>,
    /// `confusion[label][answer]`, in examples.
    pub confusion: Vec<Vec<u64>>,
    /// Agreement of translations with their references; absent for classifiers. A translator's `accuracy` is the share of its tokens
    /// that are right given what should stand before them, its `loss` is per token, and it has no classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bleu: Option<Bleu>,
    /// How well a text is predicted, by language models alone. Their examples are windows, their `accuracy` and `loss` are per
    /// token, and they have no classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<Prediction>,
    /// Texts that were longer than what the model reads of them; of translations, sources and references.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cut: usize,
    /// Examples per second, reading of the batch included.
    pub examples_per_second: f64,
}

/// What tells a better model of a run from a worse one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Metric {
    /// Of classifiers: the share of right answers.
    #[default]
    Accuracy,
    /// Of translators.
    Bleu,
    /// Of language models: less is better.
    BitsPerByte,
    /// Of models that have none of the others: less is better.
    Loss,
}

impl Metric {
    /// Its value in `evaluation`; none where it does not belong to such a model.
    pub fn of(self, evaluation: &Evaluation) -> Option<f64> {
        match self {
            Self::Accuracy => evaluation.accuracy,
            Self::Bleu => evaluation.bleu.as_ref().map(|bleu| bleu.score),
            Self::BitsPerByte => evaluation.prediction.as_ref().map(|prediction| prediction.bits_per_byte),
            Self::Loss => Some(evaluation.loss),
        }
    }

    /// Whether `value` is better than `other`.
    pub fn is_better(self, value: f64, other: f64) -> bool {
        match self {
            Self::Accuracy | Self::Bleu => value > other,
            Self::BitsPerByte | Self::Loss => value < other,
        }
    }

    /// What a number of it is of, accuracies being in percent.
    pub const fn unit(self) -> &'static str {
        match self {
            Self::Accuracy => "% accuracy",
            Self::Bleu => "BLEU",
            Self::BitsPerByte => "bits per byte",
            Self::Loss => "loss",
        }
    }

    /// What a difference of two is in.
    pub const fn points(self) -> &'static str {
        if matches!(self, Self::Accuracy) { "points" } else { self.unit() }
    }

    /// The value with its name.
    pub fn words(self, value: f64) -> String {
        match self {
            Self::Accuracy => format!("accuracy {:.2} %", value * 100.0),
            Self::Bleu => format!("BLEU {value:.2}"),
            Self::BitsPerByte => format!("{value:.4} bits per byte"),
            Self::Loss => format!("loss {value:.4}"),
        }
    }
}

impl Evaluation {
    /// Of a mean `loss` over `examples`, with nothing else known; the speed is since `began`.
    pub fn new(examples: usize, loss: f64, began: Instant) -> Self {
        Self {
            examples,
            loss,
            examples_per_second: examples as f64 / began.elapsed().as_secs_f64().max(f64::MIN_POSITIVE),
            ..Self::default()
        }
    }

    /// What such models are judged by.
    pub const fn metric(&self) -> Metric {
        if self.prediction.is_some() {
            Metric::BitsPerByte
        } else if self.bleu.is_some() {
            Metric::Bleu
        } else if self.accuracy.is_some() {
            Metric::Accuracy
        } else {
            Metric::Loss
        }
    }
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// How well a language model predicts a text, cut into windows of its context side by side: every token but the first, given those before
/// it in its window.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// Tokens predicted.
    pub tokens: usize,
    /// Bytes that they stand for.
    pub bytes: usize,
    /// The exponential of the mean cross-entropy per token, at most the largest f64; depends on what a token is.
    pub perplexity: f64,
    /// Cross-entropy in bits per byte of the text, which compares models of different tokens.
    pub bits_per_byte: f64,
}

impl Prediction {
    /// Of `nats` of cross-entropy over all tokens.
    pub fn new(nats: f64, tokens: usize, bytes: usize) -> Self {
        let bits_per_byte = nats / std::f64::consts::LN_2 / bytes as f64;
        Self { tokens, bytes, perplexity: (nats / tokens as f64).exp().min(f64::MAX), bits_per_byte }
    }

    /// `perplexity 12.34, 1.234 bits per byte`.
    pub fn line(&self) -> String {
        format!("perplexity {:.2}, {:.4} bits per byte", self.perplexity, self.bits_per_byte)
    }
}

/// The answers of a classifier, counted while the examples go by.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use resolvent_lab::evaluation::Tally;
/// let classes = ["cat".to_owned(), "dog".to_owned()];
/// let mut tally = Tally::new(&classes);
/// tally.add_batch(Tensor::from_floats([[0.0, 2.0], [1.0, 3.0]], &Device::flex()), &[1, 0])?;
/// assert_eq!(tally.finish().accuracy, Some(0.5));
/// # Ok::<(), resolvent_lab::Error>(())
/// ```
#[derive(Debug)]
pub struct Tally<'a> {
    classes: &'a [String],
    began: Instant,
    confusion: Vec<Vec<u64>>,
    in_top5: u64,
    loss: f64,
    /// Examples that the model was shown a part of.
    pub cut: usize,
    /// `[examples, classes]`.
    pub logits: Vec<f32>,
}

impl<'a> Tally<'a> {
    /// Nothing counted yet; the clock runs.
    pub fn new(classes: &'a [String]) -> Self {
        let confusion = vec![vec![0; classes.len()]; classes.len()];
        Self { classes, began: Instant::now(), confusion, in_top5: 0, loss: 0.0, cut: 0, logits: Vec::new() }
    }

    /// `logits [batch, classes]` of examples with `labels`.
    ///
    /// # Errors
    /// [`Error::Unfit`] for logits of another shape, or a label that is no class.
    pub fn add_batch(&mut self, logits: Tensor<2>, labels: &[u32]) -> Result<()> {
        let (shape, expected) = (logits.dims(), [labels.len(), self.classes.len()]);
        if shape != expected {
            let problem = format!("its model gives logits {shape:?}, expected {expected:?} (examples, classes)");
            return Err(Error::Unfit { name: "labels".into(), problem });
        }
        check_labels("labels", self.classes.len(), labels)?;
        let logits: Vec<f32> = logits.into_data().iter::<f32>().collect();
        for (row, &label) in logits.chunks_exact(self.classes.len()).zip(labels) {
            self.add(row, label as usize);
        }
        self.logits.extend(logits);
        Ok(())
    }

    /// One example: its logits and its label.
    fn add(&mut self, logits: &[f32], label: usize) {
        let above = |x: f32| logits.iter().filter(|&&other| other > x).count();
        let (answer, highest) = answer(logits);
        self.confusion[label][answer] += 1;
        self.in_top5 += u64::from(above(logits[label]) < 5);
        let highest = f64::from(highest);
        let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - highest).exp()).sum();
        self.loss += highest + sum.ln() - f64::from(logits[label]);
    }

    /// What was counted, and how fast.
    pub fn finish(self) -> Evaluation {
        let classes = self.classes;
        let of_class: Vec<u64> = self.confusion.iter().map(|row| row.iter().sum()).collect();
        let right: Vec<u64> = self.confusion.iter().enumerate().map(|(class, row)| row[class]).collect();
        let examples: u64 = of_class.iter().sum();
        let share = |part: u64, whole: u64| part as f64 / whole as f64;
        Evaluation {
            accuracy: Some(share(right.iter().sum(), examples)),
            top5: (classes.len() > 5).then(|| share(self.in_top5, examples)),
            classes: classes.to_vec(),
            per_class: right.iter().zip(&of_class).map(|(&r, &n)| (n > 0).then(|| share(r, n))).collect(),
            confusion: self.confusion,
            cut: self.cut,
            ..Evaluation::new(examples as usize, self.loss / examples as f64, self.began)
        }
    }
}

/// Checks that each of the `labels` of the data set `name` is a class.
///
/// # Errors
/// [`Error::Unfit`] naming the first that is none.
pub(crate) fn check_labels(name: &str, classes: usize, labels: &[u32]) -> Result<()> {
    let Some((at, label)) = labels.iter().enumerate().find(|(_, label)| **label as usize >= classes) else {
        return Ok(());
    };
    let problem = format!(
        "the label of its example {at} is {label}, which none of its {classes} classes has; number them from 0"
    );
    Err(Error::Unfit { name: name.into(), problem })
}

/// The class with the highest logit, and that logit. Ties go to the lower class; NaN is never the answer.
pub fn answer(logits: &[f32]) -> (usize, f32) {
    let first = (0, f32::NEG_INFINITY);
    logits.iter().enumerate().fold(first, |best, (class, &logit)| if logit > best.1 { (class, logit) } else { best })
}
