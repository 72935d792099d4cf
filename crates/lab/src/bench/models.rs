//! Whole models of pictures: time, memory, multiply-adds and energy of a forward pass and of a training step against the size of the
//! pictures. All mechanisms of one size take turns.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use burn::tensor::Device;
use resolvent_kernels::Mechanism;

use super::{
    model_results::{Cost, ModelPoint, ModelReport},
    options::{fail, validate_limit, validate_names},
};
use crate::{
    Error, Recipe, Result,
    augment::Augment,
    candidate::Candidate,
    data::{PictureDataset, PictureShape, PictureSplit},
    energy::EnergyMeter,
    environment::{Environment, Load, beyond_memory},
    memory::{MemoryProbe, peak_above},
    recipe::ModelRecipe,
    train::{Bench, Pictures, TaskData, model_size},
};

/// Classes that the pictures could be of, as many as ImageNet-1K has.
const CLASSES: usize = 1000;
/// How much longer a training step takes than a forward pass, before one was made.
const TRAINING: f64 = 4.0;
/// Bytes of a number.
const F32: u64 = 4;
/// Bytes of the gradient and the two moments of a weight.
const OPTIMISER: u64 = 3 * F32;
/// Bytes of activations that a training step keeps for every channel of a token after a block: some sixteen numbers.
const ACTIVATIONS: u64 = 64;

/// What [`ModelBenchOptions::keep`] does with a report, such as [`ModelReport::save`].
pub type KeepModels = dyn Fn(&ModelReport) -> Result<()> + Send + Sync;

/// What to measure, and how.
#[derive(Clone)]
pub struct ModelBenchOptions {
    /// The model, and how it is trained; a vision transformer or a pyramid. Its data, augmentation, batch size and mechanism do not count.
    pub recipe: Recipe,
    /// The mechanisms in it, each name once.
    pub mechanisms: Vec<Candidate>,
    /// Sides of the square pictures.
    pub pixels: Vec<usize>,
    /// Pictures of a batch, >= 1.
    pub batch: usize,
    /// Turns of every point; the median counts. >= 1.
    pub rounds: usize,
    /// How long a turn lasts at least: what takes less is run several times.
    pub turn: Duration,
    /// What would take longer, in seconds, is left out and says so; what did at its first time is not repeated, and counts.
    pub max_seconds: f64,
    /// What measures energy, where it is asked for.
    pub meter: Option<EnergyMeter>,
    /// How busy the machine was before anything ran.
    pub load: Option<Load>,
    /// Raised by whoever wants to stop.
    pub stop: Arc<AtomicBool>,
    /// Who is told of the progress.
    pub progress: Arc<dyn Fn(&str) + Send + Sync>,
    /// Who keeps what there is after every size, marked as interrupted.
    pub keep: Arc<KeepModels>,
    /// Counter of memory, if the program has one.
    pub memory: Option<Arc<dyn MemoryProbe>>,
    /// Commands that repeat the benchmark, for the report.
    pub commands: Vec<String>,
}

/// Runs the benchmark. What was measured until it was stopped is in the report, size by size.
///
/// # Errors
/// [`Error::Recipe`] for an option out of range or a model of something else than pictures. A mechanism that the model refuses is told of
/// in the report.
pub fn run_models(options: &ModelBenchOptions) -> Result<ModelReport> {
    validate(options)?;
    let mut report = ModelReport {
        recipe: options.recipe.clone(),
        batch: options.batch,
        rounds: options.rounds,
        interrupted: true,
        load: options.load,
        points: Vec::new(),
        environment: Environment::current(),
        commands: options.commands.clone(),
    };
    if let Some(load) = options.load.filter(Load::is_busy) {
        (options.progress)(&format!("warning: {load}"));
    }
    let mut sizes = options.pixels.clone();
    sizes.sort_unstable();
    sizes.dedup();
    for pixels in sizes {
        let Some(points) = size(options, pixels, &report)? else { return Ok(report) };
        points.iter().for_each(|point| (options.progress)(&point.to_string()));
        report.points.extend(points);
        // What measured nothing does not replace what an earlier benchmark found.
        let kept = if report.has_measured() { (options.keep)(&report) } else { Ok(()) };
        if let Err(why) = kept {
            (options.progress)(&format!("not kept so far: {why}"));
        }
    }
    report.interrupted = false;
    Ok(report)
}

fn validate(options: &ModelBenchOptions) -> Result<()> {
    options.recipe.validate()?;
    if !matches!(options.recipe.model, ModelRecipe::Vit(_) | ModelRecipe::Pyramid(_)) {
        return fail(
            "model",
            format!(
                "`{}`, whose model is neither a vision transformer nor a pyramid; these are measured",
                options.recipe.name
            ),
        );
    }
    if options.pixels.is_empty() || options.pixels.contains(&0) {
        return fail("pixels", "empty or has a 0; pictures have at least one pixel".into());
    }
    if options.batch == 0 || options.rounds == 0 {
        return fail(if options.batch == 0 { "batch" } else { "rounds" }, "0, must be at least 1".into());
    }
    validate_limit(options.max_seconds)?;
    validate_names(&options.mechanisms)
}

/// Every mechanism at one size; `None` when stopped before all were measured.
fn size(options: &ModelBenchOptions, pixels: usize, report: &ModelReport) -> Result<Option<Vec<ModelPoint>>> {
    if let Some(probe) = &options.memory {
        probe.give_back();
    }
    let mut points: Vec<ModelPoint> =
        options.mechanisms.iter().map(|of| ModelPoint::new(&of.name, &of.mechanism, pixels)).collect();
    // A picture is there as bytes and as f32, and as a gradient.
    let values = (pixels as u64).saturating_pow(2).saturating_mul(3).saturating_mul(options.batch as u64);
    if let Some(why) = beyond_memory("its pictures take", values.saturating_mul(9)) {
        points.iter_mut().for_each(|point| point.skipped = Some(why.clone()));
        return Ok(Some(points));
    }
    let data = generated(pixels, options.batch)?;
    let prepared: Vec<_> = points.iter_mut().map(|point| prepare(options, &data, report, point)).collect();
    let mut running = Vec::new();
    for (ready, point) in prepared.iter().zip(&mut points) {
        if options.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let Some(ready) = ready else { continue };
        match Running::begin(options, ready, point.parameters) {
            Ok(begun) => running.push((begun, point)),
            Err(why) => point.skipped = Some(why),
        }
    }
    for _ in 0..options.rounds {
        for (model, _) in &mut running {
            if options.stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            model.turn(options)?;
        }
    }
    if options.stop.load(Ordering::Relaxed) {
        return Ok(None);
    }
    running.into_iter().for_each(|(model, point)| model.finish(options.batch, point));
    Ok(Some(points))
}

/// What a point is measured by.
struct Ready {
    recipe: Recipe,
    task: Pictures,
    /// Numbers in the outputs of all blocks, of the batch.
    outputs: u64,
}

/// What a point is measured by; none, and why, where it is left out.
fn prepare(
    options: &ModelBenchOptions,
    data: &PictureDataset,
    report: &ModelReport,
    point: &mut ModelPoint,
) -> Option<Ready> {
    let mut ready = || {
        let recipe = data.settled(&recipe(options, &point.mechanism));
        let task = data.task(&recipe)?;
        let size = model_size(&task, &recipe)?;
        [point.parameters, point.multiply_adds] = [size.parameters, size.multiply_adds];
        let outputs = size.block_outputs.saturating_mul(options.batch as u64);
        Ok::<_, Error>(Ready { recipe, task, outputs })
    };
    let found = ready();
    let before = report.points.iter().rev().find(|earlier| earlier.name == point.name && earlier.inference.is_some());
    let seconds = before.and_then(|earlier| {
        Some(earlier.inference?.seconds * point.multiply_adds as f64 / earlier.multiply_adds.max(1) as f64)
    });
    let long = seconds.filter(|&seconds| seconds > options.max_seconds);
    match (found, long) {
        (Ok(found), None) => Some(found),
        (Ok(_), Some(seconds)) => {
            point.skipped = Some(too_long("a forward pass", seconds, options));
            None
        }
        (Err(why), _) => {
            point.skipped = Some(why.to_string());
            None
        }
    }
}

fn too_long(what: &str, seconds: f64, options: &ModelBenchOptions) -> String {
    format!("{what} would take about {seconds:.0} s; the limit is {} s (--max-seconds)", options.max_seconds)
}

/// One batch is an epoch, as it is drawn.
fn recipe(options: &ModelBenchOptions, mechanism: &Mechanism) -> Recipe {
    let mut recipe = Recipe { mechanism: mechanism.clone(), augment: Augment::default(), ..options.recipe.clone() };
    recipe.schedule.batch_size = options.batch;
    recipe.schedule.accumulate = 1;
    recipe.regularisation.hold_out = 0.0;
    recipe
}

/// A batch of pictures of noise.
fn generated(pixels: usize, batch: usize) -> Result<PictureDataset> {
    let shape = PictureShape { channels: 3, height: pixels, width: pixels };
    // A linear congruence, whose high bits are as good as drawn.
    let mut state = 1_u64;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let noise = (0..batch * shape.volume()).map(|_| byte()).collect();
    let split = PictureSplit::new(shape, noise, (0..batch).map(|label| (label % CLASSES) as u32).collect())?;
    let classes = (0..CLASSES).map(|class| class.to_string()).collect();
    Ok(PictureDataset { name: "generated".into(), classes, shape, train: split.clone(), validation: None, test: split })
}

/// A model that takes its turns.
struct Running<'a> {
    bench: Bench<'a, Pictures>,
    forward: Measured,
    training: Option<Measured>,
    /// Why there is no training step.
    left_out: Option<String>,
}

/// Seconds and joules of the turns of a pass, and the most memory that it holds.
#[derive(Default)]
struct Measured {
    seconds: Vec<f64>,
    joules: Vec<f64>,
    peak_bytes: Option<u64>,
    /// It is too long to be repeated.
    once: bool,
}

impl Measured {
    /// The first time of a pass, which draws weights or makes the optimiser's state; one that is short is made once more, and only what its
    /// turns find counts. Its memory is what it holds beyond `base`, or without one beside what is held when it begins.
    fn first(options: &ModelBenchOptions, base: Option<u64>, mut work: impl FnMut() -> Result<f64>) -> Result<Self> {
        let (probe, mut first) = (options.memory.as_deref(), Self::default());
        let held = || probe.map_or(0, MemoryProbe::held);
        let start = held();
        let peak = peak_of(probe, base.unwrap_or(start), || first.turn(options, Duration::ZERO, &mut work))?;
        first.once = first.seconds.iter().any(|&seconds| seconds > options.max_seconds);
        if first.once {
            // What it drew stays.
            let left = if base.is_none() { held().saturating_sub(start) } else { 0 };
            return Ok(Self { peak_bytes: peak.map(|peak| peak.saturating_sub(left)), ..first });
        }
        let peak_bytes = peak_of(probe, base.unwrap_or_else(held), || work().map(drop))?;
        Ok(Self { peak_bytes, ..Self::default() })
    }

    /// Runs of the pass for `turn`, at least one, until it is stopped.
    fn turn(
        &mut self,
        options: &ModelBenchOptions,
        turn: Duration,
        mut work: impl FnMut() -> Result<f64>,
    ) -> Result<()> {
        if self.once {
            return Ok(());
        }
        let (began, meter) = (Instant::now(), options.meter.as_ref());
        let before = meter.map(EnergyMeter::read).transpose()?;
        let (mut sum, mut count) = (0.0, 0);
        while count == 0 || began.elapsed() < turn && !options.stop.load(Ordering::Relaxed) {
            sum += work()?;
            count += 1;
        }
        self.seconds.push(sum / f64::from(count));
        if let (Some(meter), Some(before)) = (meter, before) {
            self.joules.push(meter.since(&before)? / f64::from(count));
        }
        Ok(())
    }

    fn finish(mut self, batch: usize) -> Cost {
        Cost::new(&mut self.seconds, &mut self.joules, self.peak_bytes, batch)
    }
}

impl<'a> Running<'a> {
    /// Draws the weights and makes the first passes, as far as time and memory allow; or why it cannot.
    fn begin(
        options: &ModelBenchOptions,
        Ready { recipe, task, outputs }: &'a Ready,
        parameters: u64,
    ) -> std::result::Result<Self, String> {
        let words = |e: Error| e.to_string();
        let weights = parameters.saturating_mul(F32);
        let needed = weights.saturating_add(outputs.saturating_mul(F32));
        if let Some(why) = beyond_memory("beside the mechanisms before it, it would hold about", needed) {
            return Err(why);
        }
        let before = options.memory.as_deref().map(MemoryProbe::held);
        let mut bench = Bench::new(recipe, task, None, &Device::flex()).map_err(words)?;
        let mut seconds = 0.0;
        let infer = || bench.infer().inspect(|&took| seconds = took);
        let forward = Measured::first(options, None, infer).map_err(words)?;
        let expected = TRAINING * seconds;
        let long = (expected > options.max_seconds).then(|| too_long("a training step", expected, options));
        let needed = parameters.saturating_mul(OPTIMISER).saturating_add(outputs.saturating_mul(ACTIVATIONS));
        let left_out = long.or_else(|| beyond_memory("a training step would hold about", needed));
        let training = match left_out {
            Some(_) => None,
            None => Some(Measured::first(options, before, || bench.step()).map_err(words)?),
        };
        Ok(Self { bench, forward, training, left_out })
    }

    fn turn(&mut self, options: &ModelBenchOptions) -> Result<()> {
        let Self { bench, forward, training, .. } = self;
        forward.turn(options, options.turn, || bench.infer())?;
        training.as_mut().map_or(Ok(()), |training| training.turn(options, options.turn, || bench.step()))
    }

    fn finish(self, batch: usize, point: &mut ModelPoint) {
        point.inference = Some(self.forward.finish(batch));
        point.training = self.training.map(|training| training.finish(batch));
        point.left_out = self.left_out;
    }
}

/// [`peak_above`] `held` bytes, where there is a counter.
fn peak_of(probe: Option<&dyn MemoryProbe>, held: u64, work: impl FnOnce() -> Result<()>) -> Result<Option<u64>> {
    match probe {
        Some(probe) => peak_above(probe, held, work).map(Some),
        None => work().map(|()| None),
    }
}
