//! Kernels compared at equal sharpness. "Fractional neural attention for efficient multiscale sequence processing",
//! supplementary comparison of `fna` with softmax.

use resolvent_graph::{Result, matched_bandwidth};
use resolvent_kernels::{
    Inputs, Mask, Mechanism, Shape,
    mechanism::{Fna, Kappa},
    reference,
};

use super::{Head, stored::mean_perplexity};

/// Queries that are looked at.
const QUERIES: usize = 16;
/// Length scales tried, in those that the mechanism has by itself.
const RANGE: f64 = 1e4;

/// The rows that are looked at, of `n`.
pub(super) fn sampled(n: usize) -> impl ExactSizeIterator<Item = usize> {
    (0..n).step_by(n.div_ceil(QUERIES).max(1))
}

/// The length scale at which rows of `fna` attend to as many tokens as softmax's do (`sharpness`), over the mechanism's own, from
/// 16 evenly spread rows; or why there is none.
///
/// # Errors
/// What the mechanism refuses.
pub(super) fn matched_kappa(
    fna: &Fna,
    head: Head<'_>,
    sharpness: f64,
) -> Result<std::result::Result<f64, &'static str>> {
    let (n, dim) = (head.tokens, head.q.len() / head.tokens.max(1));
    if fna.causal {
        return Ok(Err("rows see earlier tokens only: no length scale is matched"));
    }
    if fna.norm_exponent != 0.0 {
        return Ok(Err("the density of the tokens is divided out of the weights: no length scale is matched"));
    }
    let rows: Vec<usize> = sampled(n).collect();
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let q: Vec<f64> = rows.iter().flat_map(|&row| wide(&head.q[row * dim..][..dim])).collect();
    let k = wide(head.k.filter(|_| !fna.tied).unwrap_or(head.q));
    let shape = Shape { seq_q: rows.len(), seq_kv: n, value_dim: 1, ..Shape::square(1, 1, n, dim) };
    let values = vec![0.0; n];
    let of = |kappa: f64| -> Result<f64> {
        let mechanism = Mechanism::from(fna.clone().with_kappa(Some(Kappa::Value(kappa))).with_tied(false));
        let inputs = Inputs { q: &q, k: Some(&k), v: &values, extras: Default::default() };
        let found = reference::forward(&mechanism, &shape, &inputs, &Mask::NONE)?;
        Ok(mean_perplexity(found.weights().chunks(n)))
    };
    let own = fna.resolve(dim, 1).kappa;
    let kappa = matched_bandwidth(sharpness, (own / RANGE, own * RANGE), of)?;
    let within = (own / RANGE * 1.01..own * RANGE / 1.01).contains(&kappa);
    Ok(if within {
        Ok(kappa / own)
    } else {
        Err("no length scale within a factor of ten thousand is as sharp as softmax")
    })
}
