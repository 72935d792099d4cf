//! What a run tells while it runs: bars in a terminal, plain lines elsewhere.

use std::{
    fmt,
    io::{self, IsTerminal, Write},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

use crate::{
    columns::counted,
    data::{self, Data, DataSpec, reading::Reading},
    evaluation::Metric,
    metrics::EpochRecord,
    schedule::Plan,
};

/// Writes a line to standard error. Nobody is left to hear that it cannot be written.
pub fn tell(line: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Something that happened.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A run begins or continues.
    Begin {
        /// The run, e.g. `infsa, seed 1`.
        run: &'a str,
        /// Steps done in earlier sessions.
        done: usize,
        /// Its plan.
        plan: &'a Plan,
    },
    /// A step is done.
    Step {
        /// Steps done.
        done: usize,
        /// Loss of the step; on a GPU, of one of the last few.
        loss: f64,
        /// Training examples per second, over the last few steps.
        examples_per_second: f64,
    },
    /// An epoch is done.
    Epoch(&'a EpochRecord),
    /// A data set is being read.
    Reading(Reading),
    /// The data set is read, or is not to be read.
    Read,
    /// Something the user should know.
    Note(&'a str),
    /// Something for those who want to know more.
    Detail(&'a str),
    /// The run ended: how, in a line.
    End(&'a str),
}

/// Whoever wants to know. Called from the thread that trains, between steps: it should return soon.
pub trait Observer: Send + Sync {
    /// Called at every [`Event`].
    fn on(&self, event: Event<'_>);
}

/// The observer for people: [`Bars`] if standard error is a terminal, else [`Lines`]; with details where it is `verbose`.
pub fn for_stderr(verbose: bool) -> Arc<dyn Observer> {
    match std::io::stderr().is_terminal() {
        true => Arc::new(Bars { verbose, ..Bars::default() }),
        false => Arc::new(Lines { verbose, ..Lines::new(std::io::stderr()) }),
    }
}

/// Reads the data set `source` and tells `observer` how far it has come.
///
/// # Errors
/// As [`DataSpec::load`].
pub fn load(source: &DataSpec, observer: &dyn Observer) -> data::Result<Data> {
    let data = source.load_telling(&|reading| observer.on(Event::Reading(reading)));
    observer.on(Event::Read);
    data
}

/// Tells nobody.
#[derive(Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn on(&self, _event: Event<'_>) {}
}

/// One bar per run on standard error; each epoch leaves a line above it, with the run's name.
#[derive(Debug, Default)]
pub struct Bars {
    verbose: bool,
    bar: Mutex<Option<(String, ProgressBar)>>,
}

impl Bars {
    fn bar(run: &str, done: usize, plan: &Plan) -> ProgressBar {
        let bar = ProgressBar::new(plan.steps as u64);
        let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} steps, {msg}, {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_prefix(run.to_string());
        bar.set_message("no step yet");
        bar.set_position(done as u64);
        bar.reset_eta();
        bar
    }
}

impl Observer for Bars {
    fn on(&self, event: Event<'_>) {
        let mut slot = self.bar.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Begin { run, done, plan } => {
                *slot = Some((run.to_owned(), Self::bar(run, done, plan)));
                return;
            }
            Event::Reading(reading) => {
                let spinner = || (String::new(), ProgressBar::new_spinner());
                return slot.get_or_insert_with(spinner).1.set_message(reading_line(reading));
            }
            Event::Read => {
                slot.take().iter().for_each(|(_, bar)| bar.finish_and_clear());
                return;
            }
            _ => {}
        }
        let Some((run, bar)) = slot.as_ref() else {
            if let Event::Note(text) | Event::End(text) = event {
                tell(text);
            }
            return;
        };
        match event {
            Event::Step { done, loss, examples_per_second } => {
                bar.set_message(format!("loss {loss:.3}, {examples_per_second:.0} examples/s"));
                bar.set_position(done as u64);
            }
            Event::Epoch(epoch) => bar.println(format!("{run}: {}", epoch_line(epoch))),
            Event::Note(text) => bar.println(format!("{run}: {text}")),
            Event::Detail(text) if self.verbose => bar.println(format!("{run}: {text}")),
            Event::End(text) => {
                bar.finish_and_clear();
                tell(format_args!("{run}: {text}"));
                *slot = None;
            }
            Event::Begin { .. } | Event::Reading(_) | Event::Read | Event::Detail(_) => {}
        }
    }
}

/// Seconds between two lines about steps.
const PAUSE: Duration = Duration::from_secs(10);

/// Plain lines: each epoch, and a step now and then.
#[derive(Debug)]
pub struct Lines<W> {
    verbose: bool,
    inner: Mutex<LinesState<W>>,
}

#[derive(Debug)]
struct LinesState<W> {
    to: W,
    run: String,
    steps: usize,
    last: Instant,
}

impl<W: Write + Send> Lines<W> {
    /// Lines written to `to`.
    pub fn new(to: W) -> Self {
        Self {
            verbose: false,
            inner: Mutex::new(LinesState { to, run: String::new(), steps: 0, last: Instant::now() }),
        }
    }
}

impl<W: Write + Send> Observer for Lines<W> {
    fn on(&self, event: Event<'_>) {
        let mut state = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let line = match event {
            Event::Begin { run, done, plan } => {
                state.run = run.to_string();
                state.steps = plan.steps;
                state.last = Instant::now();
                let from = if done > 0 { format!(", continued after step {done}") } else { String::new() };
                format!("{}{from}", counted(plan.steps, "step"))
            }
            Event::Step { .. } if state.last.elapsed() < PAUSE => return,
            Event::Step { done, loss, examples_per_second } => {
                state.last = Instant::now();
                format!("step {done}/{}, loss {loss:.3}, {examples_per_second:.0} examples/s", state.steps)
            }
            Event::Reading(_) if state.last.elapsed() < PAUSE => return,
            Event::Reading(reading) => {
                state.last = Instant::now();
                reading_line(reading)
            }
            Event::Read => return,
            Event::Epoch(epoch) => epoch_line(epoch),
            Event::Detail(_) if !self.verbose => return,
            Event::Note(text) | Event::Detail(text) | Event::End(text) => text.to_string(),
        };
        let line = if state.run.is_empty() { line } else { format!("{}: {line}", state.run) };
        if matches!(event, Event::End(_)) {
            state.run.clear();
        }
        // Progress that nobody can read must not end a run.
        let _ = writeln!(state.to, "{line}");
    }
}

fn reading_line(Reading { what, done, of }: Reading) -> String {
    match of {
        Some(of) => format!("{done} of {of} {what}"),
        None => format!("{done} {what}"),
    }
}

fn epoch_line(epoch: &EpochRecord) -> String {
    let EpochRecord { epoch: number, train_loss, split, loss, accuracy, bleu, bits_per_byte, .. } = epoch;
    let scores = [(Metric::Bleu, *bleu), (Metric::BitsPerByte, *bits_per_byte), (Metric::Accuracy, *accuracy)];
    let scores = scores.into_iter().filter_map(|(metric, value)| Some(format!(", {split} {}", metric.words(value?))));
    let scores: String = scores.collect();
    format!("epoch {number}: training loss {train_loss:.3}, {split} loss {loss:.3}{scores}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Scalars, Watched};

    #[test]
    fn lines_tell_the_run_its_epochs_and_its_end() {
        let lines = Lines { verbose: true, ..Lines::new(Vec::new()) };
        let plan = Plan { steps_per_epoch: 5, full_steps: 10, steps: 10, warmup: 0 };
        lines.on(Event::Begin { run: "infsa, seed 1", done: 5, plan: &plan });
        lines.on(Event::Step { done: 6, loss: 2.0, examples_per_second: 100.0 });
        let epoch = EpochRecord {
            epoch: 2,
            step: 10,
            train_loss: 1.5,
            split: Watched::Test,
            loss: 1.25,
            accuracy: Some(0.875),
            bleu: None,
            bits_per_byte: None,
            learned: Scalars::default(),
            seconds: 3.0,
        };
        lines.on(Event::Epoch(&epoch));
        lines.on(Event::Detail("more"));
        lines.on(Event::End("done"));
        lines.on(Event::Note("of no run"));
        let text = String::from_utf8(lines.inner.into_inner().unwrap().to).unwrap();
        assert_eq!(
            text,
            "infsa, seed 1: 10 steps, continued after step 5\n\
             infsa, seed 1: epoch 2: training loss 1.500, test loss 1.250, test accuracy 87.50 %\n\
             infsa, seed 1: more\n\
             infsa, seed 1: done\n\
             of no run\n"
        );
    }
}
