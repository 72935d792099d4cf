//! Affinities between a tile of tokens and the landmarks by any score, and the way back to both.

use super::tile::{Zip, zip};
use crate::{
    score::{
        Manhattan, Pairs, Squared,
        contract::MOST_PARAMETERS,
        gradients,
        tiles::{ParameterSums, Tile, TileScore},
    },
    simd::{
        Level,
        product::{Add, Left, Right, Size, Store, Term, multiply, multiply_add},
    },
};

/// What the gradients of a term's differences are multiplied by: those of tokens and those of landmarks, as [`pull_back`] leaves them.
pub(super) const fn factors(term: Term) -> [f32; 2] {
    match term {
        Term::Product => [1.0, 1.0],
        Term::SquaredDifference | Term::Chord => [2.0, -2.0],
        Term::Difference => [1.0, -1.0],
    }
}

/// Turns `pairs.e`, the gradients of a tile's values, into those of the terms; writes the tokens' gradients and adds the
/// landmarks', both but for [`factors`], and adds those of the score's parameters to `sums`.
pub(super) fn pull_back(
    level: Level,
    score: &dyn TileScore,
    terms: &[f32],
    e: Tile<'_>,
    (tokens, landmarks, dim): (&[f32], &[f32], usize),
    (dtokens, dlandmarks): (&mut [f32], &mut [f32]),
    sums: &mut [f64; MOST_PARAMETERS],
) {
    let Tile { data, stride, rows, width } = e;
    let sums = ParameterSums { sums, typical: None };
    score.gradients(level, terms, Tile { data: &mut *data, stride, rows, width }, sums);
    let pairs = Pairs { tokens, landmarks, dim, e: &*data, stride, pivots: None };
    match score.term() {
        Term::SquaredDifference | Term::Chord => gradients(level, Squared, pairs, dtokens, dlandmarks),
        Term::Difference => gradients(level, Manhattan, pairs, dtokens, dlandmarks),
        Term::Product => products(level, (&*data, stride), [tokens, landmarks], dim, (dtokens, dlandmarks)),
    }
}

/// Where the gradients of landmarks are taken from.
pub(super) struct Origin<'a> {
    pub image: &'a [f32],
    /// Of every landmark that image, or its own row, which takes nothing off.
    pub rows: &'a [f32],
    /// Room for the tokens.
    pub room: &'a mut [f32],
}

/// From the gradients `e` of a tile's terms: writes the tokens' gradients and adds the landmarks', these from a pivot on; both but for
/// [`factors`].
pub(super) fn pull_back_from(
    level: Level,
    term: Term,
    (e, stride): (&[f32], usize),
    (tokens, landmarks, dim): (&[f32], &[f32], usize),
    from: Origin<'_>,
    (dtokens, dlandmarks): (&mut [f32], &mut [f32]),
) {
    let pairs = Pairs { tokens, landmarks, dim, e, stride, pivots: Some(from.rows) };
    match term {
        Term::SquaredDifference | Term::Chord => gradients(level, Squared, pairs, dtokens, dlandmarks),
        Term::Difference => gradients(level, Manhattan, pairs, dtokens, dlandmarks),
        Term::Product => {
            from.room.copy_from_slice(tokens);
            zip(level, from.room, from.image, Zip::Subtract);
            products(level, (e, stride), [from.room, landmarks], dim, (dtokens, dlandmarks));
        }
    }
}

/// Writes `dtokens = e landmarks` and adds `e^T tokens` to `dlandmarks`.
fn products(
    level: Level,
    (e, stride): (&[f32], usize),
    [tokens, landmarks]: [&[f32]; 2],
    dim: usize,
    (dtokens, dlandmarks): (&mut [f32], &mut [f32]),
) {
    let (rows, count) = (tokens.len() / dim, landmarks.len() / dim);
    let size = Size { rows, cols: dim, depth: count };
    let left = Left { data: e, row_stride: stride, depth_stride: 1 };
    multiply(level, size, left, Right { data: landmarks, stride: dim }, Store { data: dtokens, stride: dim });
    let size = Size { rows: count, cols: dim, depth: rows };
    let left = Left { data: e, row_stride: 1, depth_stride: stride };
    multiply_add(level, size, left, Right { data: tokens, stride: dim }, Add { data: dlandmarks, stride: dim });
}
