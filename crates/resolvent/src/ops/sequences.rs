//! Sequences that lie end to end, without padding.

use std::collections::BTreeMap;

use burn::tensor::{Device, Int, Tensor, TensorData};
use resolvent_kernels::{self as kernels, Heads, Sequences, VarlenOperator};

use super::{
    Extras, Inputs, Mask, Output, Strategy, attend,
    bound::{self, Bound},
    fused::{self, Call},
    plan::{self, is_flex, is_fused, of_kernels},
};
use crate::{Mechanism, Parameter, Result};

/// Sequences that are computed as one batch.
struct Group {
    /// Of queries, and of keys.
    lengths: [usize; 2],
    members: Vec<usize>,
}

/// The sequences by their lengths, or, `alone`, each by itself.
fn groups(sequences: &Sequences, alone: bool) -> Vec<Group> {
    let lengths = |n: usize| [sequences.range(n).len(), sequences.key_range(n).len()];
    let mut groups: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for n in 0..sequences.len() {
        groups.entry((if alone { n } else { 0 }, lengths(n))).or_default().push(n);
    }
    groups.into_iter().map(|((_, lengths), members)| Group { lengths, members }).collect()
}

/// Whether what is drawn for a sequence depends on its place in a batch.
pub(crate) fn draws(mechanism: &Mechanism, extras: &Extras) -> bool {
    extras.dropout.is_some() || mechanism.drawn_landmarks().is_some() || mechanism.clustering().is_some()
}

/// What `f` makes of `x [tokens, dim]`, given as batches `[sequences, length, dim]`: of equal length, or one by one where it draws; with the
/// number of the first.
///
/// # Errors
/// Those of `f`.
pub(crate) fn map(
    sequences: &Sequences,
    x: Tensor<2>,
    draws: bool,
    mut f: impl FnMut(usize, Tensor<3>) -> Result<Tensor<3>>,
) -> Result<Tensor<2>> {
    let [_, dim] = x.dims();
    let (device, groups) = (x.device(), groups(sequences, draws));
    let mut parts = Vec::with_capacity(groups.len());
    for group in &groups {
        let rows = group.queries(sequences);
        let batch = x.clone().select(0, indices(&rows, &device));
        let made = f(group.members[0], batch.reshape([group.members.len(), group.lengths[0], dim]))?;
        parts.push(made.flatten::<2>(0, 1));
    }
    Ok(Tensor::cat(parts, 0).select(0, home(sequences, &groups, &device)))
}

/// Where each query lies once the groups are end to end.
fn home(sequences: &Sequences, groups: &[Group], device: &Device) -> Tensor<1, Int> {
    let mut places = vec![0; sequences.tokens()];
    let rows = groups.iter().flat_map(|group| group.queries(sequences));
    rows.enumerate().for_each(|(place, row)| places[row] = place);
    indices(&places, device)
}

impl Group {
    /// The places of the group's queries.
    fn queries(&self, sequences: &Sequences) -> Vec<usize> {
        self.members.iter().flat_map(|&n| sequences.range(n)).collect()
    }

    /// The places of its keys.
    fn keys(&self, sequences: &Sequences) -> Vec<usize> {
        self.members.iter().flat_map(|&n| sequences.key_range(n)).collect()
    }
}

fn indices(rows: &[usize], device: &Device) -> Tensor<1, Int> {
    let rows: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
    let len = rows.len();
    Tensor::from_data(TensorData::new(rows, [len]), device)
}

/// As [`attend`], for sequences that lie end to end on the third axis: each attends to itself alone, as if it were a call of
/// its own, and nothing is spent on padding. `inputs` are `[1, heads, tokens, channels]` (`kv_heads` of keys and values), `out` is
/// `[1, heads, tokens, value_dim]`, `lse` `[1, heads, tokens]`.
///
/// On Flex it is one call of [`kernels::VarlenOperator`]. Elsewhere sequences of equal length are computed as one batch. Dropout is
/// [`reseeded`](crate::Dropout::reseeded) by a sequence's number.
///
/// # Errors
/// As [`attend`]; [`kernels::Error::Shape`] where bounds and tensors differ; [`kernels::Error::Unsupported`] for tensors that belong to a
/// batch of sequences (a plan, landmarks), and for `linear-infsa` with `broadcast` off.
pub fn attend_sequences(
    inputs: &Inputs,
    mechanism: &Mechanism,
    sequences: &Sequences,
    causal: bool,
    strategy: Strategy,
) -> Result<Output> {
    match bound(inputs, inputs.kv_heads(), mechanism, sequences, causal, strategy)? {
        Some(operator) => fused::apply(inputs, Call::bound(inputs, operator)),
        None => by_groups(inputs, mechanism, sequences, causal, strategy),
    }
}

/// The operator of the kernels on `kv_heads` heads of keys where it serves the call; the content of `inputs` is read where the mechanism makes clusters of it.
pub(super) fn bound(
    inputs: &Inputs,
    kv_heads: usize,
    mechanism: &Mechanism,
    sequences: &Sequences,
    causal: bool,
    strategy: Strategy,
) -> Result<Option<Bound>> {
    check(inputs, mechanism, sequences)?;
    let shape = plan::check(inputs, mechanism, &Mask::none())?;
    let (q, k) = (&inputs.q, inputs.k.as_ref().unwrap_or(&inputs.q));
    if strategy == Strategy::Composed || !is_flex(&q.device()) || !is_fused(q.dtype()) {
        return Ok(None);
    }
    let heads = Heads { heads: shape.heads, kv_heads, head_dim: shape.head_dim, value_dim: shape.value_dim };
    let operator = match VarlenOperator::new(mechanism, heads, sequences, causal, of_kernels(strategy)) {
        // What has no fused path may have another.
        Err(error) if strategy == Strategy::Auto && matches!(error.cause(), kernels::Error::Unsupported { .. }) => {
            return Ok(None);
        }
        operator => operator?.with_precision(inputs.extras.precision),
    };
    let extras = inputs.extras.codebook.iter().fold(kernels::Extras::default(), |extras, x| extras.with_codebook(x));
    if mechanism.clustering().is_none() {
        return Ok(Some(bound::of_sequences(operator, [&[], &[]], extras)?));
    }
    let host = |x: &Tensor<4>| x.to_data().iter::<f32>().collect::<Vec<_>>();
    Ok(Some(bound::of_sequences(operator, [&host(q), &host(k)], extras)?))
}

/// Sequences of equal length as one batch.
fn by_groups(
    inputs: &Inputs,
    mechanism: &Mechanism,
    sequences: &Sequences,
    causal: bool,
    strategy: Strategy,
) -> Result<Output> {
    let (device, groups) = (inputs.q.device(), groups(sequences, draws(mechanism, &inputs.extras)));
    let (mut outs, mut sums) = (Vec::new(), Vec::new());
    for group in &groups {
        let (size, [seq_q, seq_kv]) = (group.members.len(), group.lengths);
        let queries = indices(&group.queries(sequences), &device);
        let keys = indices(&group.keys(sequences), &device);
        let batch = |x: &Tensor<4>, rows: &Tensor<1, Int>, seq: usize| {
            let [_, heads, _, channels] = x.dims();
            x.clone().select(2, rows.clone()).reshape([heads, size, seq, channels]).swap_dims(0, 1)
        };
        let call = Inputs {
            q: batch(&inputs.q, &queries, seq_q),
            k: inputs.k.as_ref().map(|k| batch(k, &keys, seq_kv)),
            v: batch(&inputs.v, &keys, seq_kv),
            extras: of_sequence(&inputs.extras, group.members[0]),
        };
        let mask = Mask { causal, ..Mask::none() };
        let Output { out, lse } = attend(&call, mechanism, &mask, strategy)?;
        let [_, heads, _, channels] = out.dims();
        outs.push(out.swap_dims(0, 1).reshape([1, heads, size * seq_q, channels]));
        sums.extend(lse.map(|lse| lse.swap_dims(0, 1).reshape([1, heads, size * seq_q])));
    }
    let home = home(sequences, &groups, &device);
    let lse = (!sums.is_empty()).then(|| Tensor::cat(sums, 2).select(2, home.clone()));
    Ok(Output { out: Tensor::cat(outs, 2).select(2, home), lse })
}

/// The extras of a sequence's call: each draws other pairs to leave out.
fn of_sequence(extras: &Extras, n: usize) -> Extras {
    match extras.dropout {
        Some(dropout) => extras.clone().with_dropout(dropout.reseeded(n as u64)),
        None => extras.clone(),
    }
}

/// Whether tensors and sequences fit.
fn check(inputs: &Inputs, mechanism: &Mechanism, sequences: &Sequences) -> Result<()> {
    let refused = |what, why| Err(kernels::Error::Unsupported { mechanism: mechanism.id(), what, why }.into());
    let extras = &inputs.extras;
    if extras.clusters.is_some() {
        return refused("a plan for sequences end to end", "it is of a batch; leave it out");
    }
    if extras.landmark_indices.is_some() || extras.get(Parameter::GivenLandmarks).is_some() {
        return refused("given landmarks for sequences end to end", "they are of a batch; leave them out");
    }
    if mechanism.pooling().is_some_and(|pooling| !pooling.broadcast) {
        return refused("sequences end to end", "it returns one row per sequence; set broadcast to true");
    }
    let k = inputs.k.as_ref().unwrap_or(&inputs.q);
    let keys = sequences.keys();
    for (left, tensor, tokens) in [("q", &inputs.q, sequences.tokens()), ("k", k, keys), ("v", &inputs.v, keys)] {
        let [batch, _, seq, _] = tensor.dims();
        if batch != 1 || seq != tokens {
            let remedy = "expected [1, heads, tokens, channels] with as many tokens as the sequences have";
            let (left_shape, right_shape) = (tensor.dims().to_vec(), vec![tokens]);
            let op = "attend_sequences";
            return Err(kernels::Error::Shape { op, left, left_shape, right: "sequences", right_shape, remedy }.into());
        }
    }
    Ok(())
}
