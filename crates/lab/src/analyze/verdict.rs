//! Which mechanism can stand in for softmax on the tokens analysed, at what cost, and why.

use resolvent_kernels::{Mechanism, mechanism::Structure};
use serde::Serialize;

use super::{
    GraphReport,
    results::{CallResult, HeadResult, median},
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
    /// No nearer than the mean of all values.
    NotHere,
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
            Self::NotHere => "not on these tokens",
            Self::Refused => "cannot be applied",
        }
    }
}

/// The finding on one mechanism.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
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
    /// Of those, heads with an error of at most a tenth.
    pub close: usize,
    /// Error after one factor per head.
    pub error_median: Option<f64>,
    /// The largest of them.
    pub error_worst: Option<f64>,
    /// Error without a factor.
    pub error_relative: Option<f64>,
    /// Cosine of outputs, mean over tokens.
    pub cosine: Option<f64>,
    /// Seconds of a layer's forward pass.
    pub seconds: Option<f64>,
    /// Times softmax's seconds.
    pub time_ratio: Option<f64>,
    /// Bytes held beside the tensors.
    pub peak_bytes: Option<f64>,
    /// Tokens attended to by a row.
    pub perplexity: Option<f64>,
    /// Spectral gap.
    pub gap: Option<f64>,
    /// Effective rank of the symmetrised graph.
    pub effective_rank: Option<f64>,
    /// Mean hops along strong edges.
    pub hops: Option<f64>,
    /// Share of negative weight.
    pub negative: Option<f64>,
    /// Distance of the leading eigenvectors' span from softmax's.
    pub subspace: Option<f64>,
    /// Rank correlation of the tokens' importance with softmax's.
    pub centrality: Option<f64>,
}

impl Numbers {
    fn new(heads: &[&HeadResult], calls: &[&CallResult], softmax_seconds: Option<f64>) -> Self {
        let errors = || heads.iter().map(|head| head.output.scaled);
        let graphs =
            |pick: fn(&GraphReport) -> Option<f64>| median(heads.iter().filter_map(|head| pick(head.graph.as_ref()?)));
        let seconds = median(calls.iter().filter_map(|call| call.seconds));
        Self {
            heads: heads.len(),
            close: errors().filter(|&error| error <= CLOSE).count(),
            error_median: median(errors()),
            error_worst: errors().reduce(f64::max),
            error_relative: median(heads.iter().map(|head| head.output.relative)),
            cosine: median(heads.iter().map(|head| head.output.cosine)),
            seconds,
            time_ratio: seconds.zip(softmax_seconds).map(|(own, softmax)| own / softmax),
            peak_bytes: median(calls.iter().filter_map(|call| Some(call.peak_bytes? as f64))),
            perplexity: graphs(|g| g.perplexity),
            gap: graphs(|g| g.gap),
            effective_rank: graphs(|g| g.effective_rank),
            hops: graphs(|g| Some(g.hops.as_ref()?.mean)),
            negative: graphs(|g| g.negative),
            subspace: graphs(|g| g.subspace),
            centrality: graphs(|g| Some(g.centrality?.spearman)),
        }
    }
}

/// The verdicts on `mechanisms`, of which the first is softmax.
pub(super) fn verdicts(mechanisms: &[Mechanism], heads: &[HeadResult], calls: &[CallResult]) -> Vec<Verdict> {
    let numbers: Vec<Numbers> = mechanisms
        .iter()
        .scan(None, |softmax, mechanism| {
            let own: Vec<_> = heads.iter().filter(|head| head.mechanism == mechanism.id()).collect();
            let calls: Vec<_> = calls.iter().filter(|call| call.mechanism.id() == mechanism.id()).collect();
            let numbers = Numbers::new(&own, &calls, *softmax);
            *softmax = softmax.or(numbers.seconds);
            Some(Numbers { time_ratio: numbers.seconds.zip(*softmax).map(|(own, all)| own / all), ..numbers })
        })
        .collect();
    let uniform = mechanisms.iter().position(|m| m.id() == "uniform").and_then(|at| numbers[at].error_median);
    let of = |(mechanism, n): (&Mechanism, &Numbers)| {
        let refused = calls.iter().find(|c| c.mechanism.id() == mechanism.id()).and_then(|c| c.refused.clone());
        let finding = finding(mechanism, n, uniform);
        let sentence = match refused {
            Some(why) if n.heads == 0 => format!("{} cannot be applied to these tensors: {why}.", mechanism.id()),
            _ => sentence(mechanism, finding, n, &numbers[0], uniform),
        };
        Verdict { mechanism: mechanism.id(), finding, sentence, numbers: n.clone() }
    };
    mechanisms.iter().zip(&numbers).map(of).collect()
}

fn finding(mechanism: &Mechanism, n: &Numbers, uniform: Option<f64>) -> Finding {
    match (mechanism.id(), n.error_median) {
        (_, None) => Finding::Refused,
        ("softmax", _) => Finding::Baseline,
        _ if 10 * n.close >= 9 * n.heads => Finding::Replaces,
        _ if n.close > 0 => Finding::SomeHeads,
        ("uniform", _) => Finding::NeedsTraining,
        (_, Some(error)) if uniform.is_some_and(|uniform| error >= uniform) => Finding::NotHere,
        _ => Finding::NeedsTraining,
    }
}

fn sentence(mechanism: &Mechanism, finding: Finding, n: &Numbers, softmax: &Numbers, uniform: Option<f64>) -> String {
    let id = mechanism.id();
    if finding == Finding::Baseline {
        let graph = shape_of(n).map_or_else(String::new, |shape| format!(" {shape}."));
        return format!("{id} is what the others are compared with: {}.{graph}", cost(n));
    }
    let percent = |x: Option<f64>| x.map_or_else(|| "?".into(), |x| format!("{:.1} %", 100.0 * x));
    let error = format!(
        "its output is {} off (median over {} heads; worst {}; {} with its own scale)",
        percent(n.error_median),
        n.heads,
        percent(n.error_worst),
        percent(n.error_relative)
    );
    let told = match finding {
        Finding::Replaces => format!("{id} can replace softmax here: {error}"),
        Finding::SomeHeads => format!("{id} can replace softmax in {} of {} heads: {error}", n.close, n.heads),
        Finding::NotHere => {
            format!(
                "{id} cannot replace softmax here: {error}, no nearer than the mean of all values ({})",
                percent(uniform)
            )
        }
        _ => format!("{id} is another operator, to be trained with rather than swapped in: {error}"),
    };
    format!("{told}, at {}. {}", cost(n), reason(mechanism, n, softmax))
}

/// Time and memory.
fn cost(n: &Numbers) -> String {
    let time = n.seconds.map_or_else(|| "no time measured".into(), |s| format!("{:.2} ms a layer", s * 1e3));
    let ratio = n.time_ratio.filter(|ratio| (ratio - 1.0).abs() > 1e-9);
    let ratio = ratio.map_or_else(String::new, |ratio| format!(" ({ratio:.2} times softmax's)"));
    let memory =
        n.peak_bytes.map_or_else(String::new, |bytes| format!(" and {:.2} MB beside the tensors", bytes / 1e6));
    format!("{time}{ratio}{memory}")
}

/// What the graph is like.
fn shape_of(n: &Numbers) -> Option<String> {
    let (rows, rank, gap) = (n.perplexity?, n.effective_rank?, n.gap?);
    Some(format!(
        "A row attends to {rows:.1} tokens; the graph has {rank:.1} directions and a spectral gap of {gap:.3}"
    ))
}

/// Why the outputs are as near or as far as they are.
fn reason(mechanism: &Mechanism, n: &Numbers, softmax: &Numbers) -> String {
    let mut reasons = Vec::new();
    if mechanism.choices().structure == Structure::Pooled {
        let directions = softmax
            .effective_rank
            .map_or_else(String::new, |rank| format!(", where softmax's graph has {rank:.1} directions"));
        reasons.push(format!("it gives every token the same value{directions}"));
    }
    if let Some(negative) = n.negative.filter(|&share| share > 0.01) {
        reasons.push(format!("{:.0} % of its weight is negative, which no softmax has", 100.0 * negative));
    }
    if let Some((own, theirs)) = n.perplexity.zip(softmax.perplexity) {
        let how = match own / theirs {
            ratio if ratio > 1.25 => "are wider than softmax's",
            ratio if ratio < 0.8 => "are narrower than softmax's",
            _ => "are as wide as softmax's",
        };
        reasons.push(format!("its rows {how} ({own:.1} tokens against {theirs:.1})"));
    }
    if let Some(centrality) = n.centrality {
        reasons.push(format!("the rank correlation of what it and softmax find important is {centrality:.2}"));
    }
    if let Some(subspace) = n.subspace {
        reasons.push(format!("their leading eigenvectors are {:.0} % of a right angle apart", 100.0 * subspace));
    }
    match reasons.is_empty() {
        true => "Its graph could not be compared.".into(),
        false => format!("Why: {}.", reasons.join("; ")),
    }
}
