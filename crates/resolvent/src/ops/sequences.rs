//! Sequences that lie end to end, without padding.

use std::collections::BTreeMap;

use burn::tensor::{Device, Int, Tensor, TensorData};
use resolvent_kernels as kernels;

use super::{Extras, Inputs, Mask, Output, Strategy, attend};
use crate::{Error, Mechanism, Parameter, Result, mechanism::LinearInfsa};

/// Where sequences that lie end to end begin and end: their cumulative lengths.
///
/// ```
/// use resolvent::Sequences;
/// let reviews = Sequences::new(&[0, 3, 8, 11])?; // of 3, 5 and 3 tokens
/// assert_eq!((reviews.len(), reviews.tokens()), (3, 11));
/// # Ok::<(), resolvent::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequences {
    queries: Vec<usize>,
    /// Of cross-attention.
    keys: Option<Vec<usize>>,
}

/// Sequences of equal lengths: one batch.
struct Group {
    /// Of queries, and of keys.
    lengths: [usize; 2],
    members: Vec<usize>,
}

impl Sequences {
    /// The sequences between `bounds`, cumulative lengths from 0: self-attention.
    ///
    /// # Errors
    /// [`Error::Field`] unless they start with 0 and ascend: no sequence may be empty.
    pub fn new(bounds: &[usize]) -> Result<Self> {
        Ok(Self { queries: ascending("bounds", bounds)?, keys: None })
    }

    /// The sequences of queries between `queries`, each with the sequence of keys at the same place between `keys`.
    ///
    /// # Errors
    /// As [`Sequences::new`]; [`Error::Field`] unless there are as many.
    pub fn cross(queries: &[usize], keys: &[usize]) -> Result<Self> {
        let (queries, keys) = (ascending("queries", queries)?, ascending("keys", keys)?);
        if queries.len() != keys.len() {
            let got = format!("{} sequences beside {} of queries", keys.len() - 1, queries.len() - 1);
            return Err(Error::Field { field: "keys", got, expected: "one sequence of keys per sequence of queries" });
        }
        Ok(Self { queries, keys: Some(keys) })
    }

    /// How many sequences there are.
    pub fn len(&self) -> usize {
        self.queries.len() - 1
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of all sequences; of cross-attention, queries.
    pub fn tokens(&self) -> usize {
        self.queries[self.len()]
    }

    fn keys(&self) -> &[usize] {
        self.keys.as_ref().unwrap_or(&self.queries)
    }

    /// The sequences by their lengths.
    fn groups(&self) -> Vec<Group> {
        let mut groups: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for n in 0..self.len() {
            let length = |bounds: &[usize]| bounds[n + 1] - bounds[n];
            groups.entry([length(&self.queries), length(self.keys())]).or_default().push(n);
        }
        groups.into_iter().map(|(lengths, members)| Group { lengths, members }).collect()
    }

    /// What `f` makes of `x [tokens, dim]`, given as batches `[sequences, length, dim]` of equal length, with their numbers from 0.
    ///
    /// # Errors
    /// Those of `f`.
    pub(crate) fn map(
        &self,
        x: Tensor<2>,
        mut f: impl FnMut(usize, Tensor<3>) -> Result<Tensor<3>>,
    ) -> Result<Tensor<2>> {
        let [_, dim] = x.dims();
        let (device, groups) = (x.device(), self.groups());
        let mut parts = Vec::with_capacity(groups.len());
        for (number, group) in groups.iter().enumerate() {
            let rows = group.rows(&self.queries);
            let batch = x.clone().select(0, indices(&rows, &device));
            let made = f(number, batch.reshape([group.members.len(), group.lengths[0], dim]))?;
            parts.push(made.flatten::<2>(0, 1));
        }
        Ok(Tensor::cat(parts, 0).select(0, self.home(&groups, &device)))
    }

    /// Where each query lies once the groups are end to end.
    fn home(&self, groups: &[Group], device: &Device) -> Tensor<1, Int> {
        let mut places = vec![0; self.tokens()];
        let rows = groups.iter().flat_map(|group| group.rows(&self.queries));
        rows.enumerate().for_each(|(place, row)| places[row] = place);
        indices(&places, device)
    }
}

impl Group {
    /// The places of the group's tokens.
    fn rows(&self, bounds: &[usize]) -> Vec<usize> {
        self.members.iter().flat_map(|&n| bounds[n]..bounds[n + 1]).collect()
    }
}

fn ascending(field: &'static str, bounds: &[usize]) -> Result<Vec<usize>> {
    let ok = bounds.len() > 1 && bounds[0] == 0 && bounds.windows(2).all(|pair| pair[0] < pair[1]);
    let expected = "cumulative lengths: 0, then ever larger numbers";
    if ok { Ok(bounds.to_vec()) } else { Err(Error::Field { field, got: format!("{bounds:?}"), expected }) }
}

fn indices(rows: &[usize], device: &Device) -> Tensor<1, Int> {
    let rows: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
    let len = rows.len();
    Tensor::from_data(TensorData::new(rows, [len]), device)
}

/// As [`attend`], for sequences that lie end to end on the third axis: each attends to itself alone, as if it were a call of
/// its own, and nothing is spent on padding. `inputs` are `[1, heads, tokens, channels]`, `out` is
/// `[1, heads, tokens, value_dim]`, `lse` `[1, heads, tokens]`.
///
/// Sequences of equal length are computed as one batch.
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
    check(inputs, mechanism, sequences)?;
    let (device, groups) = (inputs.q.device(), sequences.groups());
    let (mut outs, mut sums) = (Vec::new(), Vec::new());
    for (number, group) in groups.iter().enumerate() {
        let (size, [seq_q, seq_kv]) = (group.members.len(), group.lengths);
        let queries = indices(&group.rows(&sequences.queries), &device);
        let keys = indices(&group.rows(sequences.keys()), &device);
        let batch = |x: &Tensor<4>, rows: &Tensor<1, Int>, seq: usize| {
            let [_, heads, _, channels] = x.dims();
            x.clone().select(2, rows.clone()).reshape([heads, size, seq, channels]).swap_dims(0, 1)
        };
        let call = Inputs {
            q: batch(&inputs.q, &queries, seq_q),
            k: inputs.k.as_ref().map(|k| batch(k, &keys, seq_kv)),
            v: batch(&inputs.v, &keys, seq_kv),
            extras: of_group(&inputs.extras, number),
        };
        let mask = Mask { causal, ..Mask::none() };
        let Output { out, lse } = attend(&call, mechanism, &mask, strategy)?;
        let [_, heads, _, channels] = out.dims();
        outs.push(out.swap_dims(0, 1).reshape([1, heads, size * seq_q, channels]));
        sums.extend(lse.map(|lse| lse.swap_dims(0, 1).reshape([1, heads, size * seq_q])));
    }
    let home = sequences.home(&groups, &device);
    let lse = (!sums.is_empty()).then(|| Tensor::cat(sums, 2).select(2, home.clone()));
    Ok(Output { out: Tensor::cat(outs, 2).select(2, home), lse })
}

/// The extras of a group's call: each draws other pairs to leave out.
pub(crate) fn of_group(extras: &Extras, number: usize) -> Extras {
    match extras.dropout {
        Some(dropout) => extras.clone().with_dropout(dropout.reseeded(number as u64)),
        None => extras.clone(),
    }
}

fn check(inputs: &Inputs, mechanism: &Mechanism, sequences: &Sequences) -> Result<()> {
    let refused = |what, why| Err(kernels::Error::Unsupported { mechanism: mechanism.id(), what, why }.into());
    let extras = &inputs.extras;
    if extras.clusters.is_some() {
        return refused("a plan for sequences end to end", "it is of a batch; leave it out");
    }
    if extras.landmark_indices.is_some() || extras.get(Parameter::GivenLandmarks).is_some() {
        return refused("given landmarks for sequences end to end", "they are of a batch; leave them out");
    }
    if let Mechanism::LinearInfsa(LinearInfsa { broadcast: false, .. }) = mechanism {
        return refused("sequences end to end", "it returns one row per sequence; set broadcast to true");
    }
    let k = inputs.k.as_ref().unwrap_or(&inputs.q);
    let keys = *sequences.keys().last().expect("bounds are not empty");
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
