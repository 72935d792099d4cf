//! Metrics of a run as JSON lines, appended one whole line at a time.
//!
//! A crash can only cut the last line off; reading leaves such a line out, and resuming cuts the file back to where the
//! checkpoint was made.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{Error, Result, budget::Held, source};

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Record {
    /// Every few steps.
    Step(StepRecord),
    /// At the end of each epoch, and of the run.
    Epoch(EpochRecord),
}

/// Training, averaged over the steps since the last such line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Steps done.
    pub step: usize,
    /// Epochs done, with fraction.
    pub epoch: f64,
    /// Mean loss.
    pub loss: f64,
    /// Learning rate of the last step.
    pub lr: f64,
    /// Norm of the last step's gradient, before clipping.
    pub grad_norm: f64,
    /// Training examples per second.
    pub examples_per_second: f64,
}

/// Evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EpochRecord {
    /// Epochs begun.
    pub epoch: usize,
    /// Steps done.
    pub step: usize,
    /// Mean training loss of the epoch.
    pub train_loss: f64,
    /// `test`, or `held-out` where the recipe holds pictures out.
    pub split: String,
    /// Mean cross-entropy on that split.
    pub loss: f64,
    /// Accuracy on that split, in [0, 1].
    pub accuracy: f64,
    /// BLEU on that split, of translators.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bleu: Option<f64>,
    /// Bits per byte on that split, of language models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
    /// The learned gammas, per layer the mean over its heads; empty for mechanisms without.
    pub gamma: Vec<f64>,
    /// Seconds since the run began, over all its sessions.
    pub seconds: f64,
}

/// The metrics file of a run.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl MetricsFile {
    /// The name of the file in a run's folder.
    pub const NAME: &'static str = "metrics.jsonl";

    /// Opens the metrics of the run in `run` and cuts them back to `bytes`, what they were at the checkpoint that is
    /// resumed (0 for a new run).
    ///
    /// # Errors
    /// [`Error::Damaged`] when the file is shorter than that, [`Error::Io`].
    pub fn open(run: &Path, bytes: u64) -> Result<Self> {
        let path = run.join(Self::NAME);
        let failed = || Error::io(&path, "cannot open the metrics");
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(failed())?;
        let found = file.metadata().map_err(failed())?.len();
        if found < bytes {
            let problem = format!(
                "is cut off: {found} bytes, {bytes} when the checkpoint was made; restore it, or delete `checkpoints` to start anew"
            );
            return Err(Error::damaged(&path, problem));
        }
        file.set_len(bytes).map_err(failed())?;
        Ok(Self { path, file, bytes })
    }

    /// Appends one line.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn append(&mut self, record: &Record) -> Result<()> {
        let failed = || Error::io(&self.path, "cannot append to the metrics");
        let mut line = serde_json::to_vec(record).map_err(|e| failed()(e.into()))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(failed())?;
        self.bytes += line.len() as u64;
        Ok(())
    }

    /// Makes what was appended durable; returns the file's length.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync(&self) -> Result<u64> {
        self.file.sync_data().map_err(Error::io(&self.path, "cannot write the metrics"))?;
        Ok(self.bytes)
    }
}

/// Reads the metrics of the run in `run`; a last line that a crash cut off is left out.
///
/// # Errors
/// [`Error::Io`], and [`Error::Damaged`] naming the line for any other line that is no record.
pub fn read(run: &Path) -> Result<Vec<Record>> {
    let path = run.join(MetricsFile::NAME);
    let held = Held::new();
    let text = source::read(&path, &held)?;
    let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    let lines = text[..whole].split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    let parse = |(number, line): (usize, &[u8])| {
        serde_json::from_slice(line)
            .map_err(|e| Error::damaged(&path, format!("line {} is no record of metrics ({e}); remove it", number + 1)))
    };
    lines.enumerate().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn record(step: usize) -> Record {
        Record::Step(StepRecord { step, epoch: 0.5, loss: 1.25, lr: 1e-3, grad_norm: 2.0, examples_per_second: 9.0 })
    }

    #[test]
    fn lines_survive_and_a_cut_last_line_is_left_out() {
        let run = tempfile::tempdir().unwrap();
        let mut file = MetricsFile::open(run.path(), 0).unwrap();
        let lengths: Vec<u64> = (1..=3)
            .map(|step| {
                file.append(&record(step)).unwrap();
                file.sync().unwrap()
            })
            .collect();
        let path = run.path().join(MetricsFile::NAME);
        assert_eq!(read(run.path()).unwrap(), [record(1), record(2), record(3)]);

        fs::write(&path, &fs::read(&path).unwrap()[..lengths[2] as usize - 4]).unwrap();
        assert_eq!(read(run.path()).unwrap(), [record(1), record(2)], "the third line lost its end");

        let mut file = MetricsFile::open(run.path(), lengths[0]).unwrap();
        file.append(&record(7)).unwrap();
        assert_eq!(read(run.path()).unwrap(), [record(1), record(7)], "cut back to the checkpoint");
    }

    #[test]
    fn damage_is_named() {
        let run = tempfile::tempdir().unwrap();
        fs::write(run.path().join(MetricsFile::NAME), "{\"kind\":\"step\"}\n{}\n").unwrap();
        let message = read(run.path()).unwrap_err().to_string();
        assert!(message.contains("metrics.jsonl") && message.contains("line 1"), "{message}");
        let message = MetricsFile::open(run.path(), 1_000).unwrap_err().to_string();
        assert!(message.contains("cut off") && message.contains("1000"), "{message}");
    }
}
