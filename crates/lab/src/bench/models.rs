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

use super::model_results::{Cost, ModelPoint, ModelReport};
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
/// Bytes of a weight while it is learnt: itself, its gradient and two moments.
const LEARNT: u64 = 16;

/// What to measure, and how.
#[derive(Clone)]
pub struct ModelBenchOptions {
    /// The model, and how it is trained; a vision transformer or a pyramid. Its data, augmentation and mechanism do not count.
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
    /// What would take longer, in seconds, is left out and says so; what did, at its first time, is not repeated.
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
    pub keep: Arc<dyn Fn(&ModelReport) -> Result<()> + Send + Sync>,
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
        model: options.recipe.name.clone(),
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
        if let Err(why) = (options.keep)(&report) {
            (options.progress)(&format!("not kept so far: {why}"));
        }
    }
    report.interrupted = false;
    Ok(report)
}

fn validate(options: &ModelBenchOptions) -> Result<()> {
    let fail = |field: &str, problem: String| {
        Err(Error::Recipe { file: "benchmark".into(), field: field.into(), problem: format!("is {problem}") })
    };
    options.recipe.validate()?;
    if !matches!(options.recipe.model, ModelRecipe::Vit(_) | ModelRecipe::Pyramid(_)) {
        return fail(
            "model",
            format!(
                "`{}`, a model of something else than pictures; vision transformers and pyramids are measured",
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
    if options.max_seconds.is_nan() || options.max_seconds <= 0.0 {
        return fail("max-seconds", format!("{}, must be above 0", options.max_seconds));
    }
    let name = |at: usize| &options.mechanisms[at].name;
    match (0..options.mechanisms.len()).find(|&at| (0..at).any(|before| name(before) == name(at))) {
        Some(at) => fail(
            "mechanisms",
            format!("`{}` twice; give configurations of one mechanism as files of different names", name(at)),
        ),
        None => Ok(()),
    }
}

/// Every mechanism at one size; `None` when stopped before all were measured.
fn size(options: &ModelBenchOptions, pixels: usize, report: &ModelReport) -> Result<Option<Vec<ModelPoint>>> {
    let bytes = (pixels as u64).saturating_pow(2).saturating_mul(3 * options.batch as u64);
    let mut points: Vec<ModelPoint> =
        options.mechanisms.iter().map(|of| ModelPoint::new(&of.name, &of.mechanism, pixels)).collect();
    // A picture is there as bytes and as f32, and as a gradient.
    if let Some(why) = beyond_memory("its pictures take", bytes.saturating_mul(10)) {
        points.iter_mut().for_each(|point| point.skipped = Some(why.clone()));
        return Ok(Some(points));
    }
    let data = generated(pixels, options.batch)?;
    let prepared: Vec<_> = points.iter_mut().map(|point| prepare(options, &data, report, point)).collect();
    let mut running = Vec::new();
    for ((recipe, task), point) in
        prepared.iter().zip(&mut points).filter_map(|(ready, point)| Some((ready.as_ref()?, point)))
    {
        if options.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        match Running::begin(options, recipe, task) {
            Ok(begun) => running.push((begun, point)),
            Err(why) => point.skipped = Some(why.to_string()),
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
    for (model, point) in running {
        model.finish(options.batch, point);
    }
    Ok(Some(points))
}

/// The recipe and the task of a point; none, and why, where it is left out.
fn prepare(
    options: &ModelBenchOptions,
    data: &PictureDataset,
    report: &ModelReport,
    point: &mut ModelPoint,
) -> Option<(Recipe, Pictures)> {
    let mut ready = || {
        let recipe = data.settled(&recipe(options, &point.mechanism));
        let task = data.task(&recipe)?;
        [point.parameters, point.multiply_adds] = model_size(&task, &recipe)?;
        Ok::<_, Error>((recipe, task))
    };
    let found = match ready() {
        Ok(found) => found,
        Err(why) => {
            point.skipped = Some(why.to_string());
            return None;
        }
    };
    // Work grows with the square of the tokens at most, memory with their number.
    let before = report.points.iter().rev().find(|earlier| earlier.name == point.name && earlier.inference.is_some());
    let sides = before.map_or(0.0, |earlier| point.pixels as f64 / earlier.pixels as f64);
    let seconds = before.and_then(|earlier| Some(earlier.inference.as_ref()?.seconds * sides.powi(4)));
    let peak = before.and_then(|earlier| Some(earlier.training.as_ref()?.peak_bytes? as f64 * sides.powi(2)));
    let needed = (peak.unwrap_or(0.0) as u64).max(point.parameters * LEARNT);
    let long = seconds
        .filter(|&seconds| seconds > options.max_seconds)
        .map(|seconds| too_long("a forward pass", seconds, options));
    point.skipped = long.or_else(|| beyond_memory("it would hold about", needed));
    point.skipped.is_none().then_some(found)
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
    /// The forward pass, and the training step where it is measured.
    passes: [Option<Measured>; 2],
    /// Why there is no training step.
    left_out: Option<String>,
}

/// Seconds and joules of the turns of a pass, and the most memory that it holds.
struct Measured {
    seconds: Vec<f64>,
    joules: Vec<f64>,
    peak_bytes: Option<u64>,
    /// It was too long to be repeated.
    once: bool,
}

impl Measured {
    fn new(seconds: f64, peak_bytes: Option<u64>, options: &ModelBenchOptions) -> Self {
        let once = seconds > options.max_seconds;
        // What was only warming up does not count.
        let seconds = if once { vec![seconds] } else { Vec::new() };
        Self { seconds, joules: Vec::new(), peak_bytes, once }
    }

    fn turn(&mut self, options: &ModelBenchOptions, mut work: impl FnMut() -> Result<f64>) -> Result<()> {
        if self.once {
            return Ok(());
        }
        let (began, meter) = (Instant::now(), options.meter.as_ref());
        let before = meter.map(EnergyMeter::read).transpose()?;
        let (mut sum, mut count) = (0.0, 0);
        while count == 0 || began.elapsed() < options.turn {
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
    /// Draws the weights, and makes a forward pass and a training step of each twice, the first to warm up.
    fn begin(options: &ModelBenchOptions, recipe: &'a Recipe, task: &'a Pictures) -> Result<Self> {
        let probe = options.memory.as_deref();
        let before = probe.map(MemoryProbe::held);
        let mut bench = Bench::new(recipe, task, None, &Device::flex())?;
        bench.infer()?;
        let (mut seconds, held) = (0.0, probe.map(MemoryProbe::held));
        let peak = peak_of(probe, held, || bench.infer().map(|took| seconds = took))?;
        let forward = Measured::new(seconds, peak, options);
        let expected = TRAINING * seconds;
        if expected > options.max_seconds {
            let left_out = Some(too_long("a training step", expected, options));
            return Ok(Self { bench, passes: [Some(forward), None], left_out });
        }
        bench.step()?;
        let peak = peak_of(probe, before, || bench.step().map(|took| seconds = took))?;
        let training = Measured::new(seconds, peak, options);
        Ok(Self { bench, passes: [Some(forward), Some(training)], left_out: None })
    }

    fn turn(&mut self, options: &ModelBenchOptions) -> Result<()> {
        let Self { bench, passes: [forward, training], .. } = self;
        if let Some(forward) = forward {
            forward.turn(options, || bench.infer())?;
        }
        training.as_mut().map_or(Ok(()), |training| training.turn(options, || bench.step()))
    }

    fn finish(self, batch: usize, point: &mut ModelPoint) {
        [point.inference, point.training] = self.passes.map(|pass| pass.map(|pass| pass.finish(batch)));
        point.left_out = self.left_out;
    }
}

/// [`peak_above`] what was held, where there is a counter.
fn peak_of(
    probe: Option<&dyn MemoryProbe>,
    held: Option<u64>,
    work: impl FnOnce() -> Result<()>,
) -> Result<Option<u64>> {
    match (probe, held) {
        (Some(probe), Some(held)) => peak_above(probe, held, work).map(Some),
        _ => work().map(|()| None),
    }
}
