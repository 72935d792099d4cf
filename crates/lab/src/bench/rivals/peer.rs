//! A peer: another framework in a process of its own, which computes on request, so that its runs take turns with ours.

use std::{
    collections::BTreeMap,
    io::{self, BufRead, BufReader, Read, Seek, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tempfile::{NamedTempFile, TempDir};

use super::super::{BenchOptions, TensorType};
use crate::{Error, Result};

/// What the peer runs, and the modules of it; the head of the first describes the requests.
const SCRIPTS: [(&str, &str); 3] = [
    ("pytorch.py", include_str!("pytorch.py")),
    ("formulas.py", include_str!("formulas.py")),
    ("inference.py", include_str!("inference.py")),
];
/// How often a wait looks whether it should end.
const GLANCE: Duration = Duration::from_millis(50);

/// A process that answers one line of JSON with another.
pub(super) struct Peer {
    name: String,
    ways: BTreeMap<String, Vec<Way>>,
    child: Child,
    requests: Sender<String>,
    answers: Receiver<String>,
    errors: NamedTempFile,
    /// Where the program is, as long as the process is.
    _scripts: TempDir,
    patience: Duration,
    stop: Arc<AtomicBool>,
    /// Why it can no longer be asked.
    lost: Option<String>,
}

/// A way of the peer to the result of a mechanism.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Way {
    /// What it is called in requests.
    pub way: String,
    /// What it is called in tables, before the mechanism's name.
    pub label: String,
    /// Type of its tensors, and of its products where that is another.
    pub dtype: TensorType,
    /// Whether it has a backward pass.
    pub trains: bool,
}

#[derive(Deserialize)]
struct Hello {
    /// By framework.
    versions: BTreeMap<String, String>,
    /// Why a framework is not there, by its name.
    #[serde(default)]
    missing: BTreeMap<String, String>,
    ways: BTreeMap<String, Vec<Way>>,
}

/// Why frameworks are not there, by their names.
pub(super) type Missing = BTreeMap<String, String>;

impl Peer {
    /// Starts the peer with the Python interpreter `python`; says which frameworks that lacks.
    ///
    /// # Errors
    /// [`Error::Rival`] if there is no such program, it lacks PyTorch, or does not answer.
    pub fn start(python: &Path, options: &BenchOptions) -> Result<(Self, Missing)> {
        let name = python.display().to_string();
        let failed = |problem: String| Error::Rival { name: name.clone(), problem };
        let unmade = |e: io::Error| failed(format!("no temporary file can be made for it: {e}"));
        let (scripts, errors) = (tempfile::tempdir().map_err(unmade)?, NamedTempFile::new().map_err(unmade)?);
        for (file, text) in SCRIPTS {
            let written = std::fs::write(scripts.path().join(file), text);
            written.map_err(|e| failed(format!("its script cannot be written: {e}")))?;
        }
        let log = errors.reopen().map_err(|e| failed(format!("its messages cannot be kept: {e}")))?;
        let mut command = Command::new(python);
        command.arg(scripts.path().join(SCRIPTS[0].0)).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut child =
            command.spawn().map_err(|e| failed(format!("cannot be started: {e}; name a Python interpreter")))?;
        let (requests, answers) = (child.stdin.take(), child.stdout.take());
        let (requests, answers) = (writer(requests.expect("piped")), lines(answers.expect("piped")));
        let (patience, stop) = (options.patience, options.stop.clone());
        let ways = BTreeMap::new();
        let mut peer =
            Self { name, ways, child, requests, answers, errors, _scripts: scripts, patience, stop, lost: None };
        let hello: Hello = peer.ask(json!({"op": "hello", "threads": rayon::current_num_threads()}))?;
        let versions: Vec<_> = hello.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
        (peer.name, peer.ways) = (versions.join(", "), hello.ways);
        Ok((peer, hello.missing))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The ways to the result of a mechanism.
    pub fn ways(&self, mechanism: &str) -> Vec<Way> {
        self.ways.get(mechanism).cloned().unwrap_or_default()
    }

    /// Ends what is open.
    pub fn clear(&mut self) -> Result<()> {
        self.ask::<Value>(json!({"op": "clear"})).map(drop)
    }

    /// The answer to a request.
    pub fn ask<T: DeserializeOwned>(&mut self, request: Value) -> Result<T> {
        let answer = match &self.lost {
            Some(why) => Err(why.clone()),
            None => self.exchange(&request).inspect_err(|why| {
                self.lost = Some(why.clone());
                let _ = self.child.kill(); // it may have ended already
            }),
        };
        answer.and_then(|answer| read(&answer)).map_err(|problem| Error::Rival { name: self.name.clone(), problem })
    }

    fn exchange(&mut self, request: &Value) -> std::result::Result<String, String> {
        // A peer that has ended reads nothing, and why is in its messages.
        if self.requests.send(request.to_string()).is_err() {
            return Err(self.ended());
        }
        let start = Instant::now();
        loop {
            match self.answers.recv_timeout(GLANCE) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
                Err(RecvTimeoutError::Timeout) if self.stop.load(Ordering::Relaxed) => return Err("interrupted".into()),
                Err(RecvTimeoutError::Timeout) if start.elapsed() > self.patience => {
                    let seconds = self.patience.as_secs();
                    return Err(format!("did not answer within {seconds} s and was ended (see --peer-timeout)"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// How the process ended, with its last words.
    fn ended(&mut self) -> String {
        let status = self.child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
        let mut words = Vec::new();
        // Without its messages there is still its status.
        let _ = self.errors.rewind().and_then(|()| self.errors.read_to_end(&mut words));
        let words = String::from_utf8_lossy(&words);
        let last = words.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
        format!("ended ({status}): {last}")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended already
        let _ = self.child.wait();
    }
}

/// Where lines for a process go, by a thread of their own: one that reads nothing must not hold up whoever waits for it.
fn writer(mut to: ChildStdin) -> Sender<String> {
    let (sender, receiver) = channel::<String>();
    thread::spawn(move || {
        for line in receiver {
            if writeln!(to, "{line}").and_then(|()| to.flush()).is_err() {
                break;
            }
        }
    });
    sender
}

/// The most bytes of an answer: far above those of the tensors that are compared.
const LONGEST: u64 = 1 << 28;

/// The lines that a process writes. One is read ahead at most.
fn lines(from: ChildStdout) -> Receiver<String> {
    let (sender, receiver) = sync_channel(1);
    thread::spawn(move || {
        let mut from = BufReader::new(from);
        loop {
            let mut line = String::new();
            let whole = from.by_ref().take(LONGEST).read_line(&mut line).is_ok() && line.ends_with('\n');
            if !whole || sender.send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

/// An answer as what was asked for, or the error in it.
fn read<T: DeserializeOwned>(answer: &str) -> std::result::Result<T, String> {
    let value: Value = serde_json::from_str(answer).map_err(|_| "its answer is not JSON".to_string())?;
    if let Some(why) = value.get("error").and_then(Value::as_str) {
        return Err(why.into());
    }
    serde_json::from_value(value).map_err(|e| format!("its answer is not as expected: {e}"))
}
