//! One head's token graph, under one mechanism.

use resolvent_graph::{
    Alignment, AttentionOperator, ClusterFit, DENSE_MAX, Dense, HopSummary, Lanczos, LinearOperator, PerronReport,
    Rank, Reversible, Spectrum, StreamedReversible, Walk, asymmetry, degree_ratio, eigenvalues, markov, mixing_bounds,
    mixing_time, row_perplexity, shortest_paths_from, sin_theta, singular_values, sweep_cut,
};
use resolvent_kernels::{Mechanism, Strategy};
use serde::Serialize;

/// Eigenvalues of the walk that are reported.
const SHOWN: usize = 16;
/// Leading eigenvectors whose span is compared with softmax's.
const SPAN: usize = 8;
/// Tokens that paths start from, unless all are asked for.
const SOURCES: usize = 48;
/// Most central tokens named.
const TOP: usize = 5;
/// The distance from the stationary distribution that counts as mixed.
const MIXED: f64 = 0.25;

/// The token graph `M` of one head; what a graph does not have is absent, and `notes` say why.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
pub struct GraphReport {
    /// Least, mean and largest row sum.
    pub row_sums: [f64; 3],
    /// Whether no row sum exceeds one by more than rounding.
    pub substochastic: bool,
    /// The share of the weight, by size, that is negative.
    pub negative: Option<f64>,
    /// Mean over the rows of the number of tokens attended to, `exp` of the entropy.
    pub perplexity: Option<f64>,
    /// Eigenvalues of the walk on the symmetrised graph, descending, the first of them.
    pub eigenvalues: Vec<f64>,
    /// One minus the second of them.
    pub gap: Option<f64>,
    /// `exp` of the entropy of all of them by size: how many directions the graph has.
    pub effective_rank: Option<f64>,
    /// Conductance of the best sweep cut.
    pub cheeger: Option<f64>,
    /// Lower and upper bound on the steps until a walker has forgotten where it started (within 0.25).
    pub mixing: Option<[f64; 2]>,
    /// Largest over least degree.
    pub degree_ratio: Option<f64>,
    /// `|W - W^T| / |W|`.
    pub asymmetry: Option<f64>,
    /// Hops of shortest paths along strong edges.
    pub hops: Option<HopSummary>,
    /// The tokens with the largest share of a walker's time (PageRank), with the share.
    pub central: Vec<(usize, f64)>,
    /// How well the shares of time agree with those on the softmax graph.
    pub centrality: Option<Alignment>,
    /// Distance of the leading eight eigenvectors' span from softmax's: 0 the same, 1 orthogonal.
    pub subspace: Option<f64>,
    /// How well the mechanism's clusters fit the softmax graph.
    pub clusters: Option<ClusterFit>,
    /// How well the token weights of `linear-infsa` stand in for the dominant direction of the queries' affinities.
    pub dominant: Option<PerronReport>,
    /// What `--full` adds.
    pub full: Option<FullReport>,
    /// Why something is absent.
    pub notes: Vec<String>,
}

/// Dense diagnostics that take long.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FullReport {
    /// Moduli of the eigenvalues of `M` itself, descending.
    pub moduli: Vec<f64>,
    /// Singular values of `M`, descending.
    pub singular_values: Vec<f64>,
    /// Their effective rank.
    pub effective_rank: f64,
    /// Steps until a walker has forgotten where it started; absent beyond 2^20 and for graphs without a walk.
    pub mixing_time: Option<u64>,
}

/// One head's queries and keys, `[tokens, head_dim]`.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// Number of tokens.
    pub tokens: usize,
    /// Queries.
    pub q: &'a [f32],
    /// Keys; `None` where they are the queries.
    pub k: Option<&'a [f32]>,
}

/// What is kept of the softmax graph to compare the others with.
#[derive(Debug)]
pub struct Baseline {
    weights: Dense,
    shares: Vec<f64>,
    span: Vec<Vec<f64>>,
}

/// Diagnoses `mechanism` on `head`; `baseline` is softmax's, which comes back where there is none yet.
///
/// # Errors
/// What the mechanism refuses.
pub fn diagnose(
    mechanism: &Mechanism,
    head: Head<'_>,
    baseline: Option<&Baseline>,
    full: bool,
) -> resolvent_graph::Result<(GraphReport, Option<Baseline>)> {
    let keys = if mechanism.tied() { None } else { Some(head.k.unwrap_or(head.q)) };
    let operator = AttentionOperator::new(mechanism, head.tokens, head.q, keys, None, Strategy::Auto)?;
    let mut report = GraphReport::default();
    if let (Mechanism::LinearInfsa(linear), true) = (mechanism, head.tokens <= DENSE_MAX) {
        let found = PerronReport::new(linear, head.tokens, head.q, None);
        report.dominant = note(&mut report.notes, found);
    }
    let sums = markov(&operator)?.row_sums;
    let fold = |f: fn(f64, f64) -> f64| sums.iter().copied().reduce(f).unwrap_or(0.0);
    report.row_sums = [fold(f64::min), sums.iter().sum::<f64>() / sums.len().max(1) as f64, fold(f64::max)];
    report.substochastic = report.row_sums[2] <= 1.0 + 1e-4;
    if head.tokens > DENSE_MAX {
        report.notes.push(format!("more than {DENSE_MAX} tokens: only what needs no stored matrix"));
        streamed(mechanism, head, keys, &mut report);
        return Ok((report, None));
    }
    let stored = Stored { weights: Dense::of(&operator)?, rows: operator.lse() };
    let made = stored.report(&mut report, baseline, full);
    if let (Some(plan), Some(baseline)) = (operator.clusters(), baseline) {
        // A token in no cluster is one of its own.
        let labels = plan.to_tensors().label_q;
        let alone = |(i, &label): (usize, &i64)| if label < 0 { labels.len() + i } else { label as usize };
        let labels: Vec<usize> = labels.iter().enumerate().map(alone).collect();
        report.clusters = note(&mut report.notes, ClusterFit::new(&baseline.weights, &labels));
    }
    Ok((report, made))
}

/// The value, or a note that says why there is none.
fn note<T>(notes: &mut Vec<String>, found: resolvent_graph::Result<T>) -> Option<T> {
    found
        .map_err(|e| {
            if !notes.contains(&e.to_string()) {
                notes.push(e.to_string())
            }
        })
        .ok()
}

/// The leading eigenvalues, by products alone.
fn streamed(mechanism: &Mechanism, head: Head<'_>, keys: Option<&[f32]>, report: &mut GraphReport) {
    let lanczos = Lanczos { largest: SPAN, tol: 1e-5, max_products: 800, ..Lanczos::default() };
    let graph = StreamedReversible::new(mechanism, head.tokens, head.q, keys);
    let found = graph.and_then(|graph| Ok((lanczos.eigenpairs(&graph)?, degree_ratio(graph.log_degree()))));
    if let Some((pairs, ratio)) = note(&mut report.notes, found) {
        report.gap = pairs.values.get(1).map(|eta| 1.0 - eta);
        (report.eigenvalues, report.degree_ratio) = (pairs.values, Some(ratio));
    }
}

/// A stored graph, with the logarithms of what its rows were divided by.
struct Stored {
    weights: Dense,
    rows: Option<Vec<f64>>,
}

impl Stored {
    fn report(&self, report: &mut GraphReport, baseline: Option<&Baseline>, full: bool) -> Option<Baseline> {
        let entries = self.weights.entries();
        let size: f64 = entries.iter().map(|w| w.abs()).sum();
        let below = entries.iter().fold(0.0, |below, w| below - w.min(0.0));
        report.negative = Some(if size > 0.0 { below / size } else { 0.0 });
        let mut notes = std::mem::take(&mut report.notes);
        let perplexity = note(&mut notes, row_perplexity(&self.weights));
        report.perplexity = perplexity.map(|rows| rows.iter().sum::<f64>() / rows.len().max(1) as f64);
        report.asymmetry = note(&mut notes, asymmetry(&self.kernel()));
        let step = if full { 1 } else { self.weights.len().div_ceil(SOURCES).max(1) };
        let sources = (0..self.weights.len()).step_by(step).collect();
        report.hops = note(&mut notes, shortest_paths_from(&self.weights, sources)).map(|paths| paths.summary());
        let shares = note(&mut notes, Walk::default().distribution(&self.weights)).map(|found| found.shares);
        if let (Some(shares), true) = (&shares, report.negative == Some(0.0)) {
            report.central = largest(shares);
            report.centrality = baseline.map(|baseline| Alignment::of(shares, &baseline.shares));
        }
        let graph = note(&mut notes, self.reversible());
        let spectrum = graph.as_ref().and_then(|graph| note(&mut notes, graph.spectrum()));
        if let (Some(graph), Some(spectrum)) = (&graph, &spectrum) {
            spectral(graph, spectrum, report);
            let span = baseline.map(|baseline| sin_theta(&baseline.span, spectrum.subspace(SPAN)));
            let sines = span.and_then(|span| note(&mut notes, span));
            report.subspace = sines.map(|sines| sines / (SPAN.min(graph.len()) as f64).sqrt());
        }
        if full {
            report.full = note(&mut notes, self.full(graph.as_ref()));
        }
        report.notes = notes;
        let span = spectrum?.subspace(SPAN).to_vec();
        baseline.is_none().then_some(Baseline { weights: self.weights.clone(), shares: shares?, span })
    }

    /// The weights before their rows were divided, up to one factor.
    fn kernel(&self) -> Dense {
        let Some(rows) = &self.rows else { return self.weights.clone() };
        let most = rows.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Dense::from_fn(rows.len(), |i, j| self.weights.row(i)[j] * (rows[i] - most).exp())
    }

    fn reversible(&self) -> resolvent_graph::Result<Reversible> {
        let Some(rows) = &self.rows else { return Reversible::from_weights(&self.weights) };
        let n = rows.len();
        let logs: Vec<f64> = self.weights.entries().iter().enumerate().map(|(at, w)| w.ln() + rows[at / n]).collect();
        Reversible::from_log_weights(n, &logs)
    }

    fn full(&self, graph: Option<&Reversible>) -> resolvent_graph::Result<FullReport> {
        let singular_values = singular_values(&self.weights)?;
        Ok(FullReport {
            moduli: eigenvalues(&self.weights)?.into_iter().map(|value| value.modulus()).collect(),
            effective_rank: Rank::of(&singular_values).effective,
            singular_values,
            mixing_time: graph.map(|graph| mixing_time(graph, MIXED)).transpose()?.flatten(),
        })
    }
}

fn spectral(graph: &Reversible, spectrum: &Spectrum, report: &mut GraphReport) {
    let walk = spectrum.walk();
    report.gap = Some(spectrum.gap());
    report.effective_rank = Some(Rank::of(&walk.iter().map(|eta| eta.abs()).collect::<Vec<_>>()).effective);
    report.eigenvalues = walk.into_iter().take(SHOWN).collect();
    report.cheeger = sweep_cut(graph, spectrum).map(|cut| cut.conductance);
    report.degree_ratio = Some(degree_ratio(graph.log_degree())).filter(|ratio| ratio.is_finite());
    report.mixing = mixing_bounds(graph, spectrum, MIXED).ok().map(|(low, high)| [low, high]);
    report.mixing = report.mixing.filter(|bounds| bounds.iter().all(|bound| bound.is_finite()));
}

/// The tokens with the largest shares.
fn largest(shares: &[f64]) -> Vec<(usize, f64)> {
    let mut order: Vec<(usize, f64)> = shares.iter().copied().enumerate().collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    order.truncate(TOP);
    order
}
