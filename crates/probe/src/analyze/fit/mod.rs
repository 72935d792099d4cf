//! The cheapest mechanism for every head that keeps near enough to dense softmax, found by trying on what a model attends to.
//!
//! Every candidate is applied to every sequence of a layer, in turns; a third of the sequences takes no part in the choice, and tells what it
//! is worth. Heads of a layer with the same mechanism are one call.

mod candidates;
mod choice;
mod measure;
mod results;

use std::{path::Path, time::Instant};

use resolvent_kernels::Mechanism;
use resolvent_lab::{
    Error, Result,
    candidate::Candidate,
    disk::write_atomically,
    environment::Environment,
    fit::{Cost, FIT, FitFile, FittedLayer, Measure},
};

use self::{
    choice::{Choices, Offer, choose, share},
    measure::{Mean, Trial},
};
use super::{AnalyzeOptions, Dump, Layer, chosen, mechanisms, with};
pub use results::{CurvePoint, Fit, HeadFit, LayerFit, Single, TriedCandidate};

/// What to fit, and how.
#[derive(Clone)]
pub struct FitOptions {
    /// The dump, its layers and sequences, causality, rounds and seed. Its `mechanisms` are not looked at.
    pub analyze: AnalyzeOptions,
    /// What is tried beside softmax. Default: routed clusters, windows, centroids, and what is linear in the tokens.
    pub candidates: Vec<Candidate>,
    /// What the target is of. Default [`Measure::Cosine`].
    pub measure: Measure,
    /// What every head is to reach: a cosine between 0 and 1, or an error of at least 0.
    pub target: f64,
    /// What is saved. Default [`Cost::Time`].
    pub cost: Cost,
    /// The share of dense softmax's cost that all heads together may take, above 0: where they would take more, heads leave the target,
    /// those first that lose the least for what it saves. Default: no limit.
    pub budget: Option<f64>,
}

impl FitOptions {
    /// A cosine of `target` on the dump of `analyze`, at the least time.
    pub const fn new(analyze: AnalyzeOptions, target: f64) -> Self {
        Self { analyze, candidates: Vec::new(), measure: Measure::Cosine, target, cost: Cost::Time, budget: None }
    }

    fn validate(&self) -> Result<()> {
        let input = &self.analyze.input;
        let refuse = |field: &str, problem: String| {
            Err(Error::Recipe { file: input.display().to_string(), field: field.into(), problem })
        };
        let (good, range) = match self.measure {
            Measure::Cosine => ((0.0..=1.0).contains(&self.target), "0 to 1, a cosine"),
            Measure::Error => (self.target >= 0.0 && self.target.is_finite(), "0 and more, an error"),
        };
        match self.budget {
            _ if !self.analyze.paths.is_empty() || self.analyze.hop_matrix => {
                let field = if self.analyze.hop_matrix { "hop-matrix" } else { "path" };
                refuse(field, "is of an analysis, and a fit looks at no graph; leave one of them out".into())
            }
            _ if !good => refuse("fit", format!("is {}, must be {range}", self.target)),
            Some(budget) if !(budget > 0.0 && budget.is_finite()) => {
                refuse("budget", format!("is {budget}, must be above 0, a share of what dense softmax costs"))
            }
            _ => Ok(()),
        }
    }
}

/// Fits a mechanism to every head and writes [`FIT`] and [`super::RESULTS`] into `folder`, which is there. `None` when it was stopped; then
/// nothing is written.
///
/// # Errors
/// As [`super::run`]; [`Error::Recipe`] for a target or a budget out of range.
pub fn fit(options: &FitOptions, folder: &Path) -> Result<Option<Fit>> {
    options.validate()?;
    let begun = Instant::now();
    let mut dump = Dump::open(&options.analyze.input)?;
    let mut tried = Vec::new();
    for index in chosen(&options.analyze, dump.layers())? {
        let Some(layer) = Tried::new(options, &mut dump, index)? else { return Ok(None) };
        tried.push(layer);
    }
    let heads: Vec<Choices> = tried.iter().flat_map(Tried::choices).collect();
    let taken = choose(&heads, options.measure.limit(options.target), options.budget);
    let mut layers = Vec::new();
    let mut rest = &taken[..];
    for layer in &tried {
        let (own, others) = rest.split_at(layer.layer.shape.heads);
        let Some(fitted) = layer.fitted(options, &mut dump, own)? else { return Ok(None) };
        layers.push(fitted);
        rest = others;
    }
    let result = Fit {
        input: options.analyze.name.clone().unwrap_or_else(|| options.analyze.input.display().to_string()),
        file: file(options, &layers),
        share: share(&heads, &taken),
        curve: curve(options, &tried, &heads),
        singles: singles(options, &tried),
        layers,
        seconds: begun.elapsed().as_secs_f64(),
        environment: Environment::current(),
        commands: options.analyze.commands.clone(),
    };
    let json = |value: &dyn Fn() -> serde_json::Result<String>, name: &str| {
        let path = folder.join(name);
        let text = value().map_err(|e| Error::damaged(&path, e.to_string()))?;
        write_atomically(&path, (text + "\n").as_bytes())
    };
    json(&|| serde_json::to_string_pretty(&result), super::RESULTS)?;
    json(&|| serde_json::to_string_pretty(&result.file), FIT)?;
    Ok(Some(result))
}

/// What others read of layers that were fitted as `options` ask.
fn file(options: &FitOptions, layers: &[LayerFit]) -> FitFile {
    let FitOptions { measure, target, cost, budget, ref analyze, .. } = *options;
    let layers = layers.iter().map(|layer| layer.mechanisms.clone()).collect();
    FitFile { fit: FitFile::VERSION, measure, target, cost, budget, causal: analyze.causal, layers }
}

/// A layer on which every candidate was tried.
struct Tried {
    index: usize,
    layer: Layer,
    /// Softmax first.
    trials: Vec<Trial>,
    /// Sequences, and of them those held out.
    sequences: [usize; 2],
    /// What one head costs with dense softmax: seconds or operations, mean over the sequences on which that was told.
    weight: f64,
}

/// Whether a sequence takes no part in the choice: every third, and the second of two.
const fn is_held_out(sequence: usize, sequences: usize) -> bool {
    sequence % 3 == 2 || (sequences == 2 && sequence == 1)
}

impl Tried {
    /// Tries all candidates on layer `index`; `None` when stopped.
    fn new(options: &FitOptions, dump: &mut Dump, index: usize) -> Result<Option<Self>> {
        let layer = dump.layers()[index].clone();
        let sequences = options.analyze.sequences.map_or(layer.shape.batch, |most| most.min(layer.shape.batch));
        let candidates = match options.candidates.is_empty() {
            true => candidates::standard(&layer.shape, options.analyze.causal),
            false => options.candidates.clone(),
        };
        let candidates = mechanisms(&AnalyzeOptions { mechanisms: candidates, ..options.analyze.clone() })?;
        if let Some(Candidate { name, .. }) = candidates.iter().find(|found| found.mechanism.tells_heads_apart()) {
            let problem = format!(
                "hold `{name}`, which has numbers of single heads: heads that are called in a group of their own would have others'"
            );
            return Err(Error::Recipe { file: "fit".into(), field: "mechanisms".into(), problem });
        }
        let [head_dim, heads] = [layer.shape.head_dim, layer.shape.heads];
        // Keys that are the queries are so in the file too, so that it can be applied to what it was made of; what follows from how many heads
        // there are stays what it is with all of them.
        let tied = |mechanism: Mechanism| if layer.tied() { with(&mechanism, "tied") } else { mechanism };
        let trial = |Candidate { name, mechanism }| {
            Trial::new(Candidate { name, mechanism: tied(mechanism).of_one_head(head_dim, heads) }, heads)
        };
        let mut trials: Vec<Trial> = candidates.into_iter().map(trial).collect();
        let (mut weight, mut held_out) = (Mean::default(), 0);
        for number in 0..sequences {
            let begun = Instant::now();
            let sequence = dump.sequence(index, number)?;
            let held = is_held_out(number, sequences);
            held_out += usize::from(held);
            let Some(cost) = measure::attempt(options, &mut trials, &sequence, number, held) else { return Ok(None) };
            cost.into_iter().for_each(|cost| weight.add(cost / layer.shape.heads as f64));
            let done = format!("{}, sequence {} of {sequences}", layer.name, number + 1);
            (options.analyze.progress)(&format!("{done}: {:.1} s", begun.elapsed().as_secs_f64()));
        }
        let weight = weight.get().filter(|weight| weight.is_finite()).unwrap_or(0.0);
        Ok(Some(Self { index, layer, trials, sequences: [sequences, held_out], weight }))
    }

    /// What its heads can choose from. Softmax is offered to all, also to heads on which nothing could be compared with it.
    fn choices(&self) -> Vec<Choices> {
        let of = |head: usize| {
            let others = self.trials.iter().enumerate().skip(1);
            let offers = others.filter_map(|(at, trial)| trial.offer(at, head, self.sequences[0]));
            let dense = Offer { candidate: 0, cost: 1.0, distance: 0.0 };
            Choices::new(self.weight, std::iter::once(dense).chain(offers).collect())
        };
        (0..self.layer.shape.heads).map(of).collect()
    }

    /// The layer with the mechanisms `taken` by its heads, run once more as it will be: group by group. `None` when stopped.
    fn fitted(&self, options: &FitOptions, dump: &mut Dump, taken: &[Offer]) -> Result<Option<LayerFit>> {
        let shape = &self.layer.shape;
        let mechanism = |head: usize| &self.trials[taken[head].candidate].candidate.mechanism;
        let mechanisms = FittedLayer::group(&self.layer.name, shape.heads, |head| mechanism(head).clone());
        let [sequences, held_out] = self.sequences;
        let (mut seconds, mut distances) = ([Mean::default(); 2], vec![Mean::default(); shape.heads]);
        for number in (0..sequences).filter(|&number| held_out == 0 || is_held_out(number, sequences)) {
            if options.analyze.stop.load(std::sync::atomic::Ordering::Relaxed) {
                return Ok(None);
            }
            let sequence = dump.sequence(self.index, number)?;
            let Some(checked) = measure::check(options, &mechanisms, &self.softmax().mechanism, &sequence) else {
                continue;
            };
            seconds.iter_mut().zip(checked.seconds).for_each(|(mean, own)| mean.add(own));
            for (mean, own) in distances.iter_mut().zip(checked.distances) {
                own.into_iter().for_each(|distance| mean.add(distance));
            }
        }
        let head = |head: usize| HeadFit {
            candidate: self.trials[taken[head].candidate].candidate.name.clone(),
            cost: taken[head].cost,
            fitted: options.measure.of_distance(taken[head].distance),
            checked: distances[head].get().map(|distance| options.measure.of_distance(distance)),
        };
        Ok(Some(LayerFit {
            tokens: shape.seq_kv,
            sequences,
            held_out,
            seconds: [seconds[0].get(), seconds[1].get()],
            heads: (0..shape.heads).map(head).collect(),
            candidates: self.trials.iter().map(|trial| self.told(options, trial)).collect(),
            mechanisms,
        }))
    }

    fn softmax(&self) -> &Candidate {
        &self.trials[0].candidate
    }

    /// A candidate's numbers on the layer, for the results.
    fn told(&self, options: &FitOptions, trial: &Trial) -> TriedCandidate {
        let measured = |held_out: bool| {
            let of = |head| trial.distance(head, held_out).map(|distance| options.measure.of_distance(distance));
            (0..self.layer.shape.heads).map(of).collect()
        };
        TriedCandidate {
            name: trial.candidate.name.clone(),
            mechanism: trial.candidate.mechanism.clone(),
            refused: trial.refused.clone(),
            cost: trial.cost(),
            fitted: measured(false),
            checked: measured(true),
        }
    }
}

/// Targets of a curve, as distances.
const LADDER: [f64; 13] = [0.0, 1e-4, 3e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0];

/// What all heads together cost, and how far they are, for targets from the strictest to the mildest.
fn curve(options: &FitOptions, tried: &[Tried], heads: &[Choices]) -> Vec<CurvePoint> {
    let mut points: Vec<CurvePoint> = Vec::new();
    for limit in LADDER {
        let taken = choose(heads, limit, None);
        let point = point(options, tried, &taken, share(heads, &taken));
        if points.last().is_none_or(|last| last.cost != point.cost) {
            points.push(point);
        }
    }
    points
}

fn point(options: &FitOptions, tried: &[Tried], taken: &[Offer], cost: f64) -> CurvePoint {
    let places = tried.iter().flat_map(|layer| (0..layer.layer.shape.heads).map(move |head| (layer, head)));
    let mut means = [Mean::default(); 2];
    for ((layer, head), offer) in places.zip(taken) {
        for (held_out, mean) in [false, true].into_iter().zip(&mut means) {
            let distance = match offer.candidate {
                0 => (!held_out || layer.sequences[1] > 0).then_some(0.0),
                at => layer.trials[at].distance(head, held_out),
            };
            distance.into_iter().for_each(|distance| mean.add(distance));
        }
    }
    let [fitted, checked] = means.map(|mean| mean.get().map(|distance| options.measure.of_distance(distance)));
    CurvePoint { cost, fitted, checked }
}

/// Every candidate on all heads, where all layers have it: what choosing head by head is compared with.
fn singles(options: &FitOptions, tried: &[Tried]) -> Vec<Single> {
    let Some((first, others)) = tried.split_first() else { return Vec::new() };
    let everywhere = |name: &str| {
        let of = |layer: &Tried| layer.trials.iter().position(|trial| trial.candidate.name == name);
        let places =
            std::iter::once(first).chain(others).map(|layer| Some((layer, of(layer)?))).collect::<Option<Vec<_>>>()?;
        let (mut cost, mut all, mut worst) = (0.0, 0.0, 0.0_f64);
        let mut taken = Vec::new();
        for (layer, at) in places {
            for head in 0..layer.layer.shape.heads {
                // Where nothing can be compared, as softmax's output is zero, no candidate says anything.
                let told = |(at, trial): (usize, &Trial)| trial.offer(at, head, layer.sequences[0]).is_some();
                if !layer.trials.iter().enumerate().skip(1).any(told) {
                    taken.push(Offer { candidate: at, cost: 0.0, distance: 0.0 });
                    continue;
                }
                let offer = match at {
                    0 => Offer { candidate: 0, cost: 1.0, distance: 0.0 },
                    _ => layer.trials[at].offer(at, head, layer.sequences[0])?,
                };
                cost += layer.weight * offer.cost;
                all += layer.weight;
                worst = worst.max(offer.distance);
                taken.push(offer);
            }
        }
        let point = point(options, tried, &taken, cost / all);
        Some(Single { name: name.to_owned(), point, worst: options.measure.of_distance(worst) })
    };
    first.trials.iter().filter_map(|trial| everywhere(&trial.candidate.name)).collect()
}

/// Whether a mechanism is dense softmax as a fit compares with it.
fn is_softmax(mechanism: &Mechanism) -> bool {
    mechanism.id() == "softmax"
}
