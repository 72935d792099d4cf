//! The inverse of the matrix between landmarks, by each method's definition, and its gradient.

use faer::{Mat, Side};

use super::matrix::{Matrix, ratio};
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
    copies: Copies,
}

/// Of every landmark, the first that it coincides with. Affinities to both are equal, so that no result has a part of the inverse whose signs
/// differ between them; every Newton-Schulz step would double what rounding leaves there.
struct Copies(Vec<usize>);

impl Copies {
    fn of(a: &Matrix) -> Self {
        let first = |i: usize| (0..i).find(|&other| a.row(other) == a.row(i)).unwrap_or(i);
        Self((0..a.rows).map(first).collect())
    }

    /// The mean over landmarks that coincide, of rows and of columns.
    fn averaged(&self, x: Matrix) -> Matrix {
        let Self(first) = self;
        if first.iter().enumerate().all(|(i, &first)| i == first) {
            return x;
        }
        let rows = |x: Matrix| {
            let of = |i: usize| (0..first.len()).filter(move |&other| first[other] == first[i]);
            x.map(|i, j, _| of(i).map(|other| x.at(other, j)).sum::<f64>() / of(i).count() as f64)
        };
        rows(rows(x).transpose()).transpose()
    }
}

/// `self` with `x` added to the diagonal.
fn shifted(a: &Matrix, x: f64) -> Matrix {
    a.map(|i, j, a| if i == j { a + x } else { a })
}

/// The largest absolute column sum.
fn norm(a: &Matrix) -> f64 {
    most(a).1
}

/// The first column of the largest absolute sum, and this.
fn most(a: &Matrix) -> (usize, f64) {
    let sum = |j: usize| (0..a.rows).map(|i| a.at(i, j).abs()).sum();
    (0..a.cols).map(|j| (j, sum(j))).fold((0, 0.0), |most, x| if x.1 > most.1 { x } else { most })
}

impl Inverted {
    pub fn new(a: &Matrix, method: Method) -> Result<Self> {
        let m = shifted(a, method.ridge);
        let (mut alpha, copies) = (0.0, Copies::of(a));
        let iterates = match method.inverse {
            Inverse::NewtonSchulz => {
                alpha = start(a, &m, method.init);
                let first = if from_identity(method.init) {
                    shifted(&Matrix::zeros(m.rows, m.cols), alpha)
                } else {
                    scaled(&m, alpha)
                };
                let mut iterates = vec![copies.averaged(first)];
                for _ in 0..method.steps {
                    let x = &iterates[iterates.len() - 1];
                    let xmx = x.times(&m).times(x);
                    iterates.push(copies.averaged(x.map(|i, j, x| 2.0 * x - xmx.at(i, j))));
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
        let inverted = Self { method, m, iterates, alpha, copies };
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
            g = self.copies.averaged(g.map(|i, j, g| 2.0 * g - left.at(i, j) - right.at(i, j)));
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

/// The pseudo-inverse of a matrix that need be neither symmetric nor square: Newton-Schulz from `1.8 A^T / (|A|_1 |A|_inf)`.
pub(super) struct PseudoInverse {
    a: Matrix,
    alpha: f64,
    iterates: Vec<Matrix>,
}

impl PseudoInverse {
    pub fn new(a: Matrix, steps: usize) -> Self {
        let norms = norm(&a) * norm(&a.transpose());
        let alpha = ratio(1.8, norms);
        let mut iterates = vec![scaled(&a.transpose(), alpha)];
        for _ in 0..steps {
            let z = &iterates[iterates.len() - 1];
            let zaz = z.times(&a).times(z);
            let largest = |x: &Matrix| x.data.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            // Further steps would double what rounding leaves in the null space.
            if largest(&zaz.map(|i, j, x| x - z.at(i, j))) <= 1e-13 * largest(z) {
                break;
            }
            let next = zaz.map(|i, j, x| 2.0 * z.at(i, j) - x);
            iterates.push(next);
        }
        Self { a, alpha, iterates }
    }

    pub fn result(&self) -> &Matrix {
        &self.iterates[self.iterates.len() - 1]
    }

    /// The gradient of the matrix: of the steps, or of the inverse that they tend to.
    pub fn backward(&self, dz: &Matrix, implicit: bool) -> Matrix {
        if implicit {
            return self.of_limit(dz);
        }
        let (mut dz, mut da) = (dz.clone(), Matrix::zeros(self.a.rows, self.a.cols));
        for z in self.iterates[..self.iterates.len() - 1].iter().rev() {
            let (zt, az, za) = (z.transpose(), self.a.times(z), z.times(&self.a));
            da = da.plus(&scaled(&zt.times(&dz).times(&zt), -1.0));
            let through = dz.times_transposed(&az).plus(&za.transpose().times(&dz));
            dz = dz.map(|i, j, x| 2.0 * x - through.at(i, j));
        }
        // The start: its matrix, and the largest sums of a column and of a row in its factor.
        let rate = -self.alpha * dz.transpose().inner(&self.a);
        let (a, across) = (&self.a, self.a.transpose());
        let [(column, most_column), (row, most_row)] = [most(a), most(&across)];
        let share = |at: bool, most: f64, x: f64| if at { ratio(x.signum(), most) } else { 0.0 };
        let norms = a.map(|i, j, x| rate * (share(j == column, most_column, x) + share(i == row, most_row, x)));
        da.plus(&scaled(&dz.transpose(), self.alpha)).plus(&norms)
    }

    /// The gradient of a pseudo-inverse of constant rank: `-Z^T dZ Z^T + (I - A Z) dZ^T Z Z^T + Z^T Z dZ^T (I - Z A)`. "The
    /// Differentiation of Pseudo-Inverses and Nonlinear Least Squares Problems Whose Variables Separate", eq. 4.12.
    fn of_limit(&self, dz: &Matrix) -> Matrix {
        let (z, zt, dzt) = (self.result(), self.result().transpose(), dz.transpose());
        let rest = |x: &Matrix| x.map(|i, j, x| f64::from(u8::from(i == j)) - x);
        let left = rest(&self.a.times(z)).times(&dzt).times(&z.times(&zt));
        let right = zt.times(z).times(&dzt).times(&rest(&z.times(&self.a)));
        scaled(&zt.times(dz).times(&zt), -1.0).plus(&left).plus(&right)
    }
}
