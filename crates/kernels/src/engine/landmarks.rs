//! The structure `nystrom` as a hop: landmarks, their inverse and all statistics are made once, and applied to any values.

use super::{
    plan::kept_by_series,
    series::{Hop, Tokens},
};
use crate::{
    ExtraGradients, Gradients, Mechanism, Parameter, Plan, Result, Shape,
    call::{Call, Saved, View},
    mechanism::{Nystrom, Series},
    structure::nystrom::{self, Preset},
};

/// Decays are the series' own.
const PRESET: Preset = Preset { decays: false, ..Preset::COMPOSED };

/// What a call does and needs.
pub(super) fn plan(m: &Mechanism, structure: &Nystrom, shape: &Shape, hops: u64) -> Plan {
    let one = nystrom::plan((m, structure), Preset::COMPOSED, shape);
    if let Series::OneHop(_) = m.series {
        return one;
    }
    let vectors = 4 * shape.slices() * shape.seq_q * shape.value_dim;
    let gradients = 4 * (shape.q_len() + shape.k_len());
    let forward = 4 * (one.scratch_forward + 2 * one.stats)
        + one.allocated_forward
        + 2 * vectors
        + 4 * kept_by_series(m, shape)[0];
    Plan {
        flops_forward: one.flops_forward * hops,
        flops_backward: one.flops_forward * hops + (one.flops_forward + one.flops_backward) * hops,
        exps_forward: one.exps_forward * hops,
        exps_backward: one.exps_forward * hops + (one.exps_forward + one.exps_backward) * hops,
        scratch_forward: 0,
        scratch_backward: 0,
        stats: 2 * shape.slices(),
        allocated_forward: forward,
        allocated_backward: forward + 4 * one.scratch_backward + one.allocated_backward + 2 * (vectors + gradients),
        ..one
    }
}

/// The hop of a series.
pub(super) struct LandmarkHop<'a> {
    call: &'a Call<'a>,
    m: &'a Mechanism,
    structure: &'a Nystrom,
    /// What the forward pass saves; of it the landmarks, their inverse and the statistics are the same whatever the values.
    stats: Vec<f32>,
    work: [usize; 2],
}

impl<'a> LandmarkHop<'a> {
    pub fn new(call: &'a Call<'a>, m: &'a Mechanism, structure: &'a Nystrom) -> Result<Self> {
        let plan = nystrom::plan((m, structure), PRESET, &call.shape);
        let mut stats = vec![0.0; plan.stats];
        let mut work = vec![0.0; plan.scratch_forward];
        nystrom::forward(call, (m, structure), PRESET, &mut vec![0.0; call.shape.out_len()], &mut stats, &mut work)?;
        Ok(Self { call, m, structure, stats, work: [plan.scratch_forward, plan.scratch_backward] })
    }

    /// The call on other values.
    fn of_values<'x>(&'x self, x: &'x [f32]) -> Call<'x> {
        let s = &self.call.shape;
        Call { v: View::in_one_piece(x, s.slices(), [s.seq_kv, s.value_dim]), ..*self.call }
    }

    /// What is saved of other values; `out` is written where it is wanted.
    fn applied(&self, x: &[f32], out: Option<&mut [f32]>) -> Vec<f32> {
        let (mut stats, mut work) = (self.stats.clone(), vec![0.0; self.work[0]]);
        let call = self.of_values(x);
        nystrom::again(&call, (self.m, self.structure), PRESET, out, &mut stats, &mut work);
        stats
    }

    /// Writes the gradients of a hop from `x` to `y`.
    fn gradients(&self, x: &[f32], y: &[f32], dout: &[f32], gradients: Gradients<'_, f32>) -> Result<()> {
        let stats = self.applied(x, None);
        let s = &self.call.shape;
        let [out, dout] = [y, dout].map(|x| View::in_one_piece(x, s.slices(), [s.seq_q, s.value_dim]));
        let saved = Saved { out, stats: &stats, dout };
        let mut work = vec![0.0; self.work[1]];
        let call = self.of_values(x);
        nystrom::backward(&call, (self.m, self.structure), PRESET, &saved, gradients, &mut work)
    }

    /// Room for the gradient of every parameter but the decay.
    fn rooms(&self) -> Vec<(Parameter, Vec<f32>)> {
        let all = self.m.parameters().into_iter().filter(|&p| p != Parameter::Gamma);
        all.map(|p| (p, vec![0.0; self.m.parameter_len(p, &self.call.shape)])).collect()
    }
}

impl Hop for LandmarkHop<'_> {
    fn shape(&self) -> Shape {
        self.call.shape
    }

    fn apply(&self, x: &[f32], out: &mut [f32]) {
        self.applied(x, Some(out));
    }

    fn transpose(&self, y: &[f32], out: &mut [f32]) {
        let zeros = vec![0.0; self.call.shape.v_len()];
        let (mut dq, mut dk) = (vec![0.0; self.call.shape.q_len()], vec![0.0; self.call.shape.k_len()]);
        let dk = (!self.m.tied).then_some(&mut dk[..]);
        let targets = Gradients { dq: &mut dq, dk, dv: out, extras: ExtraGradients::default() };
        // Landmarks that are too close for gradients are told by the backward pass of the tokens.
        let _ = self.gradients(&zeros, &zeros, y, targets);
    }

    fn backward(&self, x: &[f32], y: &[f32], dout: &[f32], dx: &mut [f32], tokens: &mut Tokens<'_>) {
        let (mut dq, mut dk) = (vec![0.0; self.call.shape.q_len()], vec![0.0; self.call.shape.k_len()]);
        let mut rooms = self.rooms();
        let extras = rooms.iter_mut().fold(ExtraGradients::default(), |all, (p, buffer)| all.with(*p, buffer));
        let targets = Gradients { dq: &mut dq, dk: (!self.m.tied).then_some(&mut dk[..]), dv: dx, extras };
        if let Err(error) = self.gradients(x, y, dout, targets) {
            tokens.failure = Some(error);
        }
        for (to, part) in [(&mut *tokens.dq, &dq), (&mut *tokens.dk, &dk)] {
            to.iter_mut().zip(part).for_each(|(to, x)| *to += x);
        }
        if tokens.others.is_empty() {
            tokens.others = rooms;
            return;
        }
        for ((_, to), (_, part)) in tokens.others.iter_mut().zip(rooms) {
            to.iter_mut().zip(part).for_each(|(to, x)| *to += x);
        }
    }

    /// All are among the others.
    fn parameters(&self) -> Vec<Parameter> {
        Vec::new()
    }
}
