//! The tensors of a call in their storage type, and as the f32 that structures compute with: as they lie where these can read and
//! write them there, else by way of working memory.

use super::{Operator, Pass};
use crate::{
    Element, ExtraGradients, Extras, Inputs, Mask, Mechanism, Result, Shape, Strided, StridedGradients, StridedInputs,
    call::{GradientTargets, Layout, Saved, Target, View},
    check,
    scratch::{cut, scratch_len},
};

/// Queries, keys and values that were found to fit.
#[derive(Debug, Clone, Copy)]
pub(super) struct CallTensors<'a, T = f32> {
    pub q: View<'a, T>,
    /// `None` iff the mechanism is tied.
    pub k: Option<View<'a, T>>,
    pub v: View<'a, T>,
    pub extras: Extras<'a>,
    /// As [`crate::call::Call::sharing`].
    pub sharing: usize,
}

/// What the forward pass left, and the gradient that comes in.
#[derive(Debug, Clone, Copy)]
pub(super) struct ForwardPass<'a, T> {
    pub out: View<'a, T>,
    pub stats: &'a [f32],
    pub dout: View<'a, T>,
}

/// Where gradients go: those that are wanted. Those of keys and values have the heads of these.
pub(super) struct Written<'a, T> {
    pub dq: Option<Target<'a, T>>,
    pub dk: Option<Target<'a, T>>,
    pub dv: Target<'a, T>,
    pub extras: ExtraGradients<'a>,
}

impl<'a, T: Element> Written<'a, T> {
    /// All gradients, of tensors of such `sizes`.
    pub fn of(
        gradients: StridedGradients<'a, T>,
        sizes: impl Fn(Role) -> [usize; 4],
        mechanism: &Mechanism,
    ) -> Result<Self> {
        const OP: &str = "backward";
        let StridedGradients { dq, dk, dv, extras } = gradients;
        dq.check(OP, "dq", sizes(Role::Query))?;
        dv.check(OP, "dv", sizes(Role::Value))?;
        check::gradient_of_keys(OP, dk.is_some(), mechanism)?;
        dk.as_ref().map_or(Ok(()), |dk| dk.check(OP, "dk", sizes(Role::Key)))?;
        let target = |x, role| Target::new(x, sizes(role));
        let dk = dk.map(|dk| target(dk, Role::Key));
        Ok(Self { dq: Some(target(dq, Role::Query)), dk, dv: target(dv, Role::Value), extras })
    }
}

/// What a tensor is in a call; its gradient has the same sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Query,
    Key,
    Value,
    Output,
}

impl Operator {
    /// `[batch, heads, tokens, channels]` of a tensor.
    pub(super) fn sizes(&self, role: Role) -> [usize; 4] {
        let Shape { batch, heads, seq_q, seq_kv, head_dim, value_dim } = self.shape;
        match role {
            Role::Query => [batch, heads, seq_q, head_dim],
            Role::Key => [batch, self.kv_heads, seq_kv, head_dim],
            Role::Value => [batch, self.kv_heads, seq_kv, value_dim],
            Role::Output => [batch, heads, self.out_seq(), value_dim],
        }
    }

    fn view<'a, T: Element>(&self, x: Strided<&'a [T]>, role: Role) -> View<'a, T> {
        let sizes = self.sizes(role);
        View::new(x.data, Layout::of(&x, sizes, self.shape.heads / sizes[1].max(1)))
    }

    /// Tensors in one piece.
    pub(super) fn of_slices<'a, T: Element>(
        &self,
        op: &'static str,
        inputs: &Inputs<'a, T>,
        mask: &Mask<'_>,
    ) -> Result<CallTensors<'a, T>> {
        let lengths = [Role::Query, Role::Key, Role::Value].map(|role| len(self.sizes(role)));
        check::tensors(op, &self.mechanism, inputs, lengths)?;
        self.check_call(op, &inputs.extras, mask)?;
        let Inputs { q, k, v, extras } = *inputs;
        let view = |x, role| self.view(self.in_one_piece(x, role), role);
        Ok(CallTensors::new(view(q, Role::Query), k.map(|k| view(k, Role::Key)), view(v, Role::Value), extras))
    }

    /// Tensors that lie anywhere.
    pub(super) fn of_strided<'a, T: Element>(
        &self,
        op: &'static str,
        inputs: &StridedInputs<'a, T>,
        mask: &Mask<'_>,
    ) -> Result<CallTensors<'a, T>> {
        let StridedInputs { q, k, v, extras } = *inputs;
        q.check(op, "q", self.sizes(Role::Query))?;
        check::keys(op, k.is_some(), &self.mechanism)?;
        k.map_or(Ok(()), |k| k.check(op, "k", self.sizes(Role::Key)))?;
        v.check(op, "v", self.sizes(Role::Value))?;
        self.check_call(op, &extras, mask)?;
        let k = k.map(|k| self.view(k, Role::Key));
        Ok(CallTensors::new(self.view(q, Role::Query), k, self.view(v, Role::Value), extras))
    }

    pub(super) fn finished<'a, T: Element>(
        &self,
        out: Strided<&'a [T]>,
        stats: &'a [f32],
        dout: Strided<&'a [T]>,
    ) -> Result<ForwardPass<'a, T>> {
        const OP: &str = "backward";
        out.check(OP, "out", self.sizes(Role::Output))?;
        check::length(OP, "stats", stats.len(), self.plan.stats, "pass what forward wrote")?;
        dout.check(OP, "dout", self.sizes(Role::Output))?;
        Ok(ForwardPass { out: self.view(out, Role::Output), stats, dout: self.view(dout, Role::Output) })
    }

    /// The strides of a tensor in one piece.
    pub(super) fn in_one_piece<D>(&self, data: D, role: Role) -> Strided<D> {
        let [_, heads, tokens, channels] = self.sizes(role);
        Strided::heads_first(data, [heads, tokens, channels])
    }

    /// f32 of working memory of [`Operator::run`].
    pub(super) fn memory<T: Element>(&self, x: &CallTensors<'_, T>, mask: &Mask<'_>, out: &Layout) -> usize {
        scratch_len(x.forward_sizes(out, self.works_in_place(&x.extras, mask, None))) + self.work(Pass::Forward)
    }

    /// The forward pass, on `memory` of [`Operator::memory`].
    pub(super) fn run<T: Element>(
        &self,
        x: &CallTensors<'_, T>,
        mask: &Mask<'_>,
        mut out: Target<'_, T>,
        stats: &mut [f32],
        memory: &mut [f32],
    ) -> Result<()> {
        let in_place = self.works_in_place(&x.extras, mask, None);
        let ([q, k, v, o], work) = cut(memory, x.forward_sizes(out.layout(), in_place));
        let wide = x.widened(in_place, [q, k, v]);
        if let Some(out) = out.as_f32(in_place) {
            return self.forward_f32(&wide, mask, out, stats, work);
        }
        self.forward_f32(&wide, mask, Target::like(o, out.layout()), stats, work)?;
        out.scatter("out", o, 1)
    }

    /// f32 of working memory of [`Operator::run_backward`].
    pub(super) fn backward_memory<T: Element>(
        &self,
        x: &CallTensors<'_, T>,
        mask: &Mask<'_>,
        finished: &ForwardPass<'_, T>,
        into: &mut Written<'_, T>,
    ) -> usize {
        let in_place = self.works_in_place(&x.extras, mask, Some(&mut into.extras));
        scratch_len(x.backward_sizes(finished, into, in_place)) + self.work(Pass::Backward)
    }

    /// The backward pass, on `memory` of [`Operator::backward_memory`].
    pub(super) fn run_backward<T: Element>(
        &self,
        x: &CallTensors<'_, T>,
        mask: &Mask<'_>,
        finished: &ForwardPass<'_, T>,
        mut into: Written<'_, T>,
        memory: &mut [f32],
    ) -> Result<()> {
        let in_place = self.works_in_place(&x.extras, mask, Some(&mut into.extras));
        let ([q, k, v, o, g, dq, dk, dv], work) = cut(memory, x.backward_sizes(finished, &into, in_place));
        let wide = x.widened(in_place, [q, k, v]);
        let out = finished.out.widened(in_place, o);
        let saved = Saved { out, stats: finished.stats, dout: finished.dout.widened(in_place, g) };
        let serves = x.v.layout().serves;
        let Written { dq: dq_into, dk: dk_into, dv: dv_into, extras } = &mut into;
        let mut done = {
            let gradients = GradientTargets {
                dq: Target::each(dq_into.as_mut(), x.q.layout(), in_place, dq),
                dk: x.k.map(|k| Target::each(dk_into.as_mut(), k.layout(), in_place, dk)),
                dv: Target::each(Some(&mut *dv_into), x.v.layout(), in_place, dv),
                extras: extras.reborrow(),
            };
            self.backward_f32(&wide, mask, &saved, gradients, work)
        };
        for (tensor, into, each, serves) in
            [("dq", dq_into.as_mut(), dq, 1), ("dk", dk_into.as_mut(), dk, serves), ("dv", Some(dv_into), dv, serves)]
        {
            if let Some(into) = into.filter(|_| !each.is_empty()) {
                done = done.and(into.scatter(tensor, each, serves));
            }
        }
        done
    }
}

impl<'a, T: Element> CallTensors<'a, T> {
    /// Tensors as they were given: keys may be of fewer heads than queries.
    pub(super) fn new(q: View<'a, T>, k: Option<View<'a, T>>, v: View<'a, T>, extras: Extras<'a>) -> Self {
        Self { q, k, v, extras, sharing: k.map_or(1, |k| k.layout().serves) }
    }

    /// f32 of working memory for q, k, v and `out`.
    fn forward_sizes(&self, out: &Layout, in_place: bool) -> [usize; 4] {
        let len = |x: &View<'_, T>| x.widened_len(in_place);
        [
            len(&self.q),
            self.k.as_ref().map_or(0, len),
            len(&self.v),
            if out.is_direct::<T>(in_place) { 0 } else { out.len() },
        ]
    }

    /// For q, k, v, `out`, `dout` and the gradients of the first three.
    fn backward_sizes(&self, finished: &ForwardPass<'_, T>, into: &Written<'_, T>, in_place: bool) -> [usize; 8] {
        let len = |x: &View<'_, T>| x.widened_len(in_place);
        let each = |into: Option<&Target<'_, T>>, x: &View<'_, T>| Target::each_len(into, x.layout(), in_place);
        [
            len(&self.q),
            self.k.as_ref().map_or(0, len),
            len(&self.v),
            len(&finished.out),
            len(&finished.dout),
            each(into.dq.as_ref(), &self.q),
            self.k.as_ref().map_or(0, |k| each(into.dk.as_ref(), k)),
            each(Some(&into.dv), &self.v),
        ]
    }

    /// In f32: as they lie, or in buffers.
    pub(super) fn widened(&self, in_place: bool, [q, k, v]: [&'a mut [f32]; 3]) -> CallTensors<'a> {
        let k = self.k.map(|x| x.widened(in_place, k));
        let (q, v) = (self.q.widened(in_place, q), self.v.widened(in_place, v));
        CallTensors { q, k, v, extras: self.extras, sharing: self.sharing }
    }
}

fn len(sizes: [usize; 4]) -> usize {
    sizes.into_iter().fold(1, usize::saturating_mul)
}
