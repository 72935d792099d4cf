//! [`Strategy::Reference`]: f32 calls through the f64 reference.

use crate::{ClusterPlan, Gradients, Inputs, Mechanism, Plan, Result, Shape, Strategy, call::Call, reference};

/// [`reference::forward`]. `stats` holds what [`crate::Operator::lse`] returns; the gradients need nothing saved.
pub(crate) fn forward(m: &Mechanism, c: &Call<'_>, out: &mut [f32], stats: &mut [f32]) -> Result<()> {
    let result = wide(m, c, |inputs| reference::forward(m, &c.shape, inputs, &c.mask))?;
    narrow(&result.out, out);
    stats.fill(0.0);
    if let Some(lse) = &result.lse {
        narrow(lse, stats);
    }
    Ok(())
}

/// [`reference::Forward::a`].
pub(crate) fn token_weights(m: &Mechanism, c: &Call<'_>, a: &mut [f32]) -> Result<()> {
    let result = wide(m, c, |inputs| reference::forward(m, &c.shape, inputs, &c.mask))?;
    narrow(&result.a.unwrap_or_default(), a);
    Ok(())
}

/// [`reference::backward`].
pub(crate) fn backward(m: &Mechanism, c: &Call<'_>, dout: &[f32], mut g: Gradients<'_, f32>) -> Result<()> {
    let result = wide(m, c, |inputs| reference::backward(m, &c.shape, inputs, &c.mask, &widened(dout)))?;
    narrow(&result.dq, g.dq);
    narrow(&result.dv, g.dv);
    if let (Some(from), Some(to)) = (&result.dk, g.dk) {
        narrow(from, to);
    }
    for (parameter, to) in g.extras.iter() {
        match result.parameters.get(&parameter) {
            Some(from) => narrow(from, to),
            None => to.fill(0.0),
        }
    }
    Ok(())
}

/// [`reference::clusters`]; none for mechanisms without clusters.
pub(crate) fn clusters(m: &Mechanism, c: &Call<'_>) -> Option<ClusterPlan> {
    // A plan does not depend on the values: they have no channels here.
    let shape = Shape { value_dim: 0, ..c.shape };
    wide(m, c, |inputs| reference::made_plan(m, &shape, &Inputs { v: &[], ..*inputs }, &c.mask))
}

/// What [`Strategy::Reference`] does in place of the `fused` plan: the same arithmetic, through stored f64 matrices.
pub(crate) fn plan(fused: Plan, shape: &Shape) -> Plan {
    let matrix = 2 * size_of::<f64>() as u64 * (shape.slices() * shape.seq_q * shape.seq_kv) as u64;
    Plan {
        strategy: Strategy::Reference,
        reason: "asked for: the naive f64 path, which stores whole matrices",
        tile: (shape.seq_q, shape.seq_kv),
        bytes_forward: fused.bytes_forward + matrix,
        bytes_backward: fused.bytes_backward + 2 * matrix,
        scratch_forward: 0,
        scratch_backward: 0,
        allocated_forward: 0,
        allocated_backward: 0,
        ..fused
    }
}

/// Runs `f` on the f64 form of a checked call.
fn wide<R>(m: &Mechanism, c: &Call<'_>, f: impl FnOnce(&Inputs<'_, f64>) -> R) -> R {
    let (q, v) = (widened(c.q.dense()), widened(c.v.dense()));
    let k = (!m.tied).then(|| widened(c.k.dense()));
    f(&Inputs { q: &q, k: k.as_deref(), v: &v, extras: c.extras })
}

fn widened(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| x.into()).collect()
}

fn narrow(from: &[f64], to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(to, &from)| *to = from as f32);
}
