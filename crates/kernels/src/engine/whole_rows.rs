//! Rows of tokens as whole vectors, in the order of a head.

use std::ops::Deref;

use crate::{call::TokenRows, score::map::Map, scratch::Aligned, structure::dense::padded};

/// Whether positions ascend, none twice.
pub(super) fn ascends(at: &[u32]) -> bool {
    at.is_sorted_by(|a, b| a < b)
}

/// Rows of whole vectors.
pub(super) enum WholeRows<'a> {
    Lent(&'a [f32]),
    Own(Aligned),
}

impl Deref for WholeRows<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Lent(rows) => rows,
            Self::Own(rows) => rows,
        }
    }
}

impl<'a> WholeRows<'a> {
    /// The rows of `x` at some positions: as they lie where they are all of them, in order, and can be.
    pub fn of(x: TokenRows<'a>, at: &[u32]) -> Self {
        let (dim, stride) = (x.channels, padded(x.channels));
        if let Some(all) = x.as_slice(0..x.tokens).filter(|_| stride == dim && at.len() == x.tokens && ascends(at)) {
            return Self::Lent(all);
        }
        let mut rows = Aligned::new(at.len() * stride);
        for (row, &n) in rows.chunks_exact_mut(stride.max(1)).zip(at) {
            row[..dim].copy_from_slice(x.row(n as usize));
        }
        Self::Own(rows)
    }

    /// `f` of every number.
    pub fn map(self, f: impl Fn(f32) -> f32) -> Self {
        let mut rows = Aligned::default();
        rows.extend(&self);
        rows.iter_mut().for_each(|x| *x = f(*x));
        Self::Own(rows)
    }

    /// With one row more.
    pub fn push(self, row: &[f32]) -> Self {
        let mut rows = match self {
            Self::Own(rows) => rows,
            Self::Lent(lent) => {
                let mut rows = Aligned::default();
                rows.extend(lent);
                rows
            }
        };
        rows.extend(row);
        let padding = padded(row.len()) - row.len();
        rows.extend(&[0.0; LANES][..padding]);
        Self::Own(rows)
    }
}

/// Whole vectors are of at most as many.
const LANES: usize = padded(1);

/// Adds rows of `x`, `width` apart, to those of `out [.., dim]` at some positions.
pub(super) fn add_rows(
    at: &[u32],
    x: &[f32],
    width: usize,
    out: &mut [f32],
    dim: usize,
    source: Option<(Map, TokenRows<'_>)>,
) {
    let source = source.filter(|(map, _)| *map == Map::Unit);
    let mut part = vec![0.0; dim];
    for (x, &n) in x.chunks_exact(width.max(1)).zip(at) {
        let at = n as usize * dim..(n as usize + 1) * dim;
        let x = match source {
            Some((map, source)) => {
                map.pull_back(source.row(n as usize), x, &mut part);
                &part
            }
            None => &x[..dim],
        };
        out[at].iter_mut().zip(x).for_each(|(out, x)| *out += x);
    }
}

/// The mean of some rows, divided at the end: that of equal rows is then that row.
pub(super) fn mean_of(x: TokenRows<'_>, rows: &[u32]) -> Vec<f32> {
    let mut sum = vec![0.0_f64; x.channels];
    for &n in rows {
        sum.iter_mut().zip(x.row(n as usize)).for_each(|(sum, &x)| *sum += f64::from(x));
    }
    sum.iter().map(|x| (x / rows.len().max(1) as f64) as f32).collect()
}
