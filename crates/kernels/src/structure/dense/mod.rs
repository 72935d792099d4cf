//! Every pair of query and key, streamed in tiles: O(N) extra memory, forward and backward.
//!
//! Three parts meet in a tile: the micro-kernel of [`crate::simd::product`], a [`crate::score::Score`], and a
//! normalisation, which says what a logit becomes, what is carried per query, and what comes back. The streams know
//! none of them. Decomposition depends on the shape alone, so that results do not depend on the threads.

mod backward;
mod bf16;
mod contraction;
mod decode;
mod distance;
mod dropout;
mod fna;
mod forward;
mod head;
mod infsa;
pub(in crate::structure) mod log_sum;
mod normalise;
mod pairing;
mod plan;
mod softmax;

pub(crate) use backward::Targets;
pub(crate) use contraction::contractions;
pub(in crate::structure) use contraction::dots_in_order;
pub(crate) use decode::Decoder;
pub(crate) use fna::{fna_backward, fna_forward, fna_plan};
pub(in crate::structure) use forward::{KEYS, QUERIES, TILE_STRIDE, advance};
pub(in crate::structure) use head::{Head, PANEL, Visible, transpose};
pub(crate) use head::{Rows, dot, padded, positions};
pub(crate) use infsa::{
    Unit, check_norms, exponent, frobenius, gamma, hop_backward, infsa_backward, infsa_forward, saved_exponent,
    unnormalised, unnormalised_work,
};
pub(in crate::structure) use normalise::{Normalisation, Row, RowState, Tile};
pub(in crate::structure) use pairing::Pairs;
pub(crate) use plan::plan;
pub(crate) use softmax::{softmax_backward, softmax_forward};
