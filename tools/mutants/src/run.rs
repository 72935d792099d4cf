//! Runs the tests with one mutant on at a time.

use std::{
    collections::BTreeSet,
    fmt::{self, Display},
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{Error, build::Binary, explained::Explained, find::Mutant, options::Options};

/// What became of a mutant.
pub enum Verdict {
    /// A test failed, crashed or did not end.
    Killed { test: String },
    /// None of so many tests that reach it noticed it.
    Survived { tests: usize },
    /// It changes nothing that a test could see, for this reason.
    Explained(String),
}

impl Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Killed { test } => write!(f, "killed by {test}"),
            Self::Survived { tests } => write!(f, "survived {tests} tests"),
            Self::Explained(reason) => write!(f, "equivalent: {reason}"),
        }
    }
}

/// One test function: how long it takes, and the mutants that it reaches.
struct Test {
    name: String,
    binary: PathBuf,
    function: String,
    takes: Duration,
    reaches: BTreeSet<usize>,
}

pub fn judge(
    mutants: &[Mutant],
    explained: &Explained,
    binaries: &[Binary],
    options: &Options,
) -> Result<Vec<Verdict>, Error> {
    let started = Instant::now();
    let tests = measured(binaries, options.jobs)?;
    println!("{} tests pass without a mutant ({:.0} s)", tests.len(), started.elapsed().as_secs_f64());
    let mut verdicts: Vec<_> = (0..mutants.len()).map(|_| None).collect();
    in_parallel(options.jobs, &mut verdicts, |id, verdict| {
        let found = match explained.reason(&mutants[id]) {
            Some(reason) => Verdict::Explained(reason.into()),
            None => try_one(id, &tests),
        };
        println!("[{:5.0} s] {}: {found}", started.elapsed().as_secs_f64(), mutants[id]);
        *verdict = Some(found);
    });
    Ok(verdicts.into_iter().flatten().collect())
}

/// The tests of the `binaries`, the quickest first.
fn measured(binaries: &[Binary], jobs: usize) -> Result<Vec<Test>, Error> {
    let mut tests = functions(binaries)?;
    let failures = Mutex::new(Vec::new());
    let log = std::env::temp_dir().join(format!("mutants-{}", std::process::id()));
    fs::create_dir_all(&log)?;
    in_parallel(jobs, &mut tests, |n, test| {
        if !test.measure(&log.join(n.to_string())) {
            failures.lock().unwrap().push(test.name.clone());
        }
    });
    fs::remove_dir_all(&log)?;
    let failures = failures.into_inner()?;
    if !failures.is_empty() {
        println!("left out, as they fail without a mutant: {}", failures.join(", "));
    }
    tests.retain(|test| !failures.contains(&test.name));
    tests.sort_by_key(|test| test.takes);
    Ok(tests)
}

/// Runs the tests that reach a mutant, the quickest first, until one fails.
fn try_one(id: usize, tests: &[Test]) -> Verdict {
    let reaching = tests.iter().filter(|test| test.reaches.contains(&id)).collect::<Vec<_>>();
    for test in &reaching {
        let limit = Duration::from_secs(15) + 5 * test.takes;
        if !test.passes(Some(id), None, limit) {
            return Verdict::Killed { test: test.name.clone() };
        }
    }
    Verdict::Survived { tests: reaching.len() }
}

impl Test {
    /// Notes time and reach of the test without a mutant; false where it fails.
    fn measure(&mut self, log: &Path) -> bool {
        let started = Instant::now();
        let passed = self.passes(None, Some(log), Duration::from_secs(900));
        self.takes = started.elapsed();
        let reached = fs::read_to_string(log).unwrap_or_default();
        self.reaches = reached.lines().filter_map(|id| id.parse().ok()).collect();
        passed
    }

    /// Runs the test with a `mutant` on, on one thread, and within memory that a broken size does not exceed. A test that
    /// outlasts the `limit` has failed.
    fn passes(&self, mutant: Option<usize>, log: Option<&Path>, limit: Duration) -> bool {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -v 8000000; exec \"$0\" --exact \"$1\" --test-threads 1"]);
        command.arg(&self.binary).arg(&self.function);
        command.env("RAYON_NUM_THREADS", "1").env("PROPTEST_MAX_SHRINK_ITERS", "0");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        mutant.map(|id| command.env("MUTANT", id.to_string()));
        log.map(|log| command.env("MUTANTS_REACHED", log));
        let (Ok(mut child), deadline) = (command.spawn(), Instant::now() + limit) else { return false };
        loop {
            match child.try_wait() {
                Ok(Some(status)) => return status.success(),
                Err(_) => return false,
                Ok(None) if Instant::now() > deadline => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return false;
                }
                Ok(None) => thread::sleep(Duration::from_millis(3)),
            }
        }
    }
}

/// The test functions of all programs.
fn functions(binaries: &[Binary]) -> Result<Vec<Test>, Error> {
    let mut tests = Vec::new();
    for Binary { name, path } in binaries {
        let list = Command::new(path).args(["--list", "--format", "terse"]).output()?;
        let list = String::from_utf8(list.stdout)?;
        tests.extend(list.lines().filter_map(|line| line.strip_suffix(": test")).map(|function| Test {
            name: format!("{name}::{function}"),
            binary: path.clone(),
            function: function.into(),
            takes: Duration::ZERO,
            reaches: BTreeSet::new(),
        }));
    }
    Ok(tests)
}

/// `work(number, item)` for all `items`, `jobs` at a time.
fn in_parallel<T: Send>(jobs: usize, items: &mut [T], work: impl Fn(usize, &mut T) + Sync) {
    let next = AtomicUsize::new(0);
    let cells = items.iter_mut().map(Mutex::new).collect::<Vec<_>>();
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    let Some(cell) = cells.get(n) else { break };
                    work(n, &mut cell.lock().unwrap());
                }
            });
        }
    });
}
