//! Whether the tensors of a call fit its sizes: once, for every way of computing it.

use crate::{Error, ExtraGradients, Extras, Inputs, Mask, Mechanism, Parameter, Result, Shape, mechanism::Estimator};

/// Lengths of all inputs and masks, and which of them the mechanism takes.
pub(crate) fn inputs<T>(
    op: &'static str,
    mechanism: &Mechanism,
    s: &Shape,
    inputs: &Inputs<'_, T>,
    mask: &Mask<'_>,
) -> Result<()> {
    planned(op, mechanism, s, inputs, mask)?;
    required(op, mechanism, s, &inputs.extras)
}

/// The same of a call whose queries, keys and values were found to fit.
pub(crate) fn beside_tokens(
    op: &'static str,
    mechanism: &Mechanism,
    s: &Shape,
    extras: &Extras<'_>,
    mask: &Mask<'_>,
) -> Result<()> {
    masked_and_given(op, mechanism, s, extras, mask)?;
    required(op, mechanism, s, extras)
}

/// The same of a call that is planned: what the weights of pairs depend on may be missing.
pub(crate) fn planned<T>(
    op: &'static str,
    mechanism: &Mechanism,
    s: &Shape,
    inputs: &Inputs<'_, T>,
    mask: &Mask<'_>,
) -> Result<()> {
    tensors(op, mechanism, inputs, [s.q_len(), s.k_len(), s.v_len()])?;
    masked_and_given(op, mechanism, s, &inputs.extras, mask)
}

fn masked_and_given(
    op: &'static str,
    mechanism: &Mechanism,
    s: &Shape,
    extras: &Extras<'_>,
    mask: &Mask<'_>,
) -> Result<()> {
    for (tensor, keep, seq) in [("key_mask", mask.key, s.seq_kv), ("query_mask", mask.query, s.seq_q)] {
        let len = keep.map_or(s.batch * seq, <[bool]>::len);
        length(op, tensor, len, s.batch * seq, "expected batch * sequence length")?;
    }
    one_token_set(mechanism, s, mask)?;
    given(op, mechanism, s, extras)?;
    let causal = mask.causal || mechanism.causal;
    match (extras.clusters, mechanism.clustering()) {
        (Some(plan), Some(m)) if causal && m.routes_queries() => plan.check_segments(op, &m),
        _ => Ok(()),
    }
}

/// Whether queries, keys and values are there, and of these lengths.
pub(crate) fn tensors<T>(
    op: &'static str,
    mechanism: &Mechanism,
    inputs: &Inputs<'_, T>,
    [q, k, v]: [usize; 3],
) -> Result<()> {
    length(op, "q", inputs.q.len(), q, "expected batch * heads * seq_q * head_dim")?;
    keys(op, inputs.k.is_some(), mechanism)?;
    let given = inputs.k.map_or(k, <[T]>::len);
    length(op, "k", given, k, "expected batch * heads * seq_kv * head_dim")?;
    length(op, "v", inputs.v.len(), v, "expected batch * heads * seq_kv * value_dim")
}

/// Heads of queries to one of `kv_heads` heads of keys.
pub(crate) fn sharing(mechanism: &Mechanism, heads: usize, kv_heads: usize) -> Result<usize> {
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        let got = format!("{kv_heads} for {heads} heads");
        return Err(Error::OutOfRange { field: "kv_heads", got, expected: "a divisor of the heads" });
    }
    if kv_heads != heads && mechanism.tied {
        let why = "queries are keys, so that there are as many heads of both; set tied to false";
        return Err(Error::Unsupported { mechanism: mechanism.id(), what: "kv_heads below heads", why });
    }
    Ok(heads / kv_heads)
}

/// Whether keys are given as the mechanism wants them.
pub(crate) fn keys(op: &'static str, given: bool, mechanism: &Mechanism) -> Result<()> {
    let problem = match (given, mechanism.tied) {
        (true, true) => "is given although the mechanism is tied (the keys are `q`); leave it out",
        (false, false) => "is missing; only a tied mechanism has none",
        _ => return Ok(()),
    };
    Err(Error::Tensor { op, tensor: "k", problem })
}

/// Whether a gradient of the keys is wanted iff there are keys.
pub(crate) fn gradient_of_keys(op: &'static str, wanted: bool, mechanism: &Mechanism) -> Result<()> {
    let problem = match (wanted, mechanism.tied) {
        (true, true) => "is given although the mechanism is tied; `dq` holds both paths",
        (false, false) => "is missing",
        _ => return Ok(()),
    };
    Err(Error::Tensor { op, tensor: "dk", problem })
}

/// Whether the gradients of the mechanism's own tensors that are wanted have their lengths.
pub(crate) fn parameter_gradients(
    op: &'static str,
    mechanism: &Mechanism,
    s: &Shape,
    wanted: &mut ExtraGradients<'_>,
) -> Result<()> {
    wanted.iter().try_for_each(|(parameter, gradient)| {
        parameter_length(op, mechanism, s, parameter, parameter.gradient_name(), gradient.len())
    })
}

/// Where queries are keys there is one mask.
fn one_token_set(mechanism: &Mechanism, s: &Shape, mask: &Mask<'_>) -> Result<()> {
    let Some(query) = mask.query.filter(|_| mechanism.masks_tokens_once()) else { return Ok(()) };
    let keeps = |n: usize| mask.key.is_none_or(|key| key[n]);
    if (0..s.batch * s.seq_q).all(|n| query[n] == keeps(n)) {
        return Ok(());
    }
    let why = "queries are keys: one mask is for both; pass the same, or only `key_mask`";
    Err(Error::Unsupported { mechanism: mechanism.id(), what: "a query_mask that differs from key_mask", why })
}

/// Whether the mechanism's own tensors fit, and none is missing.
pub(crate) fn extras(op: &'static str, mechanism: &Mechanism, s: &Shape, extras: &Extras<'_>) -> Result<()> {
    given(op, mechanism, s, extras)?;
    required(op, mechanism, s, extras)
}

fn required(op: &'static str, mechanism: &Mechanism, s: &Shape, extras: &Extras<'_>) -> Result<()> {
    let problem = "is missing; the configuration asks for it";
    match mechanism.missing(s, |parameter| extras.get(parameter).is_some()) {
        Some(parameter) => Err(Error::Tensor { op, tensor: parameter.name(), problem }),
        None => Ok(()),
    }
}

fn given(op: &'static str, mechanism: &Mechanism, s: &Shape, extras: &Extras<'_>) -> Result<()> {
    for (parameter, values) in extras.iter() {
        parameter_length(op, mechanism, s, parameter, parameter.name(), values.len())?;
        mechanism.check_parameter(parameter, values)?;
    }
    extras.dropout.map_or(Ok(()), |dropout| dropout.check(mechanism))?;
    extras.landmark_indices.map_or(Ok(()), |indices| landmark_indices(op, mechanism, s, indices))?;
    clustered(op, mechanism, s, extras)
}

/// Codebook and plan of a clustered call.
fn clustered(op: &'static str, mechanism: &Mechanism, s: &Shape, extras: &Extras<'_>) -> Result<()> {
    let clustered = mechanism.clustering();
    let Some(m) = &clustered else {
        let tensors = [("codebook", extras.codebook.is_some()), ("plan", extras.clusters.is_some())];
        return match tensors.into_iter().find(|(_, given)| *given) {
            Some((tensor, _)) => {
                Err(Error::Tensor { op, tensor, problem: "belongs to mechanisms with clusters; leave it out" })
            }
            None => Ok(()),
        };
    };
    if let Some(codebook) = extras.codebook {
        if m.jl_dim.is_some() {
            let why = "the centroids have head_dim channels; leave jl_dim out";
            return Err(Error::Unsupported { mechanism: "ssa", what: "codebook with jl_dim", why });
        }
        let rows = m.clusters.unwrap_or((codebook.len() / (s.heads * s.head_dim)).max(1));
        length(op, "codebook", codebook.len(), s.heads * rows * s.head_dim, "expected heads * clusters * head_dim")?;
    }
    extras.clusters.map_or(Ok(()), |plan| plan.check(op, s, m.estimator != Estimator::Centroid))
}

/// Distinct tokens of every batch element, in ascending order.
fn landmark_indices(op: &'static str, mechanism: &Mechanism, s: &Shape, indices: &[i64]) -> Result<()> {
    let tensor = "landmark_indices";
    let Some(count) = mechanism.drawn_landmarks() else {
        let problem = "is given although no landmarks are drawn; leave it out, or use landmarks of kind random";
        return Err(Error::Tensor { op, tensor, problem });
    };
    length(op, tensor, indices.len(), s.batch * count, "expected batch * landmarks.count")?;
    let tokens = 0..s.seq_kv as i64;
    let ascend = |entry: &[i64]| entry.windows(2).all(|pair| pair[0] < pair[1]);
    if indices.iter().all(|i| tokens.contains(i)) && indices.chunks_exact(count).all(ascend) {
        return Ok(());
    }
    let problem = "must hold distinct tokens, ascending and below the sequence length, for every batch element";
    Err(Error::Tensor { op, tensor, problem })
}

/// Whether the mechanism has `parameter`, and whether `tensor` (its values or their gradient) has as many elements.
pub(crate) fn parameter_length(
    op: &'static str,
    mechanism: &Mechanism,
    s: &Shape,
    parameter: Parameter,
    tensor: &'static str,
    got: usize,
) -> Result<()> {
    if !mechanism.has(parameter) {
        return Err(Error::Tensor { op, tensor, problem: "belongs to another mechanism; leave it out" });
    }
    let expected = mechanism.parameter_len(parameter, s);
    length(op, tensor, got, expected, "see `Mechanism::parameter_shape`")
}

/// [`Error::Length`] unless `got == expected`.
pub(crate) fn length(
    op: &'static str,
    tensor: &'static str,
    got: usize,
    expected: usize,
    remedy: &'static str,
) -> Result<()> {
    if got == expected { Ok(()) } else { Err(Error::Length { op, tensor, got, expected, remedy }) }
}
