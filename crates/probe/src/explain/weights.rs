//! The weights of one map: what is rounding in them, their colours, and on how many places they lie.

/// Heads whose weights differ by less than this share of the largest are flat: what is left is rounding.
const FLAT: f32 = 1e-5;

/// Negative weights as 0.
pub(super) fn positive(weights: &[f32]) -> Vec<f32> {
    weights.iter().map(|weight| weight.max(0.0)).collect()
}

/// Weights that differ by rounding alone made equal.
pub(super) fn flattened(weights: Vec<f32>) -> Vec<f32> {
    let highest = weights.iter().copied().fold(0.0, f32::max);
    let lowest = weights.iter().copied().fold(f32::INFINITY, f32::min);
    match highest - lowest <= FLAT * highest {
        true => vec![weights.iter().sum::<f32>() / weights.len().max(1) as f32; weights.len()],
        false => weights,
    }
}

/// The weight that has the strongest colour: the largest one, and at least twice the mean, so that a flat map looks flat, in the middle of
/// the scale. With weights below zero it is the largest size of one.
pub fn ceiling(weights: &[f32]) -> f32 {
    let sizes = || weights.iter().map(|weight| weight.abs());
    sizes().fold(0.0, f32::max).max(2.0 * sizes().sum::<f32>() / weights.len().max(1) as f32)
}

/// Weights over their [`ceiling`], for the eye: from 0, of signed ones from -1, to 1.
pub fn scaled(weights: &[f32]) -> Vec<f32> {
    let ceiling = ceiling(weights);
    weights.iter().map(|weight| if ceiling > 0.0 { weight / ceiling } else { 0.0 }).collect()
}

/// How many places the weights lie on: the exponential of their entropy; 0 where there are none.
pub fn breadth(weights: &[f32]) -> f64 {
    let sum: f64 = weights.iter().map(|&weight| f64::from(weight)).sum();
    let shares = weights.iter().map(|&weight| f64::from(weight) / sum).filter(|share| *share > 0.0);
    let entropy: f64 = shares.map(|share| -share * share.ln()).sum();
    if sum > 0.0 { entropy.exp() } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flat_map_is_in_the_middle_of_its_colours() {
        assert_eq!(scaled(&[0.25; 4]), [0.5; 4]);
        assert_eq!(scaled(&[0.0, 0.0, 0.0, 4.0]), [0.0, 0.0, 0.0, 1.0]);
        assert_eq!((scaled(&[-4.0, 0.0, 0.0, 2.0]), ceiling(&[0.0; 3])), (vec![-1.0, 0.0, 0.0, 0.5], 0.0));
    }

    #[test]
    fn breadths() {
        assert_eq!(breadth(&[0.0, 0.0]), 0.0);
        assert!((breadth(&[2.0, 2.0, 0.0]) - 2.0).abs() < 1e-12);
    }
}
