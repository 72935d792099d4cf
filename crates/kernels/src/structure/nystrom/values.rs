//! The filter over the values: every head lays its values out on the grid and convolves them with its one kernel.

use super::pass::{Part, of_tokens, rows_of};
use crate::{
    Parameter,
    call::Call,
    mechanism::{Nystrom, Soft},
    parallel,
};

/// The filters of all heads; a width of 0 is none.
#[derive(Clone, Copy)]
pub(crate) struct Filter<'a> {
    call: &'a Call<'a>,
    grid: Option<[usize; 2]>,
    width: usize,
}

impl<'a> Filter<'a> {
    pub fn of(call: &'a Call<'a>, m: &Nystrom) -> Self {
        Self { call, grid: m.grid, width: m.value_conv }
    }

    pub fn of_soft(call: &'a Call<'a>, m: &Soft) -> Self {
        Self { call, grid: m.grid, width: m.value_conv }
    }

    /// Whether a token is kept, as a key or as key and query.
    fn keeps(&self, slice: usize, token: usize, as_query: bool) -> bool {
        let mask = &self.call.mask;
        let at = slice / self.call.shape.heads * self.call.shape.seq_kv + token;
        mask.key.is_none_or(|keep| keep[at]) && (!as_query || mask.query.is_none_or(|keep| keep[at]))
    }

    /// Calls `visit(token it reads, place in the filter)` for every kept token that the filter at `n` reaches; `turned`: for
    /// every token whose filter reaches `n`.
    fn taps(&self, slice: usize, n: usize, turned: bool, mut visit: impl FnMut(usize, usize)) {
        let k = self.width;
        let [height, width] = self.grid.unwrap_or([1, self.call.shape.seq_kv]);
        let rows = if self.grid.is_some() { k } else { 1 };
        if !self.keeps(slice, n, !turned) {
            return;
        }
        let (top, left) = (n / width, n % width);
        for i in 0..rows {
            let Some(y) = (top + i).checked_sub(rows / 2).filter(|&y| y < height) else { continue };
            for j in 0..k {
                let Some(x) = (left + j).checked_sub(k / 2).filter(|&x| x < width) else { continue };
                let (token, tap) = (y * width + x, i * k + j);
                if self.keeps(slice, token, turned) {
                    visit(token, if turned { rows * k - 1 - tap } else { tap });
                }
            }
        }
    }

    /// One slice's part of a tensor of the values' shape.
    fn part<'x>(&self, x: &'x [f32], slice: usize) -> &'x [f32] {
        let len = self.call.shape.seq_kv * self.call.shape.value_dim;
        &x[slice * len..][..len]
    }

    /// Adds the filtered `x` (or, `turned`, what the gradient of the outputs says of it) to the rows `out` of `part`.
    pub fn add(&self, part: &Part, x: &[f32], turned: bool, out: &mut [f32]) {
        if self.width == 0 {
            return;
        }
        let dim = self.call.shape.value_dim;
        let weight = self.call.extras.get(Parameter::ValueWeight).unwrap_or_default();
        let weight = &weight[Parameter::ValueWeight.part(weight.len(), &self.call.shape, part.slice)];
        let x = self.part(x, part.slice);
        for (n, out) in part.tokens.clone().zip(out.chunks_exact_mut(dim)) {
            self.taps(part.slice, n, turned, |token, tap| {
                out.iter_mut().zip(&x[token * dim..]).for_each(|(out, x)| *out += weight[tap] * x);
            });
        }
    }

    /// [`Filter::add`] for whole tensors, where no pass is at work on them anyway.
    pub fn add_all(&self, x: &[f32], turned: bool, out: &mut [f32]) {
        let s = &self.call.shape;
        if self.width > 0 {
            let parts = of_tokens(s.slices(), s.seq_kv).zip(rows_of(out, s.slices(), s.seq_kv, s.value_dim));
            parallel::each(parts, |(part, out)| self.add(&part, x, turned, out));
        }
    }

    /// Outputs without what the filter added to them.
    pub fn removed(&self, out: &[f32]) -> Vec<f32> {
        let mut rest: Vec<f32> = out.iter().map(|&x| -x).collect();
        self.add_all(self.call.v.dense(), false, &mut rest);
        rest.iter_mut().for_each(|x| *x = -*x);
        rest
    }

    /// Writes the gradient of the filters, `out` of the shape of the parameter.
    pub fn gradient(&self, dout: &[f32], out: &mut [f32]) {
        let s = &self.call.shape;
        out.fill(0.0);
        for slice in 0..s.slices() {
            let range = Parameter::ValueWeight.part(out.len(), s, slice);
            let out = &mut out[range];
            let (v, dout) = (self.part(self.call.v.dense(), slice), self.part(dout, slice));
            for (n, g) in dout.chunks_exact(s.value_dim).enumerate() {
                self.taps(slice, n, false, |token, tap| {
                    out[tap] += g.iter().zip(&v[token * s.value_dim..]).map(|(g, v)| g * v).sum::<f32>();
                });
            }
        }
    }
}
