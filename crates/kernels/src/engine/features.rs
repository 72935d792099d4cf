//! The structure `features` as a hop, and one hop of it without a series around.

use super::{
    plan::kept_by_series,
    series::{Hop, Tokens},
};
use crate::{
    Gradients, Mechanism, Parameter, Plan, Precision, Result, Shape,
    call::{Call, Saved},
    mechanism::{Features, Series},
    structure::features::{self, Backward, Operator, Targets},
};

/// What a call does and needs.
pub(super) fn plan(
    (m, structure): (&Mechanism, &Features),
    shape: &Shape,
    causal: bool,
    hops: u64,
    precision: Precision,
) -> Plan {
    let one = features::plan(structure, shape, causal, precision);
    if let Series::OneHop(_) = m.series {
        return one;
    }
    let vectors = 4 * shape.slices() * shape.seq_q * shape.value_dim;
    let gradients = 4 * (shape.q_len() + shape.k_len());
    let kept = kept_by_series(m, shape).map(|len| 4 * len);
    Plan {
        flops_forward: one.flops_forward * (1 + hops),
        flops_backward: (one.flops_forward + one.flops_backward) * (1 + hops),
        exps_forward: one.exps_forward * (1 + hops),
        exps_backward: one.exps_backward * (1 + hops),
        scratch_forward: 0,
        scratch_backward: 0,
        stats: 2 * shape.slices(),
        allocated_forward: 4 * one.scratch_forward + 2 * vectors + kept[0],
        allocated_backward: 4 * one.scratch_backward + 3 * vectors + kept[1] + 2 * gradients,
        ..one
    }
}

/// The operator of a call: with the decays of the heads, or for a series that has them.
fn operator<'a>(call: &'a Call<'a>, m: &Mechanism, structure: &Features, decays: bool) -> Result<Operator<'a>> {
    let Shape { head_dim, heads, .. } = call.shape;
    let scale = m.score.value(Parameter::Scale, head_dim, heads);
    Operator::new(call, structure, scale, decays.then(|| m.series.gamma()))
}

/// One hop: writes `out` and what the backward pass needs.
pub(super) fn forward(
    call: &Call<'_>,
    (m, structure): (&Mechanism, &Features),
    out: &mut [f32],
    stats: &mut [f32],
    work: &mut [f32],
) -> Result<()> {
    operator(call, m, structure, true)?.forward(call.v.dense(), out, stats, work)
}

/// The gradients of one hop.
pub(super) fn backward(
    call: &Call<'_>,
    (m, structure): (&Mechanism, &Features),
    saved: &Saved<'_>,
    gradients: Gradients<'_, f32>,
    work: &mut [f32],
) -> Result<()> {
    let Gradients { dq, mut dk, dv, mut extras } = gradients;
    let operator = operator(call, m, structure, true)?;
    let from =
        Backward { v: call.v.dense(), out: Some(saved.out.dense()), dout: saved.dout.dense(), stats: saved.stats };
    operator.backward(from, Targets { dq: Some(&mut *dq), dk: dk.as_deref_mut(), dv: Some(dv) }, m.tied, work);
    let heads = call.shape.heads;
    let of_heads = |to: &mut [f32], of: &dyn Fn(usize) -> f64| {
        for (head, to) in to.iter_mut().enumerate() {
            *to = (head..call.shape.slices()).step_by(heads).map(of).sum::<f64>() as f32;
        }
    };
    if let Some(to) = extras.get(Parameter::Scale) {
        let each = operator.scale_gradients(dq, dk.as_deref());
        of_heads(to, &|slice| each[slice]);
    }
    if let Some(to) = extras.get(Parameter::Gamma) {
        let each = operator.decay_gradients(saved.out.dense(), saved.dout.dense());
        of_heads(to, &|slice| each[slice]);
    }
    Ok(())
}

/// The hop of a series.
pub(super) struct FeatureHop<'a> {
    call: &'a Call<'a>,
    operator: Operator<'a>,
    /// What the forward pass saves: the same whatever the values.
    stats: Vec<f32>,
    work: usize,
}

impl<'a> FeatureHop<'a> {
    pub fn new(call: &'a Call<'a>, m: &Mechanism, structure: &Features) -> Result<Self> {
        let plan = features::plan(structure, &call.shape, call.mask.causal, Precision::Full);
        let work = plan.scratch_forward.max(plan.scratch_backward);
        let mut hop = Self { call, operator: operator(call, m, structure, false)?, stats: vec![0.0; plan.stats], work };
        let mut out = vec![0.0; call.shape.out_len()];
        hop.operator.forward(call.v.dense(), &mut out, &mut hop.stats, &mut vec![0.0; work])?;
        Ok(hop)
    }

    fn backward_into(&self, from: Backward<'_>, targets: Targets<'_>) {
        self.operator.backward(from, targets, false, &mut vec![0.0; self.work]);
    }
}

impl Hop for FeatureHop<'_> {
    fn shape(&self) -> Shape {
        self.call.shape
    }

    fn apply(&self, x: &[f32], out: &mut [f32]) {
        // Row sums are those that were in range when the hop was made.
        let done = self.operator.forward(x, out, &mut self.stats.clone(), &mut vec![0.0; self.work]);
        debug_assert!(done.is_ok());
    }

    fn transpose(&self, y: &[f32], out: &mut [f32]) {
        let from = Backward { v: self.call.v.dense(), out: None, dout: y, stats: &self.stats };
        self.backward_into(from, Targets { dv: Some(out), ..Targets::default() });
    }

    fn backward(&self, x: &[f32], y: &[f32], dout: &[f32], dx: &mut [f32], tokens: &mut Tokens<'_>) {
        let (mut dq, mut dk) = (vec![0.0; self.call.shape.q_len()], vec![0.0; self.call.shape.k_len()]);
        let from = Backward { v: x, out: Some(y), dout, stats: &self.stats };
        self.backward_into(from, Targets { dq: Some(&mut dq), dk: Some(&mut dk), dv: Some(dx) });
        let of_scale = self.operator.scale_gradients(&dq, Some(&dk));
        for (to, part) in [(&mut *tokens.dq, &dq), (&mut *tokens.dk, &dk)] {
            to.iter_mut().zip(part).for_each(|(to, x)| *to += x);
        }
        tokens.parameters.iter_mut().zip(of_scale).for_each(|(to, x)| to[0] += x);
    }

    fn parameters(&self) -> Vec<Parameter> {
        vec![Parameter::Scale]
    }
}
