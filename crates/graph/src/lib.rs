//! The token graph of an attention mechanism, without its matrix.
//!
//! Attention moves values along the edges of a weighted graph over the tokens, `out = M v`. Read as a graph, `M` has
//! walks, absorbed walkers, central tokens and a dominant direction. Everything here needs `M x` and `M^T x` only
//! ([`LinearOperator`]), so it runs on the fused kernels of any mechanism ([`AttentionOperator`]) as well as on a stored
//! matrix ([`Dense`]):
//!
//! - [`markov`]: row sums and absorption, and [`HTransform`], the chain that is substochastic whatever `M` is;
//! - [`katz`]: how many discounted walks start and end at each token, `(I - M)^-1 1`, by [`Solver`]; [`Walk`]: where
//!   walkers spend their time, PageRank and the stationary distribution;
//! - [`spectral_radius`], [`spectral_norm`], [`perron`]: power iteration; [`Lanczos`] and [`Arnoldi`]: outermost
//!   eigenvalues with measured residuals; [`symmetric_eigen`], [`eigenvalues`], [`singular_values`] and
//!   [`Rank`] of stored matrices up to [`DENSE_MAX`];
//! - [`PerronReport`]: how well the token weights of `linear-infsa` stand in for the dominant direction;
//! - [`Reversible`]: the symmetrised graph, its Laplacian's [`Spectrum`], [`mixing_time`], [`sweep_cut`],
//!   [`diffusion_map`]; [`StreamedReversible`] is the same without the matrix;
//! - [`shortest_paths`], [`row_perplexity`], [`ClusterFit`], [`sin_theta`]: hops, sharpness, clusters, subspaces;
//! - [`nystrom`]: the matrices among landmarks, their inverses, and what is lost by going through them.
//!
//! A graph may be disconnected, have rows of zeros, negative weights or NaN: what a diagnostic then is, or which [`Error`]
//! it returns, stands at each of them.
//!
//! ```
//! use resolvent_graph::{Dense, Solver, katz, markov};
//! let chain = Dense::new(3, vec![0.0, 0.5, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0])?; // 0 -> 1 -> 2
//! assert_eq!(markov(&chain)?.absorption, [0.5, 0.5, 1.0]);
//! let scores = katz(&chain, &Solver::default())?;
//! assert!((scores.c_out[0] - 1.75).abs() < 1e-6 && (scores.c_in[2] - 1.75).abs() < 1e-6);
//! # Ok::<(), resolvent_graph::Error>(())
//! ```

mod alignment;
mod attention;
mod centrality;
mod clusters;
mod eigen;
mod error;
mod katz;
mod markov;
pub mod nystrom;
mod operator;
mod paths;
mod rank;
mod reversible;
mod sharpness;
mod solver;
mod spectrum;
mod vector;

pub use alignment::{Alignment, PerronReport, cosine, spearman};
pub use attention::{AttentionOperator, HeadExtras};
pub use centrality::{Distribution, Walk};
pub use clusters::{ClusterFit, asymmetry, degree_ratio, two_stage_distortion};
use eigen::dense;
pub use eigen::{
    Arnoldi, Complex, DENSE_MAX, Eigenpairs, Lanczos, RitzValue, SymmetricEigen, eigenvalues, singular_values,
    spectral_gap, symmetric_eigen,
};
pub use error::{Error, Result};
pub use katz::{Katz, katz};
pub use markov::{HTransform, Markov, markov};
pub use operator::{Dense, LinearOperator, Transposed};
pub use paths::{HopSummary, Paths, UNREACHABLE, shortest_paths, shortest_paths_from, shortest_paths_from_logs};
pub use rank::{Rank, sin_theta};
pub use reversible::{
    Reversible, Spectrum, StreamedReversible, Sweep, diffusion_distances, diffusion_map, generator, mixing_bounds,
    mixing_time, sweep_cut,
};
pub use sharpness::{matched_bandwidth, neighbour_dimension, perplexity, row_perplexity};
pub use solver::Solver;
pub use spectrum::{Eigenpair, Power, perron, spectral_norm, spectral_radius, subdominant_ratio};

/// The examples of the README compile and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
