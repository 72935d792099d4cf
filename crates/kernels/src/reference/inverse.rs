//! The inverse of the matrix between landmarks, by each method's definition, and its gradient.

use faer::{Mat, Side};

use super::matrix::Matrix;
use crate::{
    Error, Result,
    linalg::SMALLEST_PIVOT,
    mechanism::{Inverse, InverseGradient, NewtonInit},
};

/// How a matrix `M = A + ridge I` is inverted.
#[derive(Clone, Copy)]
pub(super) struct Method {
    pub mechanism: &'static str,
    pub inverse: Inverse,
    pub steps: usize,
    /// Where Newton-Schulz starts; `None` is `I / |M|_1`.
    pub init: Option<NewtonInit>,
    pub ridge: f64,
    pub gradient: InverseGradient,
    pub cutoff: f64,
}

/// An inverse with what its gradient needs.
pub(super) struct Inverted {
    method: Method,
    m: Matrix,
    /// The Newton-Schulz iterates, the result last; of other methods the result alone.
    iterates: Vec<Matrix>,
    /// Of newton-schulz, the factor on the start.
    alpha: f64,
}

/// `self` with `x` added to the diagonal.
fn shifted(a: &Matrix, x: f64) -> Matrix {
    a.map(|i, j, a| if i == j { a + x } else { a })
}

/// The largest absolute column sum.
fn norm(a: &Matrix) -> f64 {
    (0..a.cols).map(|j| (0..a.rows).map(|i| a.at(i, j).abs()).sum()).fold(0.0, f64::max)
}

impl Inverted {
    pub fn new(a: &Matrix, method: Method) -> Result<Self> {
        let m = shifted(a, method.ridge);
        let mut alpha = 0.0;
        let iterates = match method.inverse {
            Inverse::NewtonSchulz => {
                alpha = start(a, &m, method.init);
                let first = if from_identity(method.init) {
                    shifted(&Matrix::zeros(m.rows, m.cols), alpha)
                } else {
                    scaled(&m, alpha)
                };
                let mut iterates = vec![first];
                for _ in 0..method.steps {
                    let x = &iterates[iterates.len() - 1];
                    let xmx = x.times(&m).times(x);
                    iterates.push(x.map(|i, j, x| 2.0 * x - xmx.at(i, j)));
                }
                iterates
            }
            Inverse::Cholesky | Inverse::Cg => {
                check_pivots(&m, method.mechanism)?;
                vec![m.clone().inverse()]
            }
            Inverse::Eigen => {
                let (values, vectors) = eigen(&m);
                let f = kept(&values, method.cutoff);
                let scaled = vectors.map(|_, j, u| u * f[j]);
                vec![scaled.times_transposed(&vectors)]
            }
        };
        let inverted = Self { method, m, iterates, alpha };
        let finite = inverted.result().data.iter().all(|x| x.is_finite());
        if finite { Ok(inverted) } else { Err(Error::Diverged { mechanism: method.mechanism }) }
    }

    pub fn result(&self) -> &Matrix {
        &self.iterates[self.iterates.len() - 1]
    }

    /// `dA` from `dY`.
    pub fn backward(&self, dy: &Matrix) -> Matrix {
        let y = self.result();
        match (self.method.inverse, self.method.gradient) {
            (Inverse::NewtonSchulz, InverseGradient::Unrolled) => self.unrolled(dy),
            (Inverse::Eigen, _) => self.spectral(dy),
            _ => scaled(&y.transpose().times(dy).times(&y.transpose()), -1.0),
        }
    }

    /// Back through the steps, the factor on the start held constant.
    fn unrolled(&self, dy: &Matrix) -> Matrix {
        let (mut g, mut dm) = (dy.clone(), Matrix::zeros(dy.rows, dy.cols));
        for x in self.iterates[..self.iterates.len() - 1].iter().rev() {
            let xt = x.transpose();
            dm = dm.plus(&scaled(&xt.times(&g).times(&xt), -1.0));
            let left = g.times_transposed(&self.m.times(x));
            let right = x.times(&self.m).transpose().times(&g);
            g = g.map(|i, j, g| 2.0 * g - left.at(i, j) - right.at(i, j));
        }
        if from_identity(self.method.init) { dm } else { dm.plus(&scaled(&g, self.alpha)) }
    }

    /// By the divided differences of `1/x`, cut off.
    fn spectral(&self, dy: &Matrix) -> Matrix {
        let (values, u) = eigen(&self.m);
        let f = kept(&values, self.method.cutoff);
        let symmetric = dy.map(|i, j, x| 0.5 * (x + dy.at(j, i)));
        let rotated = u.transpose().times(&symmetric).times(&u);
        let divided = rotated.map(|i, j, x| {
            x * match (f[i] != 0.0, f[j] != 0.0) {
                (true, true) => -f[i] * f[j],
                (false, false) => 0.0,
                _ => (f[i] - f[j]) / (values[i] - values[j]),
            }
        });
        u.times(&divided).times_transposed(&u)
    }
}

fn scaled(a: &Matrix, by: f64) -> Matrix {
    a.map(|_, _, x| by * x)
}

/// Whether Newton-Schulz starts from the identity rather than from `M`.
fn from_identity(init: Option<NewtonInit>) -> bool {
    matches!(init, None | Some(NewtonInit::Identity))
}

/// The factor on the start of Newton-Schulz.
fn start(a: &Matrix, m: &Matrix, init: Option<NewtonInit>) -> f64 {
    let Some(init) = init else { return 1.0 / norm(m) };
    let mut alpha = match init {
        NewtonInit::Scaled => 1.8 / norm(m).powi(2),
        NewtonInit::Official => 1.8 / norm(a).powi(2),
        NewtonInit::Paper | NewtonInit::Backtrack => 2.0 / norm(m).powi(2),
        NewtonInit::Identity => 1.8 / norm(m),
    };
    if init == NewtonInit::Backtrack {
        let square = m.times(m);
        let residual = |alpha: f64| norm(&shifted(&scaled(&square, -alpha), 1.0));
        for _ in 0..10 {
            if residual(alpha) > 1.01 {
                alpha *= 0.5;
            }
        }
    }
    alpha
}

/// Whether the matrix is positive definite as far as f32 entries can tell.
fn check_pivots(m: &Matrix, mechanism: &'static str) -> Result<()> {
    let mut rest = m.clone();
    for k in 0..m.rows {
        let pivot = rest.at(k, k);
        if pivot.is_nan() || pivot < SMALLEST_PIVOT {
            return Err(Error::Singular { mechanism, landmark: k });
        }
        let column = Vec::from_iter((0..m.rows).map(|i| rest.at(i, k)));
        rest = rest.map(|i, j, x| if i > k { x - column[i] * column[j] / pivot } else { x });
    }
    Ok(())
}

/// Eigenvalues and eigenvectors (columns) of a symmetric matrix.
pub(super) fn eigen(m: &Matrix) -> (Vec<f64>, Matrix) {
    let symmetric = Mat::from_fn(m.rows, m.rows, |i, j| 0.5 * (m.at(i, j) + m.at(j, i)));
    let Ok(eigen) = symmetric.self_adjoint_eigen(Side::Lower) else {
        let nan = || f64::NAN;
        return ((0..m.rows).map(|_| nan()).collect(), m.map(|_, _, _| nan()));
    };
    let values = (0..m.rows).map(|i| eigen.S()[i]).collect();
    (values, Matrix::from_fn(m.rows, m.rows, |i, j| eigen.U()[(i, j)]))
}

/// `1/x`, and 0 for eigenvalues up to `cutoff` of the largest.
fn kept(values: &[f64], cutoff: f64) -> Vec<f64> {
    let most = values.iter().fold(f64::NEG_INFINITY, |most, &x| most.max(x));
    values.iter().map(|&x| if x > cutoff * most { 1.0 / x } else { 0.0 }).collect()
}
