//! Attention mechanisms as operators on the graph of tokens, computed on the CPU, on slices, without a framework.
//!
//! A mechanism is four values ([`Mechanism`]): a *score* (how two tokens relate), a *structure* (how the
//! `N x N` operator is held), a *normalisation* (what makes it an average) and a *series* (how many hops). A score is
//! written once and serves every structure; a structure is written once and serves every score.
//!
//! [`Operator`] is the call surface, [`mod@reference`] the naive f64 form that every fast path must match.

mod cache;
mod call;
mod check;
mod element;
mod engine;
mod error;
#[doc(hidden)]
pub mod inner;
mod linalg;
pub mod mechanism;
mod memory;
mod operator;
pub mod parallel;
mod plan;
mod precision;
mod random;
mod random_features;
mod range;
pub mod reference;
mod rescale;
pub mod score;
mod scratch;
mod series;
pub mod simd;
mod structure;
mod tol;

pub use cache::{Cache, PagedCache, SequenceId};
pub use call::{
    ClusterPlan, Dropout, Dropped, ExtraGradients, Extras, Gradients, Inputs, Mask, Parameter, PlanTensors, Sequences,
    Shape, Strided, StridedGradients, StridedInputs, check_finite,
};
pub use element::Element;
pub use error::{Error, Result};
pub use mechanism::Mechanism;
pub use memory::check_memory;
pub use operator::{Heads, Operator, TokenWeights, VarlenInputs, VarlenOperator, plan};
pub use plan::{Plan, Strategy};
pub use precision::{Arithmetic, Precision};
pub use scratch::Scratch;
pub use series::Convergence;
pub use structure::clustered::{Certificate, PlanMatrices};
pub use tol::{Tol, relative_distance};

/// The examples of the README compile and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
