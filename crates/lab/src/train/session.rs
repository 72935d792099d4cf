//! The state of a run between two steps, and the step itself.

use std::{
    sync::MutexGuard,
    time::{Duration, Instant},
};

use burn::{
    module::Module,
    optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer, OptimizerRecord},
    tensor::{Device, Tensor},
};

use super::{
    LayerRates, Task, clip_by_global_norm, clip_on_device, decay_at,
    model::{build_for, seed_generator},
    optimiser, update,
};
use crate::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, DataIdentity, Part, Plateau, State, cannot_serialise, moments, parts},
    clock::{Breakdown, Clock},
    device::is_cpu,
    evaluation::Evaluation,
    metrics::StepRecord,
    recipe::Decay,
    schedule::{LearningRate, Plan},
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
    layers: LayerRates,
    pub state: State,
    window: Window,
    unread: Vec<Unread>,
    /// Loss and norm of the gradients of the latest step that was read.
    latest: Option<(f64, f64)>,
}

/// Steps of a GPU between two readings of their losses: reading waits for all that was asked of it.
const READ_EVERY: usize = 10;

/// What a step found, before it is read.
struct Unread {
    step: usize,
    /// The loss `[1]`, and where it is not yet a number the norm of all gradients together `[1]`.
    found: Vec<Tensor<1>>,
    norm: Option<f64>,
}

/// Speed since the last line of metrics.
#[derive(Default)]
struct Window {
    examples: usize,
    time: Duration,
}

/// What one step found.
pub(crate) struct Step {
    /// Of the latest step that was read; on the CPU of this one.
    pub loss: f64,
    pub grad_norm: f64,
    pub lr: f64,
    /// Training examples per second since the last line of metrics.
    pub examples_per_second: f64,
}

impl<'a, T: Task> Session<'a, T> {
    /// A run that has done nothing yet.
    pub fn new(recipe: &'a Recipe, task: &'a T, data: DataIdentity, plan: Plan, device: &Device) -> Result<Self> {
        let device = device.clone().autodiff();
        let model = build_for(task, recipe, &device)?;
        let average = (recipe.regularisation.ema_decay > 0.0).then(|| model.valid());
        Ok(Self {
            optimiser: optimiser(&recipe.optimiser, &model),
            layers: LayerRates::new(recipe.optimiser.layer_decay, &model),
            rate: LearningRate::new(&plan, &recipe.schedule, &recipe.optimiser),
            state: State {
                step: 0,
                plan,
                recipe: recipe.clone(),
                data,
                expects: task.expects(),
                seconds: 0.0,
                time: Breakdown::default(),
                evaluated: 0,
                epoch_loss: (0.0, 0),
                window_loss: (0.0, 0),
                best: None,
                plateau: None,
                origin: None,
                metrics_bytes: 0,
            },
            recipe,
            task,
            device,
            model,
            average,
            window: Window::default(),
            unread: Vec::new(),
            latest: None,
        })
    }

    /// A run as `checkpoint` left it.
    pub fn resumed(recipe: &'a Recipe, task: &'a T, checkpoint: &Checkpoint, device: &Device) -> Result<Self> {
        let saved = checkpoint.state.clone();
        let mut session = Self::new(recipe, task, saved.data.clone(), saved.plan.clone(), device)?;
        session.model = checkpoint.load_module(session.model, parts::MODEL)?;
        if let Some(average) = session.average.take() {
            session.average = Some(checkpoint.load_module(average, parts::AVERAGE)?);
        }
        let record = moments(checkpoint, &session.model)?;
        session.optimiser = optimiser(&recipe.optimiser, &session.model).load_record(record);
        session.state = saved;
        Ok(session)
    }

    /// Begins with those of the weights of `trained` that the model has too.
    pub fn begin_with(&mut self, trained: &Checkpoint) -> Result<()> {
        let (model, origin) = trained.begin(self.model.clone(), &self.state.expects)?;
        self.model = model;
        self.average = self.average.take().map(|_| self.model.valid());
        self.optimiser = optimiser(&self.recipe.optimiser, &self.model);
        self.state.origin = Some(origin);
        Ok(())
    }

    /// Takes the weights that `trained` is evaluated with.
    pub fn load_weights(&mut self, trained: &Checkpoint) -> Result<()> {
        self.model = trained.load_weights(self.model.clone())?;
        self.average = self.average.take().map(|_| self.model.valid());
        Ok(())
    }

    /// One step on `batches`, whose gradients are averaged.
    ///
    /// # Errors
    /// [`Error::Diverged`] where a loss that was read is no number; the session is then of no more use.
    pub fn step(&mut self, batches: Vec<T::Batch>, clock: &mut Clock) -> Result<Step> {
        let (began, examples) = (Instant::now(), batches.iter().map(T::len_of).sum::<usize>());
        let lr = self.step_unread(batches, clock)?;
        let (done, plan) = (self.state.step, &self.state.plan);
        // The first is read for what it tells: a device that fails, a loss to show.
        let due = self.latest.is_none() || done.is_multiple_of(self.recipe.log.every) || plan.ends_epoch(done);
        if due || is_cpu(&self.device) || self.unread.len() >= READ_EVERY {
            self.read()?;
            clock.lap(&mut self.state.time.optimiser);
        }
        self.window.examples += examples;
        self.window.time += began.elapsed();
        let examples_per_second = self.window.examples as f64 / self.window.time.as_secs_f64();
        let (loss, grad_norm) = self.latest.unwrap_or((f64::NAN, f64::NAN));
        Ok(Step { loss, grad_norm, lr, examples_per_second })
    }

    /// [`Session::step`] without waiting for what it finds. The learning rate.
    pub fn step_unread(&mut self, batches: Vec<T::Batch>, clock: &mut Clock) -> Result<f64> {
        let step = self.state.step;
        let (loss, mut grads) = self.gradients(batches, clock)?;
        let mut found = vec![loss];
        let max_norm = self.recipe.optimiser.clip_norm;
        let norm = if is_cpu(&self.device) {
            Some(clip_by_global_norm(&self.model, &mut grads, max_norm))
        } else {
            found.push(clip_on_device(&self.model, &mut grads, max_norm));
            None
        };
        let lr = self.rate.at(step) * self.fallen();
        self.model = self.optimiser.step(self.layers.at(lr), self.model.clone(), grads);
        if let Some(average) = self.average.take() {
            let decay = decay_at(self.recipe.regularisation.ema_decay, step);
            self.average = Some(update(average, &self.model, decay));
        }
        clock.lap(&mut self.state.time.optimiser);
        self.state.step += 1;
        self.state.time.steps += 1;
        self.unread.push(Unread { step: step + 1, found, norm });
        Ok(lr)
    }

    /// Waits for the steps that were asked for, and counts their losses; all of them are read at once.
    ///
    /// # Errors
    /// [`Error::Diverged`] for the first step whose loss is no number, or the norm of its gradients; [`Error::Device`] where the device fails.
    pub fn read(&mut self) -> Result<()> {
        let unread = std::mem::take(&mut self.unread);
        if unread.is_empty() {
            return Ok(());
        }
        let tensors = unread.iter().flat_map(|unread| unread.found.clone()).collect();
        let values = Tensor::cat(tensors, 0).try_into_vec_as::<f32>().map_err(|e| failed(&e))?;
        let mut values = values.into_iter().map(f64::from);
        let mut next = || values.next().unwrap_or(f64::NAN);
        for Unread { step, norm, .. } in unread {
            let loss = next();
            let norm = norm.unwrap_or_else(&mut next);
            self.latest = Some((loss, norm));
            self.count(loss);
            if !loss.is_finite() || !norm.is_finite() {
                return Err(Error::Diverged { step, loss: loss as f32 });
            }
        }
        Ok(())
    }

    /// The share of the rate that is left, where it falls on plateaus.
    fn fallen(&self) -> f64 {
        match (&self.recipe.schedule.decay, &self.state.plateau) {
            (Decay::Plateau { factor, .. }, Some(plateau)) => factor.powi(plateau.falls),
            _ => 1.0,
        }
    }

    /// Lowers the rate on a plateau, where the schedule says so, after an epoch that ended in `evaluation`.
    pub fn watch(&mut self, evaluation: &Evaluation) {
        let (Decay::Plateau { patience, .. }, metric) = (&self.recipe.schedule.decay, evaluation.metric()) else {
            return;
        };
        let Some(value) = metric.of(evaluation) else { return };
        match &mut self.state.plateau {
            Some(plateau) if !metric.is_better(value, plateau.best) => {
                plateau.since += 1;
                if plateau.since >= *patience {
                    (plateau.since, plateau.falls) = (0, plateau.falls + 1);
                }
            }
            plateau => {
                let falls = plateau.map_or(0, |plateau| plateau.falls);
                *plateau = Some(Plateau { best: value, since: 0, falls });
            }
        }
    }

    /// Loss and gradients of one batch as large as all of `batches`: each counts by what its own loss is the mean over.
    /// The loss is `[1]`.
    fn gradients(&mut self, batches: Vec<T::Batch>, clock: &mut Clock) -> Result<(Tensor<1>, GradientsParams)> {
        let parts = batches.len();
        let all: usize = batches.iter().map(T::terms_of).sum();
        let (mut losses, mut accumulated) = (Vec::with_capacity(parts), GradientsAccumulator::new());
        for (part, batch) in batches.into_iter().enumerate() {
            let share = T::terms_of(&batch) as f64 / all as f64;
            let inputs = self.task.inputs(self.recipe, batch, &self.device);
            clock.lap(&mut self.state.time.data);
            let loss = {
                let _alone = self.seed_draws(part);
                self.task.loss(&self.model, inputs).map_err(|e| diverged(e, self.state.step + 1))?
            };
            let loss = if parts > 1 { loss.mul_scalar(share) } else { loss };
            losses.push(loss.clone().inner());
            clock.lap(&mut self.state.time.forward);
            let grads = GradientsParams::from_grads(loss.backward(), &self.model);
            accumulated.accumulate(&self.model, grads);
            clock.lap(&mut self.state.time.backward);
        }
        Ok((Tensor::cat(losses, 0).sum(), accumulated.grads()))
    }

    /// What a model draws, as for dropout, comes from Burn's generator: seeded by the step and the batch of the step, it needs no state in
    /// the checkpoint.
    fn seed_draws(&self, part: usize) -> MutexGuard<'static, ()> {
        let batch = self.state.step as u64 * self.recipe.schedule.accumulate as u64 + part as u64;
        seed_generator(&self.device, self.recipe.seed ^ (batch + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    fn count(&mut self, loss: f64) {
        for (sum, count) in [&mut self.state.epoch_loss, &mut self.state.window_loss] {
            *sum += loss;
            *count += 1;
        }
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

    /// Mean training loss of the epoch that was evaluated. One that is evaluated before its end goes on where the run is extended.
    pub fn end_epoch(&mut self) -> f64 {
        self.state.evaluated = self.state.step;
        let (sum, count) = self.state.epoch_loss;
        if self.state.step.is_multiple_of(self.state.plan.steps_per_epoch) {
            self.state.epoch_loss = (0.0, 0);
        }
        sum / count.max(1) as f64
    }

    /// The weights that are evaluated: the average where there is one. Without autodiff.
    pub fn evaluated(&self) -> T::Model {
        self.average.clone().unwrap_or_else(|| self.model.valid())
    }

    /// The weights that are evaluated, as a checkpoint.
    pub fn best_parts(&self) -> Result<Vec<(&'static str, Part)>> {
        let mut saved = vec![(parts::MODEL, Part::weights(&self.evaluated()))];
        saved.extend(self.extras()?);
        Ok(saved)
    }

    fn extras(&self) -> Result<impl Iterator<Item = (&'static str, Part)>> {
        Ok(self.task.extras()?.into_iter().map(|(name, bytes)| (name, Part::Bytes(bytes))))
    }

    /// The tensors of a checkpoint from which the run can go on.
    pub fn parts(&self) -> Result<Vec<(&'static str, Part)>> {
        let mut saved = vec![(parts::MODEL, Part::weights(&self.model.valid()))];
        if let Some(average) = &self.average {
            saved.push((parts::AVERAGE, Part::weights(average)));
        }
        // Burn writes the moments in the order of a hash map, which is another in every process, and reads them by their names.
        let moments = self.optimiser.into_bytes().and_then(OptimizerRecord::from_bytes);
        let moments = moments.and_then(OptimizerRecord::into_bytes).map_err(|e| cannot_serialise(e.into()))?;
        saved.push((parts::OPTIMISER, Part::Bytes(moments)));
        saved.extend(self.extras()?);
        Ok(saved)
    }
}

/// A device that gives no results.
fn failed(error: &dyn std::fmt::Display) -> Error {
    let problem = format!("it failed ({error}); lower `schedule.batch_size` if its memory is full, or take `cpu`");
    Error::Device { asked: "gpu".into(), problem }
}

/// A layer whose tokens or result leave f32, or a learned number its range, refuses them before the loss could be no number: the same end of
/// a run. Where that is so from the first step on it is the mechanism's, whose error says more.
pub(super) fn diverged(error: Error, step: usize) -> Error {
    let overflows =
        matches!(error, Error::Model(resolvent::Error::Mechanism(resolvent_kernels::Error::Overflow { .. })));
    if overflows || step > 1 && error.is_divergence() { Error::Diverged { step, loss: f32::NAN } } else { error }
}

/// The mean of what was summed, which begins anew.
fn mean(sum_and_count: &mut (f64, usize)) -> f64 {
    let (sum, count) = std::mem::take(sum_and_count);
    sum / count.max(1) as f64
}
