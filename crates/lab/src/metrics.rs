//! Metrics of a run as JSON lines, appended one whole line at a time.
//!
//! A crash can only cut the last line off; reading leaves such a line out, and resuming cuts the file back to where the
//! checkpoint was made.

use std::{
    fmt,
    fs::{File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{MapAccess, SeqAccess, Visitor},
};

use crate::{Error, Result, budget::Held, named, source};

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

named! {
    /// The examples that are looked at after each epoch.
    pub enum Watched {
        /// Those of the test part.
        Test = "test",
        /// Those that the recipe holds out, or that the data set brings for it.
        HeldOut = "held-out",
    }
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
    /// Which examples the rest is of.
    pub split: Watched,
    /// Mean cross-entropy on that split.
    pub loss: f64,
    /// Accuracy on that split, in [0, 1]; of models that have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// BLEU on that split, of translators.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bleu: Option<f64>,
    /// Bits per byte on that split, of language models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
    /// What the model has learned in scalars.
    #[serde(default, alias = "gamma")]
    pub learned: Scalars,
    /// Seconds since the run began, over all its sessions.
    pub seconds: f64,
}

/// Learned scalars by name, in the model's order: those of an attention as the mean over its heads, such as `blocks.0.gamma`, and those
/// of a model of one's own. In files a map.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scalars(pub Vec<(String, f64)>);

impl Scalars {
    /// The value of this name.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(own, _)| own == name).map(|&(_, value)| value)
    }

    /// What there is of each kind: the last part of a name, with the parts before it and the values, in the order of the first of a kind.
    pub fn kinds(&self) -> Vec<(&str, Vec<(&str, f64)>)> {
        let mut kinds: Vec<(&str, Vec<(&str, f64)>)> = Vec::new();
        for (name, value) in &self.0 {
            let (place, kind) = name.rsplit_once('.').unwrap_or(("", name));
            match kinds.iter_mut().find(|(own, _)| *own == kind) {
                Some((_, places)) => places.push((place, *value)),
                None => kinds.push((kind, vec![(place, *value)])),
            }
        }
        kinds
    }
}

impl Serialize for Scalars {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

/// A map, or the list that files of older programs have: the gamma of each block.
impl<'de> Deserialize<'de> for Scalars {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Named;
        impl<'de> Visitor<'de> for Named {
            type Value = Scalars;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("numbers by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Scalars, A::Error> {
                let mut scalars = Scalars::default();
                while let Some(entry) = map.next_entry()? {
                    scalars.0.push(entry);
                }
                Ok(scalars)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Scalars, A::Error> {
                let mut scalars = Scalars::default();
                while let Some(gamma) = list.next_element()? {
                    scalars.0.push((format!("blocks.{}.gamma", scalars.0.len()), gamma));
                }
                Ok(scalars)
            }
        }
        deserializer.deserialize_any(Named)
    }
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

    #[test]
    fn scalars_are_a_map_in_their_order_and_lists_of_gammas_are_read() {
        let epoch = |learned: &str| {
            let line = format!(
                r#"{{"kind": "epoch", "epoch": 1, "step": 2, "train_loss": 1.0, "split": "test", "loss": 1.5, "accuracy": 0.5, {learned}, "seconds": 3.0}}"#
            );
            let Record::Epoch(record) = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
            record
        };
        let old = epoch(r#""gamma": [0.75, 0.5]"#);
        let named =
            |scalars: &[(&str, f64)]| Scalars(scalars.iter().map(|&(name, value)| (name.into(), value)).collect());
        assert_eq!(
            (old.accuracy, old.learned),
            (Some(0.5), named(&[("blocks.0.gamma", 0.75), ("blocks.1.gamma", 0.5)]))
        );
        let own =
            named(&[("blocks.10.gamma", 0.5), ("sharpness", 2.0), ("blocks.2.gamma", 0.25), ("blocks.2.alpha", 1.5)]);
        let text = serde_json::to_string(&own).unwrap();
        assert_eq!(epoch(&format!(r#""learned": {text}"#)).learned, own, "{text}");
        let kinds = [
            ("gamma", vec![("blocks.10", 0.5), ("blocks.2", 0.25)]),
            ("sharpness", vec![("", 2.0)]),
            ("alpha", vec![("blocks.2", 1.5)]),
        ];
        assert_eq!(own.kinds(), kinds);
    }
}
