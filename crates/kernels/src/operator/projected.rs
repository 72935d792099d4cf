//! Calls over projected keys and values: these are made, and the operator over their pairs is any dense one.

use std::borrow::Cow;

use super::{Operator, planning, tensors::CallTensors};
use crate::{
    Extras, Mask, Mechanism, Parameter, Plan, Precision, Result, Shape, Strategy,
    call::{Call, GradientTargets, Saved, Target, View},
    mechanism::Projected,
    scratch::{cut, scratch_len},
    structure::projected::{Projection, Sizes},
};

/// The sizes of the maps of keys and of values.
fn sizes(m: &Projected, s: &Shape) -> [Sizes; 2] {
    let (maps, columns) = (m.maps(s.heads), m.columns(s.seq_kv));
    [s.head_dim, s.value_dim].map(|dim| Sizes {
        batch: s.batch,
        heads: s.heads,
        tokens: s.seq_kv,
        dim,
        maps,
        count: m.count,
        columns,
    })
}

/// What a call does and needs, where the structure is one of projections.
pub(super) fn plan(m: &Mechanism, shape: &Shape) -> Option<Result<Plan>> {
    let (projected, over) = m.over_projections()?;
    let dense = planning::costs(&over, &over_shape(projected, shape), false, Strategy::Auto, Precision::Full);
    Some(dense.map(|dense| with_projections(dense, projected, shape)))
}

fn over_shape(m: &Projected, shape: &Shape) -> Shape {
    Shape { seq_kv: m.count, ..*shape }
}

/// The plan of the pairs, with what making projections costs: once forward; backward again, and for tokens and maps.
fn with_projections(dense: Plan, m: &Projected, shape: &Shape) -> Plan {
    let sizes = sizes(m, shape);
    let [each, gradients] = [sizes.map(|s| s.out_len()), sizes.map(|s| s.gradient_work())];
    let work = sizes.map(|s| s.work()).into_iter().fold(0, usize::max);
    let products: u64 = sizes.iter().map(|s| 2 * (s.out_len() as u64).saturating_mul(s.tokens as u64)).sum();
    let map = 4 * sizes.iter().map(|s| (s.maps * s.count * s.columns) as u64).sum::<u64>();
    let tokens = 4 * (shape.k_len() + shape.v_len()) as u64;
    Plan {
        reason: "keys and values are projected once; their pairs are scored in tiles and never stored",
        flops_forward: dense.flops_forward.saturating_add(products),
        flops_backward: dense.flops_backward.saturating_add(3 * products),
        bytes_forward: dense.bytes_forward + map + tokens,
        bytes_backward: dense.bytes_backward + 2 * map + 2 * tokens,
        scratch_forward: scratch_len(each) + dense.scratch_forward.max(work),
        scratch_backward: 2 * scratch_len(each) + dense.scratch_backward.max(work).max(gradients[0]).max(gradients[1]),
        // Maps that a call does not give are drawn in it.
        allocated_forward: dense.allocated_forward + map as usize,
        allocated_backward: dense.allocated_backward + map as usize,
        ..dense
    }
}

/// The operator over the pairs of queries and projected keys, where the structure is one of projections.
pub(super) fn over(mechanism: &Mechanism, shape: &Shape, plan: &Plan) -> Result<Option<Box<Operator>>> {
    let Some((projected, over)) = mechanism.over_projections().filter(|_| plan.strategy == Strategy::Fused) else {
        return Ok(None);
    };
    Operator::new(&over, over_shape(projected, shape), false, Strategy::Fused).map(|op| Some(Box::new(op)))
}

/// Keys and values of a call, and their maps.
struct Projections<'a> {
    call: Call<'a>,
    sizes: [Sizes; 2],
    maps: [Cow<'a, [f32]>; 2],
}

const MAPS: [Parameter; 2] = [Parameter::KeyMap, Parameter::ValueMap];

impl<'a> Projections<'a> {
    fn of(call: Call<'a>, m: &Projected) -> Self {
        let s = call.shape;
        let maps = MAPS.map(|parameter| match call.extras.get(parameter) {
            Some(map) => Cow::Borrowed(map),
            None => Cow::Owned(m.map(parameter, s.heads, m.columns(s.seq_kv))),
        });
        Self { call, sizes: sizes(m, &s), maps }
    }

    fn each(&self) -> [Projection<'_>; 2] {
        let Self { call, sizes, maps } = self;
        let of = |n: usize, x| Projection { sizes: sizes[n], x, map: &maps[n], keep: call.mask.key, level: call.level };
        [of(0, call.k.dense()), of(1, call.v.dense())]
    }

    /// Writes the projections; returns the tensors of the call over them.
    fn make<'x>(&self, [k, v]: [&'x mut [f32]; 2], work: &mut [f32]) -> CallTensors<'x>
    where
        'a: 'x,
    {
        for (projection, out) in self.each().into_iter().zip([&mut *k, &mut *v]) {
            projection.apply(out, work);
        }
        let extras = MAPS.into_iter().fold(self.call.extras, Extras::without);
        let view = |x: &'x [f32], n: usize| {
            let s = self.sizes[n];
            View::in_one_piece(x, s.batch * s.heads, [s.count, s.dim])
        };
        CallTensors::new(self.call.q, Some(view(k, 0)), view(v, 1), extras)
    }
}

impl Operator {
    /// The operator over projections, and these of a call; none where the structure is another.
    fn projections<'a>(&self, call: &Call<'a>) -> Option<(&Operator, Projections<'a>)> {
        Some((self.over.as_deref()?, Projections::of(*call, self.mechanism.projected()?)))
    }

    /// The forward pass; none where the structure is another.
    pub(super) fn forward_projected(
        &self,
        call: &Call<'_>,
        out: &mut Target<'_>,
        stats: &mut [f32],
        work: &mut [f32],
    ) -> Option<Result<()>> {
        let (over, projections) = self.projections(call)?;
        let (projected, work) = cut(work, projections.sizes.map(|s| s.out_len()));
        let x = projections.make(projected, work);
        Some(over.forward_f32(&x, &Mask { key: None, ..call.mask }, out.reborrow(), stats, work))
    }

    /// The backward pass; none where the structure is another.
    pub(super) fn backward_projected(
        &self,
        call: &Call<'_>,
        saved: &Saved<'_>,
        gradients: &mut GradientTargets<'_>,
        work: &mut [f32],
    ) -> Option<Result<()>> {
        let (over, projections) = self.projections(call)?;
        let sizes = projections.sizes;
        let (projected, work) = cut(work, sizes.map(|s| s.out_len()));
        let ([dk, dv], work) = cut(work, sizes.map(|s| s.out_len()));
        let GradientTargets { dq, dk: dk_into, dv: dv_into, extras } = gradients;
        let dmaps = MAPS.map(|parameter| extras.take(parameter));
        let target = |x, s: Sizes| Target::in_one_piece(x, s.batch * s.heads, [s.count, s.dim]);
        let of_pairs = GradientTargets {
            dq: dq.reborrow(),
            dk: Some(target(&mut *dk, sizes[0])),
            dv: target(&mut *dv, sizes[1]),
            extras: extras.reborrow(),
        };
        let x = projections.make(projected, work);
        let done = over.backward_f32(&x, &Mask { key: None, ..call.mask }, saved, of_pairs, work);
        let tied = dk_into.is_none();
        let into = [dk_into.as_mut().unwrap_or(dq).dense(), dv_into.dense()];
        let each = projections.each().into_iter().zip([&*dk, &*dv]).zip(into).zip(dmaps);
        for (n, (((projection, dout), dx), dmap)) in each.enumerate() {
            if n == 1 || !tied {
                dx.fill(0.0);
            }
            projection.transpose(dout, dx, work);
            if let Some(dmap) = dmap {
                projection.gradient(dout, dmap, work);
            }
        }
        Some(done)
    }
}
