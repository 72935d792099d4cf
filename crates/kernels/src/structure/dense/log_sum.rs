//! Log-sum-exps of rows, saved so that the backward pass makes the very weights of the forward pass.
//!
//! As one f32 the logarithm of a sharp row's sum loses what tells its weights apart: at 1e5 a unit of rounding is one per
//! cent. So what its rounding left out is saved beside it. The backward pass takes the f32 nearest to the base-2 logarithm
//! out of every pair, and what that leaves out, one factor per row, out of the output gradients.

use super::{contraction::contractions, head::Head};
use crate::{
    call::{Call, Saved},
    parallel,
};

/// What is saved of the rows of one pass: [`SAVED`] numbers per row.
#[derive(Clone, Copy)]
pub(in crate::structure) struct LogSums<'a> {
    sums: &'a [f32],
    rests: &'a [f32],
}

/// Numbers that are saved per row: the logarithm, natural, and what is left of it.
pub(in crate::structure) const SAVED: usize = 2;

/// Saves natural logarithms in [`SAVED`] times as many numbers.
pub(in crate::structure) fn save(logs: &[f64], stats: &mut [f32]) {
    let (sums, rests) = stats.split_at_mut(logs.len());
    for ((&log, sum), rest) in logs.iter().zip(sums).zip(rests) {
        *sum = log as f32;
        *rest = if log.is_finite() { (log - f64::from(*sum)) as f32 } else { 0.0 };
    }
}

impl<'a> LogSums<'a> {
    pub fn of(stats: &'a [f32]) -> Self {
        let (sums, rests) = stats.split_at(stats.len() / SAVED);
        Self { sums, rests }
    }

    /// The base-2 logarithm of a row's sum; `None` for a row without keys.
    pub fn base_two(&self, row: usize) -> Option<f64> {
        let sum = f64::from(self.sums[row]);
        sum.is_finite().then(|| (sum + f64::from(self.rests[row])) * std::f64::consts::LOG2_E)
    }

    /// What to take out of the base-2 logarithms of a row's pairs, and the factor on what `exp2` then gives; `None` for a row
    /// without keys.
    pub fn split(&self, row: usize) -> Option<(f32, f32)> {
        let log = self.base_two(row)?;
        let shift = log as f32;
        Some((shift, (f64::from(shift) - log).exp2() as f32))
    }
}

/// What the backward stream needs to know of rows that sum to one: shift, `<dout, out>` and factor.
pub(super) fn row_terms(call: &Call<'_>, saved: &Saved<'_>, logs: LogSums<'_>, terms: [&mut [f32]; 3]) {
    let seq = call.shape.seq_q;
    let [shift, delta, factor] = terms.map(|x| x.chunks_mut(seq));
    parallel::each(shift.zip(delta).zip(factor).enumerate(), |(slice, ((shift, delta), factor))| {
        let head = Head::of(call, slice);
        for i in 0..seq {
            // A row without keys has no pair that its terms could enter.
            (shift[i], factor[i]) = logs.split(slice * seq + i).unwrap_or((0.0, 1.0));
        }
        let [out, dout] = [saved.out, saved.dout].map(|x| head.outputs(x));
        match call.bf16 {
            None => contractions(call.level, out, (dout, Some(factor)), delta),
            Some(products) => (0..seq).for_each(|i| {
                delta[i] = head.rounded_contraction(products, i, (saved.dout, factor[i]), saved.out) as f32;
            }),
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_of_sharp_rows_keep_their_digits() {
        let logs = [1.234_567_890_123e5, -3.3e5, 2.0 / 3.0, f64::NEG_INFINITY, 0.0];
        let mut stats = [f32::NAN; SAVED * 5];
        save(&logs, &mut stats);
        let saved = LogSums::of(&stats);
        for (row, log) in logs.into_iter().enumerate() {
            let Some(((shift, factor), found)) = saved.split(row).zip(saved.base_two(row)) else {
                assert_eq!(log, f64::NEG_INFINITY);
                continue;
            };
            assert!((found - log * std::f64::consts::LOG2_E).abs() <= 1e-13 * log.abs(), "{found}");
            assert!((f64::from(shift) - f64::from(factor).log2() - found).abs() < 1e-7, "{log}");
        }
        assert_eq!(saved.sums[0], 1.234_567_9e5, "the first half is the logarithm itself");
    }
}
