//! The command line.

use crate::Error;

const USAGE: &str = "usage: resolvent-mutants [--package kernels|layers] [--sample N] [--seed N] [--min PERCENT] [--jobs N] [--only PART-OF-PATH] [--again FILE] [--list]";

pub struct Options {
    /// The folder in `crates` of the package to change. Default `kernels`.
    pub package: String,
    /// Mutants to try. Default 40.
    pub sample: usize,
    /// Chooses them. Default 1.
    pub seed: u64,
    /// Score in percent below which the exit code is 1. Default 0.
    pub min: f64,
    /// Mutants tried side by side. Default: one per core.
    pub jobs: usize,
    /// Only files whose path contains this.
    pub only: Option<String>,
    /// Only what this file names: the printed survivors of an earlier run, say.
    pub again: Option<String>,
    /// Lists the mutants instead of trying them.
    pub list: bool,
}

impl Options {
    pub fn from_args() -> Result<Self, Error> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let package = "kernels".to_owned();
        let mut options =
            Self { package, sample: 40, seed: 1, min: 0.0, jobs: cores, only: None, again: None, list: false };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value; {USAGE}"));
            match arg.as_str() {
                "--package" => options.package = value()?,
                "--sample" => options.sample = value()?.parse()?,
                "--seed" => options.seed = value()?.parse()?,
                "--min" => options.min = value()?.parse()?,
                "--jobs" => options.jobs = value()?.parse::<usize>()?.max(1),
                "--only" => options.only = Some(value()?),
                "--again" => options.again = Some(std::fs::read_to_string(value()?)?),
                "--list" => options.list = true,
                _ => return Err(format!("{arg} is not known; {USAGE}").into()),
            }
        }
        Ok(options)
    }
}
