//! Gradients of the tensors beside tokens and values.

use super::{
    backward::Kept,
    layout::Sizes,
    operator::Core,
    pass::{self, share},
    values::Filter,
};
use crate::{
    ExtraGradients, Parameter,
    scratch::{cut, scratch_len},
};

/// Rows of the landmark filters' gradient at one slot: one for every channel that a filter makes.
fn filters(s: &Sizes) -> usize {
    if s.full { s.shape.head_dim } else { 1 }
}

/// f32 of scratch of [`write`]: the filters' gradients slot by slot, and per worker the tokens of a slot.
pub(super) fn work(s: &Sizes) -> usize {
    if s.slots == 0 {
        return 0;
    }
    scratch_len([s.slots * filters(s) * s.rp]) + pass::work(s.slots, 1, s.landmarks * s.rp)
}

impl<'a> Core<'a> {
    pub fn filter(&self) -> Filter<'a> {
        Filter::of(self.call, self.structure)
    }
}

/// Writes the gradients that are asked for, but that of the decay; `kept` has every slice's share.
pub(super) fn write(core: &Core<'_>, kept: &[f32], dout: &[f32], extras: &mut ExtraGradients<'_>, work: &mut [f32]) {
    let (sizes, shape) = (&core.sizes, &core.sizes.shape);
    let slices = || kept.chunks_exact(Kept::scratch_len(sizes)).map(|kept| Kept::of(sizes, kept)).enumerate();
    for (parameter, out) in extras.iter().filter(|(parameter, _)| *parameter != Parameter::Gamma) {
        match parameter {
            Parameter::LandmarkWeight => {
                filter_gradient(core, kept, out, work);
                continue;
            }
            Parameter::ValueWeight => {
                core.filter().gradient(dout, out);
                continue;
            }
            _ => out.fill(0.0),
        }
        for (slice, kept) in slices() {
            let range = parameter.part(out.len(), shape, slice);
            let out = &mut out[range];
            match parameter {
                Parameter::LandmarkNormGamma => out.iter_mut().zip(kept.norm).for_each(|(out, x)| *out += x),
                Parameter::LandmarkNormBeta => {
                    out.iter_mut().zip(&kept.norm[sizes.rp..]).for_each(|(out, x)| *out += x)
                }
                Parameter::GivenLandmarks => {
                    for (out, du) in out.chunks_exact_mut(shape.head_dim).zip(kept.du.chunks_exact(sizes.rp)) {
                        out.copy_from_slice(&du[..shape.head_dim]);
                    }
                }
                // The second parameter of a score that has two; one that has it alone repeats it.
                Parameter::Kappa => out[0] += kept.parameters[1],
                _ => out[0] += kept.parameters[0],
            }
        }
    }
}

/// The gradient of the landmarks' filter: slot by slot, over all slices in their order.
fn filter_gradient(core: &Core<'_>, kept: &[f32], out: &mut [f32], work: &mut [f32]) {
    let (sizes, d, slots) = (&core.sizes, core.sizes.shape.head_dim, core.sizes.slots);
    let len = filters(sizes) * sizes.rp;
    let ([sums], work) = cut(work, [slots * len]);
    share(sums.chunks_exact_mut(len).enumerate(), work, sizes.landmarks * sizes.rp, |(slot, sums), rows| {
        sums.fill(0.0);
        for (slice, kept) in kept.chunks_exact(Kept::scratch_len(sizes)).enumerate() {
            let (du, tokens) = (Kept::of(sizes, kept).du, core.producer.tokens(slice, core.call.k.dense()));
            core.producer.filter_gradient(core.call.level, tokens, slot, du, sums, rows);
        }
    });
    for (slot, sums) in sums.chunks_exact(len).enumerate() {
        let of_slot = out.iter_mut().skip(slot).step_by(slots);
        of_slot.zip(sums.chunks_exact(sizes.rp).flat_map(|row| &row[..d])).for_each(|(out, sum)| *out = *sum);
    }
}
