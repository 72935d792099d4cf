//! The state of a run between two steps, and the step itself.

use std::{
    sync::MutexGuard,
    time::{Duration, Instant},
};

use burn::{
    module::Module,
    optim::{GradientsParams, ModuleOptimizer, OptimizerRecord},
    tensor::{Bytes, Device},
};
use resolvent::models::Vit;

use super::{
    Breakdown, LearningRate, Plan, adamw, build, clip_by_global_norm, clock::Clock, decay_at, pictures, seed_generator,
    soft_cross_entropy, update,
};
use crate::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, DataIdentity, Expectation, State, cannot_serialise, module_bytes, parts},
    data::{Batch, Dataset, PictureShape},
    metrics::StepRecord,
};

/// Model, average, optimiser and counters of a run.
pub(crate) struct Session<'a> {
    recipe: &'a Recipe,
    device: Device,
    shape: PictureShape,
    pub model: Vit,
    average: Option<Vit>,
    optimiser: ModuleOptimizer,
    rate: LearningRate,
    pub state: State,
    pub time: Breakdown,
    window: Window,
}

/// What a run learns from.
pub(crate) struct Identity {
    pub data: DataIdentity,
    pub expects: Expectation,
}

/// Speed since the last line of metrics.
#[derive(Default)]
struct Window {
    images: usize,
    time: Duration,
}

/// What one step found.
pub(crate) struct Step {
    pub loss: f64,
    grad_norm: f64,
    lr: f64,
    /// Training pictures per second since the last line of metrics.
    pub images_per_second: f64,
}

impl<'a> Session<'a> {
    /// A run that has done nothing yet.
    pub fn new(recipe: &'a Recipe, dataset: &Dataset, identity: Identity, plan: Plan) -> Result<Self> {
        let device = Device::flex().autodiff();
        let model = build(recipe, dataset, &device)?;
        let average = (recipe.regularisation.ema_decay > 0.0).then(|| model.valid());
        Ok(Self {
            optimiser: adamw(&recipe.optimiser, &model),
            rate: LearningRate::new(&plan, &recipe.schedule, &recipe.optimiser),
            state: State {
                step: 0,
                plan,
                recipe: recipe.clone(),
                data: identity.data,
                expects: identity.expects,
                seconds: 0.0,
                epoch_loss: (0.0, 0),
                window_loss: (0.0, 0),
                best: None,
                metrics_bytes: 0,
            },
            recipe,
            shape: dataset.shape,
            device,
            model,
            average,
            time: Breakdown::default(),
            window: Window::default(),
        })
    }

    /// A run as `checkpoint` left it.
    pub fn resumed(recipe: &'a Recipe, dataset: &Dataset, mut checkpoint: Checkpoint) -> Result<Self> {
        let saved = checkpoint.state.clone();
        let identity = Identity { data: saved.data.clone(), expects: saved.expects.clone() };
        let mut session = Self::new(recipe, dataset, identity, saved.plan.clone())?;
        session.model = checkpoint.load_module(session.model, parts::MODEL)?;
        if let Some(average) = session.average.take() {
            session.average = Some(checkpoint.load_module(average, parts::AVERAGE)?);
        }
        let bytes = checkpoint.take(parts::OPTIMISER)?;
        let record = OptimizerRecord::from_bytes(bytes)
            .map_err(|e| Error::damaged(&checkpoint.path.join(parts::OPTIMISER), e.to_string()))?;
        session.optimiser = adamw(&recipe.optimiser, &session.model).load_record(record);
        session.state = saved;
        Ok(session)
    }

    /// Takes the weights that `trained` is evaluated with.
    pub fn load_weights(&mut self, trained: &mut Checkpoint) -> Result<()> {
        self.model = trained.load_weights(self.model.clone())?;
        self.average = self.average.take().map(|_| self.model.valid());
        Ok(())
    }

    /// One step of AdamW on `batch`.
    pub fn step(&mut self, mut batch: Batch, clock: &mut Clock) -> Result<Step> {
        let began = Instant::now();
        let step = self.state.step;
        let images = pictures::images(&mut batch, self.shape, &self.device);
        let targets = pictures::targets(&mut batch, self.recipe.regularisation.label_smoothing, &self.device);
        clock.lap(&mut self.time.data);
        let logits = {
            let _alone = self.seed_draws();
            self.model.try_forward(images)?
        };
        let loss = soft_cross_entropy(logits, targets);
        let value = loss.clone().inner().into_scalar::<f32>();
        if !value.is_finite() {
            return Err(Error::Diverged { step: step + 1, loss: value });
        }
        clock.lap(&mut self.time.forward);
        let mut grads = GradientsParams::from_grads(loss.backward(), &self.model);
        clock.lap(&mut self.time.backward);
        let grad_norm = clip_by_global_norm(&self.model, &mut grads, self.recipe.optimiser.clip_norm);
        let lr = self.rate.at(step);
        self.model = self.optimiser.step(lr, self.model.clone(), grads);
        if let Some(average) = self.average.take() {
            let decay = decay_at(self.recipe.regularisation.ema_decay, step);
            self.average = Some(update(average, &self.model, decay));
        }
        clock.lap(&mut self.time.optimiser);
        self.count(f64::from(value), batch.len(), began.elapsed());
        let images_per_second = self.window.images as f64 / self.window.time.as_secs_f64();
        Ok(Step { loss: f64::from(value), grad_norm, lr, images_per_second })
    }

    /// Dropout, and landmarks that are drawn, come from Burn's generator: seeded by the step, it needs no state in the
    /// checkpoint.
    fn seed_draws(&self) -> Option<MutexGuard<'static, ()>> {
        let model = &self.recipe.model;
        let seed = self.recipe.seed ^ (self.state.step as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let draws = model.dropout > 0.0 || model.drop_path > 0.0 || self.recipe.mechanism.drawn_landmarks().is_some();
        draws.then(|| seed_generator(&self.device, seed))
    }

    fn count(&mut self, loss: f64, images: usize, time: Duration) {
        self.state.step += 1;
        self.time.steps += 1;
        for (sum, count) in [&mut self.state.epoch_loss, &mut self.state.window_loss] {
            *sum += loss;
            *count += 1;
        }
        self.window.images += images;
        self.window.time += time;
    }

    /// The line of metrics for the steps since the last one.
    pub fn metrics(&mut self, last: &Step) -> StepRecord {
        self.window = Window::default();
        StepRecord {
            step: self.state.step,
            epoch: self.state.step as f64 / self.state.plan.steps_per_epoch as f64,
            loss: mean(&mut self.state.window_loss),
            lr: last.lr,
            grad_norm: last.grad_norm,
            images_per_second: last.images_per_second,
        }
    }

    /// Mean training loss of the epoch that ends here.
    pub fn end_epoch(&mut self) -> f64 {
        mean(&mut self.state.epoch_loss)
    }

    /// The weights that are evaluated: the average where there is one. Without autodiff.
    pub fn evaluated(&self) -> Vit {
        self.average.clone().unwrap_or_else(|| self.model.valid())
    }

    /// The tensors of a checkpoint from which the run can go on.
    pub fn parts(&self) -> Result<Vec<(&'static str, Bytes)>> {
        let mut saved = vec![(parts::MODEL, module_bytes(self.model.valid())?)];
        if let Some(average) = &self.average {
            saved.push((parts::AVERAGE, module_bytes(average.clone())?));
        }
        saved.push((parts::OPTIMISER, self.optimiser.into_bytes().map_err(|e| cannot_serialise(e.into()))?));
        Ok(saved)
    }
}

/// The mean of what was summed, which begins anew.
fn mean(sum_and_count: &mut (f64, usize)) -> f64 {
    let (sum, count) = std::mem::take(sum_and_count);
    sum / count.max(1) as f64
}
