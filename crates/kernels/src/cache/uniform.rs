//! Decoding of `uniform`: the sum of the values so far.

use super::{Cache, Tokens, part};
use crate::{Shape, parallel};

impl Cache {
    /// Takes the tokens in and writes their rows, where they are asked for, one after the other.
    pub(super) fn attend_uniform(&mut self, tokens: &Tokens<'_>, mut out: Option<&mut [f32]>) {
        let Shape { heads, value_dim, .. } = self.token;
        let (new, sharing) = (tokens.new, self.sharing);
        let sums = self.sums.chunks_exact_mut(1 + value_dim).enumerate();
        let take = |slice: usize, sums: &mut [f64], mut rows: Option<&mut [f32]>| {
            for n in 0..new {
                if tokens.keeps_key(slice / heads, n) {
                    let v = part(&tokens.v, (slice / sharing * new + n) * value_dim, value_dim);
                    sums[1..].iter_mut().zip(v).for_each(|(sum, v)| *sum += f64::from(*v));
                }
                let Some(rows) = &mut rows else { continue };
                let seen = if tokens.keeps_query(slice / heads, n) { tokens.seen(slice / heads, n) } else { 0 };
                let mean = |sum: &f64| if seen == 0 { 0.0 } else { (sum / seen as f64) as f32 };
                rows[n * value_dim..].iter_mut().zip(&sums[1..]).for_each(|(row, sum)| *row = mean(sum));
            }
        };
        match &mut out {
            Some(out) => {
                let slices = sums.zip(out.chunks_exact_mut(new * value_dim));
                parallel::each(slices, |((slice, sums), rows)| take(slice, sums, Some(rows)));
            }
            None => parallel::each(sums, |(slice, sums)| take(slice, sums, None)),
        }
    }
}
