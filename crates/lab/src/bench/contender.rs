//! What is measured: our operators, and others' ways to the same results.

use resolvent_kernels::Shape;

use super::{
    buffers::{Buffers, Results},
    ceilings::seconds,
};
use crate::{
    Result,
    memory::{MemoryProbe, peak_above},
};

/// One way to the result of a mechanism at one size.
pub(super) trait Contender {
    /// Output and gradients of the buffers' tensors.
    fn solve(&mut self, buffers: &mut Buffers) -> Result<Results>;

    /// A first forward and a first backward pass, which touch all memory: the most bytes that each holds beyond the tensors
    /// of the call, where they are counted.
    fn warm(&mut self, buffers: &mut Buffers, probe: Option<&dyn MemoryProbe>) -> Result<[Option<u64>; 2]>;

    /// Seconds of one forward pass, and of one forward and backward pass where it has a backward pass.
    fn round(&mut self, buffers: &mut Buffers) -> Result<(f64, Option<f64>)>;

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
    fn solve(&mut self, buffers: &mut Buffers) -> Result<Results>;

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
    fn solve(&mut self, buffers: &mut Buffers) -> Result<Results> {
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

    fn round(&mut self, buffers: &mut Buffers) -> Result<(f64, Option<f64>)> {
        let mut outcome = Ok(());
        let forward = seconds(|| outcome = self.forward(buffers));
        outcome?;
        let mut outcome = Ok(());
        let training = seconds(|| outcome = self.training(buffers));
        outcome.map(|()| (forward, Some(training)))
    }
}

/// Peak bytes of `work`, where there is a counter.
fn counted(probe: Option<&dyn MemoryProbe>, work: impl FnOnce() -> Result<()>) -> Result<Option<u64>> {
    match probe {
        Some(probe) => peak_above(probe, probe.held(), work).map(Some),
        None => work().map(|()| None),
    }
}
