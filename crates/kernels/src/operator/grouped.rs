//! Fewer heads of keys and values than of queries: each serves several of these in a row.

use super::{Operator, Pass};
use crate::{Extras, Mask, Result, check, scratch::scratch_len};

impl Operator {
    /// The same operator on keys and values of `kv_heads` heads, `[batch, kv_heads, seq_kv, ..]`: each serves `heads / kv_heads`
    /// heads of queries in a row (grouped-query attention; with one, multi-query attention). The gradients of a key and a value are
    /// the sums over the heads that it serves, in their order.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] where `kv_heads` does not divide the heads; [`crate::Error::Unsupported`] where keys are queries, of which
    /// there are as many.
    ///
    /// ```
    /// use resolvent_kernels::*;
    /// let op = Operator::new(&Mechanism::preset("softmax")?, Shape::square(1, 4, 8, 2), false, Strategy::Auto)?;
    /// let op = op.with_kv_heads(2)?;
    /// let (q, kv, mut out) = (vec![0.5; 4 * 16], vec![0.25; 2 * 16], vec![0.0; 4 * 16]);
    /// let inputs = Inputs { q: &q, k: Some(&kv), v: &kv, extras: Extras::default() };
    /// op.forward(&inputs, &Mask::NONE, &mut out, &mut vec![0.0; op.plan().stats], &mut Scratch::default())?;
    /// assert!((out[63] - 0.25).abs() < 1e-6);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn with_kv_heads(mut self, kv_heads: usize) -> Result<Self> {
        check::sharing(&self.mechanism, self.shape.heads, kv_heads)?;
        self.kv_heads = kv_heads;
        self.plan_scratch();
        Ok(self)
    }

    /// Plans the working memory: of the structures, and of heads that share keys and values.
    pub(super) fn plan_scratch(&mut self) {
        // Gradients of every head of queries, before they are summed; and keys and values of each, for what cannot read them shared.
        let shared = self.kv_heads != self.shape.heads;
        let each = if shared { scratch_len([self.shape.k_len(), self.shape.v_len()]) } else { 0 };
        let read = if self.works_in_place(&Extras::default(), &Mask::NONE, None) { 0 } else { each };
        self.plan.scratch_forward = self.work(Pass::Forward) + read;
        self.plan.scratch_backward = self.work(Pass::Backward) + read + each;
    }

    /// Heads of keys and values.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }
}
