//! Fewer heads of keys and values than of queries: each serves several of these in a row.

use std::borrow::Cow;

use super::{Operator, narrow};
use crate::{
    ClusterPlan, Element, Error, ExtraGradients, Gradients, Inputs, Mask, Result, Scratch, Shape, check,
    operator::as_f32,
};

impl Operator {
    /// The same operator on keys and values of `kv_heads` heads, `[batch, kv_heads, seq_kv, ..]`: each serves `heads / kv_heads`
    /// heads of queries in a row (grouped-query attention; with one, multi-query attention). The gradients of a key and a value are
    /// the sums over the heads that it serves, in their order.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where `kv_heads` does not divide the heads; [`Error::Unsupported`] where keys are queries, of which
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
        let heads = self.shape.heads;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let got = format!("{kv_heads} for {heads} heads");
            return Err(Error::OutOfRange { field: "kv_heads", got, expected: "a divisor of the heads" });
        }
        if kv_heads != heads && self.mechanism.tied() {
            let why = "queries are keys, so that there are as many heads of both; set tied to false";
            return Err(Error::Unsupported { mechanism: self.mechanism.id(), what: "kv_heads below heads", why });
        }
        self.kv_heads = kv_heads;
        if self.is_grouped() {
            // Keys, values and their gradients of every head, and rows that are widened.
            let bytes = |len: usize| size_of::<f32>() * len;
            let each = self.shape.k_len() + self.shape.v_len();
            self.plan.allocated_forward += bytes(each + self.out_len());
            self.plan.allocated_backward += bytes(2 * each + self.shape.q_len());
        }
        Ok(self)
    }

    /// Heads of keys and values.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    pub(super) fn is_grouped(&self) -> bool {
        self.kv_heads != self.shape.heads
    }

    /// The operator on as many heads of keys as of queries.
    fn ungrouped(&self) -> Self {
        Self { kv_heads: self.shape.heads, ..self.clone() }
    }

    /// The sizes of keys and values.
    fn key_shape(&self) -> Shape {
        Shape { heads: self.kv_heads, ..self.shape }
    }

    fn check_grouped<T>(&self, op: &'static str, inputs: &Inputs<'_, T>) -> Result<()> {
        let keys = self.key_shape();
        check::tensors(op, &self.mechanism, inputs, [self.shape.q_len(), keys.k_len(), keys.v_len()])
    }

    /// Rows of heads of keys, as often as heads of queries share them.
    fn shared<T: Element>(&self, x: &[T]) -> Vec<f32> {
        let times = self.shape.heads / self.kv_heads;
        let wide = as_f32(x);
        let heads = wide.chunks((x.len() / (self.shape.batch * self.kv_heads)).max(1));
        heads.flat_map(|head| std::iter::repeat_n(head, times)).flatten().copied().collect()
    }

    /// The sums of what the heads that share a key get, from the first on.
    fn summed<T: Element>(&self, each: &[f32], out: &mut [T]) {
        let times = self.shape.heads / self.kv_heads;
        let len = (each.len() / self.shape.slices()).max(1);
        for (out, of_heads) in out.chunks_mut(len).zip(each.chunks(len * times)) {
            let mut sums = of_heads[..len].to_vec();
            for head in of_heads.chunks(len).skip(1) {
                sums.iter_mut().zip(head).for_each(|(sum, x)| *sum += x);
            }
            narrow(&sums, out);
        }
    }

    pub(super) fn forward_grouped<T: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        mask: &Mask<'_>,
        out: &mut [T],
        stats: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<()> {
        self.check_grouped("forward", inputs)?;
        let (q, k, v) = (as_f32(inputs.q), inputs.k.map(|k| self.shared(k)), self.shared(inputs.v));
        let each = Inputs { q: &q, k: k.as_deref(), v: &v, extras: inputs.extras };
        let mut wide = vec![0.0; out.len()];
        let done = self.ungrouped().forward(&each, mask, &mut wide, stats, scratch);
        narrow(&wide, out);
        done
    }

    #[allow(clippy::too_many_arguments)] // as [`Operator::backward`]
    pub(super) fn backward_grouped<T: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        mask: &Mask<'_>,
        out: &[T],
        stats: &[f32],
        dout: &[T],
        gradients: &mut Gradients<'_, T>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        self.check_grouped("backward", inputs)?;
        let keys = self.key_shape();
        let dk_len = gradients.dk.as_ref().map_or(keys.k_len(), |dk| dk.len());
        for (tensor, got, expected) in [("dk", dk_len, keys.k_len()), ("dv", gradients.dv.len(), keys.v_len())] {
            check::length("backward", tensor, got, expected, "expected the shape of what it is the gradient of")?;
        }
        let (q, k, v) = (as_f32(inputs.q), inputs.k.map(|k| self.shared(k)), self.shared(inputs.v));
        let each = Inputs { q: &q, k: k.as_deref(), v: &v, extras: inputs.extras };
        let Gradients { dq, dk, dv, extras } = gradients;
        let [mut dq_each, mut dk_each, mut dv_each] =
            [dq.len(), self.shape.k_len(), self.shape.v_len()].map(|len| vec![0.0; len]);
        let mut into = Gradients {
            dq: &mut dq_each,
            dk: dk.is_some().then_some(&mut dk_each[..]),
            dv: &mut dv_each,
            extras: ExtraGradients::reborrow(extras),
        };
        let (out, dout) = (as_f32(out), as_f32(dout));
        let done = self.ungrouped().backward(&each, mask, &out, stats, &dout, &mut into, scratch);
        narrow(&dq_each, dq);
        self.summed(&dv_each, dv);
        if let Some(dk) = dk {
            self.summed(&dk_each, dk);
        }
        done
    }

    pub(super) fn clusters_grouped<'a, T: Element>(
        &self,
        inputs: &Inputs<'a, T>,
        mask: &Mask<'_>,
    ) -> Result<Cow<'a, ClusterPlan>> {
        self.check_grouped("clusters", inputs)?;
        let (q, k, v) = (as_f32(inputs.q), inputs.k.map(|k| self.shared(k)), self.shared(inputs.v));
        let each = Inputs { q: &q, k: k.as_deref(), v: &v, extras: inputs.extras };
        self.ungrouped().clusters(&each, mask).map(|plan| Cow::Owned(plan.into_owned()))
    }
}
