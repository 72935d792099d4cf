//! What becomes of rows before they meet: a score may be of directions alone.

use crate::{
    mechanism::{Manifold, Score},
    structure::dense::padded,
};

/// Shorter rows have no direction. "Fractional neural attention for efficient multiscale sequence processing", A.1.
const NO_LENGTH: f64 = 1e-12;

/// What becomes of rows before they meet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Map {
    Identity,
    /// Rows at length one, and two channels more: a row without length is at a right angle to every other.
    Unit,
    /// A channel more, by which every query has its own offset.
    Offset,
}

impl Map {
    pub fn of(score: &Score) -> Self {
        match score {
            Score::CosineExp(_) => Self::Unit,
            Score::Levy(m) | Score::Student(m) if m.manifold == Manifold::Sphere => Self::Unit,
            Score::DotSigmoid(m) if m.offset.is_none() => Self::Offset,
            _ => Self::Identity,
        }
    }

    pub const fn channels(self) -> usize {
        match self {
            Self::Identity => 0,
            Self::Unit => 2,
            Self::Offset => 1,
        }
    }

    /// Distance of mapped rows of `dim` channels.
    pub fn stride(self, dim: usize) -> usize {
        padded(dim + self.channels())
    }

    /// Writes the image of a row; `query` tells the sides apart, `offset` is the query's.
    pub fn apply(self, row: &[f32], query: bool, offset: f32, out: &mut [f32]) {
        let dim = row.len();
        out.fill(0.0);
        out[..dim].copy_from_slice(row);
        match self {
            Self::Identity => {}
            Self::Offset => out[dim] = if query { offset } else { 1.0 },
            Self::Unit => {
                let length = length(row);
                if length > NO_LENGTH {
                    out[..dim].iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
                } else {
                    out[..dim].fill(0.0);
                    out[dim + usize::from(!query)] = 1.0;
                }
            }
        }
    }

    /// The gradient of a row from that of its image.
    pub fn pull_back(self, row: &[f32], dimage: &[f32], out: &mut [f32]) {
        let dim = row.len();
        out.copy_from_slice(&dimage[..dim]);
        if self != Self::Unit {
            return;
        }
        let length = length(row);
        if length <= NO_LENGTH {
            return out.fill(0.0);
        }
        let along: f64 = row.iter().zip(&*out).map(|(&x, &d)| f64::from(x) / length * f64::from(d)).sum();
        let gradient = |d: f32, x: f32| ((f64::from(d) - along * f64::from(x) / length) / length) as f32;
        out.iter_mut().zip(row).for_each(|(out, &x)| *out = gradient(*out, x));
    }
}

fn length(row: &[f32]) -> f64 {
    row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}
