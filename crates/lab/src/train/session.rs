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

use super::{
    Breakdown, LearningRate, Plan, Task, adamw, clip_by_global_norm,
    clock::Clock,
    decay_at,
    model::{build_for, seed_generator},
    update,
};
use crate::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, DataIdentity, State, cannot_serialise, module_bytes, parts},
    metrics::StepRecord,
};

/// Model, average, optimiser and counters of a run.
pub(crate) struct Session<'a, T: Task> {
    recipe: &'a Recipe,
    task: &'a T,
    device: Device,
    pub model: T::Model,
    average: Option<T::Model>,
    optimiser: ModuleOptimizer,
    rate: LearningRate,
    pub state: State,
    pub time: Breakdown,
    window: Window,
}

/// Speed since the last line of metrics.
#[derive(Default)]
struct Window {
    examples: usize,
    time: Duration,
}

/// What one step found.
pub(crate) struct Step {
    pub loss: f64,
    pub grad_norm: f64,
    pub lr: f64,
    /// Training examples per second since the last line of metrics.
    pub examples_per_second: f64,
}

impl<'a, T: Task> Session<'a, T> {
    /// A run that has done nothing yet.
    pub fn new(recipe: &'a Recipe, task: &'a T, data: DataIdentity, plan: Plan) -> Result<Self> {
        let device = Device::flex().autodiff();
        let model = build_for(task, recipe, &device)?;
        let average = (recipe.regularisation.ema_decay > 0.0).then(|| model.valid());
        Ok(Self {
            optimiser: adamw(&recipe.optimiser, &model),
            rate: LearningRate::new(&plan, &recipe.schedule, &recipe.optimiser),
            state: State {
                step: 0,
                plan,
                recipe: recipe.clone(),
                data,
                expects: task.expects(),
                seconds: 0.0,
                epoch_loss: (0.0, 0),
                window_loss: (0.0, 0),
                best: None,
                metrics_bytes: 0,
            },
            recipe,
            task,
            device,
            model,
            average,
            time: Breakdown::default(),
            window: Window::default(),
        })
    }

    /// A run as `checkpoint` left it.
    pub fn resumed(recipe: &'a Recipe, task: &'a T, mut checkpoint: Checkpoint) -> Result<Self> {
        let saved = checkpoint.state.clone();
        let mut session = Self::new(recipe, task, saved.data.clone(), saved.plan.clone())?;
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
    ///
    /// # Errors
    /// [`Error::Diverged`] where the loss is no number; the session is then of no more use.
    pub fn step(&mut self, batch: T::Batch, clock: &mut Clock) -> Result<Step> {
        let step = self.step_whatever(batch, clock)?;
        if step.loss.is_finite() {
            return Ok(step);
        }
        Err(Error::Diverged { step: self.state.step, loss: step.loss as f32 })
    }

    /// [`Session::step`] whatever the loss is: a step is as long with any numbers.
    pub fn step_whatever(&mut self, batch: T::Batch, clock: &mut Clock) -> Result<Step> {
        let began = Instant::now();
        let step = self.state.step;
        let examples = T::len_of(&batch);
        let inputs = self.task.inputs(self.recipe, batch, &self.device);
        clock.lap(&mut self.time.data);
        let loss = {
            let _alone = self.seed_draws();
            self.task.loss(&self.model, inputs).map_err(|e| diverged(e, step + 1))?
        };
        let value = loss.clone().inner().into_scalar::<f32>();
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
        self.count(f64::from(value), examples, began.elapsed());
        let examples_per_second = self.window.examples as f64 / self.window.time.as_secs_f64();
        Ok(Step { loss: f64::from(value), grad_norm, lr, examples_per_second })
    }

    /// Dropout, and landmarks that are drawn, come from Burn's generator: seeded by the step, it needs no state in the
    /// checkpoint.
    fn seed_draws(&self) -> Option<MutexGuard<'static, ()>> {
        let model = &self.recipe.model;
        let seed = self.recipe.seed ^ (self.state.step as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let draws = model.dropout().iter().any(|share| *share > 0.0)
            || model.drop_path() > 0.0
            || self.recipe.mechanism.drawn_landmarks().is_some();
        draws.then(|| seed_generator(&self.device, seed))
    }

    fn count(&mut self, loss: f64, examples: usize, time: Duration) {
        self.state.step += 1;
        self.time.steps += 1;
        for (sum, count) in [&mut self.state.epoch_loss, &mut self.state.window_loss] {
            *sum += loss;
            *count += 1;
        }
        self.window.examples += examples;
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
            examples_per_second: last.examples_per_second,
        }
    }

    /// Mean training loss of the epoch that ends here.
    pub fn end_epoch(&mut self) -> f64 {
        mean(&mut self.state.epoch_loss)
    }

    /// The weights that are evaluated: the average where there is one. Without autodiff.
    pub fn evaluated(&self) -> T::Model {
        self.average.clone().unwrap_or_else(|| self.model.valid())
    }

    /// The tensors of a checkpoint from which the run can go on.
    pub fn parts(&self) -> Result<Vec<(&'static str, Bytes)>> {
        let mut saved = vec![(parts::MODEL, module_bytes(self.model.valid())?)];
        if let Some(average) = &self.average {
            saved.push((parts::AVERAGE, module_bytes(average.clone())?));
        }
        saved.push((parts::OPTIMISER, self.optimiser.into_bytes().map_err(|e| cannot_serialise(e.into()))?));
        saved.extend(self.task.extras()?);
        Ok(saved)
    }
}

/// A layer whose result leaves f32 refuses it before the loss could be no number: the same end of a run.
fn diverged(error: Error, step: usize) -> Error {
    match error {
        Error::Model(resolvent::Error::Mechanism(resolvent_kernels::Error::Overflow { .. })) => {
            Error::Diverged { step, loss: f32::NAN }
        }
        other => other,
    }
}

/// The mean of what was summed, which begins anew.
fn mean(sum_and_count: &mut (f64, usize)) -> f64 {
    let (sum, count) = std::mem::take(sum_and_count);
    sum / count.max(1) as f64
}
