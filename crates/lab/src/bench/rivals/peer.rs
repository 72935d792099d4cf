//! A peer: another framework in a process of its own, which computes on request, so that its runs take turns with ours.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Seek, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use base64::{Engine, prelude::BASE64_STANDARD};
use resolvent_kernels::{Mechanism, Shape};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use super::super::{
    BenchOptions,
    contender::{Buffers, Contender},
};
use crate::{Error, Result, memory::MemoryProbe};

/// What the peer runs; its head describes the requests.
const SCRIPT: &str = include_str!("pytorch.py");
/// How often a wait looks whether it should end.
const GLANCE: Duration = Duration::from_millis(50);

/// A process that answers one line of JSON with another.
pub(super) struct Peer {
    name: String,
    ways: BTreeMap<String, Vec<String>>,
    child: Child,
    requests: Sender<String>,
    answers: Receiver<String>,
    errors: NamedTempFile,
    /// The program, which must be there as long as the process is.
    _script: NamedTempFile,
    patience: Duration,
    stop: Arc<AtomicBool>,
    /// Why it can no longer be asked.
    lost: Option<String>,
}

#[derive(Deserialize)]
struct Hello {
    version: String,
    ways: BTreeMap<String, Vec<String>>,
}

#[derive(Deserialize)]
struct Opened {
    id: usize,
    peak_bytes: [u64; 2],
}

#[derive(Deserialize)]
struct Ran {
    seconds: [f64; 2],
}

#[derive(Deserialize)]
struct Solved {
    out: String,
    dq: String,
    dk: Option<String>,
    dv: String,
}

impl Peer {
    /// Starts the peer with the Python interpreter `python`.
    ///
    /// # Errors
    /// [`Error::Rival`] if there is no such program, it lacks PyTorch, or does not answer.
    pub fn start(python: &Path, options: &BenchOptions) -> Result<Self> {
        let name = python.display().to_string();
        let failed = |problem: String| Error::Rival { name: name.clone(), problem };
        let file = || NamedTempFile::new().map_err(|e| failed(format!("no temporary file can be made for it: {e}")));
        let (mut script, errors) = (file()?, file()?);
        script.write_all(SCRIPT.as_bytes()).map_err(|e| failed(format!("its script cannot be written: {e}")))?;
        let log = errors.reopen().map_err(|e| failed(format!("its messages cannot be kept: {e}")))?;
        let mut command = Command::new(python);
        command.arg(script.path()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut child =
            command.spawn().map_err(|e| failed(format!("cannot be started: {e}; name a Python interpreter")))?;
        let (requests, answers) = (child.stdin.take(), child.stdout.take());
        let (requests, answers) = (writer(requests.expect("piped")), lines(answers.expect("piped")));
        let (patience, stop) = (options.patience, options.stop.clone());
        let ways = BTreeMap::new();
        let mut peer =
            Self { name, ways, child, requests, answers, errors, _script: script, patience, stop, lost: None };
        let hello: Hello = peer.ask(json!({"op": "hello", "threads": rayon::current_num_threads()}))?;
        (peer.name, peer.ways) = (format!("torch {}", hello.version), hello.ways);
        Ok(peer)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The ways to the result of a mechanism.
    pub fn ways(&self, mechanism: &str) -> Vec<String> {
        self.ways.get(mechanism).cloned().unwrap_or_default()
    }

    /// Ends what is open.
    pub fn clear(&mut self) -> Result<()> {
        self.ask::<Value>(json!({"op": "clear"})).map(drop)
    }

    /// The answer to a request.
    fn ask<T: DeserializeOwned>(&mut self, request: Value) -> Result<T> {
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

/// A mechanism at one size, computed by a peer.
pub(super) struct PeerCase {
    peer: Rc<RefCell<Peer>>,
    request: Value,
    tied: bool,
    id: Option<usize>,
}

impl PeerCase {
    pub fn new(peer: Rc<RefCell<Peer>>, mechanism: &Mechanism, way: &str, shape: Shape) -> Self {
        let Shape { batch, heads, seq_q, head_dim, .. } = shape;
        let (tied, shape) = (mechanism.tied(), [batch, heads, seq_q, head_dim]);
        let request = json!({"mechanism": mechanism, "way": way, "shape": shape, "tied": tied});
        Self { peer, request, tied, id: None }
    }

    fn ask<T: DeserializeOwned>(&self, op: &str) -> Result<T> {
        let mut request = self.request.clone();
        request["op"] = op.into();
        self.peer.borrow_mut().ask(request)
    }
}

impl Contender for PeerCase {
    fn solve(&mut self, b: &mut Buffers) -> Result<()> {
        let mut request = self.request.clone();
        request["op"] = "check".into();
        for (name, values) in [("q", &b.q), ("k", &b.k), ("v", &b.v), ("dout", &b.dout)] {
            if name != "k" || !self.tied {
                let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                request[name] = BASE64_STANDARD.encode(bytes).into();
            }
        }
        let solved: Solved = self.peer.borrow_mut().ask(request)?;
        let results = [(&mut b.out, Some(solved.out)), (&mut b.dq, Some(solved.dq)), (&mut b.dk, solved.dk)];
        for (into, from) in results.into_iter().chain([(&mut b.dv, Some(solved.dv))]) {
            let Some(from) = from else { continue };
            let problem = || Error::Rival { name: "torch".into(), problem: "its tensors are not of this size".into() };
            let bytes = BASE64_STANDARD.decode(from).map_err(|_| problem())?;
            let values = bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x));
            into.get_mut(..values.len()).ok_or_else(problem)?.iter_mut().zip(values).for_each(|(into, x)| *into = x);
        }
        Ok(())
    }

    fn warm(&mut self, _: &mut Buffers, _: Option<&dyn MemoryProbe>) -> Result<[Option<u64>; 2]> {
        let opened: Opened = self.ask("open")?;
        self.id = Some(opened.id);
        Ok(opened.peak_bytes.map(Some))
    }

    fn round(&mut self, _: &mut Buffers) -> Result<[f64; 2]> {
        let ran: Ran = self.peer.borrow_mut().ask(json!({"op": "run", "id": self.id}))?;
        if ran.seconds.iter().all(|seconds| seconds.is_finite() && *seconds > 0.0) {
            return Ok(ran.seconds);
        }
        let problem = format!("its runs took {:?} seconds, which cannot be", ran.seconds);
        Err(Error::Rival { name: self.peer.borrow().name().into(), problem })
    }
}
