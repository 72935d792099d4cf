//! Fewer heads of keys and values than of queries: each serves several of these in a row.

use std::borrow::Cow;

use super::{
    Operator,
    storage::{as_f32, narrow},
};
use crate::{
    ClusterPlan, Element, Error, ExtraGradients, Extras, Gradients, Inputs, Mask, Result, Scratch, Shape,
    call::HeadGroups, check,
};

/// The inputs of a call whose heads of keys are as many as those of queries.
struct Repeated<'a> {
    q: Cow<'a, [f32]>,
    k: Option<Vec<f32>>,
    v: Vec<f32>,
    extras: Extras<'a>,
}

impl Repeated<'_> {
    fn inputs(&self) -> Inputs<'_, f32> {
        Inputs { q: &self.q, k: self.k.as_deref(), v: &self.v, extras: self.extras }
    }
}

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

    fn groups(&self) -> HeadGroups {
        HeadGroups::new(self.shape.batch, self.shape.heads, self.kv_heads)
    }

    /// Elements of keys and of values.
    fn key_lengths(&self) -> [usize; 2] {
        let keys = Shape { heads: self.kv_heads, ..self.shape };
        [keys.k_len(), keys.v_len()]
    }

    /// The inputs with keys and values for every head of queries.
    fn repeated<'a, T: Element>(&self, op: &'static str, inputs: &Inputs<'a, T>) -> Result<Repeated<'a>> {
        let [k_len, v_len] = self.key_lengths();
        check::tensors(op, &self.mechanism, inputs, [self.shape.q_len(), k_len, v_len])?;
        let repeat = |x| self.groups().repeat(&as_f32::<T>(x));
        let (k, v) = (inputs.k.map(repeat), repeat(inputs.v));
        Ok(Repeated { q: as_f32(inputs.q), k, v, extras: inputs.extras })
    }

    pub(super) fn forward_grouped<T: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        mask: &Mask<'_>,
        out: &mut [T],
        stats: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<()> {
        let each = self.repeated("forward", inputs)?;
        let mut wide = vec![0.0; out.len()];
        let done = self.ungrouped().forward(&each.inputs(), mask, &mut wide, stats, scratch);
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
        let each = self.repeated("backward", inputs)?;
        let [k_len, v_len] = self.key_lengths();
        let dk_len = gradients.dk.as_ref().map_or(k_len, |dk| dk.len());
        for (tensor, got, expected) in [("dk", dk_len, k_len), ("dv", gradients.dv.len(), v_len)] {
            check::length("backward", tensor, got, expected, "expected the shape of what it is the gradient of")?;
        }
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
        let done = self.ungrouped().backward(&each.inputs(), mask, &out, stats, &dout, &mut into, scratch);
        let sum = |each: &[f32]| self.groups().sum(each, |a, b| a + b);
        narrow(&dq_each, dq);
        narrow(&sum(&dv_each), dv);
        if let Some(dk) = dk {
            narrow(&sum(&dk_each), dk);
        }
        done
    }

    pub(super) fn clusters_grouped<'a, T: Element>(
        &self,
        inputs: &Inputs<'a, T>,
        mask: &Mask<'_>,
    ) -> Result<Cow<'a, ClusterPlan>> {
        let each = self.repeated("clusters", inputs)?;
        self.ungrouped().clusters(&each.inputs(), mask).map(|plan| Cow::Owned(plan.into_owned()))
    }
}
