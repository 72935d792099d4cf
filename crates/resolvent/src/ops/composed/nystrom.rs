//! Affinities through landmarks: `G = Cq X Ck^T`, and its normalisations.

use burn::tensor::Tensor;
use resolvent_kernels::Result;

use super::{
    super::Extras,
    Call, absent,
    hop::Hop,
    landmarks::{Marks, Method, Producer, activate, identity},
    root,
    score::Affinity,
    unsupported, whitened,
};
use crate::{
    Mechanism,
    mechanism::{Degree, Factor, Normalisation, Nystrom},
};

/// A row sum is at least this part of the product of the norms that it is of.
const LEAST_SUM: f64 = 1e-6;

/// `Cq`, `X` and `Ck^T`.
struct Landmarked {
    cq: Tensor<4>,
    x: Tensor<4>,
    ck: Tensor<4>,
}

/// One hop.
pub(super) fn hop<'a>(
    call: &Call,
    affinity: &Affinity<'_>,
    m: &Nystrom,
    normalisation: &Normalisation,
    extras: &Extras,
    mechanism: &Mechanism,
) -> Result<Hop<'a>> {
    Landmarked::of(call, affinity, m, normalisation, extras, mechanism)?.normalised(call, normalisation, mechanism)
}

impl Landmarked {
    fn of(
        call: &Call,
        affinity: &Affinity<'_>,
        m: &Nystrom,
        normalisation: &Normalisation,
        extras: &Extras,
        mechanism: &Mechanism,
    ) -> Result<Self> {
        let full = !mechanism.filters_by_channel();
        let producer = Producer { landmarks: m.landmarks, grid: m.grid, full, extras, keep: call.keep_key() };
        let Marks { u, live } = producer.make(&call.k);
        let u = if m.landmark_act { activate(u, extras) } else { u };
        let across = live.clone().swap_dims(2, 3);
        let cq = absent(affinity.powers(&call.q, &u) * across.clone(), &call.no_query);
        let ck = call.of_keys(affinity.powers(&call.k, &u) * across.clone());
        let a = affinity.powers(&u, &u) * (live.clone() * across);
        // A landmark without tokens is the identity's.
        let a = a.clone() + identity(&a) * (live.neg() + 1.0);
        let (steps, init) = (m.newton_iterations, m.newton_init);
        let method =
            Method { mechanism: mechanism.id(), inverse: m.inverse, steps, init, ridge: m.ridge, gradient: m.gradient };
        let x = method.invert(a.clone())?;
        let degree = match normalisation {
            Normalisation::Symmetric(m) => Some(m.degree.unwrap_or_default()),
            _ => None,
        };
        let c = match degree {
            None => None,
            Some(Degree::Landmark) => Some(a.sum_dim(3).sqrt().recip()),
            Some(Degree::Token) => Some(ck.clone().sum_dim(2).clamp_min(1e-30).sqrt().recip().swap_dims(2, 3)),
        };
        let x = match c {
            Some(c) => x * c.clone() * c.swap_dims(2, 3),
            None => x,
        };
        Ok(Self { cq, x, ck: ck.swap_dims(2, 3) })
    }

    fn normalised<'a>(self, call: &Call, normalisation: &Normalisation, mechanism: &Mechanism) -> Result<Hop<'a>> {
        let Self { cq, x, ck } = self;
        let right = x.clone().matmul(ck.clone());
        Ok(match normalisation {
            Normalisation::Row(_) => {
                let t = x.matmul(ck.sum_dim(3));
                Hop::factors(cq.clone(), right).divided(row_sums(cq, t))
            }
            Normalisation::Whitened(m) => {
                Hop::whole(whitened::weights(call, m, mechanism.id(), cq.matmul(right), &call.blocked())?)
            }
            Normalisation::None(m) if m.factor == Factor::InvN => {
                let ones = Tensor::ones([call.shape.batch, 1, 1, call.shape.seq_kv], (&cq.device(), cq.dtype()));
                Hop::factors(cq, right).divided(absent(ones, &call.no_key).sum_dim(3))
            }
            Normalisation::None(_) | Normalisation::Symmetric(_) => Hop::factors(cq, right),
            _ => return Err(unsupported(mechanism.id(), "this normalisation with Strategy::Composed")),
        })
    }
}

/// `Cq t`, signed, at least [`LEAST_SUM`] of `|Cq| |t|`.
fn row_sums(cq: Tensor<4>, t: Tensor<4>) -> Tensor<4> {
    let least = root(cq.clone().square().sum_dim(3)) * root(t.clone().square().sum_dim(2)) * LEAST_SUM;
    let sums = cq.matmul(t);
    let below = sums.clone().detach().abs().lower(least.clone().detach());
    let negative = sums.clone().detach().lower_elem(0.0);
    let least = least.clone().mask_where(negative, least.neg());
    sums.mask_where(below, least)
}
