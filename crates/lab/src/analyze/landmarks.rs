//! What a mechanism that goes through landmarks loses on a head, and how well its matrix among them can be inverted.

use resolvent_graph::{
    Result,
    nystrom::{Kernel, Start, newton_curve, nystrom_error, one_norm},
    symmetric_eigen,
};
use resolvent_kernels::{
    Mechanism,
    mechanism::{Inverse, Landmarks},
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
    /// `|A X A - A|_2 / |A|_2` after as many steps of Newton-Schulz as the mechanism takes, from `1.8 A / |A|_1^2` and without
    /// its ridge: "Softmax-free Linear Transformers", Fig. 5. With `--full`.
    pub newton_residual: Option<f64>,
}

/// A mechanism's kernel, where its landmarks are means over windows of a sequence.
struct Pooled {
    kernel: Kernel,
    ratio: usize,
    ridge: f64,
    newton: Option<usize>,
}

impl Pooled {
    fn of(mechanism: &Mechanism, head_dim: usize) -> Option<Self> {
        let steps = |inverse: Inverse, steps: usize| (inverse == Inverse::NewtonSchulz).then_some(steps);
        let (kernel, landmarks, grid, ridge, newton) = match mechanism {
            Mechanism::Soft(m) | Mechanism::SoftPp(m) if !m.landmark_act => {
                let kernel = Kernel::Gaussian { scale: m.scale_for(head_dim) };
                (kernel, m.landmarks, m.grid, m.ridge, steps(m.inverse, m.newton_iterations))
            }
            Mechanism::Laplacian(m) => {
                let kernel = Kernel::Laplacian { lambda: m.lambda };
                (kernel, m.landmarks, m.grid, m.ridge, steps(m.inverse, m.newton_iterations))
            }
            _ => return None,
        };
        match (landmarks, grid) {
            (Landmarks::Pool { ratio }, None) => Some(Self { kernel, ratio, ridge, newton }),
            _ => None,
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
    let k = if mechanism.tied() { q.clone() } else { wide(head.k.unwrap_or(head.q)) };
    let mean = |window: &[f64]| {
        let rows = (window.len() / dim.max(1)) as f64;
        (0..dim).map(|c| window.iter().skip(c).step_by(dim).sum::<f64>() / rows).collect::<Vec<_>>()
    };
    let marks: Vec<f64> = k.chunks(pooled.ratio * dim).flat_map(mean).collect();
    let gram = pooled.kernel.gram(&marks, dim)?;
    let values = symmetric_eigen(&gram)?.values;
    let ends = |at: Option<&f64>| at.map_or(1.0, |x| x + pooled.ridge);
    let lost = nystrom_error(pooled.kernel, &q, &k, &marks, dim, pooled.ridge)?;
    let newton_residual = match (full, pooled.newton) {
        (true, Some(steps)) => {
            let one = one_norm(&gram);
            newton_curve(&gram, Start::Matrix(1.8 / (one * one)), steps)?.last().map(|last| last.residual)
        }
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
