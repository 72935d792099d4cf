//! Every token's similarity to a few landmarks, and the inverse of the landmarks' similarities to each other: linear in the
//! tokens, forward and backward, where the number of landmarks is fixed ([`reason`]). Nothing of size tokens x landmarks is stored.
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

use crate::mechanism::Landmarks;

/// What a plan says of how the cost grows.
const fn reason(landmarks: Landmarks) -> &'static str {
    if landmarks.grow() {
        "similarities to landmarks, computed tile by tile in every pass; more tokens make more windows of one side, and with them \
         more landmarks, so that the cost is not linear in the tokens: it is with pooled landmarks of a fixed `count`"
    } else {
        "similarities to a fixed number of landmarks, computed tile by tile in every pass: linear in the tokens"
    }
}
