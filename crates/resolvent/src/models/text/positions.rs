//! Positions that are not learned.

use burn::tensor::{Device, Tensor, TensorData};

/// Sines and cosines of `positions`, `[1, positions, dim]`: channels `2 i` and `2 i + 1` are the sine and cosine
/// of `position / 10000^(2 i / dim)`. "Attention Is All You Need", section 3.5.
pub(super) fn sinusoids(positions: &[usize], dim: usize, device: &Device) -> Tensor<3> {
    let frequency = |channel: usize| 1e4_f64.powf(-((channel - channel % 2) as f64) / dim as f64);
    let frequencies: Vec<f64> = (0..dim).map(frequency).collect();
    let mut values = Vec::with_capacity(positions.len() * dim);
    for &position in positions {
        values.extend(frequencies.iter().enumerate().map(|(channel, frequency)| {
            let (sine, cosine) = (position as f64 * frequency).sin_cos();
            (if channel % 2 == 0 { sine } else { cosine }) as f32
        }));
    }
    Tensor::from_data(TensorData::new(values, [1, positions.len(), dim]), device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_are_sines_and_cosines_of_falling_frequency() {
        let table: Vec<f32> = sinusoids(&[0, 1, 2, 3], 5, &Device::flex()).into_data().iter().collect();
        for position in 0..4 {
            for channel in 0..5 {
                let angle = position as f64 / 1e4_f64.powf((channel / 2 * 2) as f64 / 5.0);
                let expected = if channel % 2 == 0 { angle.sin() } else { angle.cos() };
                assert!((f64::from(table[position * 5 + channel]) - expected).abs() < 1e-6);
            }
        }
        let later: Vec<f32> = sinusoids(&[3], 5, &Device::flex()).into_data().iter().collect();
        assert_eq!(later, table[15..]);
    }
}
