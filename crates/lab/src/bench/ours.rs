//! Our operators on tensors as a call has them.

use resolvent_kernels::{
    ExtraGradients, Extras, Heads, Mask, Mechanism, Operator, Parameter, Plan, Precision, Scratch, Shape, Strategy,
    Strided, StridedGradients, StridedInputs, VarlenInputs, VarlenOperator,
};

use super::{
    PlanSummary,
    buffers::{Buffers, Results, gather, numbers},
    call::{Call, TensorLayout},
    contender::Local,
};
use crate::Result;

/// A mechanism bound to a call: to a batch, or to sequences end to end.
enum Bound {
    Batch(Box<Operator>),
    Sequences(Box<VarlenOperator>),
}

/// What the forward pass left, and the gradient that comes in.
type Finished<'a> = (Strided<&'a [f32]>, &'a [f32], Strided<&'a [f32]>);

impl Bound {
    fn new(mechanism: &Mechanism, call: &Call, precision: Precision) -> Result<Self> {
        let (shape, kv_heads) = (call.shape, call.kv_heads);
        let Some(sequences) = &call.sequences else {
            let operator = Operator::new(mechanism, shape, false, Strategy::Auto)?.with_kv_heads(kv_heads)?;
            return Ok(Self::Batch(Box::new(operator.with_precision(precision))));
        };
        let heads = Heads { kv_heads, ..Heads::new(shape.heads, shape.head_dim) };
        let operator = VarlenOperator::new(mechanism, heads, sequences, false, Strategy::Auto)?;
        Ok(Self::Sequences(Box::new(operator.with_precision(precision))))
    }

    fn plan(&self) -> &Plan {
        match self {
            Self::Batch(operator) => operator.plan(),
            Self::Sequences(operator) => operator.plan(),
        }
    }

    fn mechanism(&self) -> &Mechanism {
        match self {
            Self::Batch(operator) => operator.mechanism(),
            Self::Sequences(operator) => operator.mechanism(),
        }
    }

    /// Views of queries, keys and values, or of their gradients.
    fn views<'a>(&self, call: &Call, [q, k, v]: [&'a [f32]; 3], extras: Extras<'a>) -> Result<StridedInputs<'a, f32>> {
        if call.layout != TensorLayout::Packed {
            let (tokens, tied) = (call.shape.seq_q, self.mechanism().tied);
            let [q, k, v] = [(q, call.shape.heads), (k, call.kv_heads), (v, call.kv_heads)]
                .map(|(x, heads)| call.strided(x, heads, tokens));
            return Ok(StridedInputs { q, k: (!tied).then_some(k), v, extras });
        }
        let packed = &q[..call.packed_len(self.mechanism())];
        Ok(match self {
            Self::Batch(operator) => operator.packed_inputs(packed, extras)?,
            Self::Sequences(operator) => {
                let VarlenInputs { q, k, v, extras, .. } = operator.packed_inputs(packed, extras, None)?;
                StridedInputs { q, k, v, extras }
            }
        })
    }

    fn forward(
        &self,
        inputs: &StridedInputs<'_, f32>,
        out: Strided<&mut [f32]>,
        stats: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<()> {
        let done = match self {
            Self::Batch(operator) => operator.forward_strided(inputs, &Mask::NONE, out, stats, scratch),
            Self::Sequences(operator) => operator.forward(&end_to_end(inputs), &Mask::NONE, out, stats, scratch),
        };
        Ok(done?)
    }

    fn backward(
        &self,
        inputs: &StridedInputs<'_, f32>,
        (out, stats, dout): Finished<'_>,
        into: &mut StridedGradients<'_, f32>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let mask = &Mask::NONE;
        let done = match self {
            Self::Batch(operator) => operator.backward_strided(inputs, mask, out, stats, dout, into, scratch),
            Self::Sequences(operator) => operator.backward(&end_to_end(inputs), mask, out, stats, dout, into, scratch),
        };
        Ok(done?)
    }

    fn backward_packed(
        &self,
        inputs: &StridedInputs<'_, f32>,
        (out, stats, dout): Finished<'_>,
        into: (&mut [f32], &mut ExtraGradients<'_>),
        scratch: &mut Scratch,
    ) -> Result<()> {
        let mask = &Mask::NONE;
        let done = match self {
            Self::Batch(operator) => operator.backward_packed(inputs, mask, out, stats, dout, into, scratch),
            Self::Sequences(operator) => {
                operator.backward_packed(&end_to_end(inputs), mask, out, stats, dout, into, scratch)
            }
        };
        Ok(done?)
    }
}

fn end_to_end<'a>(inputs: &StridedInputs<'a, f32>) -> VarlenInputs<'a, f32> {
    let StridedInputs { q, k, v, extras } = *inputs;
    VarlenInputs { q, k, v, extras, clusters: None }
}

/// What a call will do and needs.
///
/// # Errors
/// What the mechanism refuses.
pub(super) fn plan(mechanism: &Mechanism, call: &Call) -> Result<Plan> {
    Bound::new(mechanism, call, Precision::Full).map(|bound| *bound.plan())
}

/// One of the mechanism's own tensors.
type Own = (Parameter, Vec<f32>);

fn extras(own: &[Own]) -> Extras<'_> {
    own.iter().fold(Extras::default(), |extras, (parameter, x)| extras.with(*parameter, x))
}

/// One of our operators.
pub(super) struct Ours {
    bound: Bound,
    call: Call,
    /// The mechanism's own tensors: drawn where the configuration has no values for them, else what a module starts from.
    own: Vec<Own>,
    /// Their gradients, one after another.
    own_gradients: Vec<f32>,
    stats: Vec<f32>,
    scratch: Scratch,
}

impl Ours {
    /// # Errors
    /// What the mechanism refuses.
    pub fn new(mechanism: &Mechanism, call: &Call, precision: Precision) -> Result<Self> {
        let bound = Bound::new(mechanism, call, precision)?;
        let (own, own_gradients, stats, scratch) = (Vec::new(), Vec::new(), Vec::new(), Scratch::default());
        Ok(Self { bound, call: call.clone(), own, own_gradients, stats, scratch })
    }

    pub fn plan(&self) -> &Plan {
        self.bound.plan()
    }

    pub fn call(&self) -> &Call {
        &self.call
    }

    /// Rows of the output of a head.
    pub fn out_seq(&self) -> usize {
        self.bound.mechanism().out_seq(&self.call.shape)
    }

    /// The mechanism's own tensors, as a call takes them.
    pub fn extras(&self) -> Extras<'_> {
        extras(&self.own)
    }

    /// The gradients of the mechanism's own tensors.
    pub fn own_gradients(&self) -> Vec<(Parameter, &[f32])> {
        let mut left = &self.own_gradients[..];
        let of = |(parameter, x): &Own| {
            let (own, rest) = left.split_at(x.len());
            left = rest;
            (*parameter, own)
        };
        self.own.iter().map(of).collect()
    }

    /// Queries, keys, values and the gradient that comes in as the operator reads them, `[batch, heads, tokens, channels]`.
    pub fn read(&self, b: &Buffers) -> Result<[Vec<f32>; 4]> {
        let [q, k, v] = self.gathered([&b.q, &b.k, &b.v])?;
        let (heads, kv_heads) = (self.call.shape.heads, self.call.kv_heads);
        // What is not there is not read: any numbers do.
        let [q, k] = [(q, heads), (k, kv_heads)].map(|(x, heads)| x.unwrap_or_else(|| vec![0.0; self.call.len(heads)]));
        Ok([q, k, v.unwrap_or_default(), self.rows(&b.dout)])
    }

    /// Queries, keys and values, or their gradients, `[batch, heads, tokens, channels]`; those that the layout has.
    fn gathered(&self, buffers: [&[f32]; 3]) -> Result<[Option<Vec<f32>>; 3]> {
        let StridedInputs { q, k, v, .. } = self.bound.views(&self.call, buffers, Extras::default())?;
        // Side by side, a mechanism that reads values alone has no queries and keys.
        let all = self.call.layout != TensorLayout::Packed || self.bound.mechanism().projections() > 1;
        let of = |x, heads| gather(&x, self.sizes(heads, self.call.shape.seq_q));
        let (heads, kv_heads) = (self.call.shape.heads, self.call.kv_heads);
        let k = k.filter(|_| all).map(|k| of(k, kv_heads));
        Ok([all.then(|| of(q, heads)), k, Some(of(v, kv_heads))])
    }

    fn sizes(&self, heads: usize, rows: usize) -> [usize; 4] {
        [self.call.shape.batch, heads, rows, self.call.shape.head_dim]
    }

    /// A tensor of the output's sizes, `[batch, heads, rows, channels]`.
    fn rows(&self, x: &[f32]) -> Vec<f32> {
        let (heads, rows) = (self.call.shape.heads, self.out_seq());
        gather(&self.call.strided(x, heads, rows), self.sizes(heads, rows))
    }

    fn out_len(&self) -> usize {
        self.sizes(self.call.shape.heads, self.out_seq()).into_iter().product()
    }

    /// The mechanism's own tensors that it needs or learns in any case, and how many elements each has.
    fn wanted(&self) -> Vec<(Parameter, usize)> {
        let (mechanism, shape) = (self.bound.mechanism(), self.call.first());
        let learnt = |p: &Parameter| mechanism.requires(*p, &shape) || p.is_weights() || *p == Parameter::Bias;
        let wanted = mechanism.parameters().into_iter().filter(learnt);
        wanted.map(|p| (p, mechanism.parameter_len(p, &shape))).collect()
    }
}

impl Local for Ours {
    fn prepare(&mut self, _: &Buffers) -> Result<()> {
        let (mechanism, shape) = (self.bound.mechanism(), self.call.first());
        let values = |(n, (parameter, len)): (usize, (Parameter, usize))| {
            let drawn = mechanism.requires(parameter, &shape);
            let seed = 5 + n as u64;
            (parameter, if drawn { numbers(len, seed) } else { mechanism.parameter_default(parameter, &shape) })
        };
        self.own = self.wanted().into_iter().enumerate().map(values).collect();
        self.own_gradients = vec![f32::NAN; self.own.iter().map(|(_, x)| x.len()).sum()];
        Ok(())
    }

    fn forward(&mut self, b: &mut Buffers) -> Result<()> {
        let (rows, len) = (self.out_seq(), self.out_len());
        let Self { bound, call, own, stats, scratch, .. } = self;
        stats.resize(bound.plan().stats, 0.0);
        let inputs = bound.views(call, [&b.q, &b.k, &b.v], extras(own))?;
        bound.forward(&inputs, call.strided(&mut b.out[..len], call.shape.heads, rows), stats, scratch)
    }

    fn training(&mut self, b: &mut Buffers) -> Result<()> {
        Local::forward(self, b)?;
        let (rows, len) = (self.out_seq(), self.out_len());
        let Self { bound, call, own, own_gradients, stats, scratch } = self;
        let Buffers { q, k, v, dout, out, dq, dk, dv, .. } = b;
        let (tokens, heads, kv_heads) = (call.shape.seq_q, call.shape.heads, call.kv_heads);
        let wanted = own.iter().map(|(parameter, x)| (*parameter, x.len()));
        let mut own_into = ExtraGradients::of_parts(own_gradients, wanted);
        let inputs = bound.views(call, [q, k, v], extras(own))?;
        let [out, dout] = [&*out, &*dout].map(|x| call.strided(&x[..len], heads, rows));
        if call.layout == TensorLayout::Packed {
            let packed = &mut dq[..call.packed_len(bound.mechanism())];
            return bound.backward_packed(&inputs, (out, stats, dout), (packed, &mut own_into), scratch);
        }
        let into = [(dq, heads), (dk, kv_heads), (dv, kv_heads)];
        let [dq, dk, dv] = into.map(|(x, heads)| call.strided(&mut x[..], heads, tokens));
        let dk = (!bound.mechanism().tied).then_some(dk);
        let mut into = StridedGradients { dq, dk, dv, extras: own_into };
        bound.backward(&inputs, (out, stats, dout), &mut into, scratch)
    }

    fn solve(&mut self, b: &mut Buffers) -> Result<Results> {
        b.poison();
        self.training(b)?;
        let [dq, dk, dv] = self.gathered([&b.dq, &b.dk, &b.dv])?;
        Ok(Results { out: self.rows(&b.out), dq, dk, dv })
    }

    fn needs(&self, _: Shape) -> u64 {
        let own: usize = self.wanted().iter().map(|(_, len)| len).sum();
        PlanSummary::of(self.plan()).training_bytes.saturating_add(8 * own as u64)
    }

    fn forget(&mut self) {
        (self.stats, self.scratch) = (Vec::new(), Scratch::default());
    }
}
