//! One call: sizes, tensors, masks, and what a mechanism takes beside them. Knows of no mechanism.

pub(crate) mod cluster_plan;
pub(crate) mod dropout;
mod head_groups;
pub(crate) mod magnitude;
mod parameter;
mod sequences;
mod shape;
mod strided;
mod tensors;
mod view;

pub use cluster_plan::{ClusterPlan, PlanTensors};
pub use dropout::{Dropout, Dropped};
pub use head_groups::HeadGroups;
pub use parameter::{ExtraGradients, Extras, Parameter};
pub use sequences::Sequences;
pub use shape::Shape;
pub use strided::Strided;
pub use tensors::{Gradients, Inputs, Mask, StridedGradients, StridedInputs, check_finite};
pub(crate) use view::{Layout, Target, TokenRows, View};

use crate::simd::{Level, bf16::Bf16Products};

/// One checked f32 call, as the structures see it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    pub shape: Shape,
    pub q: View<'a>,
    /// The keys; `q` itself when tied.
    pub k: View<'a>,
    pub v: View<'a>,
    pub extras: Extras<'a>,
    /// Heads of queries in a row whose keys are the same, as they share one head of them: 1 where every head has its own.
    pub sharing: usize,
    /// With the configuration's causality already in `mask.causal`.
    pub mask: Mask<'a>,
    pub level: Level,
    /// What multiplies in bf16, where the call runs in it.
    pub bf16: Option<Bf16Products>,
    /// Powers of two that queries and keys have been divided by, per slice: see [`crate::rescale`].
    pub units: Option<&'a [[i32; 2]]>,
}

impl Call<'_> {
    /// The powers of two that a slice's queries and keys have been divided by.
    pub fn units(&self, slice: usize) -> [i32; 2] {
        self.units.map_or([0; 2], |units| units[slice])
    }
}

/// What the forward pass left for the backward pass, and the gradient that comes in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Saved<'a> {
    pub out: View<'a>,
    pub stats: &'a [f32],
    pub dout: View<'a>,
}

/// Where the gradients of a checked f32 call go.
pub(crate) struct GradientTargets<'a> {
    pub dq: Target<'a>,
    /// `None` when tied: `dq` then gets both paths.
    pub dk: Option<Target<'a>>,
    pub dv: Target<'a>,
    pub extras: ExtraGradients<'a>,
}

impl GradientTargets<'_> {
    /// The same room for a shorter time.
    pub fn reborrow(&mut self) -> GradientTargets<'_> {
        let Self { dq, dk, dv, extras } = self;
        let dk = dk.as_mut().map(Target::reborrow);
        GradientTargets { dq: dq.reborrow(), dk, dv: dv.reborrow(), extras: extras.reborrow() }
    }

    /// For structures that write one piece.
    pub fn dense(&mut self) -> Gradients<'_, f32> {
        let Self { dq, dk, dv, extras } = self;
        let dk = dk.as_mut().map(Target::dense);
        Gradients { dq: dq.dense(), dk, dv: dv.dense(), extras: extras.reborrow() }
    }
}
