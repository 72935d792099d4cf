//! The token graph of an attention mechanism, without its matrix.
//!
//! Attention moves values along the edges of a weighted graph over the tokens, `out = M v`. Read as a graph, `M` has
//! walks, absorbed walkers, central tokens and a dominant direction. Everything here needs `M x` and `M^T x` only
//! ([`LinearOperator`]), so it runs on the fused kernels of any mechanism ([`AttentionOperator`]) as well as on a stored
//! matrix ([`Dense`]):
//!
//! - [`markov`]: row sums and absorption, and [`HTransform`], the chain that is substochastic whatever `M` is;
//! - [`katz`]: how many discounted walks start and end at each token, `(I - M)^-1 1`, by [`Solver`];
//! - [`spectral_radius`], [`spectral_norm`], [`perron`]: power iteration;
//! - [`PerronReport`]: how well the token weights of `linear-infsa` stand in for the dominant direction.
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
mod error;
mod katz;
mod markov;
mod operator;
mod solver;
mod spectrum;
mod vector;

pub use alignment::{Alignment, PerronReport, cosine, spearman};
pub use attention::AttentionOperator;
pub use error::{Error, Result};
pub use katz::{Katz, katz};
pub use markov::{HTransform, Markov, markov};
pub use operator::{Dense, LinearOperator, Transposed};
pub use solver::Solver;
pub use spectrum::{Eigenpair, Power, perron, spectral_norm, spectral_radius, subdominant_ratio};
