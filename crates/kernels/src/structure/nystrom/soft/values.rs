//! The filter over the values: every head lays its values out on the grid and convolves them with its one kernel.

use super::Core;
use crate::{
    Parameter,
    call::Call,
    mechanism::Soft,
    parallel::Parts,
    simd::Level,
    structure::nystrom::pass::{self, Part, Pass},
};

/// Calls `visit(token it reads, place in the filter)` for every kept token that the filter at `n` reaches; `turned`: for
/// every token whose filter reaches `n`.
fn taps(core: &Core<'_>, keep: Option<&[bool]>, n: usize, turned: bool, mut visit: impl FnMut(usize, usize)) {
    let k = core.m.value_conv;
    let [height, width] = core.m.grid.unwrap_or([1, core.call.shape.seq_q]);
    let rows = if core.m.grid.is_some() { k } else { 1 };
    if keep.is_some_and(|keep| !keep[n]) {
        return;
    }
    let (top, left) = (n / width, n % width);
    for i in 0..rows {
        let Some(y) = (top + i).checked_sub(rows / 2).filter(|&y| y < height) else { continue };
        for j in 0..k {
            let Some(x) = (left + j).checked_sub(k / 2).filter(|&x| x < width) else { continue };
            let (token, tap) = (y * width + x, i * k + j);
            if keep.is_none_or(|keep| keep[token]) {
                visit(token, if turned { rows * k - 1 - tap } else { tap });
            }
        }
    }
}

/// One head's filter.
fn weight<'a>(core: &Core<'a>, slice: usize) -> &'a [f32] {
    let weight = core.call.extras.get(Parameter::ValueWeight).unwrap_or_default();
    &weight[Parameter::ValueWeight.part(weight.len(), &core.call.shape, slice)]
}

/// Adds the filtered `x` (or, `turned`, what the gradient of the outputs says of it) to the rows `out` of `part`.
pub(super) fn add(core: &Core<'_>, part: &Part, x: &[f32], turned: bool, out: &mut [f32]) {
    if core.m.value_conv == 0 {
        return;
    }
    let dim = core.call.shape.value_dim;
    let (x, weight, keep) = (core.part(x, part.slice, dim), weight(core, part.slice), core.keep(part.slice));
    for (n, out) in part.tokens.clone().zip(out.chunks_exact_mut(dim)) {
        taps(core, keep, n, turned, |token, tap| {
            out.iter_mut().zip(&x[token * dim..]).for_each(|(out, x)| *out += weight[tap] * x);
        });
    }
}

/// [`add`] for whole tensors, where no pass is at work on them anyway.
pub(crate) fn filter(call: &Call<'_>, m: &Soft, x: &[f32], turned: bool, out: &mut [f32], work: &mut [f32]) {
    if m.value_conv > 0 {
        let core = Core::new(call, m, "");
        let pass = Whole { core, x, turned, out: Parts::new(out) };
        pass::run(&pass, call.level, call.shape.slices(), call.shape.seq_q, work);
    }
}

struct Whole<'a> {
    core: Core<'a>,
    x: &'a [f32],
    turned: bool,
    out: Parts<'a, f32>,
}

impl Pass for Whole<'_> {
    fn memory(&self) -> usize {
        0
    }

    fn run(&self, _: Level, part: Part, _: &mut [f32]) {
        let shape = &self.core.call.shape;
        // SAFETY: parts are distinct ranges of rows.
        let out = unsafe { self.out.part(part.rows(shape.seq_q, shape.value_dim)) };
        add(&self.core, &part, self.x, self.turned, out);
    }
}

/// Writes the gradient of the filters, `out` of the shape of the parameter.
pub(crate) fn filter_gradient(call: &Call<'_>, m: &Soft, dout: &[f32], out: &mut [f32]) {
    let core = Core::new(call, m, "");
    out.fill(0.0);
    for slice in 0..call.shape.slices() {
        let range = Parameter::ValueWeight.part(out.len(), &call.shape, slice);
        gradient(&core, slice, dout, &mut out[range]);
    }
}

/// Adds one slice's share of the gradient of its filter.
pub(super) fn gradient(core: &Core<'_>, slice: usize, dout: &[f32], out: &mut [f32]) {
    let (dim, keep) = (core.call.shape.value_dim, core.keep(slice));
    let (v, dout) = (core.part(core.call.v, slice, dim), core.part(dout, slice, dim));
    for (n, g) in dout.chunks_exact(dim).enumerate() {
        taps(core, keep, n, false, |token, tap| {
            out[tap] += g.iter().zip(&v[token * dim..]).map(|(g, v)| g * v).sum::<f32>();
        });
    }
}
