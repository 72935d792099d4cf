//! What an analysis is asked for.

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
};

use resolvent_kernels::{Mechanism, mechanism::Estimator};
use resolvent_lab::{candidate::Candidate, memory::MemoryProbe};

use super::Learned;

/// What to analyse, and how.
#[derive(Clone)]
pub struct AnalyzeOptions {
    /// The dump.
    pub input: PathBuf,
    /// What the results call it. Default: the path.
    pub name: Option<String>,
    /// The mechanisms, each name once; one mechanism may be there in several configurations. Default: all presets, and `ssa` with
    /// the means of its clusters in place of sampled tokens. Softmax is there
    /// whether named or not; the first is what the others are compared with.
    pub mechanisms: Vec<Candidate>,
    /// What each layer of the model has learned for the mechanism that it has, where the dump is of a model. Default: nothing.
    pub learned: Option<Learned>,
    /// The words of the first sequence, token by token, where it is a text. Default: none.
    pub words: Vec<String>,
    /// Layers by name. Default: all.
    pub layers: Vec<String>,
    /// Sequences of every layer, from the first. Default: all.
    pub sequences: Option<usize>,
    /// Tokens see earlier ones only. Default false.
    pub causal: bool,
    /// All numbers in place of thirteen ([`super::QUANTITIES`]), dense spectra of the graphs as they are and paths from every token, diffusion maps, and
    /// distances between queries and keys. Default false.
    pub full: bool,
    /// Pairs of tokens, from and to, whose shortest path is told. Default: none.
    pub paths: Vec<[usize; 2]>,
    /// The hops between all tokens are told, of graphs of up to [`super::HOP_MATRIX_MAX`]. Default false.
    pub hop_matrix: bool,
    /// Runs of every call; their median counts. Default 3, >= 1.
    pub rounds: usize,
    /// Seed of the values where the dump has none, and of what mechanisms draw. Default: 0 for the values, the mechanisms'
    /// own.
    pub seed: Option<u64>,
    /// Raised by whoever wants to stop.
    pub stop: Arc<AtomicBool>,
    /// Who is told of the progress.
    pub progress: Arc<dyn Fn(&str) + Send + Sync>,
    /// Texts of the dump that were cut to what a model reads, for the report. Default 0.
    pub cut: usize,
    /// Counter of memory, if the program has one.
    pub memory: Option<Arc<dyn MemoryProbe>>,
    /// Commands that repeat the analysis, for the report.
    pub commands: Vec<String>,
}

impl AnalyzeOptions {
    /// What the input is called in results and errors.
    pub(super) fn called(&self) -> String {
        self.name.clone().unwrap_or_else(|| self.input.display().to_string())
    }

    /// All mechanisms on all of `input`.
    pub fn new(input: impl Into<PathBuf>) -> Self {
        let preset = |id: &&str| Mechanism::preset(id).expect("the ids name presets").into();
        Self {
            input: input.into(),
            name: None,
            mechanisms: Mechanism::IDS.iter().map(preset).chain(ssa_with_centroids(None)).collect(),
            learned: None,
            words: Vec::new(),
            layers: Vec::new(),
            sequences: None,
            causal: false,
            full: false,
            paths: Vec::new(),
            hop_matrix: false,
            rounds: 3,
            seed: None,
            cut: 0,
            stop: Arc::default(),
            progress: Arc::new(|_| {}),
            memory: None,
            commands: Vec::new(),
        }
    }
}

/// `ssa` with the means of its clusters in place of sampled tokens, which without training is nearer to softmax; with the settings of
/// `own` where that is `ssa` or a composition of the same values, `None` where it has means already.
pub fn ssa_with_centroids(own: Option<&Mechanism>) -> Option<Candidate> {
    let own = own.and_then(|own| own.as_ssa()).filter(|own| !own.routes_queries());
    let settings = own.unwrap_or_default();
    let name = "ssa-centroid".into();
    (settings.estimator != Estimator::Centroid)
        .then(|| Candidate { name, mechanism: settings.with_samples(None).with_estimator(Estimator::Centroid).into() })
}
