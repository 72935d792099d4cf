//! A comparison by rank: which mechanism is best, and whether the seeds and test examples tell it from the next.

use super::{Comparison, Entry, results::RunResult};
use crate::{
    evaluation::Metric,
    stats::{Interval, Side},
};

/// The value of `metric` in one run, as readers have it: accuracy in percent.
fn of_run(metric: Metric, run: &RunResult) -> Option<f64> {
    match metric {
        Metric::Accuracy => Some(100.0 * run.accuracy?),
        Metric::Bleu => run.bleu,
        Metric::BitsPerByte => Some(run.prediction.as_ref()?.bits_per_byte),
        Metric::Loss => Some(run.loss),
    }
}

/// The mean over the seeds.
fn mean(metric: Metric, entry: &Entry) -> f64 {
    let values: Vec<f64> = entry.runs.iter().filter_map(|run| of_run(metric, run)).collect();
    values.iter().sum::<f64>() / values.len() as f64
}

/// Whether two mechanisms have the same value in every seed, and the same seeds.
fn are_alike(metric: Metric, one: &Entry, other: &Entry) -> bool {
    let values = |entry: &Entry| -> Vec<(u64, Option<f64>)> {
        entry.runs.iter().map(|run| (run.seed, of_run(metric, run))).collect()
    };
    let (one, other) = (values(one), values(other));
    one.len() == other.len() && one.iter().all(|run| other.contains(run))
}

/// How much better the first is.
fn gain(metric: Metric, better: f64, than: f64) -> f64 {
    if metric.is_better(0.0, 1.0) { than - better } else { better - than }
}

/// Points within which two sums of the same numbers may differ.
const ROUNDING: f64 = 1e-9;

/// In percent, from the test examples of pairs of runs: those of one run, as every seed is tested on the same.
fn of_examples(metric: Metric, pairs: &[[&RunResult; 2]]) -> Option<Interval> {
    let shares = |at: usize| pairs.iter().map(|pair| pair[at].accuracy).sum::<Option<f64>>();
    let [best, own] = pairs.first()?.map(|run| run.examples);
    if metric != Metric::Accuracy || best == 0 || own == 0 {
        return None;
    }
    let shares = [shares(0)?, shares(1)?].map(|sum| sum / pairs.len() as f64);
    let Interval { low, high } = Interval::of_difference(shares, [best, own]);
    Some(Interval { low: 100.0 * low, high: 100.0 * high })
}

const fn decimals(metric: Metric) -> usize {
    if matches!(metric, Metric::BitsPerByte | Metric::Loss) { 4 } else { 2 }
}

/// How much worse a mechanism is than the best.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Difference {
    /// In the score's points, the mean over the seeds that both have; where they share none, the difference of the means of all runs. It may
    /// be negative: the best is so by the mean of its own seeds.
    pub points: f64,
    /// Where the true difference lies, where anything tells it.
    pub interval: Option<Interval>,
    /// Whether it is of seeds, taken in pairs; else of the test examples.
    pub of_seeds: bool,
    decimals: usize,
}

impl Difference {
    /// Whether it is told from none.
    pub fn is_told(&self) -> bool {
        self.interval.is_some_and(|interval| interval.side_of(0.0) == Side::Above)
    }

    /// `0.26 (-0.33 to 0.85)`.
    pub fn text(&self) -> String {
        let interval = self.interval.map_or_else(String::new, |i| format!(" ({})", i.text(1.0, self.decimals)));
        format!("{:.*}{interval}", self.decimals, self.points)
    }
}

impl Comparison {
    /// By what its mechanisms are ranked.
    pub fn metric(&self) -> Metric {
        let runs = || self.entries.iter().flat_map(|entry| &entry.runs);
        let has = |metric: Metric| runs().all(|run| of_run(metric, run).is_some());
        let metrics = [Metric::BitsPerByte, Metric::Bleu, Metric::Accuracy];
        metrics.into_iter().find(|metric| has(*metric)).unwrap_or(Metric::Loss)
    }

    /// The mechanisms of which a run ended, the best first.
    pub fn ranked(&self) -> Vec<&Entry> {
        let metric = self.metric();
        let mut entries: Vec<&Entry> = self.entries.iter().collect();
        entries.sort_by(|a, b| gain(metric, mean(metric, b), mean(metric, a)).total_cmp(&0.0));
        entries
    }

    /// How much worse than the best `entry` is, with the interval of the mean over the seeds that both have, in pairs. One such seed, or
    /// differences that are all the same, as few test examples make them, say nothing of their spread: then, of accuracies, it is that of
    /// the test examples. Every interval is of its own difference: of many mechanisms that are alike, a few seem
    /// worse than the best by chance.
    pub fn beside_best(&self, entry: &Entry) -> Difference {
        let (metric, best) = (self.metric(), self.ranked()[0]);
        let own = entry.runs.iter();
        let pairs: Vec<[&RunResult; 2]> =
            own.filter_map(|run| Some([best.runs.iter().find(|other| other.seed == run.seed)?, run])).collect();
        let gain_of = |[best, own]: &[&RunResult; 2]| Some(gain(metric, of_run(metric, best)?, of_run(metric, own)?));
        let gains: Vec<f64> = pairs.iter().filter_map(gain_of).collect();
        let of_seeds = Interval::of_mean(&gains).filter(|interval| interval.high - interval.low > ROUNDING);
        let interval = of_seeds.or_else(|| of_examples(metric, &pairs));
        let points = match gains.len() {
            0 => gain(metric, mean(metric, best), mean(metric, entry)),
            count => gains.iter().sum::<f64>() / count as f64,
        };
        Difference { points, interval, of_seeds: of_seeds.is_some(), decimals: decimals(metric) }
    }

    /// What the comparison comes to.
    pub fn headline(&self) -> String {
        let (metric, ranked) = (self.metric(), self.ranked());
        let Some(best) = ranked.first().map(|best| mean(metric, best)) else { return "No run ended.".into() };
        let digits = decimals(metric);
        let reached = format!("{best:.digits$} {}", metric.unit());
        let (leaders, others): (Vec<&Entry>, Vec<&Entry>) =
            ranked.iter().copied().partition(|entry| are_alike(metric, ranked[0], entry));
        let leaders: Vec<&str> = leaders.iter().map(|entry| entry.name.as_str()).collect();
        let names = leaders.join(", ");
        let (leads, it) = match (leaders.len(), others.len()) {
            (1, 0) => return format!("{names} has {reached}."),
            (_, 0) => return format!("{names} all have {reached}."),
            (1, _) => (format!("{names} leads with {reached}"), "it"),
            _ => (format!("{names} lead alike with {reached}"), "them"),
        };
        let differences: Vec<Difference> = others.iter().map(|entry| self.beside_best(entry)).collect();
        let even: Vec<&str> =
            others.iter().zip(&differences).filter(|(_, d)| !d.is_told()).map(|(e, _)| e.name.as_str()).collect();
        let by = |of_seeds: bool| differences.iter().any(|d| d.interval.is_some() && d.of_seeds == of_seeds);
        let of = match (by(true), by(false)) {
            (true, true) => "seeds and test examples",
            (true, false) => "seeds",
            _ => "test examples",
        };
        let told = match even[..] {
            [] => format!(", {} {} before {}", differences[0].text(), metric.points(), others[0].name),
            _ if differences.iter().all(|difference| difference.interval.is_none()) => {
                let one = ranked.iter().all(|entry| entry.runs.len() == 1);
                let what = if one { "one seed tells" } else { "the seeds that both have tell" };
                format!("; {what} none of the others from {it}")
            }
            _ if even.len() == others.len() => format!("; these {of} tell none of the others from {it}"),
            _ => format!("; these {of} do not tell {} from {it}", even.join(", ")),
        };
        let control = others.iter().find(|entry| entry.mechanism.id() == "uniform");
        let control = control.map_or_else(String::new, |uniform| {
            format!(". Without attention (uniform) it is {:.digits$}", mean(metric, uniform))
        });
        format!("{leads}{told}{control}.")
    }
}
