//! Centroids of clusters that follow the queries of many sequences: what mechanisms with clusters then cluster by, in place of k-means on
//! every sequence. "Spectral Sparse Attention", section 4.2 ("online k-means, updated every 100 steps"). As they come from
//! earlier passes alone, labels are strictly causal.

use burn::{
    module::{Module, RunningState},
    tensor::{Bool, Device, Distribution, Tensor, TensorData},
};
use serde::{Deserialize, Serialize};

use super::{MultiHeadAttention, field};
use crate::{Extras, Mask, Mechanism, Result, mechanism::ClusterOn};

/// How a [`Codebook`] follows the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CodebookConfig {
    /// Training passes from one update to the next; the first pass makes the first. Default 100, 1 to 1000000.
    pub every: usize,
    /// What an update keeps of a centroid; the rest is the mean of the tokens that are nearest to it. Default 0.9, in [0, 1).
    pub decay: f64,
}

impl Default for CodebookConfig {
    fn default() -> Self {
        Self { every: 100, decay: 0.9 }
    }
}

impl CodebookConfig {
    /// Checks every field, and that `mechanism`, where it attends along clusters, can have a codebook. Returns how many centroids it
    /// has: `None` for other mechanisms.
    pub(super) fn validate(&self, mechanism: &Mechanism) -> Result<Option<usize>> {
        field("codebook.every", self.every, (1..=1_000_000).contains(&self.every), "1 to 1000000")?;
        field("codebook.decay", self.decay, (0.0..1.0).contains(&self.decay), "in [0, 1)")?;
        let Some(m) = mechanism.clustering() else { return Ok(None) };
        field("jl_dim", m.jl_dim.unwrap_or(0), m.jl_dim.is_none(), "null with a codebook")?;
        let expected = "a number with a codebook, whose centroids are as many in every sequence";
        field("clusters", "null", m.clusters.is_some(), expected)?;
        Ok(m.clusters)
    }
}

/// Rounds of Lloyd's algorithm on the tokens of the first pass.
const FIRST_ROUNDS: usize = 4;

/// Centroids of every head, and when they move. State, not parameters: no gradient, but part of every checkpoint.
#[derive(Module, Debug)]
pub struct Codebook {
    /// `[heads, clusters, head_dim]`. Random until the first training pass.
    pub centroids: RunningState<Tensor<3>>,
    /// Training passes since the last update, that one's included, `[1]`; 0 before the first.
    pub passes: RunningState<Tensor<1>>,
    /// When and how far they move.
    #[module(skip)]
    pub config: CodebookConfig,
}

impl Codebook {
    pub(super) fn init(config: CodebookConfig, [heads, clusters, head_dim]: [usize; 3], device: &Device) -> Self {
        let normal = Distribution::Normal(0.0, 1.0);
        Self {
            centroids: RunningState::new(Tensor::random([heads, clusters, head_dim], normal, device)),
            passes: RunningState::new(Tensor::zeros([1], device)),
            config,
        }
    }

    /// The centroids, row by row.
    pub fn values(&self) -> Vec<f32> {
        self.centroids.value_sync().to_data().iter::<f32>().collect()
    }

    /// Counts a training pass over `tokens [batch, heads, seq, head_dim]`, and moves the centroids towards the means of the
    /// tokens nearest to them when it is time. `keep [batch, seq]` is false for tokens that do not count.
    pub fn observe(&self, tokens: Tensor<4>, keep: Option<Tensor<2, Bool>>) {
        let passes = self.passes.value_sync().into_scalar::<f32>() as usize;
        let due = passes == 0 || passes >= self.config.every;
        if due {
            self.update(tokens, keep, passes == 0);
        }
        let passes = if due { 1 } else { passes + 1 };
        let device = self.passes.value().device();
        self.passes.update(Tensor::full([1], passes as f32, &device));
        // A state is read, by checkpoints too, as of its last synchronisation.
        self.passes.value_sync();
    }

    fn update(&self, tokens: Tensor<4>, keep: Option<Tensor<2, Bool>>, first: bool) {
        let [batch, heads, seq, dim] = tokens.dims();
        let tokens: Vec<f32> = tokens.swap_dims(0, 1).to_data().iter::<f32>().collect();
        let keep = keep.map_or(vec![true; batch * seq], |keep| keep.to_data().iter::<bool>().collect());
        let mut centroids = self.values();
        let len = centroids.len() / heads;
        for (h, centroids) in centroids.chunks_exact_mut(len).enumerate() {
            let rows = tokens[h * batch * seq * dim..][..batch * seq * dim].chunks_exact(dim);
            let kept: Vec<&[f32]> = rows.zip(&keep).filter(|(_, keep)| **keep).map(|(row, _)| row).collect();
            match first {
                true => place(centroids, &kept),
                false => follow(centroids, &kept, self.config.decay as f32),
            }
        }
        let state = self.centroids.value();
        self.centroids.update(Tensor::from_data(TensorData::new(centroids, state.shape()), &state.device()));
        self.centroids.value_sync();
    }
}

impl MultiHeadAttention {
    /// The mechanism's own tensors in self-attention, which has the codebook too.
    pub(super) fn extras_of_tokens(&self) -> Extras {
        match &self.codebook {
            Some(codebook) => self.extras().with_codebook(codebook.values()),
            None => self.extras(),
        }
    }

    /// The extras with the codebook as it was before this pass, which it then takes in if it is one of training: `packed
    /// [batch, seq, 3 * d_model]`.
    pub(super) fn with_codebook(
        &self,
        extras: Extras,
        packed: &Tensor<3>,
        mechanism: &Mechanism,
        mask: &Mask,
    ) -> Extras {
        let (Some(codebook), Some(m)) = (&self.codebook, mechanism.clustering()) else { return extras };
        let extras = extras.with_codebook(codebook.values());
        if packed.device().is_autodiff() {
            let width = self.n_heads * self.head_dim();
            let part = |part: usize| self.heads(packed.clone().narrow(2, part * width, width)).detach();
            // Tied, the queries are the keys.
            let keys = usize::from(!mechanism.tied);
            let keep = || mask.key.clone();
            let (tokens, keep) = match m.cluster_on {
                ClusterOn::Queries => (part(0), keep()),
                ClusterOn::Keys => (part(keys), keep()),
                ClusterOn::Dual => (
                    Tensor::cat(vec![part(0), part(keys)], 2),
                    keep().map(|keep| Tensor::cat(vec![keep.clone(), keep], 1)),
                ),
            };
            codebook.observe(tokens, keep);
        }
        extras
    }
}

/// Puts the centroids on tokens, evenly along them, and moves them to the means of those nearest.
fn place(centroids: &mut [f32], tokens: &[&[f32]]) {
    let Some(dim) = tokens.first().map(|token| token.len()) else { return };
    let count = centroids.len() / dim;
    for (c, centroid) in centroids.chunks_exact_mut(dim).enumerate() {
        centroid.copy_from_slice(tokens[c * tokens.len() / count]);
    }
    (0..FIRST_ROUNDS).for_each(|_| follow(centroids, tokens, 0.0));
}

/// `c <- decay c + (1 - decay) mean` of the tokens that are nearest to `c`, where there are any.
fn follow(centroids: &mut [f32], tokens: &[&[f32]], decay: f32) {
    let Some(dim) = tokens.first().map(|token| token.len()) else { return };
    let count = centroids.len() / dim;
    let (mut sums, mut counts) = (vec![0.0_f64; centroids.len()], vec![0.0_f64; count]);
    for token in tokens {
        let distance =
            |c: usize| -> f32 { token.iter().zip(&centroids[c * dim..]).map(|(x, c)| (x - c).powi(2)).sum() };
        let nearer = |best: (usize, f32), c: usize| if distance(c) < best.1 { (c, distance(c)) } else { best };
        let (nearest, _) = (1..count).fold((0, distance(0)), nearer);
        counts[nearest] += 1.0;
        sums[nearest * dim..][..dim].iter_mut().zip(*token).for_each(|(sum, &x)| *sum += f64::from(x));
    }
    for ((centroid, sum), &count) in centroids.chunks_exact_mut(dim).zip(sums.chunks_exact(dim)).zip(&counts) {
        if count > 0.0 {
            let moved = |(c, sum): (&mut f32, &f64)| *c = decay * *c + (1.0 - decay) * (sum / count) as f32;
            centroid.iter_mut().zip(sum).for_each(moved);
        }
    }
}
