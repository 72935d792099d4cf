//! One head's token graph, under one mechanism.

use resolvent_graph::{
    Alignment, AttentionOperator, ClusterFit, DENSE_MAX, Error, HeadExtras, Lanczos, LinearOperator, PerronReport,
    Rank, Reversible, Spectrum, StreamedReversible, Walk, degree_ratio, diffusion_map, eigenvalues, markov,
    mixing_bounds, mixing_time, row_perplexity, sin_theta, singular_values, sweep_cut, two_stage_distortion,
};
use resolvent_kernels::{
    ClusterPlan, Mechanism, Strategy,
    mechanism::{ClusterOn, Ssa},
};

use super::{
    AnalyzeOptions,
    graph_report::{FullReport, GraphReport, Subspace},
    landmarks::landmarks,
    matched::{matched_kappa, sampled},
    paths,
    stored::{Stored, mean_perplexity, negative},
    walks::{Step, diffusion, walks},
};

/// Eigenvalues of the walk that are reported.
const SHOWN: usize = 16;
/// Most leading eigenvectors whose span is compared with softmax's.
const SPAN: usize = 8;
/// Tokens that paths start from, unless all are asked for.
const SOURCES: usize = 48;
/// Tokens up to which all eigenvalues of the weights, whose time grows with the cube of these, are found without being asked for.
const EIGENVALUES: usize = 512;
/// Between eigenvalues, what tells the span of those before from rounding.
const CLEAR: f64 = 1e-3;
/// Below this, differences of numbers of about one are rounding.
const ROUNDING: f64 = 1e-9;
/// Why a graph with NaN has nothing else.
const NOT_FINITE: &str = "its weights are not all finite: the scores leave f32";
/// Most central tokens named.
const TOP: usize = 5;
/// The distance from the stationary distribution that counts as mixed.
const MIXED: f64 = 0.25;

/// One head's queries and keys, `[tokens, head_dim]`.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// Number of tokens.
    pub tokens: usize,
    /// Queries.
    pub q: &'a [f32],
    /// Keys; `None` where they are the queries.
    pub k: Option<&'a [f32]>,
    /// What the mechanism's call has for this head alone.
    pub extras: &'a HeadExtras,
    /// Of a clustered mechanism: the plan of the call that the head is one of, and which.
    pub plan: Option<(&'a ClusterPlan, usize)>,
    /// Whether its diffusion map is wanted.
    pub mapped: bool,
    /// The words of its tokens, where they are known.
    pub words: &'a [String],
}

/// What is kept of the softmax graph to compare the others with.
#[derive(Debug)]
pub struct Baseline {
    mechanism: Mechanism,
    extras: HeadExtras,
    /// Tokens that its rows attend to, of those that [`matched_kappa`] looks at.
    sharpness: f64,
    shares: Vec<f64>,
    /// With the vectors of the smallest eigenvalues alone.
    spectrum: Spectrum,
}

/// Diagnoses `mechanism` on `head`; `baseline` is softmax's, which comes back where there is none yet.
///
/// # Errors
/// What the mechanism refuses.
pub fn diagnose(
    mechanism: &Mechanism,
    head: Head<'_>,
    baseline: Option<&Baseline>,
    options: &AnalyzeOptions,
) -> resolvent_graph::Result<(GraphReport, Option<Baseline>)> {
    let keys = if mechanism.tied { None } else { Some(head.k.unwrap_or(head.q)) };
    let extras = head.extras.clone();
    let mut operator = AttentionOperator::of_call(mechanism, head.tokens, head.q, keys, None, extras, Strategy::Auto)?;
    if let Some((plan, index)) = head.plan {
        operator = operator.with_clusters(plan, index)?;
    }
    let mut report = GraphReport::default();
    if let (Some(linear), true) = (mechanism.pooling(), options.full && head.tokens <= DENSE_MAX) {
        let found = PerronReport::new(&linear, head.tokens, head.q, None);
        report.dominant = note(&mut report.notes, found);
        if let Some(change) = report.dominant.as_ref().map(|found| found.change).filter(|&change| change > 1e-4) {
            report.notes.push(format!("the dominant direction still changed by {change:.0e} in its last step of 200"));
        }
    }
    sums(&operator, &mut report)?;
    if head.tokens > DENSE_MAX {
        report.notes.push(format!("more than {DENSE_MAX} tokens: no matrix is stored, only what a few products tell"));
        streamed(operator, &mut report);
        return Ok((report, None));
    }
    let stored = Stored::new(&operator)?;
    let made = diagnose_stored(mechanism, &stored, &mut report, baseline, head, options);
    let values = mechanism.values();
    let ssa = values.as_ssa().filter(|ssa| !ssa.routes_queries());
    let apart = ssa.as_ref().is_some_and(|ssa| ssa.cluster_on == ClusterOn::Dual);
    if apart {
        remark(&mut report.notes, "queries and keys are in clusters of their own: nothing told of these".into());
    }
    if let (Some(ssa), Some(plan), Some(baseline)) = (ssa.filter(|_| !apart), operator.clusters(), baseline) {
        clusters(&ssa, head, plan, baseline, &mut report, options.full);
    }
    let found = landmarks(mechanism, head, options.full);
    report.landmarks = note(&mut report.notes, found).flatten();
    if let (Some(fna), Some(baseline)) = (values.as_fna(), baseline) {
        let matched = match values.bias {
            None => matched_kappa(&fna, head, baseline.sharpness),
            Some(_) => Ok(Err("a bias is added to the logarithms of the weights: no length scale is matched")),
        };
        match note(&mut report.notes, matched) {
            Some(Ok(kappa)) => report.matched_kappa = Some(kappa),
            Some(Err(why)) => remark(&mut report.notes, why.into()),
            None => {}
        }
    }
    Ok((report, made))
}

/// How well a plan's clusters fit softmax's kernel.
fn clusters(ssa: &Ssa, head: Head<'_>, plan: &ClusterPlan, baseline: &Baseline, report: &mut GraphReport, full: bool) {
    // A token in no cluster is one of its own.
    let labels = plan.to_tensors().label_q;
    let alone = |(i, &label): (usize, &i64)| if label < 0 { labels.len() + i } else { label as usize };
    let labels: Vec<usize> = labels.iter().enumerate().map(alone).collect();
    // Made again rather than kept: the kernels of all heads of a layer would take much memory.
    let keys = if baseline.mechanism.tied { None } else { Some(head.k.unwrap_or(head.q)) };
    let (mechanism, extras) = (&baseline.mechanism, baseline.extras.clone());
    let softmax = AttentionOperator::of_call(mechanism, head.tokens, head.q, keys, None, extras, Strategy::Auto);
    let fit = softmax.and_then(|softmax| ClusterFit::new(&Stored::new(&softmax)?.kernel(), &labels));
    report.clusters = note(&mut report.notes, fit);
    if !full {
        return;
    }
    let [q, k] = [head.q, head.k.unwrap_or(head.q)].map(|x| x.iter().map(|&x| x.into()).collect::<Vec<f64>>());
    let dim = q.len() / head.tokens.max(1);
    let scale = ssa.scale.unwrap_or((dim as f64).powf(-0.5));
    let found = note(&mut report.notes, two_stage_distortion(dim, &q, &k, scale, &labels));
    report.distortion = found.filter(|factor| factor.is_finite());
    if found.is_some() && report.distortion.is_none() {
        remark(&mut report.notes, "the two-stage distortion is beyond f64".into());
    }
}

/// Row sums: all NaN where one is.
fn sums(operator: &AttentionOperator, report: &mut GraphReport) -> resolvent_graph::Result<()> {
    let chain = markov(operator)?;
    let sums = &chain.row_sums;
    let fold = |f: fn(f64, f64) -> f64| sums.iter().copied().reduce(f).unwrap_or(0.0);
    let mean = sums.iter().sum::<f64>() / sums.len().max(1) as f64;
    let whole = sums.iter().all(|sum| sum.is_finite());
    report.row_sums = if whole { [fold(f64::min), mean, fold(f64::max)] } else { [f64::NAN; 3] };
    report.substochastic = whole && report.row_sums[2] <= 1.0 + 1e-4;
    if !whole {
        report.notes.push(NOT_FINITE.into());
    }
    Ok(())
}

/// The value, or a note that says why there is none.
pub(super) fn note<T>(notes: &mut Vec<String>, found: resolvent_graph::Result<T>) -> Option<T> {
    let told = |error: Error| match error {
        Error::NotFinite { .. } | Error::Product { .. } => NOT_FINITE.into(),
        Error::Degree { degree, .. } if !degree.is_finite() => NOT_FINITE.into(),
        other => other.to_string(),
    };
    found.map_err(|error| remark(notes, told(error))).ok()
}

/// Adds a note that is not there yet.
pub(super) fn remark(notes: &mut Vec<String>, note: String) {
    if !notes.contains(&note) {
        notes.push(note);
    }
}

/// What a few rows tell, and the leading eigenvalues, by products alone.
fn streamed(operator: AttentionOperator, report: &mut GraphReport) {
    let Some(rows) = note(&mut report.notes, some_rows(&operator)) else { return };
    let below = negative(&rows.concat());
    (report.negative, report.negative_rows) = (Some(below), Some(rows.len()));
    if below > 0.0 {
        let problem = "weights below zero: a graph with them has no entropy, walk or path";
        let share = format!("{:.1e} of the weight of {} rows", below, rows.len());
        return remark(&mut report.notes, format!("{problem} ({share})"));
    }
    report.perplexity = Some(mean_perplexity(rows.iter().map(Vec::as_slice))).filter(|x| x.is_finite());
    let lanczos = Lanczos { largest: SPAN, tol: 1e-5, max_products: 800, ..Lanczos::default() };
    let graph = StreamedReversible::of(operator);
    let found = graph.and_then(|graph| Ok((lanczos.eigenpairs(&graph)?, degree_ratio(graph.log_degree()))));
    if let Some((pairs, ratio)) = note(&mut report.notes, found) {
        report.gap = pairs.values.get(1).map(|eta| 1.0 - eta);
        (report.eigenvalues, report.degree_ratio) = (pairs.values, Some(ratio));
    }
}

/// Evenly spread rows of the weights.
fn some_rows(operator: &AttentionOperator) -> resolvent_graph::Result<Vec<Vec<f64>>> {
    let n = operator.len();
    let unit = |row: usize| (0..n).map(|i| f64::from(u8::from(i == row))).collect();
    let rows = (0..n).step_by(n.div_ceil(SOURCES).max(1)).map(unit).collect::<Vec<Vec<f64>>>();
    operator.apply_transpose_block(&rows)
}

fn diagnose_stored(
    mechanism: &Mechanism,
    stored: &Stored,
    report: &mut GraphReport,
    baseline: Option<&Baseline>,
    head: Head<'_>,
    options: &AnalyzeOptions,
) -> Option<Baseline> {
    let n = stored.weights.len();
    report.negative = Some(stored.negative()).filter(|share| share.is_finite());
    let mut notes = std::mem::take(&mut report.notes);
    let perplexity = note(&mut notes, row_perplexity(&stored.weights));
    report.perplexity = perplexity.map(|rows| rows.iter().sum::<f64>() / rows.len().max(1) as f64);
    if options.full {
        report.asymmetry = note(&mut notes, stored.asymmetry());
    }
    let values = (options.full || n <= EIGENVALUES).then(|| eigenvalues(&stored.weights));
    let values = values.and_then(|values| note(&mut notes, values));
    let moduli: Option<Vec<f64>> = values.map(|values| values.into_iter().map(|value| value.modulus()).collect());
    report.walk_gap = moduli.as_deref().map(walk_gap);
    let step = if options.full { 1 } else { n.div_ceil(SOURCES).max(1) };
    report.hops = note(&mut notes, stored.paths((0..n).step_by(step).collect())).map(|paths| paths.summary());
    paths::add(options, head.words, stored, report, &mut notes);
    let shares = note(&mut notes, Walk::default().distribution(&stored.weights)).map(|found| found.shares);
    if let (Some(shares), true) = (&shares, report.negative == Some(0.0)) {
        report.central = largest(shares);
        report.centrality = baseline.map(|baseline| Alignment::of(shares, &baseline.shares));
        let softmax = baseline.map(|baseline| &baseline.shares[..]);
        let most = report.row_sums[2];
        let found = options.full.then(|| walks(&stored.weights, Step::of(mechanism, most), most, softmax));
        report.walks = found.and_then(|found| note(&mut notes, found));
        if report.centrality.is_some_and(|found| found.spearman.is_none()) {
            let why = "all tokens are equally important, here or in softmax's graph: no rank correlation";
            remark(&mut notes, why.into());
        }
    }
    let graph = note(&mut notes, stored.reversible());
    let spectrum = graph.as_ref().and_then(|graph| note(&mut notes, graph.spectrum()));
    if let (Some(graph), Some(spectrum)) = (&graph, &spectrum) {
        spectral(spectrum, report);
        cut(graph, spectrum, report, &mut notes);
        if options.full {
            mixing(graph, spectrum, report, &mut notes);
        }
        if options.full && head.mapped && !graph.is_connected() {
            remark(&mut notes, "the graph is in parts, or has tokens without edges: no map of it".into());
        } else if options.full && head.mapped {
            let places = diffusion_map(graph, spectrum, 2, 1.0).into_iter();
            let places: Vec<[f64; 2]> = places.filter_map(|at| <[f64; 2]>::try_from(at).ok()).collect();
            report.diffusion_map = if places.iter().flatten().all(|x| x.is_finite()) { places } else { Vec::new() };
        }
        if let Some(baseline) = baseline {
            report.subspace = subspace(&baseline.spectrum, spectrum, &mut notes);
        }
    }
    if options.full {
        report.full = moduli.and_then(|moduli| note(&mut notes, full_report(stored, moduli, graph.as_ref())));
        if graph.is_some() && report.full.as_ref().is_some_and(|full| full.mixing_time.is_none()) {
            remark(&mut notes, "walkers have not forgotten where they started after 2^20 steps: no mixing time".into());
        }
    }
    report.notes = notes;
    if baseline.is_some() {
        return None;
    }
    let mut spectrum = spectrum?;
    spectrum.vectors.truncate(SPAN);
    let sharpness = mean_perplexity(sampled(n).map(|row| stored.weights.row(row)));
    let extras = head.extras.clone();
    Some(Baseline { mechanism: mechanism.clone(), extras, sharpness, shares: shares?, spectrum })
}

/// See [`GraphReport::walk_gap`], from all moduli, descending.
fn walk_gap(moduli: &[f64]) -> f64 {
    match *moduli {
        [first, second, ..] if first > 0.0 => 1.0 - second / first,
        _ => 1.0,
    }
}

fn full_report(stored: &Stored, moduli: Vec<f64>, graph: Option<&Reversible>) -> resolvent_graph::Result<FullReport> {
    let singular_values = singular_values(&stored.weights)?;
    Ok(FullReport {
        moduli,
        effective_rank: Rank::of(&singular_values).effective,
        singular_values,
        mixing_time: graph.map(|graph| mixing_time(graph, MIXED)).transpose()?.flatten(),
    })
}

fn spectral(spectrum: &Spectrum, report: &mut GraphReport) {
    let walk = spectrum.walk();
    report.gap = Some(spectrum.gap());
    report.effective_rank = Some(Rank::of(&walk.iter().map(|eta| eta.abs()).collect::<Vec<_>>()).effective);
    report.eigenvalues = walk.into_iter().take(SHOWN).collect();
}

fn cut(graph: &Reversible, spectrum: &Spectrum, report: &mut GraphReport, notes: &mut Vec<String>) {
    report.cheeger = sweep_cut(graph, spectrum).map(|cut| cut.conductance);
    if spectrum.gap_at(2).is_some_and(|clear| clear < ROUNDING) && report.cheeger.is_some_and(|cut| cut > 0.0) {
        remark(
            notes,
            "the second eigenvalue is as large as the third: the cut is along one of several directions".into(),
        );
    }
    if report.cheeger.is_none() {
        remark(notes, "fewer than two tokens have edges: nothing to cut".into());
    }
}

/// How a walker spreads and forgets where it started, and what slows it.
fn mixing(graph: &Reversible, spectrum: &Spectrum, report: &mut GraphReport, notes: &mut Vec<String>) {
    let above_rounding = |x: f64| if x.abs() < ROUNDING { 0.0 } else { x };
    report.diffusion = diffusion(graph, spectrum).map(|distances| distances.map(above_rounding));
    report.degree_ratio = Some(degree_ratio(graph.log_degree())).filter(|ratio| ratio.is_finite());
    if report.degree_ratio.is_none() {
        remark(notes, "the degrees are further apart than f64 holds: no ratio of them".into());
    }
    let bounds = mixing_bounds(graph, spectrum, MIXED).ok().map(|(low, high)| [above_rounding(low), high]);
    let bounds = bounds.filter(|bounds| bounds.iter().all(|bound| bound.is_finite()));
    let why = match () {
        () if !graph.is_connected() => "the graph is in parts, or has tokens that no walker comes to: it never mixes",
        () if spectrum.absolute_gap() < ROUNDING || bounds.is_none() => {
            "the gap is too small to be told from rounding: no bounds of how soon it mixes"
        }
        () => {
            report.mixing = bounds;
            return;
        }
    };
    remark(notes, why.into());
}

/// How far the leading eigenvectors' spans are apart: of as many as both graphs tell clearly from the next.
fn subspace(softmax: &Spectrum, own: &Spectrum, notes: &mut Vec<String>) -> Option<Subspace> {
    let clear = |spectrum: &Spectrum, r: usize| spectrum.gap_at(r).is_some_and(|gap| gap > CLEAR);
    let Some(directions) = (2..=SPAN).rev().find(|&r| clear(softmax, r) && clear(own, r)) else {
        remark(
            notes,
            "none of the leading eigenvalues is clear of the next here and in softmax's graph: no span".into(),
        );
        return None;
    };
    let sines = note(notes, sin_theta(softmax.subspace(directions), own.subspace(directions)))?;
    Some(Subspace { directions, sine: sines / (directions as f64).sqrt() })
}

/// The tokens with the largest shares.
fn largest(shares: &[f64]) -> Vec<(usize, f64)> {
    let mut order: Vec<(usize, f64)> = shares.iter().copied().enumerate().collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    order.truncate(TOP);
    order
}
