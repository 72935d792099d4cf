//! Diffusion maps: tokens placed so that distances are those of the distributions of their walkers.

use super::{Reversible, Spectrum};

/// The eigenvectors of the walk, `psi_l = v_l / sqrt(pi)`, so that `psi_0 = 1`; 0 at tokens without edges.
fn right_vector(vector: &[f64], pi: &[f64]) -> Vec<f64> {
    vector.iter().zip(pi).map(|(v, pi)| if *pi > 0.0 { v / pi.sqrt() } else { 0.0 }).collect()
}

/// The diffusion map: token `i` at `(eta_l^tau psi_l(i))`, `l = 1..=channels`, one vector per token. Negative `eta`, which
/// have no real power, count as 0. For a graph that [`Reversible::is_connected`]: of one in parts it is arbitrary which of the vectors
/// with the eigenvalue 1 comes first and is left out. "Fractional neural attention ...", eq. 36.
pub fn diffusion_map(graph: &Reversible, spectrum: &Spectrum, channels: usize, tau: f64) -> Vec<Vec<f64>> {
    let pi = graph.stationary();
    let axes: Vec<Vec<f64>> = spectrum.vectors.iter().skip(1).take(channels).map(|v| right_vector(v, &pi)).collect();
    let powers: Vec<f64> = spectrum.values.iter().skip(1).map(|lambda| (1.0 - lambda).max(0.0).powf(tau)).collect();
    (0..pi.len()).map(|i| axes.iter().zip(&powers).map(|(axis, power)| power * axis[i]).collect()).collect()
}

/// Squared diffusion distances `sum_y (P^tau_iy - P^tau_jy)^2 / pi_y`, `[n, n]`: how differently walkers from two tokens
/// are spread after `tau` steps. "Fractional neural attention ...", eq. 37. For a graph without isolated tokens; it may be in parts.
pub fn diffusion_distances(graph: &Reversible, spectrum: &Spectrum, tau: u32) -> Vec<f64> {
    let (n, pi) = (spectrum.values.len(), graph.stationary());
    // All of them: of a connected graph the first is the same for every token, of one in parts none need be.
    let axes = spectrum.vectors.iter().zip(&spectrum.values).map(|(vector, lambda)| {
        let power = (1.0 - lambda).abs().powi(tau.min(i32::MAX as u32) as i32);
        right_vector(vector, &pi).into_iter().map(|x| x * power).collect::<Vec<_>>()
    });
    let mut distances = vec![0.0; n * n];
    for axis in axes {
        for (row, x) in distances.chunks_mut(n).zip(&axis) {
            row.iter_mut().zip(&axis).for_each(|(d, y)| *d += (x - y) * (x - y));
        }
    }
    distances
}

/// Eigenvalues `-ln(eta_l) / time` of the generator whose walk over `time` this is; infinite where `eta <= 0`. For `fna`,
/// `time = kappa^alpha`. "Fractional neural attention ...", eq. 31.
pub fn generator(spectrum: &Spectrum, time: f64) -> Vec<f64> {
    spectrum.values.iter().map(|lambda| -(1.0 - lambda).max(0.0).ln() / time).collect()
}
