//! What verdicts and reports say of all heads, in memory that does not grow with their number.

use resolvent_lab::stats::{Interval, finite_median};

use super::{CLOSE, CallResult, DistanceStats, GraphReport, HeadDistances, HeadResult, QUANTITIES, Quantity};

/// Values kept of a quantity, an even number; of more, every second one is, then every fourth ...
const ROOM: usize = 4096;
/// Heads listed one by one in a report.
pub const LISTED: usize = 2000;
/// Errors that differ by less than this share of one, or by less than f32 rounds of an output, are the same.
const SAME: f64 = 1e-4;
const ROUNDING: f64 = 1e-6;

/// Whether an error is less than `other` by more than rounding.
fn is_less(error: f64, other: f64) -> bool {
    error < other * (1.0 - SAME) - ROUNDING
}

/// Kinds of remarks kept of a mechanism.
const REMARKS: usize = 12;

/// Values of one quantity, evenly thinned beyond 4096 of them; what is not finite is left out.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    seen: usize,
    stride: usize,
    values: Vec<f64>,
    largest: Option<f64>,
}

impl Default for Sample {
    fn default() -> Self {
        Self { seen: 0, stride: 1, values: Vec::new(), largest: None }
    }
}

impl Sample {
    /// Adds a value, where there is one.
    pub fn add(&mut self, value: Option<f64>) {
        let Some(value) = value.filter(|x| x.is_finite()) else { return };
        if self.values.len() == ROOM && self.seen.is_multiple_of(self.stride) {
            self.values = self.values.iter().copied().step_by(2).collect();
            self.stride *= 2;
        }
        if self.seen.is_multiple_of(self.stride) {
            self.values.push(value);
        }
        self.seen += 1;
        self.largest = Some(self.largest.map_or(value, |largest| largest.max(value)));
    }

    /// How many there were.
    pub const fn count(&self) -> usize {
        self.seen
    }

    /// The largest of all.
    pub const fn largest(&self) -> Option<f64> {
        self.largest
    }

    /// The middle of those kept; `None` of none.
    pub fn median(&self) -> Option<f64> {
        finite_median(self.values.iter().copied())
    }

    /// Where the true middle lies, from those kept; `None` of fewer than six.
    pub fn median_interval(&self) -> Option<Interval> {
        Interval::of_median(&self.values)
    }

    /// Mean and standard deviation of those kept; `None` of none.
    pub fn spread(&self) -> Option<[f64; 2]> {
        let count = self.values.len() as f64;
        let mean = self.values.iter().sum::<f64>() / count;
        let variance = self.values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
        (count > 0.0).then(|| [mean, variance.sqrt()])
    }
}

/// The mean of several curves, place by place, over those that reach so far.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Curve(Vec<(f64, usize)>);

impl Curve {
    /// Adds a curve.
    pub fn add(&mut self, values: &[f64]) {
        self.0.resize(self.0.len().max(values.len()), (0.0, 0));
        for ((sum, count), x) in self.0.iter_mut().zip(values).filter(|(_, x)| x.is_finite()) {
            (*sum, *count) = (*sum + x, *count + 1);
        }
    }

    /// How many curves there were.
    pub fn count(&self) -> usize {
        self.0.first().map_or(0, |first| first.1)
    }

    /// The means.
    pub fn means(&self) -> impl Iterator<Item = f64> {
        self.0.iter().map(|&(sum, count)| sum / count.max(1) as f64)
    }
}

/// Remarks on a mechanism, by their kinds: those that differ in numbers alone are of one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Remarks {
    /// The first of each kind, up to twelve, with how many there were of it.
    pub kinds: Vec<(String, usize)>,
}

impl Remarks {
    fn add(&mut self, remark: &str) {
        // Words with a digit are numbers and places.
        let words = |text: &str| {
            let told = text.split_whitespace().filter(|word| !word.contains(|c: char| c.is_ascii_digit()));
            told.map(str::to_owned).collect::<Vec<_>>()
        };
        let own = words(remark);
        match self.kinds.iter().position(|(known, _)| words(known) == own) {
            Some(at) => self.kinds[at].1 += 1,
            None if self.kinds.len() < REMARKS => self.kinds.push((remark.to_owned(), 1)),
            None => {}
        }
    }

    /// The first of all.
    pub fn first(&self) -> Option<&str> {
        self.kinds.first().map(|(remark, _)| remark.as_str())
    }
}

/// What a layer's chart shows.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LayerTally {
    /// Error after one factor.
    pub error: Sample,
    /// Tokens that a row attends to.
    pub perplexity: Sample,
    /// Spectral gap.
    pub gap: Sample,
    /// Mean hops.
    pub hops: Sample,
}

/// All heads and calls of one mechanism.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Tally {
    /// Heads on which softmax has an output to compare with.
    pub heads: usize,
    /// Heads on which it has none.
    pub incomparable: usize,
    /// Of the heads compared, those that are close.
    pub close: usize,
    /// Of these, those that are nearer than the mean of all values, or where there is none.
    pub close_nearer: usize,
    /// Heads compared on which the mean of all values is close.
    pub mean_close: usize,
    /// Of the heads compared, those whose output is not finite.
    pub broken: usize,
    /// Error after one factor per head.
    pub error: Sample,
    /// Error without.
    pub relative: Sample,
    /// Cosine of outputs.
    pub cosine: Sample,
    /// The error of the mean of all values on the same heads.
    pub mean_of_values: Sample,
    /// Heads whose output is nearer to softmax's than that mean is, and heads where it is farther; what is as near is in neither.
    pub beside_mean: [usize; 2],
    /// Tokens that a row attends to where softmax's rows have a number too, and softmax's there.
    pub rows_beside: [Sample; 2],
    /// One for each of [`QUANTITIES`].
    pub graph: Vec<Sample>,
    /// Eigenvalues of the walk.
    pub eigenvalues: Curve,
    /// Singular values.
    pub singular_values: Curve,
    /// Moduli of the eigenvalues of the weights themselves.
    pub moduli: Curve,
    /// Pairs of tokens by their hops.
    pub hops: Vec<usize>,
    /// Cosines and rank correlations with the dominant direction: of the weights, of equal ones, of the queries' norms.
    pub dominant: [[Sample; 2]; 3],
    /// Seconds of a layer's forward pass.
    pub seconds: Sample,
    /// Over softmax's of the same call.
    pub time_ratio: Sample,
    /// Bytes held beside the tensors.
    pub peak_bytes: Sample,
    /// Heads of the calls that it was refused in.
    pub refused_heads: usize,
    /// Why it was refused, the first time.
    pub refused: Option<String>,
    /// What was left out.
    pub remarks: Remarks,
    /// Whether queries served as keys where there are keys.
    pub tied: bool,
    /// Layer by layer.
    pub layers: Vec<LayerTally>,
}

impl Tally {
    /// Adds a head of layer number `layer`, beside softmax's result on the same head.
    pub(super) fn add(&mut self, layer: usize, head: &HeadResult, softmax: &HeadResult) {
        self.layers.resize(self.layers.len().max(layer + 1), LayerTally::default());
        let error = head.output.map(|output| output.scaled);
        match head.comparable {
            true => self.heads += 1,
            false => self.incomparable += 1,
        }
        let close = error.filter(|error| *error <= CLOSE);
        let nearer = |error: f64| head.mean_of_values.is_none_or(|mean| is_less(error, mean));
        self.close += usize::from(close.is_some());
        self.close_nearer += usize::from(close.is_some_and(nearer));
        self.mean_close += usize::from(head.mean_of_values.is_some_and(|mean| mean <= CLOSE));
        self.broken += usize::from(head.comparable && head.output.is_none());
        self.error.add(error);
        self.relative.add(head.output.map(|output| output.relative));
        self.cosine.add(head.output.map(|output| output.cosine));
        self.mean_of_values.add(head.mean_of_values);
        if let Some((error, mean)) = error.zip(head.mean_of_values) {
            self.beside_mean[0] += usize::from(is_less(error, mean));
            self.beside_mean[1] += usize::from(is_less(mean, error));
        }
        self.layers[layer].error.add(error);
        head.notes.iter().for_each(|note| self.remarks.add(note));
        if let Some(graph) = &head.graph {
            self.add_graph(layer, graph, softmax.graph.as_ref());
        }
    }

    fn add_graph(&mut self, layer: usize, graph: &GraphReport, softmax: Option<&GraphReport>) {
        self.graph.resize(QUANTITIES.len(), Sample::default());
        self.graph.iter_mut().zip(&QUANTITIES).for_each(|(sample, quantity)| sample.add((quantity.of)(graph)));
        if let Some((own, theirs)) = graph.perplexity.zip(softmax.and_then(|softmax| softmax.perplexity)) {
            self.rows_beside[0].add(Some(own));
            self.rows_beside[1].add(Some(theirs));
        }
        self.eigenvalues.add(&graph.eigenvalues);
        if let Some(full) = &graph.full {
            self.singular_values.add(&full.singular_values);
            self.moduli.add(&full.moduli);
        }
        if let Some(hops) = &graph.hops {
            self.hops.resize(self.hops.len().max(hops.counts.len()), 0);
            self.hops.iter_mut().zip(&hops.counts).for_each(|(all, count)| *all += count);
        }
        if let Some(found) = &graph.dominant {
            for (samples, own) in self.dominant.iter_mut().zip([found.weights, found.uniform, found.energies]) {
                samples[0].add(Some(own.cosine));
                samples[1].add(own.spearman);
            }
        }
        let own = &mut self.layers[layer];
        own.perplexity.add(graph.perplexity);
        own.gap.add(graph.gap);
        own.hops.add(graph.hops.as_ref().map(|hops| hops.mean));
        graph.notes.iter().for_each(|note| self.remarks.add(note));
    }

    /// Adds a call, beside softmax's on the same sequence.
    pub(super) fn call(&mut self, call: &CallResult, softmax: Option<f64>) {
        self.seconds.add(call.seconds);
        self.time_ratio.add(call.seconds.zip(softmax).map(|(own, softmax)| own / softmax));
        self.peak_bytes.add(call.peak_bytes.map(|bytes| bytes as f64));
        if self.refused.is_none() {
            self.refused.clone_from(&call.refused);
        }
    }

    /// The values of one of [`QUANTITIES`].
    pub fn quantity(&self, quantity: &Quantity) -> Option<&Sample> {
        self.graph.get(QUANTITIES.iter().position(|own| own.name == quantity.name)?)
    }
}

/// How far queries are from keys, of all heads of one layer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DistanceTally {
    /// Channels of the queries.
    pub channels: usize,
    /// Absolute, then squared differences: variation, kurtosis, tail.
    pub stats: [[Sample; 3]; 2],
    /// The mean of their histograms.
    pub density: [Curve; 2],
    /// Directions in which queries vary, and the share of the first two.
    pub components: [Sample; 2],
}

impl DistanceTally {
    /// Adds a head.
    pub(super) fn add(&mut self, head: &HeadDistances) {
        self.channels = head.channels;
        let kinds = self.stats.iter_mut().zip(&mut self.density).zip([&head.absolute, &head.squared]);
        for ((samples, density), found) in kinds {
            let DistanceStats { variation, kurtosis, tail, histogram, .. } = found;
            samples.iter_mut().zip([variation, kurtosis, tail]).for_each(|(sample, &x)| sample.add(Some(x)));
            density.add(histogram);
        }
        let [directions, plane] = &mut self.components;
        directions.add(head.components.map(|found| found.directions));
        plane.add(head.components.map(|found| found.plane));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hundred thousand values are thinned evenly: the memory is bounded, the middle stays, the largest is the largest.
    #[test]
    fn a_sample_does_not_grow() {
        let mut sample = Sample::default();
        (0..100_000).for_each(|i| sample.add(Some(f64::from(i))));
        sample.add(None);
        sample.add(Some(f64::NAN));
        assert_eq!((sample.count(), sample.largest()), (100_000, Some(99_999.0)));
        assert!(sample.values.len() <= ROOM && sample.values.len() >= ROOM / 2);
        assert!((sample.median().unwrap() - 50_000.0).abs() < 100.0);
        assert!(sample.values.windows(2).all(|pair| pair[1] - pair[0] == sample.stride as f64));
        let few: Vec<f64> = (0..ROOM).map(|i| i as f64).collect();
        let mut exact = Sample::default();
        few.iter().for_each(|&x| exact.add(Some(x)));
        assert_eq!(exact.median(), finite_median(few));
    }

    /// A remark of every head does not hide what was said of one.
    #[test]
    fn remarks_are_told_by_their_kind() {
        let mut remarks = Remarks::default();
        (0..40).for_each(|at| remarks.add(&format!("the weight of {at} -> 3 is -{at}.5e-7; use relu")));
        remarks.add("never mixes");
        assert_eq!(remarks.first(), Some("the weight of 0 -> 3 is -0.5e-7; use relu"));
        let counts: Vec<usize> = remarks.kinds.iter().map(|kind| kind.1).collect();
        assert_eq!((counts, remarks.kinds[1].0.as_str()), (vec![40, 1], "never mixes"));
    }

    #[test]
    fn curves_of_different_lengths() {
        let mut curve = Curve::default();
        curve.add(&[1.0, 2.0]);
        curve.add(&[3.0]);
        assert_eq!(curve.means().collect::<Vec<_>>(), [2.0, 2.0]);
    }
}
