//! Which mechanism can stand in for softmax on the tokens analysed, at what cost, and why.

use resolvent_kernels::{Mechanism, mechanism::Structure};
use resolvent_lab::{
    candidate::Candidate,
    stats::{Interval, Side},
};
use serde::Serialize;

use super::{
    DIRECTIONS, GAP, HOPS, IMPORTANCE, LARGEST_ROW, NEGATIVE, Quantity, ROWS, SUBSPACE, Sample, Tally,
    sentence::sentence, window,
};

/// Up to this share of softmax's output (after one factor per head) an error is one that a model hardly notices: about
/// that of storing it in eight bits with outliers, and an order below what dropping a head does.
pub const CLOSE: f64 = 0.1;

/// What can be said of one mechanism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Finding {
    /// It is softmax.
    Baseline,
    /// It is softmax, too: a window that leaves none of the tokens out, or the same four values.
    IsSoftmax,
    /// Close in nine of ten heads, where the mean of all values is not, or is farther.
    Replaces,
    /// Close in nine of ten heads, as the mean of all values is, and no nearer than that.
    LikeTheMean,
    /// Close in some heads, and nearer there than the mean of all values.
    SomeHeads,
    /// Close in none, but nearer than the mean of all values is.
    NeedsTraining,
    /// Close in none, and nearer than the mean of all values in some heads and farther in others, too few of either to tell.
    Undecided,
    /// No nearer than the mean of all values.
    NotHere,
    /// Its outputs are not finite.
    NotFinite,
    /// Softmax has no output to compare with.
    Incomparable,
    /// It cannot be applied to these tensors.
    Refused,
}

impl Finding {
    /// In words.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Baseline => "the baseline",
            Self::IsSoftmax => "is softmax here",
            Self::Replaces => "replaces softmax here",
            Self::LikeTheMean => "close, as the mean is",
            Self::SomeHeads => "in some heads",
            Self::NeedsTraining => "only with training",
            Self::Undecided => "as near as the mean",
            Self::NotHere => "not on these tokens",
            Self::NotFinite => "not finite here",
            Self::Incomparable => "nothing to compare with",
            Self::Refused => "cannot be applied",
        }
    }
}

/// The finding on one mechanism.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// What the mechanism is called here.
    pub name: String,
    /// Its id.
    pub mechanism: &'static str,
    /// The finding.
    pub finding: Finding,
    /// The same with its numbers and reasons, for a reader.
    pub sentence: String,
    /// The numbers.
    pub numbers: Numbers,
}

/// Medians over heads (errors, graphs) and calls (time, memory).
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
pub struct Numbers {
    /// Heads compared, sequences apart.
    pub heads: usize,
    /// Heads not compared: softmax's output is zero there, or none.
    pub incomparable: usize,
    /// Heads of softmax's that it cannot be applied to.
    pub refused: usize,
    /// Of those compared, heads on which the output is not finite.
    pub broken: usize,
    /// Of those, heads with an error of at most a tenth.
    pub close: usize,
    /// Of those close, heads that are nearer than the mean of all values, or where there is none.
    pub close_nearer: usize,
    /// Heads on which the mean of all values is close.
    pub mean_close: usize,
    /// Where the true share of close heads lies, with those that it cannot be applied to.
    pub close_interval: Option<Interval>,
    /// Error after one factor per head.
    pub error_median: Option<f64>,
    /// Where the middle of more such heads would lie; absent of fewer than six.
    pub error_interval: Option<Interval>,
    /// The largest of them.
    pub error_worst: Option<f64>,
    /// Error without a factor.
    pub error_relative: Option<f64>,
    /// Cosine of outputs, mean over tokens.
    pub cosine: Option<f64>,
    /// Seconds of a layer's forward pass.
    pub seconds: Option<f64>,
    /// Times softmax's seconds in the same calls.
    pub time_ratio: Option<f64>,
    /// Bytes held beside the tensors.
    pub peak_bytes: Option<f64>,
    /// Tokens attended to by a row.
    pub perplexity: Option<f64>,
    /// Heads that they are of.
    pub perplexity_heads: usize,
    /// The median over the heads of the largest row sum.
    pub largest_row: Option<f64>,
    /// Whether no row of any head has any weight.
    pub weightless: bool,
    /// Spectral gap.
    pub gap: Option<f64>,
    /// Effective rank of the symmetrised graph.
    pub effective_rank: Option<f64>,
    /// Mean hops along strong edges.
    pub hops: Option<f64>,
    /// Share of negative weight.
    pub negative: Option<f64>,
    /// Root mean square of the sines between the leading eigenvectors' span and softmax's.
    pub subspace: Option<f64>,
    /// Rank correlation of the tokens' importance with softmax's.
    pub centrality: Option<f64>,
    /// Error of the mean of all values on the same heads.
    pub mean_of_values: Option<f64>,
    /// Heads that are nearer to softmax than that, and heads that are farther.
    pub beside_mean: [usize; 2],
    /// Heads that the subspace is of.
    pub subspace_heads: usize,
    /// Heads that the importance is of.
    pub centrality_heads: usize,
    /// The heads on which the rows of both have an entropy: how many, and the tokens attended to here and by softmax.
    pub rows_beside: Option<(usize, f64, f64)>,
}

impl Numbers {
    fn new(tally: &Tally) -> Self {
        let graph = |quantity: Quantity| tally.quantity(&quantity).and_then(Sample::median);
        let count = |quantity: Quantity| tally.quantity(&quantity).map_or(0, Sample::count);
        let [own, theirs] = &tally.rows_beside;
        let counted = tally.heads + tally.refused_heads;
        Self {
            heads: tally.heads,
            incomparable: tally.incomparable,
            refused: tally.refused_heads,
            broken: tally.broken,
            close: tally.close,
            close_nearer: tally.close_nearer,
            mean_close: tally.mean_close,
            close_interval: (counted > 0).then(|| Interval::of_share(tally.close, counted)),
            error_median: tally.error.median(),
            error_interval: tally.error.median_interval(),
            error_worst: tally.error.largest(),
            error_relative: tally.relative.median(),
            cosine: tally.cosine.median(),
            seconds: tally.seconds.median(),
            time_ratio: tally.time_ratio.median(),
            peak_bytes: tally.peak_bytes.median(),
            perplexity: graph(ROWS),
            perplexity_heads: count(ROWS),
            largest_row: graph(LARGEST_ROW),
            weightless: tally.broken == 0 && tally.quantity(&LARGEST_ROW).and_then(Sample::largest) == Some(0.0),
            gap: graph(GAP),
            effective_rank: graph(DIRECTIONS),
            hops: graph(HOPS),
            negative: graph(NEGATIVE),
            subspace: graph(SUBSPACE),
            centrality: graph(IMPORTANCE),
            mean_of_values: tally.mean_of_values.median(),
            beside_mean: tally.beside_mean,
            subspace_heads: count(SUBSPACE),
            centrality_heads: count(IMPORTANCE),
            rows_beside: own.median().zip(theirs.median()).map(|(x, y)| (own.count(), x, y)),
        }
    }
}

/// The verdicts on `mechanisms`, of which the first is softmax, on layers of at most so many `tokens`.
pub(super) fn verdicts(mechanisms: &[Candidate], tallies: &[Tally], tokens: usize, causal: bool) -> Vec<Verdict> {
    let numbers: Vec<Numbers> = tallies.iter().map(Numbers::new).collect();
    let of = |(at, ((candidate, n), tally)): (usize, ((&Candidate, &Numbers), &Tally))| {
        let Candidate { name, mechanism } = candidate;
        let finding = match finding(at == 0, n) {
            found @ (Finding::Baseline | Finding::Refused) => found,
            _ if is_softmax(mechanism, &mechanisms[0].mechanism, tokens) => Finding::IsSoftmax,
            found => found,
        };
        let sentence = match (finding, &tally.refused) {
            (Finding::IsSoftmax, _) => {
                let why = match window(mechanism) {
                    Some(window) => format!("its window of {window} leaves none of the {tokens} tokens out"),
                    None => "its score, structure, normalisation and series are softmax's".into(),
                };
                format!("{name} is softmax here: {why}. It is no replacement.")
            }
            (Finding::Refused, why) => {
                let why = why.as_deref().unwrap_or("softmax refused the call");
                format!("{name} cannot be applied to these tensors: {why}.")
            }
            (Finding::Incomparable, _) => {
                let why = tallies[0].remarks.first().unwrap_or("softmax has no output here");
                format!("Of {name} nothing can be said on these tokens: {why}.")
            }
            _ => sentence(candidate, finding, n, &numbers[0], causal),
        };
        Verdict { name: name.clone(), mechanism: mechanism.id(), finding, sentence, numbers: n.clone() }
    };
    mechanisms.iter().zip(&numbers).zip(tallies).enumerate().map(of).collect()
}

fn finding(baseline: bool, n: &Numbers) -> Finding {
    match n.error_median {
        _ if n.heads + n.incomparable == 0 => Finding::Refused,
        _ if baseline => Finding::Baseline,
        _ if n.heads == 0 => Finding::Incomparable,
        None => Finding::NotFinite,
        _ if 10 * n.close >= 9 * (n.heads + n.refused) => match beside_mean(n.beside_mean) {
            Finding::NeedsTraining => Finding::Replaces,
            _ if n.mean_of_values.is_none() => Finding::Replaces,
            _ if 10 * n.mean_close < 9 * n.heads => Finding::Replaces,
            _ => Finding::LikeTheMean,
        },
        _ if n.close_nearer > 0 => Finding::SomeHeads,
        Some(_) if n.mean_of_values.is_none() => Finding::NeedsTraining,
        Some(_) => beside_mean(n.beside_mean),
    }
}

/// Whether `mechanism` is `softmax` on at most so many `tokens`.
fn is_softmax(mechanism: &Mechanism, softmax: &Mechanism, tokens: usize) -> bool {
    let (mut own, softmax) = (mechanism.values(), softmax.values());
    if window(mechanism).is_some_and(|window| window >= tokens) {
        own.structure = Structure::default();
    }
    own.score == softmax.score
        && own.structure == softmax.structure
        && own.normalisation == softmax.normalisation
        && own.series == softmax.series
        && (own.bias, own.tied, own.causal) == (softmax.bias, softmax.tied, softmax.causal)
}

/// What heads say that are nearer than the mean of all values, and such that are farther: a sign test, where both are there.
pub(super) fn beside_mean(counts: [usize; 2]) -> Finding {
    match counts {
        [0, _] => Finding::NotHere,
        [_, 0] => Finding::NeedsTraining,
        [nearer, farther] => match Interval::of_share(nearer, nearer + farther).side_of(0.5) {
            Side::Above => Finding::NeedsTraining,
            Side::Open => Finding::Undecided,
            Side::Below => Finding::NotHere,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Close everywhere, and in too few heads nearer than the mean to tell: that the mean does the same is said where it is close, too.
    #[test]
    fn the_mean_is_held_against_what_replaces_softmax_where_it_is_close() {
        let found = |mean_close| {
            let numbers = Numbers {
                heads: 12,
                close: 12,
                mean_close,
                error_median: Some(0.0),
                mean_of_values: Some(0.95),
                beside_mean: [7, 5],
                ..Numbers::default()
            };
            finding(false, &numbers)
        };
        assert_eq!([5, 12].map(found), [Finding::Replaces, Finding::LikeTheMean]);
    }

    /// What is nearer in 29 heads of 72 is not called farther; in 20 of 72 it is.
    #[test]
    fn few_heads_do_not_decide() {
        let found = [[29, 43], [20, 52], [52, 20], [0, 1], [1, 0], [0, 0], [1, 1]].map(beside_mean);
        use Finding::{NeedsTraining, NotHere, Undecided};
        assert_eq!(found, [Undecided, NotHere, NeedsTraining, NotHere, NeedsTraining, NotHere, Undecided]);
    }
}
