//! Landmarks by their definition, and the gradient through them.

use super::matrix::{Matrix, inner};
use crate::mechanism::Landmarks;

/// A linear map from tokens to landmarks: `u_w[o] = sum over (token, slot) of window w, and channels i, of
/// filter(o, i, slot) x_token[i]`.
pub(super) struct LandmarkSource {
    /// The kept tokens that each landmark is made of.
    pub members: Vec<Vec<(usize, usize)>>,
    pub filter: Filter,
}

/// What a token's channels are multiplied by.
pub(super) enum Filter {
    /// One over the number of members.
    Mean,
    /// `[out, in, slot]`: every channel to every other.
    Full(Vec<f64>),
    /// `[channel, slot]`.
    Depthwise(Vec<f64>),
}

impl LandmarkSource {
    /// Landmarks of windows and picks; `partial` windows and a `filter` of `conv`, `indices` of `random`.
    pub fn new(
        landmarks: Landmarks,
        grid: Option<[usize; 2]>,
        keep: &[bool],
        partial: bool,
        filter: Option<Filter>,
        indices: &[usize],
    ) -> Self {
        let windows = || {
            let mut members = landmarks.members(keep.len(), grid, partial).unwrap_or_default();
            members.iter_mut().for_each(|window| window.retain(|&(token, _)| keep[token]));
            members
        };
        let pick = |token: usize| Vec::from_iter(keep[token].then_some((token, 0)));
        let members = match landmarks {
            Landmarks::Pool(_) | Landmarks::Conv { .. } => windows(),
            Landmarks::Stride { ratio } => {
                let centre = Landmarks::centre(ratio, grid.is_some());
                let nearest = |window: Vec<(usize, usize)>| {
                    let picked = window.into_iter().min_by_key(|&(_, slot)| (slot.abs_diff(centre), slot));
                    Vec::from_iter(picked)
                };
                windows().into_iter().map(nearest).collect()
            }
            Landmarks::First { count } => (0..count).map(pick).collect(),
            Landmarks::Random { .. } => indices.iter().map(|&token| pick(token)).collect(),
            Landmarks::Given { .. } | Landmarks::All => Vec::new(),
        };
        Self { members, filter: filter.unwrap_or(Filter::Mean) }
    }

    /// The landmarks `[len, channels]`; those without members are zero.
    pub fn apply(&self, x: &Matrix) -> Matrix {
        let mut u = Matrix::zeros(self.members.len(), x.cols);
        // A mean is divided at the end: that of equal tokens is then that token.
        let is_mean = matches!(self.filter, Filter::Mean);
        self.each(x.cols, |w, o, i, token, factor, _| {
            u.row_mut(w)[o] += if is_mean { x.at(token, i) } else { factor * x.at(token, i) };
        });
        for (w, members) in self.members.iter().enumerate().filter(|_| is_mean) {
            u.row_mut(w).iter_mut().for_each(|x| *x /= members.len().max(1) as f64);
        }
        u
    }

    /// `(dx, dfilter)` from `du`; `dfilter` in the filter's layout, empty for a mean.
    pub fn backward(&self, x: &Matrix, du: &Matrix) -> (Matrix, Vec<f64>) {
        let mut dx = Matrix::zeros(x.rows, x.cols);
        let mut dfilter = match &self.filter {
            Filter::Mean => Vec::new(),
            Filter::Full(weight) | Filter::Depthwise(weight) => vec![0.0; weight.len()],
        };
        self.each(x.cols, |w, o, i, token, factor, at| {
            dx.row_mut(token)[i] += factor * du.at(w, o);
            if let Some(at) = at {
                dfilter[at] += du.at(w, o) * x.at(token, i);
            }
        });
        (dx, dfilter)
    }

    /// Calls `visit(window, out, in, token, factor, index of the factor in the filter)` for every term.
    fn each(&self, dim: usize, mut visit: impl FnMut(usize, usize, usize, usize, f64, Option<usize>)) {
        for (w, members) in self.members.iter().enumerate() {
            for &(token, slot) in members {
                for o in 0..dim {
                    match &self.filter {
                        Filter::Mean => visit(w, o, o, token, 1.0 / members.len() as f64, None),
                        Filter::Depthwise(weight) => {
                            let at = o * (weight.len() / dim) + slot;
                            visit(w, o, o, token, weight[at], Some(at));
                        }
                        Filter::Full(weight) => {
                            let window = weight.len() / (dim * dim);
                            for i in 0..dim {
                                let at = (o * dim + i) * window + slot;
                                visit(w, o, i, token, weight[at], Some(at));
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Layer norm over the channels and exact GELU, with what the gradient needs.
pub(super) struct Activated {
    gamma: Vec<f64>,
    /// Normalised rows, and one over their standard deviations.
    hat: Matrix,
    inverse: Vec<f64>,
    /// Before GELU.
    y: Matrix,
    pub u: Matrix,
}

impl Activated {
    const EPS: f64 = 1e-5;

    pub fn new(u: &Matrix, gamma: Vec<f64>, beta: &[f64]) -> Self {
        let d = u.cols as f64;
        let mean: Vec<f64> = (0..u.rows).map(|i| u.row(i).iter().sum::<f64>() / d).collect();
        let square = |i: usize| u.row(i).iter().map(|x| (x - mean[i]).powi(2)).sum::<f64>();
        let inverse: Vec<f64> = (0..u.rows).map(|i| (square(i) / d + Self::EPS).powf(-0.5)).collect();
        let hat = u.map(|i, _, x| (x - mean[i]) * inverse[i]);
        let y = hat.map(|_, c, x| gamma[c] * x + beta[c]);
        let u = y.map(|_, _, x| crate::mechanism::Activation::Gelu.value(x));
        Self { gamma, hat, inverse, y, u }
    }

    /// `(du before, dgamma, dbeta)`.
    pub fn backward(&self, du: &Matrix) -> (Matrix, Vec<f64>, Vec<f64>) {
        let dy = du.map(|i, c, x| x * crate::mechanism::Activation::Gelu.derivative(self.y.at(i, c)));
        let column = |f: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
            (0..dy.cols).map(|c| (0..dy.rows).map(|i| f(i, c)).sum()).collect()
        };
        let (dgamma, dbeta) = (column(&|i, c| dy.at(i, c) * self.hat.at(i, c)), column(&|i, c| dy.at(i, c)));
        let dhat = dy.map(|_, c, x| x * self.gamma[c]);
        let d = dy.cols as f64;
        let before = dhat.map(|i, c, x| {
            let (mean, slope) = (dhat.row(i).iter().sum::<f64>() / d, inner(dhat.row(i), self.hat.row(i)) / d);
            self.inverse[i] * (x - mean - self.hat.at(i, c) * slope)
        });
        (before, dgamma, dbeta)
    }
}
