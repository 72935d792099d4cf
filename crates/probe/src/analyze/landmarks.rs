//! What a mechanism that goes through landmarks loses on a head, and how well its matrix among them can be inverted.

use resolvent_graph::{
    Dense, LinearOperator, Result,
    nystrom::{Kernel, Start, newton_curve, nystrom_error, one_norm},
    symmetric_eigen,
};
use resolvent_kernels::{
    Mechanism, Parameter,
    mechanism::{Inverse, Landmarks, NewtonInit, Normalisation, Nystrom, Score, Structure},
};
use serde::Serialize;

use super::Head;

/// The matrix among the landmarks of one head.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LandmarkReport {
    /// Number of landmarks.
    pub landmarks: usize,
    /// Its condition number, ridge included.
    pub condition: f64,
    /// `|G - K|_F / |K|_F`: the kernel between queries and keys beside what an exact inverse makes of it.
    pub error: f64,
    /// `sum x / (x + ridge)` over its eigenvalues: how many landmarks count.
    pub effective_rank: f64,
    /// `|M X M - M|_2 / |M|_2` where the mechanism's Newton-Schulz stops, on the matrix `M` that it inverts, ridge included, from
    /// where it starts: the metric of "Softmax-free Linear Transformers", Fig. 5. With `--full`.
    pub newton_residual: Option<f64>,
}

/// A mechanism's kernel, where its landmarks are means over windows of a sequence or grid.
struct Pooled {
    kernel: Kernel,
    landmarks: Landmarks,
    grid: Option<[usize; 2]>,
    ridge: f64,
    newton: Option<Newton>,
}

/// How the mechanism inverts.
struct Newton {
    steps: usize,
    /// `None` is `I / |M|_1`, where `laplacian` starts.
    init: Option<NewtonInit>,
}

impl Pooled {
    fn of(mechanism: &Mechanism, head_dim: usize) -> Option<Self> {
        let newton = |inverse: Inverse, steps: usize, init: Option<NewtonInit>| {
            (inverse == Inverse::NewtonSchulz).then_some(Newton { steps, init })
        };
        let Mechanism { score, structure: Structure::Nystrom(m), normalisation, .. } = mechanism.values() else {
            return None;
        };
        let kernel = match score {
            Score::Gaussian(_) => Kernel::Gaussian { scale: score.value(Parameter::Scale, head_dim, 1) },
            Score::Laplacian(m) => Kernel::Laplacian { lambda: m.lambda },
            _ => return None,
        };
        let Nystrom { landmarks, grid, ridge, .. } = m;
        let newton = newton(m.inverse, m.newton_iterations, m.newton_init);
        // What is inverted between factors is another matrix.
        let one = !matches!(normalisation, Normalisation::Factors(_));
        let pooled = one && matches!(landmarks, Landmarks::Pool(_)) && !m.landmark_act;
        pooled.then_some(Self { kernel, landmarks, grid, ridge, newton })
    }

    /// The landmarks of `keys [tokens, dim]`: means over windows.
    fn landmarks(&self, keys: &[f64], dim: usize) -> Vec<f64> {
        let tokens = keys.len() / dim;
        let members = self.landmarks.members(tokens, self.grid, true).unwrap_or_default();
        let mean = |window: &Vec<(usize, usize)>| {
            let sum = |c: usize| window.iter().map(|&(token, _)| keys[token * dim + c]).sum::<f64>();
            (0..dim).map(|c| sum(c) / window.len() as f64).collect::<Vec<_>>()
        };
        members.iter().flat_map(mean).collect()
    }
}

impl Newton {
    /// The residual of its last step on the matrix `a`.
    fn residual(&self, a: &Dense, ridge: f64) -> Result<f64> {
        let m = Dense::from_fn(a.len(), |i, j| a.row(i)[j] + if i == j { ridge } else { 0.0 });
        let curve = newton_curve(&m, self.start(a, &m), self.steps)?;
        Ok(curve[self.steps].residual)
    }

    /// Where the mechanism starts: as its kernels do.
    fn start(&self, a: &Dense, m: &Dense) -> Start {
        let norm = one_norm(m);
        match self.init {
            None => Start::Identity(1.0 / norm),
            Some(NewtonInit::Identity) => Start::Identity(1.8 / norm),
            Some(NewtonInit::Scaled) => Start::Matrix(1.8 / (norm * norm)),
            Some(NewtonInit::Official) => Start::Matrix(1.8 / one_norm(a).powi(2)),
            Some(NewtonInit::Paper) => Start::Matrix(2.0 / (norm * norm)),
            Some(NewtonInit::Backtrack) => {
                let square = Dense::from_fn(m.len(), |i, j| m.row(i).iter().zip(m.row(j)).map(|(x, y)| x * y).sum());
                let rest = |alpha: f64| {
                    let entry = |i: usize, j: usize| f64::from(u8::from(i == j)) - alpha * square.row(i)[j];
                    one_norm(&Dense::from_fn(m.len(), entry))
                };
                let halved = |times: i32| 2.0 / (norm * norm) * 0.5_f64.powi(times);
                let times = (0..10).find(|&times| rest(halved(times)) <= 1.01).unwrap_or(10);
                Start::Matrix(halved(times))
            }
        }
    }
}

/// The report on `mechanism`, where it has pooled landmarks.
///
/// # Errors
/// Those of the decompositions.
pub(super) fn landmarks(mechanism: &Mechanism, head: Head<'_>, full: bool) -> Result<Option<LandmarkReport>> {
    let dim = head.q.len() / head.tokens.max(1);
    let Some(pooled) = Pooled::of(mechanism, dim) else { return Ok(None) };
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let q = wide(head.q);
    let k = if mechanism.tied { q.clone() } else { wide(head.k.unwrap_or(head.q)) };
    let marks = pooled.landmarks(&k, dim);
    let gram = pooled.kernel.gram(&marks, dim)?;
    let values = symmetric_eigen(&gram)?.values;
    let ends = |at: Option<&f64>| at.map_or(1.0, |x| x + pooled.ridge);
    let lost = nystrom_error(pooled.kernel, &q, &k, &marks, dim, pooled.ridge)?;
    let newton_residual = match (full, pooled.newton) {
        (true, Some(newton)) => Some(newton.residual(&gram, pooled.ridge)?),
        _ => None,
    };
    Ok(Some(LandmarkReport {
        landmarks: values.len(),
        condition: ends(values.last()) / ends(values.first()),
        error: lost.frobenius,
        effective_rank: lost.effective_rank,
        newton_residual,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Newton-Schulz in closed form: what is left of an eigenvalue `x` is `(1 - alpha x)^(2^k)` from a multiple of the
    /// identity, `(1 - alpha x^2)^(2^k)` from one of the matrix.
    #[test]
    fn the_residual_is_that_of_the_mechanisms_own_start() {
        let marks: Vec<f64> = (0..12).map(|i| (i as f64 * 0.7).sin()).collect();
        let a = Kernel::Gaussian { scale: 0.5 }.gram(&marks, 2).unwrap();
        let (ridge, steps) = (0.01, 9);
        let m = Dense::from_fn(6, |i, j| a.row(i)[j] + if i == j { ridge } else { 0.0 });
        let (values, norm) = (symmetric_eigen(&m).unwrap().values, one_norm(&m));
        let left = |alpha: f64, power: i32| {
            let of = |x: &f64| x * (1.0 - alpha * x.powi(power)).powi(1 << steps).abs();
            values.iter().map(of).fold(0.0, f64::max) / values[5]
        };
        let found = |init| Newton { steps, init }.residual(&a, ridge).unwrap();
        for (init, alpha, power) in [
            (None, 1.0 / norm, 1),
            (Some(NewtonInit::Identity), 1.8 / norm, 1),
            (Some(NewtonInit::Scaled), 1.8 / (norm * norm), 2),
            (Some(NewtonInit::Official), 1.8 / one_norm(&a).powi(2), 2),
            (Some(NewtonInit::Paper), 2.0 / (norm * norm), 2),
        ] {
            let (found, expected) = (found(init), left(alpha, power));
            assert!((found - expected).abs() < 1e-9, "{init:?}: {found} is not {expected}");
        }
        // Halved until |I - alpha M^2|_1 is at most 1.01, or ten times.
        let backtracked = found(Some(NewtonInit::Backtrack));
        let halvings = (0..=10).find(|&n| (backtracked - left(2.0 / (norm * norm) * 0.5_f64.powi(n), 2)).abs() < 1e-9);
        assert!(halvings.is_some_and(|n| n > 0), "{backtracked}");
    }
}
