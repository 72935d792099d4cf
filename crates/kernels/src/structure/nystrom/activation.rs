//! Layer norm over the channels, then exact GELU, on landmarks: few rows, so that f64 costs nothing.

/// Added to the variance.
const EPS: f64 = 1e-5;

/// Gain and offset of the norm, `[dim]` each.
#[derive(Clone, Copy)]
pub(super) struct Norm<'a> {
    pub gamma: &'a [f32],
    pub beta: &'a [f32],
}

impl Norm<'_> {
    /// Writes the activated rows of `x [.., stride]`; zeros beyond the last channel.
    pub fn forward(self, x: &[f32], stride: usize, out: &mut [f32]) {
        for (x, out) in x.chunks_exact(stride).zip(out.chunks_exact_mut(stride)) {
            let row = Row::of(&x[..self.gamma.len()]);
            out.fill(0.0);
            for (c, out) in out.iter_mut().take(self.gamma.len()).enumerate() {
                let y = self.normed(row, x, c);
                *out = (y * normal_cdf(y)) as f32;
            }
        }
    }

    fn normed(self, row: Row, x: &[f32], c: usize) -> f64 {
        f64::from(self.gamma[c]) * row.hat(x[c]) + f64::from(self.beta[c])
    }

    /// Turns `du`, the gradient of the activated rows, into that of `x`; adds to `sums`, the gradients of gain and offset.
    pub fn backward(self, x: &[f32], stride: usize, du: &mut [f32], sums: [&mut [f32]; 2]) {
        let [dgamma, dbeta] = sums;
        let dim = self.gamma.len();
        for (x, du) in x.chunks_exact(stride).zip(du.chunks_exact_mut(stride)) {
            let row = Row::of(&x[..dim]);
            let (mut mean, mut slope) = (0.0, 0.0);
            for c in 0..dim {
                let y = self.normed(row, x, c);
                let density = (-0.5 * y * y).exp() / (2.0 * std::f64::consts::PI).sqrt();
                let dy = f64::from(du[c]) * (normal_cdf(y) + y * density);
                dgamma[c] += (dy * row.hat(x[c])) as f32;
                dbeta[c] += dy as f32;
                let dhat = dy * f64::from(self.gamma[c]);
                mean += dhat / dim as f64;
                slope += dhat * row.hat(x[c]) / dim as f64;
                du[c] = dhat as f32;
            }
            for c in 0..dim {
                du[c] = (row.inverse * (f64::from(du[c]) - mean - row.hat(x[c]) * slope)) as f32;
            }
        }
    }
}

/// Mean of a row, and one over its standard deviation.
#[derive(Clone, Copy)]
struct Row {
    mean: f64,
    inverse: f64,
}

impl Row {
    fn of(x: &[f32]) -> Self {
        let dim = x.len() as f64;
        let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / dim;
        let variance = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / dim;
        Self { mean, inverse: (variance + EPS).powf(-0.5) }
    }

    fn hat(self, x: f32) -> f64 {
        (f64::from(x) - self.mean) * self.inverse
    }
}

/// The share of a standard normal variable below `x`.
fn normal_cdf(x: f64) -> f64 {
    0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}
