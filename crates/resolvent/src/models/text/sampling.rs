//! Choosing a token by its logits.

use crate::{Result, attention::field};

/// How the next token is chosen. The restrictions apply in the order of the fields.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0 takes the likeliest token. Default 1.
    pub temperature: f64,
    /// Only so many of the likeliest tokens. Default all.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens whose probabilities together first reach this share ("The Curious Case of Neural Text
    /// Degeneration", section 3.1). Default 1: all.
    pub top_p: f64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: 1.0 }
    }
}

impl Sampling {
    /// Always the likeliest token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`crate::Error::Field`].
    pub fn validate(&self) -> Result<()> {
        let Self { temperature, top_k, top_p } = *self;
        field("temperature", temperature, temperature.is_finite() && temperature >= 0.0, "finite and >= 0")?;
        field("top_k", top_k.unwrap_or(1), top_k != Some(0), "at least 1")?;
        field("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "in (0, 1]")
    }

    /// The token that the number `uniform` in [0, 1) falls on, among those with `logits`; of equal ones the lower comes first.
    /// `logits` must not be empty.
    pub fn choose(&self, logits: &[f32], uniform: f64) -> usize {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        if self.temperature == 0.0 {
            return order[0];
        }
        order.truncate(self.top_k.unwrap_or(order.len()));
        let likeliest = f64::from(logits[order[0]]);
        let weight = |token: usize| ((f64::from(logits[token]) - likeliest) / self.temperature).exp();
        let weights: Vec<f64> = order.iter().map(|&token| weight(token)).collect();
        let sums: Vec<f64> = weights
            .iter()
            .scan(0.0, |sum, weight| {
                *sum += weight;
                Some(*sum)
            })
            .collect();
        let reach = |share: f64| sums.partition_point(|&sum| sum < share).min(sums.len() - 1);
        let last = reach(self.top_p * sums[sums.len() - 1]);
        let target = uniform * sums[last];
        order[sums.partition_point(|&sum| sum <= target).min(last)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Probabilities 0.5, 0.25, 0.125, 0.125 of the tokens 2, 0, 1, 3.
    fn logits() -> [f32; 4] {
        [4.0_f32, 2.0, 8.0, 2.0].map(f32::ln)
    }

    fn chosen(sampling: Sampling) -> Vec<usize> {
        (0..16).map(|i| sampling.choose(&logits(), f64::from(i) / 16.0 + 0.01)).collect()
    }

    #[test]
    fn tokens_come_by_their_probabilities() {
        assert_eq!(chosen(Sampling::default()), [2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 1, 1, 3, 3]);
        assert_eq!(chosen(Sampling::greedy()), [2; 16]);
        let flat = chosen(Sampling { temperature: 1e6, ..Sampling::default() });
        assert_eq!(flat, [2, 2, 2, 2, 0, 0, 0, 0, 1, 1, 1, 1, 3, 3, 3, 3]);
        assert_eq!(chosen(Sampling { temperature: 1e-3, ..Sampling::default() }), [2; 16]);
    }

    #[test]
    fn the_unlikely_are_left_out() {
        let two = [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0];
        assert_eq!(chosen(Sampling { top_k: Some(2), ..Sampling::default() }), two);
        assert_eq!(chosen(Sampling { top_p: 0.7, ..Sampling::default() }), two);
        assert_eq!(chosen(Sampling { top_p: 0.4, ..Sampling::default() }), [2; 16]);
        assert_eq!(chosen(Sampling { top_k: Some(9), ..Sampling::default() }), chosen(Sampling::default()));
        // Two thirds of what is left are enough for the first alone.
        assert_eq!(chosen(Sampling { top_k: Some(2), top_p: 0.6, ..Sampling::default() }), [2; 16]);
    }

    #[test]
    fn impossible_choices_are_named() {
        for (sampling, name) in [
            (Sampling { temperature: -1.0, ..Sampling::default() }, "temperature"),
            (Sampling { temperature: f64::NAN, ..Sampling::default() }, "temperature"),
            (Sampling { top_k: Some(0), ..Sampling::default() }, "top_k"),
            (Sampling { top_p: 0.0, ..Sampling::default() }, "top_p"),
        ] {
            assert!(sampling.validate().unwrap_err().to_string().contains(name));
        }
    }
}
