//! What the tests of the program share: a folder of its own, tensors in files, and the built binary.
#![allow(dead_code)] // each test binary uses its part

pub mod tiny;

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// The built program, with an environment that nothing outside the test decides.
pub fn resolvent() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_resolvent"));
    command.env_remove("RESOLVENT_SIMD").env("RESOLVENT_CALIBRATION", "off");
    // Libraries that graphics drivers load complain on standard error where it is not set.
    command.env("XDG_RUNTIME_DIR", std::env::temp_dir());
    command
}

/// The tables that recipes for [`Sandbox::of_letters`] have in common.
pub const LETTERS: &str = "
[text]
tokens = 'bytes'
lowercase = false
[optimiser]
lr = 0.02
[schedule]
epochs = 10
batch_size = 8
";

/// A folder that is gone after the test.
pub struct Sandbox(tempfile::TempDir);

impl Sandbox {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// With `text.txt`, a text that repeats itself, each character saying which comes next, and `tiny.toml`, a recipe for a language model
    /// of it: `recipe` and [`LETTERS`].
    pub fn of_letters(recipe: &str) -> Self {
        let sandbox = Self::new();
        sandbox.write("text.txt", "abcdefghijklmnop\n".repeat(90));
        sandbox.write("tiny.toml", format!("{recipe}{LETTERS}"));
        sandbox
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.path(name), bytes).unwrap();
        self.path(name)
    }

    /// Runs the program in this folder.
    pub fn run(&self, args: &[&str]) -> Outcome {
        Outcome::of(resolvent().current_dir(self.0.path()).args(args))
    }

    /// Runs the program in this folder with `input` on its standard input.
    pub fn pipe(&self, args: &[&str], input: &[u8]) -> Outcome {
        let mut command = resolvent();
        command.current_dir(self.0.path()).args(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        child.wait_with_output().unwrap().into()
    }

    /// Every file below this folder with its content.
    pub fn snapshot(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        fn collect(folder: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let found = fs::symlink_metadata(&path).unwrap();
                match found.is_dir() {
                    true => collect(&path, files),
                    false if found.is_file() => drop(files.insert(path.clone(), fs::read(&path).unwrap_or_default())),
                    false => drop(files.insert(path, Vec::new())),
                }
            }
        }
        let mut files = BTreeMap::new();
        collect(self.0.path(), &mut files);
        files
    }
}

/// How a run of the program ended.
#[derive(Debug)]
pub struct Outcome {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    pub fn of(command: &mut Command) -> Self {
        Self::from(command.output().unwrap())
    }

    /// Panics unless the program succeeded.
    #[track_caller]
    pub fn success(self) -> Self {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self
    }

    /// Panics unless the program failed with `code` and told so in exactly one `error:` line, which is returned.
    #[track_caller]
    pub fn failure(&self, code: i32) -> &str {
        assert_eq!(self.code, Some(code), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        let errors: Vec<_> = self.stderr.lines().filter(|line| line.starts_with("error:")).collect();
        assert_eq!(errors.len(), 1, "expected one error line: {}", self.stderr);
        errors[0]
    }

    /// The one JSON document on standard output.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        Self { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }
}

/// Named tensors, to be written to a file or read from one.
#[derive(Debug, Clone, Default)]
pub struct Tensors(BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>);

impl Tensors {
    /// `q`, `k`, `v` and `dout`, all `shape`, of fixed pseudo-random values in [-1, 1).
    pub fn call(shape: &[usize]) -> Self {
        let mut tensors = Self::default();
        for (seed, name) in ["q", "k", "v", "dout"].into_iter().enumerate() {
            tensors.noise(name, shape, seed as u32);
        }
        tensors
    }

    /// Pseudo-random values in [-1, 1).
    pub fn noise(&mut self, name: &str, shape: &[usize], seed: u32) -> &mut Self {
        let mut state = 0x9e37_79b9_u32.wrapping_mul(seed + 1) | 1;
        let values = (0..shape.iter().product()).map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as f32 / 2_147_483_648.0 - 1.0
        });
        let values: Vec<_> = values.collect();
        self.f32(name, shape, &values)
    }

    pub fn f32(&mut self, name: &str, shape: &[usize], values: &[f32]) -> &mut Self {
        self.raw(name, Dtype::F32, shape, values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub fn u8(&mut self, name: &str, shape: &[usize], values: &[u8]) -> &mut Self {
        self.raw(name, Dtype::U8, shape, values.to_vec())
    }

    pub fn raw(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> &mut Self {
        self.0.insert(name.into(), (dtype, shape.to_vec(), bytes));
        self
    }

    pub fn remove(&mut self, name: &str) -> &mut Self {
        self.0.remove(name);
        self
    }

    pub fn shape(&self, name: &str) -> &[usize] {
        &self.0[name].1
    }

    pub fn dtype(&self, name: &str) -> Dtype {
        self.0[name].0
    }

    pub fn bytes(&self, name: &str) -> &[u8] {
        &self.0[name].2
    }

    pub fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    /// The elements of a floating-point tensor.
    #[track_caller]
    pub fn values(&self, name: &str) -> Vec<f64> {
        let (dtype, _, bytes) = self.0.get(name).unwrap_or_else(|| panic!("no tensor {name} among {:?}", self.names()));
        match dtype {
            Dtype::F32 => bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b).into()).collect(),
            Dtype::I64 => bytes.as_chunks().0.iter().map(|&b| i64::from_le_bytes(b) as f64).collect(),
            Dtype::F64 => bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect(),
            other => panic!("{name} is {other}"),
        }
    }

    /// The bytes of a file that holds them.
    pub fn file(&self) -> Vec<u8> {
        let view = |(d, s, b): &'_ (Dtype, Vec<usize>, Vec<u8>)| (*d, s.clone(), b.clone());
        let owned: Vec<_> = self.0.iter().map(|(name, t)| (name.clone(), view(t))).collect();
        let views = owned.iter().map(|(name, (d, s, b))| (name, TensorView::new(*d, s.clone(), b).unwrap()));
        safetensors::serialize(views, None).unwrap()
    }

    pub fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let own =
            |(name, t): (&str, TensorView<'_>)| (name.to_owned(), (t.dtype(), t.shape().to_vec(), t.data().to_vec()));
        Self(file.iter().map(own).collect())
    }
}
