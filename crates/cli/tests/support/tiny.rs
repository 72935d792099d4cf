//! A run that takes a second: a tiny model on a few generated pictures, and pictures in idx files.

use super::Sandbox;

/// Generated pictures, as `--data` takes them.
pub const DATA: &str = "shapes:seed=1,size=16,train=64,test=32,difficulty=0.5";

/// A recipe for a model of two heads on them.
pub const RECIPE: &str = "
name = 'tiny'
[model]
patch = 4
dim = 16
depth = 1
heads = 2
mlp_dim = 16
[schedule]
epochs = 2
batch_size = 16
warmup_epochs = 0.5
[log]
every = 2
";

/// A folder with `tiny.toml`.
pub fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("tiny.toml", RECIPE);
    sandbox
}

/// `train` with that recipe and data, into `out`.
pub fn train<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["train", "--config", "tiny.toml", "--data", DATA, "--out", out], more].concat()
}

/// An idx file of bytes.
pub fn idx(extents: &[u32], values: &[u8]) -> Vec<u8> {
    let extents_bytes = extents.iter().flat_map(|n| n.to_be_bytes());
    [0, 0, 8, extents.len() as u8].into_iter().chain(extents_bytes).chain(values.iter().copied()).collect()
}

/// The arguments of `explain` on the run of [`train`] that is called `run`, with `more`.
pub fn explain<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["explain", "--checkpoint", "run", "--out", "out", "--json"], more].concat()
}
