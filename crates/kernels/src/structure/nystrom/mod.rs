//! Every token's similarity to a few landmarks, and the inverse of the landmarks' similarities to each other: linear in the
//! tokens, forward and backward. Nothing of size tokens x landmarks is stored.
//!
//! A call is a few passes over the tokens ([`pass`]), in tiles ([`tile`]) of one kernel ([`crate::score::Metric`]); between
//! them stand small products per batch element and head. Landmarks ([`marks`]) and inverses ([`crate::linalg`]) are
//! the same for all mechanisms.

mod activation;
pub(crate) mod laplacian;
mod marks;
pub(crate) mod pass;
pub(crate) mod soft;
pub(crate) mod tile;
