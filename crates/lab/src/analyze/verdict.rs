//! Which mechanism can stand in for softmax on the tokens analysed, at what cost, and why.

use resolvent_kernels::{Mechanism, mechanism::Structure};
use serde::Serialize;

use super::{DIRECTIONS, GAP, HOPS, IMPORTANCE, LARGEST_ROW, NEGATIVE, Quantity, ROWS, SUBSPACE, Sample, Tally};
use crate::{
    compare::Candidate,
    stats::{Interval, Side},
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
    /// Close in nine of ten heads.
    Replaces,
    /// Close in some heads.
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
            Self::Replaces => "replaces softmax here",
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
    /// Where the true share of such heads lies, with those that it cannot be applied to.
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
    /// The largest row sum.
    pub largest_row: Option<f64>,
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

/// The verdicts on `mechanisms`, of which the first is softmax.
pub(super) fn verdicts(mechanisms: &[Candidate], tallies: &[Tally], causal: bool) -> Vec<Verdict> {
    let numbers: Vec<Numbers> = tallies.iter().map(Numbers::new).collect();
    let of = |(at, ((candidate, n), tally)): (usize, ((&Candidate, &Numbers), &Tally))| {
        let Candidate { name, mechanism } = candidate;
        let finding = finding(at == 0, n);
        let sentence = match (finding, &tally.refused) {
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
        _ if 10 * n.close >= 9 * (n.heads + n.refused) => Finding::Replaces,
        _ if n.close > 0 => Finding::SomeHeads,
        Some(_) if n.mean_of_values.is_none() => Finding::NeedsTraining,
        Some(_) => beside_mean(n.beside_mean),
    }
}

/// What heads say that are nearer than the mean of all values, and such that are farther: a sign test, where both are there.
fn beside_mean(counts: [usize; 2]) -> Finding {
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

fn sentence(candidate: &Candidate, finding: Finding, n: &Numbers, softmax: &Numbers, causal: bool) -> String {
    let Candidate { name: id, mechanism } = candidate;
    if finding == Finding::Baseline {
        let graph = shape_of(n).map_or_else(String::new, |shape| format!(" {shape}."));
        let left = match n.incomparable {
            0 => String::new(),
            left => format!(" On {} it has no output to compare with.", heads(left)),
        };
        return format!("{id} is what the others are compared with: {}.{graph}{left}", cost(n));
    }
    if finding == Finding::NotFinite {
        return format!("{id} breaks down here: its output is not finite on any of {}.", heads(n.heads));
    }
    let mean = if causal { "the mean of the values so far" } else { "the mean of all values" };
    let told = match finding {
        Finding::Replaces => format!("{id} can replace softmax here: {}", error(n)),
        Finding::SomeHeads => {
            let all = n.heads + n.refused;
            format!("{id} can replace softmax in {} of {}{}: {}", n.close, heads(all), share(n), error(n))
        }
        Finding::NotHere => {
            format!("{id} cannot replace softmax here: {}, no nearer than {mean} ({})", error(n), beside(n))
        }
        Finding::Undecided => {
            format!(
                "{id} is about as near to softmax here as {mean} ({}): {}; these heads do not tell which is nearer",
                beside(n),
                error(n)
            )
        }
        _ => format!(
            "{id} is another operator, to be trained with rather than swapped in: {}, nearer than {mean} ({})",
            error(n),
            beside(n)
        ),
    };
    let refused = match n.refused {
        0 => String::new(),
        refused => format!(" To {} it cannot be applied: the remarks say why.", heads(refused)),
    };
    format!("{told}, at {}.{refused} {}", cost(n), reason(mechanism, n, softmax, causal))
}

/// Where the share of close heads lies, if these leave it open whether nine of ten are.
fn share(n: &Numbers) -> String {
    match n.close_interval.filter(|interval| interval.side_of(0.9) == Side::Open) {
        Some(interval) => {
            format!(" (of more such heads {} %, 95 % interval: nine of ten is not ruled out)", interval.text(100.0, 0))
        }
        None => String::new(),
    }
}

/// The error of the mean of all values, and in how many heads the mechanism is nearer.
fn beside(n: &Numbers) -> String {
    let [nearer, farther] = n.beside_mean;
    let mean = percent(n.mean_of_values);
    match nearer + farther {
        0 => mean,
        all if nearer == 0 || farther == 0 => format!("{mean}; nearer in {nearer} of {}", heads(all)),
        all => {
            let interval = Interval::of_share(nearer, all).text(100.0, 0);
            format!("{mean}; nearer in {nearer} of {}, 95 % interval {interval} %", heads(all))
        }
    }
}

/// How far the output is off.
fn error(n: &Numbers) -> String {
    let of = heads(n.heads - n.broken);
    let broken = match n.broken {
        0 => String::new(),
        broken => format!("; on {} more it is not finite", heads(broken)),
    };
    format!(
        "its output is {} off (median over {of}{}; worst {}; {} with its own scale{broken})",
        percent(n.error_median),
        n.error_interval.map_or_else(String::new, |interval| format!(", 95 % interval {} %", interval.text(100.0, 1))),
        percent(n.error_worst),
        percent(n.error_relative)
    )
}

fn percent(x: Option<f64>) -> String {
    x.map_or_else(|| "?".into(), |x| format!("{:.1} %", 100.0 * x))
}

/// `1 head`, `12 heads`.
fn heads(count: usize) -> String {
    format!("{count} head{}", if count == 1 { "" } else { "s" })
}

/// Time and memory.
fn cost(n: &Numbers) -> String {
    let time = n.seconds.map_or_else(|| "no time measured".into(), |s| format!("{} a layer", duration(s)));
    let ratio = n.time_ratio.filter(|ratio| (ratio - 1.0).abs() > 1e-9);
    let ratio = ratio.map_or_else(String::new, |ratio| format!(" ({} times softmax's)", two_digits(ratio)));
    let memory =
        n.peak_bytes.map_or_else(String::new, |bytes| format!(" and {:.2} MB beside the tensors", bytes / 1e6));
    format!("{time}{ratio}{memory}")
}

/// With two decimals, or two digits that matter.
fn two_digits(x: f64) -> String {
    let decimals = if x > 0.0 { (1.0 - x.log10().floor()).clamp(2.0, 9.0) } else { 2.0 };
    format!("{x:.*}", decimals as usize)
}

fn duration(seconds: f64) -> String {
    if seconds < 1e-4 { format!("{:.1} µs", seconds * 1e6) } else { format!("{:.2} ms", seconds * 1e3) }
}

/// What the graph is like.
fn shape_of(n: &Numbers) -> Option<String> {
    let (rows, rank, gap) = (n.perplexity?, n.effective_rank?, n.gap?);
    Some(format!(
        "A row attends to {rows:.1} tokens; the graph has {rank:.1} directions and a spectral gap of {gap:.3}"
    ))
}

/// Why the outputs are as near or as far as they are.
fn reason(mechanism: &Mechanism, n: &Numbers, softmax: &Numbers, causal: bool) -> String {
    if n.largest_row == Some(0.0) {
        return "It gives these tokens no weight at all: its output is zero.".into();
    }
    let mut reasons = Vec::new();
    if matches!(mechanism.values().structure, Structure::Pooled(_)) {
        let directions = softmax
            .effective_rank
            .map_or_else(String::new, |rank| format!(", where softmax's graph has {rank:.1} directions"));
        let pooled = if causal { "one pooled value of the tokens so far" } else { "the same value" };
        reasons.push(format!("it gives every token {pooled}{directions}"));
    }
    if let Some(negative) = n.negative.filter(|&share| share > 0.01) {
        reasons.push(format!("{:.0} % of its weight is negative, which no softmax has", 100.0 * negative));
    }
    let all = n.heads + n.incomparable;
    let among = |count: usize| if count < all { format!(", on {count} of {}", heads(all)) } else { String::new() };
    if let Some((count, own, theirs)) = n.rows_beside {
        let how = match own / theirs {
            ratio if ratio > 1.25 => "are wider than softmax's",
            ratio if ratio < 0.8 => "are narrower than softmax's",
            _ => "are as wide as softmax's",
        };
        reasons.push(format!("its rows {how} ({own:.1} tokens against {theirs:.1}{})", among(count)));
    }
    if let Some(centrality) = n.centrality {
        let heads = among(n.centrality_heads);
        reasons.push(format!("the rank correlation of what it and softmax find important is {centrality:.2}{heads}"));
    }
    if let Some(subspace) = n.subspace {
        let heads = among(n.subspace_heads);
        reasons.push(format!("the sines of the angles between their leading eigenvectors are {subspace:.2}{heads}"));
    }
    match reasons.is_empty() {
        true => "Its graph could not be compared: the remarks say why.".into(),
        false => format!("Why: {}.", reasons.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is nearer in 29 heads of 72 is not called farther; in 20 of 72 it is.
    #[test]
    fn few_heads_do_not_decide() {
        let found = [[29, 43], [20, 52], [52, 20], [0, 1], [1, 0], [0, 0], [1, 1]].map(beside_mean);
        use Finding::{NeedsTraining, NotHere, Undecided};
        assert_eq!(found, [Undecided, NotHere, NeedsTraining, NotHere, NeedsTraining, NotHere, Undecided]);
    }

    /// An uncertain share of close heads is told with its interval, a clear one without.
    #[test]
    fn a_share_at_the_edge_says_so() {
        let numbers =
            |close, heads| Numbers { close_interval: Some(Interval::of_share(close, heads)), ..Numbers::default() };
        assert!(share(&numbers(62, 72)).contains("76 to 92 %"), "{}", share(&numbers(62, 72)));
        assert_eq!(share(&numbers(10, 72)), "");
    }
}
