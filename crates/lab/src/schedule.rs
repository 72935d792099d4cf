//! How many steps a run takes, and the learning rate of each.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::recipe::{Decay, OptimiserRecipe, ScheduleRecipe};

/// Share of the time budget that is planned for training; the rest is for evaluation, checkpoints and a machine that
/// grows slower.
const PLANNED_SHARE: f64 = 0.85;

/// The steps of a run. Decided once, when the run starts, and kept in its checkpoints, so that a resumed run follows the
/// same schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Steps in one pass over the training pictures.
    pub steps_per_epoch: usize,
    /// Steps that the recipe's epochs would take.
    pub full_steps: usize,
    /// Steps that the run takes: `full_steps`, or what fits in the time budget.
    pub steps: usize,
    /// Steps of warm-up, shortened with the rest.
    pub warmup: usize,
}

impl Plan {
    /// The plan of a recipe without regard to time.
    pub fn full(recipe: &ScheduleRecipe, pictures: usize) -> Self {
        let steps_per_epoch = (pictures / recipe.step_examples()).max(1);
        let all = steps_per_epoch * recipe.epochs;
        let full_steps = recipe.max_steps.map_or(all, |most| most.clamp(1, all));
        let warmup = recipe.warmup_epochs * steps_per_epoch as f64 * full_steps as f64 / all as f64;
        let warmup = warmup.round() as usize;
        Self { steps_per_epoch, full_steps, steps: full_steps, warmup: warmup.min(full_steps - 1) }
    }

    /// Steps that fit in `max_minutes` at `seconds_per_step`; at least one.
    pub fn affordable(max_minutes: f64, seconds_per_step: f64) -> usize {
        ((max_minutes * 60.0 * PLANNED_SHARE / seconds_per_step) as usize).max(1)
    }

    /// The plan with at most `steps` steps; the warm-up shrinks in proportion.
    pub fn shortened(self, steps: usize) -> Self {
        let steps = steps.clamp(1, self.full_steps);
        let warmup = (self.warmup as f64 * steps as f64 / self.full_steps as f64).round() as usize;
        Self { steps, warmup: warmup.min(steps - 1), ..self }
    }

    /// Epochs begun by the end of the run.
    pub fn epochs(&self) -> usize {
        self.steps.div_ceil(self.steps_per_epoch)
    }

    /// Whether an epoch, or the run, ends after `done` steps.
    pub fn ends_epoch(&self, done: usize) -> bool {
        done == self.steps || done.is_multiple_of(self.steps_per_epoch)
    }
}

/// Linear warm-up from 0 to the peak, then what the recipe's kind of schedule says.
#[derive(Debug, Clone, PartialEq)]
pub struct LearningRate {
    peak: f64,
    warmup: usize,
    steps: usize,
    decay: Decay,
    /// The steps at which the rate falls, where it falls in steps.
    falls: Vec<usize>,
}

impl LearningRate {
    /// The learning rates of `plan`. In a run that is shorter than its epochs, milestones keep their share of it.
    pub fn new(plan: &Plan, schedule: &ScheduleRecipe, optimiser: &OptimiserRecipe) -> Self {
        let decay = schedule.decay.clone();
        let at = |epoch: &f64| (plan.steps as f64 * epoch / schedule.epochs as f64).round() as usize;
        let falls = match &decay {
            Decay::Step { milestones, .. } => milestones.iter().map(at).collect(),
            _ => Vec::new(),
        };
        Self { peak: optimiser.lr, warmup: plan.warmup, steps: plan.steps, decay, falls }
    }

    /// The rate of step `step`, counted from 0. The warm-up's last step and the first after it have the peak; where the rate falls
    /// gradually, the run's last step has the last rate.
    pub fn at(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let length = (self.steps - 1).saturating_sub(self.warmup).max(1);
        let progress = ((step - self.warmup) as f64 / length as f64).min(1.0);
        match self.decay {
            Decay::Cosine { final_lr_share } => {
                let last = self.peak * final_lr_share;
                last + (self.peak - last) * 0.5 * (1.0 + (PI * progress).cos())
            }
            Decay::Linear { final_lr_share } => {
                let last = self.peak * final_lr_share;
                last + (self.peak - last) * (1.0 - progress)
            }
            // What falls on plateaus is known when they are seen.
            Decay::Constant | Decay::Plateau { .. } => self.peak,
            Decay::Step { factor, .. } => {
                let passed = self.falls.iter().filter(|fall| step >= **fall).count();
                self.peak * factor.powi(passed as i32)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(epochs: usize, warmup_epochs: f64) -> ScheduleRecipe {
        let decay = Decay::Cosine { final_lr_share: 0.1 };
        ScheduleRecipe { decay, epochs, batch_size: 10, warmup_epochs, ..Default::default() }
    }

    #[test]
    fn the_rate_follows_its_closed_form() {
        let recipe = schedule(5, 1.0);
        let plan = Plan::full(&recipe, 109);
        assert_eq!(plan, Plan { steps_per_epoch: 10, full_steps: 50, steps: 50, warmup: 10 });
        let rate = LearningRate::new(&plan, &recipe, &OptimiserRecipe { lr: 2.0, ..Default::default() });
        assert_eq!((rate.at(0), rate.at(4), rate.at(9), rate.at(10)), (0.2, 1.0, 2.0, 2.0));
        // 39 steps from the peak at step 10 to the last rate at step 49.
        let expected = |step: usize| 0.2 + 0.9 * (1.0 + (PI * (step - 10) as f64 / 39.0).cos());
        for step in 10..50 {
            assert!((rate.at(step) - expected(step)).abs() < 1e-12);
        }
        assert!((rate.at(49) - 0.2).abs() < 1e-12);
    }

    #[test]
    fn other_kinds_follow_theirs() {
        let optimiser = OptimiserRecipe { lr: 2.0, ..Default::default() };
        let of = |decay: Decay, most: Option<usize>| {
            let recipe = ScheduleRecipe { decay, max_steps: most, ..schedule(5, 1.0) };
            LearningRate::new(&Plan::full(&recipe, 100), &recipe, &optimiser)
        };
        let linear = of(Decay::Linear { final_lr_share: 0.1 }, None);
        assert_eq!((linear.at(4), linear.at(10), linear.at(49)), (1.0, 2.0, 0.2));
        assert!((linear.at(23) - (2.0 - 1.8 / 3.0)).abs() < 1e-12);
        let constant = of(Decay::Constant, None);
        assert_eq!((constant.at(4), constant.at(10), constant.at(49)), (1.0, 2.0, 2.0));
        let step = Decay::Step { milestones: vec![2.0, 4.5], factor: 0.5 };
        let whole = of(step.clone(), None);
        assert_eq!([4, 19, 20, 44, 45].map(|n| whole.at(n)), [1.0, 2.0, 1.0, 1.0, 0.5]);
        let short = of(step, Some(20));
        assert_eq!([7, 8, 17, 18].map(|n| short.at(n)), [2.0, 1.0, 1.0, 0.5], "milestones keep their share");
    }

    #[test]
    fn batches_that_are_accumulated_make_one_step() {
        let plan = Plan::full(&ScheduleRecipe { accumulate: 3, ..schedule(5, 1.0) }, 100);
        assert_eq!((plan.steps_per_epoch, plan.steps, plan.warmup), (3, 15, 3));
    }

    #[test]
    fn a_number_of_steps_cuts_the_schedule() {
        let plan = |most| Plan::full(&ScheduleRecipe { max_steps: Some(most), ..schedule(5, 1.0) }, 100);
        let cut = plan(20);
        assert_eq!((cut.steps, cut.full_steps, cut.warmup, cut.epochs()), (20, 20, 4, 2));
        assert_eq!(plan(1_000), Plan::full(&schedule(5, 1.0), 100));
        assert_eq!(cut.shortened(10).warmup, 2);
    }

    #[test]
    fn no_warm_up_and_one_step_are_fine() {
        let recipe = schedule(1, 0.0);
        let plan = Plan::full(&recipe, 3);
        assert_eq!((plan.steps, plan.warmup), (1, 0));
        assert_eq!(LearningRate::new(&plan, &recipe, &OptimiserRecipe { lr: 2.0, ..Default::default() }).at(0), 2.0);
    }

    #[test]
    fn a_budget_shortens_steps_and_warm_up_alike() {
        let plan = Plan::full(&schedule(5, 1.0), 100);
        let affordable = Plan::affordable(1.0, 2.0);
        assert_eq!(affordable, 25, "51 of 60 seconds");
        let short = plan.clone().shortened(affordable);
        assert_eq!((short.steps, short.warmup, short.full_steps, short.epochs()), (25, 5, 50, 3));
        assert_eq!(plan.clone().shortened(1_000), plan);
        assert_eq!(plan.shortened(0).steps, 1);
        let ends: Vec<_> = (1..=25).filter(|&done| short.ends_epoch(done)).collect();
        assert_eq!(ends, [10, 20, 25]);
    }
}
