//! How a run begins, goes on, or is extended.

use std::collections::BTreeSet;

use burn::tensor::Device;
use resolvent_kernels::{Mechanism, Operator, Precision, Shape, Strategy};
use resolvent_layers::bf16::Bf16Layers;

use super::{
    Task, TaskData, TrainOptions,
    bench::time_steps,
    run::{FILES, RECIPE, SUMMARY},
    session::Session,
};
use crate::{
    Error, Recipe, Result,
    checkpoint::{Checkpoint, DataIdentity, Expectation, State, Store},
    columns::counted,
    data::TextRecipe,
    device::is_cpu,
    disk::{self, write_atomically},
    folder::{Claim, Contents},
    progress::Event,
    recipe::{Decay, ScheduleRecipe, first_difference, length_scale_rule, rule_name},
    schedule::Plan,
};

/// The folder, taken and prepared, with the run that is continued or begins in it.
pub(super) fn open<'a, T: Task>(
    recipe: &'a Recipe,
    task: &'a T,
    identity: DataIdentity,
    checkpoint: Option<Checkpoint>,
    trained: Option<Checkpoint>,
    options: &TrainOptions,
) -> Result<(Claim, Session<'a, T>)> {
    let folder = &options.out_dir;
    let claim = || Claim::take(folder, &FILES, Contents::Run);
    let (claim, session) = match checkpoint {
        Some(checkpoint) => {
            let (claim, session) = (claim()?, Session::resumed(recipe, task, &checkpoint, &options.device)?);
            // From here on the run is as long as it is now, however it ends.
            Store::new(folder, recipe.log.keep).renew(&session.state)?;
            (claim, session)
        }
        None => {
            let plan = plan(recipe, task, options)?;
            let mut session = Session::new(recipe, task, identity, plan, &options.device)?;
            if let Some(trained) = trained {
                session.begin_with(&trained)?;
            }
            let claim = claim()?;
            Store::new(folder, recipe.log.keep).forget_best()?;
            (claim, session)
        }
    };
    if let Some(note) = precision_note(recipe)? {
        options.observer.on(Event::Note(&note));
    }
    if let Some(origin) = &session.state.origin {
        options.observer.on(Event::Note(&origin.line()));
    }
    // A run that begins or goes on is not finished, whatever one whose checkpoints were deleted, or itself when it was shorter, left here.
    disk::remove(&folder.join(SUMMARY))?;
    write_atomically(&folder.join(RECIPE), recipe.to_toml()?.as_bytes())?;
    Ok((claim, session))
}

/// Refuses a recipe with another vocabulary than that of the weights which a run begins with: it keeps theirs.
pub(super) fn check_vocabulary(recipe: &Recipe, trained: &Checkpoint) -> Result<()> {
    use Expectation::{Corpus, Matches, Pairs, Texts};
    let theirs = &trained.state.recipe.text;
    let of_their_length = TextRecipe { max_tokens: theirs.max_tokens, ..recipe.text.clone() };
    let [ours, theirs] = [&of_their_length, theirs].map(|text| serde_json::to_value(text).unwrap_or_default());
    match first_difference("text", &theirs, &ours) {
        Some((field, theirs, ours))
            if matches!(trained.state.expects, Texts(_) | Matches(_) | Pairs(_) | Corpus(_)) =>
        {
            let path = trained.path.display();
            let problem = format!(
                "is {ours}, but a run keeps the vocabulary of the weights that it begins with, and that of {path} was made with {theirs}; set it to that"
            );
            Err(Error::Recipe { file: "recipe".into(), field, problem })
        }
        _ => Ok(()),
    }
}

/// Refuses a device that has no products of the recipe's precision.
pub(super) fn check_precision(recipe: &Recipe, device: &Device) -> Result<()> {
    if recipe.precision == Precision::Full || is_cpu(device) {
        return Ok(());
    }
    let problem = "is bf16, which the CPU alone computes; train on the CPU, or set it to `f32`".into();
    Err(Error::Recipe { file: "recipe".into(), field: "precision".into(), problem })
}

/// What multiplies, and which attention stays in f32, where the recipe asks for less.
fn precision_note(recipe: &Recipe) -> Result<Option<String>> {
    if recipe.precision == Precision::Full {
        return Ok(None);
    }
    let unit = Bf16Layers::selected()?.unit().name();
    let stay: BTreeSet<_> = recipe.mechanisms().filter(|m| !rounds(m)).map(|m| m.id()).collect();
    let stay = stay.into_iter().collect::<Vec<_>>().join(", ");
    let stay = if stay.is_empty() { stay } else { format!("; the attention of {stay} stays in f32") };
    Ok(Some(format!("products of bf16 by {unit}, weights and sums in f32{stay}")))
}

/// Whether the mechanism has products of bf16, which no sizes decide.
fn rounds(mechanism: &Mechanism) -> bool {
    let operator = Operator::new(mechanism, Shape::square(1, 1, 64, 64), false, Strategy::Auto);
    let arithmetic = |operator: Operator| operator.with_precision(Precision::Bf16).plan().arithmetic;
    operator.is_ok_and(|operator| arithmetic(operator).runs == Precision::Bf16)
}

/// The recipe with what suits the data, as the length scale of `fna`, where it names none. A run that began without one goes on as
/// it began.
pub(super) fn settled<D: TaskData>(
    recipe: &Recipe,
    data: &D,
    begun: Option<&Checkpoint>,
    options: &TrainOptions,
) -> Recipe {
    let settled = data.settled(recipe);
    let goes_on = |begun: &Recipe| begun.difference(recipe).is_none() || recipe.is_longer(begun);
    if settled == *recipe || begun.is_some_and(|begun| goes_on(&begun.state.recipe)) {
        return recipe.clone();
    }
    let rule = settled.mechanisms().find_map(|mechanism| length_scale_rule(&mechanism));
    let note = rule.map(|rule| {
        format!(
            "`kappa` is not named: it follows the rule `{}`, as in the paper's models of such data",
            rule_name(rule)
        )
    });
    note.iter().for_each(|note| options.observer.on(Event::Note(note)));
    settled
}

/// The steps of the run `begun`, which is to be longer than the recipe `shorter` had it.
///
/// # Errors
/// [`Error::Recipe`] naming what still ends the run where it is.
pub(super) fn extension<T: Task>(shorter: &Recipe, task: &T, begun: &State, options: &TrainOptions) -> Result<Plan> {
    let recipe = &begun.recipe;
    if begun.plan.ends_epoch(begun.step) && !begun.is_unjudged() && begun.is_exhausted() {
        return Err(no_patience(begun));
    }
    if recipe.schedule == shorter.schedule {
        let late = recipe.schedule.max_minutes.is_some_and(|minutes| begun.seconds > minutes * 60.0);
        if late || begun.step == begun.plan.steps {
            return Err(nothing_left(&recipe.schedule, &begun.plan.clone().shortened(begun.step), begun.step));
        }
        options.observer.on(Event::Note("the run goes on with more patience"));
        return Ok(begun.plan.clone());
    }
    let mut plan = Plan::full(&recipe.schedule, task.train_len());
    if let Some(minutes) = recipe.schedule.max_minutes {
        let left = minutes - begun.seconds / 60.0;
        let more = if left > 0.0 { Plan::affordable(left, time_steps(recipe, task, &options.device)?) } else { 0 };
        plan = plan.shortened(begun.step.saturating_add(more));
    }
    if plan.steps <= begun.step {
        return Err(nothing_left(&recipe.schedule, &plan, begun.step));
    }
    let note = format!("the run is extended from {} to {} steps", begun.plan.steps, plan.steps);
    options.observer.on(Event::Note(&note));
    Ok(plan)
}

/// The error of a run that is to be longer, but has waited for a better epoch for as long as its recipe does.
fn no_patience(begun: &State) -> Error {
    let best = begun.best.as_ref().map_or(0, |best| best.epoch);
    let waited = counted(begun.epoch() - best, "epoch");
    let field = "regularisation.patience";
    let problem = format!(
        "ends the run {waited} after the best, epoch {best}; give more with --set {field}=N, or none with --set {field}=none"
    );
    Error::Recipe { file: "recipe".into(), field: field.into(), problem }
}

/// The error of a run that is to be longer and was `done` steps long: which field of the recipe allows no more than `plan`.
fn nothing_left(schedule: &ScheduleRecipe, plan: &Plan, done: usize) -> Error {
    let ScheduleRecipe { epochs, max_steps, max_minutes, .. } = *schedule;
    let all = epochs * plan.steps_per_epoch;
    let (field, asked, more) = match (max_minutes, max_steps) {
        (Some(minutes), _) if plan.steps < plan.full_steps => {
            ("max_minutes", format!("{minutes} minutes, which are over"), "--max-minutes")
        }
        (_, Some(steps)) if steps < all => ("max_steps", counted(steps, "step"), "--max-steps"),
        _ => ("epochs", format!("{}, {} in all", counted(epochs, "epoch"), counted(all, "step")), "--epochs"),
    };
    let none = if field == "epochs" { String::new() } else { format!(", or none with --set schedule.{field}=none") };
    let problem = format!("ends the run after {asked}; done are {done}; give more with {more}{none}");
    Error::Recipe { file: "recipe".into(), field: format!("schedule.{field}"), problem }
}

/// Checks that there is a whole batch to learn from, and that the recipe watches what can be watched.
pub(crate) fn check_fit<T: Task>(recipe: &Recipe, task: &T, name: &str) -> Result<()> {
    let (examples, batch) = (task.train_len(), recipe.schedule.step_examples());
    let regularisation = &recipe.regularisation;
    let problem = if task.brings_validation() && regularisation.hold_out > 0.0 {
        "it has a validation part of its own, so nothing is held out; leave out `regularisation.hold_out`".into()
    } else if regularisation.patience.is_some() && !task.holds_out(recipe) {
        "it has no validation part, and its test part must not stop the run; `regularisation.patience` needs \
         `regularisation.hold_out` above 0"
            .into()
    } else if matches!(recipe.schedule.decay, Decay::Plateau { .. }) && !task.holds_out(recipe) {
        "it has no validation part, and its test part must not lower the learning rate; `schedule.kind` of `plateau` needs \
         `regularisation.hold_out` above 0"
            .into()
    } else if examples == 0 {
        "it has nothing to learn from; a corpus is cut into windows of `model.context` tokens: give more text, or less context"
            .into()
    } else if examples < batch {
        let how = if recipe.schedule.accumulate > 1 { " or `schedule.accumulate`" } else { "" };
        format!("{examples} examples to learn from do not fill a batch of {batch}; lower `schedule.batch_size`{how}")
    } else {
        return Ok(());
    };
    Err(Error::Unfit { name: name.into(), problem })
}

/// The steps of a new run.
fn plan<T: Task>(recipe: &Recipe, task: &T, options: &TrainOptions) -> Result<Plan> {
    if let Some(plan) = &options.plan {
        return Ok(plan.clone());
    }
    let full = Plan::full(&recipe.schedule, task.train_len());
    let Some(max_minutes) = recipe.schedule.max_minutes else { return Ok(full) };
    let affordable = Plan::affordable(max_minutes, time_steps(recipe, task, &options.device)?);
    let plan = full.shortened(affordable);
    if plan.steps < plan.full_steps {
        let note = format!(
            "{} of {} steps fit in {max_minutes} minutes: the schedule is shortened to them",
            plan.steps, plan.full_steps
        );
        options.observer.on(Event::Note(&note));
    }
    Ok(plan)
}
