//! What is measured: our operators, and others' ways to the same results.

use resolvent_kernels::{
    ExtraGradients, Extras, Gradients, Inputs, Mask, Mechanism, Operator, Plan, Precision, Scratch, Shape, Strategy,
};

use super::{PlanSummary, ceilings::seconds};
use crate::{
    Result,
    memory::{MemoryProbe, peak_above},
};

/// The tensors of one size, shared by all contenders, and a place for results.
pub(super) struct Buffers {
    pub shape: Shape,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub dout: Vec<f32>,
    pub out: Vec<f32>,
    pub dq: Vec<f32>,
    pub dk: Vec<f32>,
    pub dv: Vec<f32>,
}

impl Buffers {
    pub fn new(shape: Shape) -> Self {
        let [q, k, v, dout] = [1, 2, 3, 4].map(|seed| numbers(shape.q_len(), seed));
        let zeros = || vec![0.0; shape.q_len()];
        Self { shape, q, k, v, dout, out: zeros(), dq: zeros(), dk: zeros(), dv: zeros() }
    }

    /// What they take at a size.
    pub fn bytes(shape: Shape) -> u64 {
        8 * (size_of::<f32>() * shape.q_len()) as u64
    }

    /// Makes results that nobody writes show.
    pub fn poison(&mut self) {
        for results in [&mut self.out, &mut self.dq, &mut self.dk, &mut self.dv] {
            results.fill(f32::NAN);
        }
    }
}

/// Deterministic numbers of about unit variance.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    // The sum of three uniform numbers has variance 1/4.
    (0..len).map(|_| 2.0 * (uniform() + uniform() + uniform())).collect()
}

/// One way to the result of a mechanism at one size.
pub(super) trait Contender {
    /// Leaves output and gradients in the buffers, where it has them.
    fn solve(&mut self, buffers: &mut Buffers) -> Result<()>;

    /// A first forward and a first backward pass, which touch all memory: the most bytes that each holds beyond the tensors
    /// of the call, where they are counted.
    fn warm(&mut self, buffers: &mut Buffers, probe: Option<&dyn MemoryProbe>) -> Result<[Option<u64>; 2]>;

    /// Seconds of one forward pass, and of one forward and backward pass.
    fn round(&mut self, buffers: &mut Buffers) -> Result<[f64; 2]>;

    /// Bytes that it holds in this process at its peak, where they are too many to be tried out.
    fn needs(&self, _: Shape) -> u64 {
        0
    }
}

/// A contender that computes in this process.
pub(super) trait Local {
    /// Makes the call's tensors in its own form, which are not counted as memory of a pass.
    fn prepare(&mut self, _: &Buffers) -> Result<()> {
        Ok(())
    }

    fn forward(&mut self, buffers: &mut Buffers) -> Result<()>;

    /// A forward and a backward pass.
    fn training(&mut self, buffers: &mut Buffers) -> Result<()>;

    /// As [`Contender::solve`].
    fn solve(&mut self, buffers: &mut Buffers) -> Result<()>;

    /// Gives back the memory that it keeps between calls.
    fn forget(&mut self) {}

    /// As [`Contender::needs`].
    fn needs(&self, _: Shape) -> u64 {
        0
    }
}

/// Bytes of `matrices` of all scores.
pub(super) fn scores(shape: Shape, matrices: u64) -> u64 {
    matrices * (size_of::<f32>() * shape.slices() * shape.seq_q * shape.seq_kv) as u64
}

impl<T: Local> Contender for T {
    fn solve(&mut self, buffers: &mut Buffers) -> Result<()> {
        Local::solve(self, buffers)
    }

    fn needs(&self, shape: Shape) -> u64 {
        Local::needs(self, shape)
    }

    fn warm(&mut self, buffers: &mut Buffers, probe: Option<&dyn MemoryProbe>) -> Result<[Option<u64>; 2]> {
        self.prepare(buffers)?;
        let forward = counted(probe, || self.forward(buffers))?;
        self.forget();
        Ok([forward, counted(probe, || self.training(buffers))?])
    }

    fn round(&mut self, buffers: &mut Buffers) -> Result<[f64; 2]> {
        let mut outcome = Ok(());
        let forward = seconds(|| outcome = self.forward(buffers));
        outcome?;
        let mut outcome = Ok(());
        let training = seconds(|| outcome = self.training(buffers));
        outcome.map(|()| [forward, training])
    }
}

/// Peak bytes of `work`, where there is a counter.
fn counted(probe: Option<&dyn MemoryProbe>, work: impl FnOnce() -> Result<()>) -> Result<Option<u64>> {
    match probe {
        Some(probe) => peak_above(probe, probe.held(), work).map(Some),
        None => work().map(|()| None),
    }
}

/// One of our operators.
pub(super) struct Ours {
    operator: Operator,
    stats: Vec<f32>,
    scratch: Scratch,
}

impl Ours {
    /// # Errors
    /// What the mechanism refuses.
    pub fn new(mechanism: &Mechanism, shape: Shape, precision: Precision) -> Result<Self> {
        let operator = Operator::new(mechanism, shape, false, Strategy::Auto)?.with_precision(precision);
        Ok(Self { operator, stats: Vec::new(), scratch: Scratch::default() })
    }

    pub fn plan(&self) -> &Plan {
        self.operator.plan()
    }
}

impl Local for Ours {
    fn forward(&mut self, b: &mut Buffers) -> Result<()> {
        let Self { operator, stats, scratch } = self;
        stats.resize(operator.plan().stats, 0.0);
        let k = (!operator.mechanism().tied()).then_some(&b.k[..]);
        let inputs = Inputs { q: &b.q, k, v: &b.v, extras: Extras::default() };
        Ok(operator.forward(&inputs, &Mask::NONE, &mut b.out[..operator.out_len()], stats, scratch)?)
    }

    fn training(&mut self, b: &mut Buffers) -> Result<()> {
        self.forward(b)?;
        let Self { operator, stats, scratch } = self;
        let (tied, len) = (operator.mechanism().tied(), operator.out_len());
        let inputs = Inputs { q: &b.q, k: (!tied).then_some(&b.k[..]), v: &b.v, extras: Extras::default() };
        let dk = (!tied).then_some(&mut b.dk[..]);
        let mut gradients = Gradients { dq: &mut b.dq, dk, dv: &mut b.dv, extras: ExtraGradients::default() };
        let (out, dout) = (&b.out[..len], &b.dout[..len]);
        Ok(operator.backward(&inputs, &Mask::NONE, out, stats, dout, &mut gradients, scratch)?)
    }

    fn solve(&mut self, buffers: &mut Buffers) -> Result<()> {
        self.training(buffers)
    }

    fn needs(&self, _: Shape) -> u64 {
        PlanSummary::of(self.plan()).training_bytes
    }

    fn forget(&mut self) {
        (self.stats, self.scratch) = (Vec::new(), Scratch::default());
    }
}
