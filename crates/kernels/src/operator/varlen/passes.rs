//! Forward and backward pass, sequence by sequence.

use std::sync::{Mutex, PoisonError};

use super::{
    super::{
        packed::Packed,
        tensors::{CallTensors, ForwardPass, Role, Written},
    },
    VarlenInputs, VarlenOperator,
};
use crate::{
    ClusterPlan, Element, Error, ExtraGradients, Extras, Mask, Parameter, Result, Scratch, Strided, StridedGradients,
    StridedInputs,
    call::{Layout, Target, View},
    check,
    mechanism::Bias,
    parallel::{self, FirstError, Parts},
};

impl VarlenOperator {
    /// `out = A(q, k) v`, sequence by sequence. Writes all rows of `out` (`[heads, tokens, value_dim]`) and all of `stats`
    /// (`plan().stats` elements). Masks are `[tokens]` and `[keys]`.
    ///
    /// # Errors
    /// As [`crate::Operator::forward`], within [`Error::Sequence`] where the fault is one sequence's: of several the first. [`Error::Length`],
    /// [`Error::Tensor`] for strides that lead beyond a tensor's end or write an element twice; [`Error::Unsupported`] for tensors
    /// that are of single tokens or of a batch.
    pub fn forward<T: Element>(
        &self,
        inputs: &VarlenInputs<'_, T>,
        mask: &Mask<'_>,
        out: Strided<&mut [T]>,
        stats: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<()> {
        const OP: &str = "forward";
        self.check(OP, inputs, mask)?;
        out.check(OP, "out", self.sizes(Role::Output))?;
        check::length(OP, "stats", stats.len(), self.plan.stats, "size it with `plan().stats`")?;
        let (x, all) = (self.operands(inputs), Target::new(out, self.sizes(Role::Output)));
        let (out, stats) = (&all, Parts::new(stats));
        let layout = |n: usize| out.layout().part(self.sequences.range(n));
        let needed = |n: usize| {
            let (own, mask) = (self.of_sequence(n, &x, inputs), self.mask_of(n, mask));
            self.operator(n).memory(&own, &mask, &layout(n))
        };
        self.each(needed, scratch, |n, memory| {
            let (operator, own, mask) = (self.operator(n), self.of_sequence(n, &x, inputs), self.mask_of(n, mask));
            let first = self.parts[n].stats;
            // SAFETY: every sequence has statistics of its own.
            let stats = unsafe { stats.part(first..first + operator.plan().stats) };
            operator.check_call(OP, &own.extras, &mask)?;
            // SAFETY: every sequence has tokens of its own.
            let out = unsafe { out.part(self.sequences.range(n)) };
            operator.run(&own, &mask, out, stats, memory)
        })
    }

    /// The gradients of `<dout, out>`. `out` and `stats` are what [`VarlenOperator::forward`] wrote for the same inputs.
    ///
    /// # Errors
    /// As [`VarlenOperator::forward`]. Where the first fault is [`Error::Overflow`] or [`Error::Close`], all gradients of sequences without
    /// another fault are written.
    #[allow(clippy::too_many_arguments)] // the call's tensors, what forward saved, and where to write
    pub fn backward<T: Element>(
        &self,
        inputs: &VarlenInputs<'_, T>,
        mask: &Mask<'_>,
        out: Strided<&[T]>,
        stats: &[f32],
        dout: Strided<&[T]>,
        gradients: &mut StridedGradients<'_, T>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let finished = self.finished(inputs, mask, (out, stats, dout))?;
        let into = Written::of(gradients.reborrow(), |role| self.sizes(role), self.mechanism())?;
        self.differentiate(inputs, mask, &finished, into, scratch)
    }

    /// Views of what one layer has projected, as [`crate::Operator::packed_inputs`] makes them; `packed` is `[tokens, width]`.
    ///
    /// # Errors
    /// As [`crate::Operator::packed_inputs`].
    pub fn packed_inputs<'a, T>(
        &self,
        packed: &'a [T],
        extras: Extras<'a>,
        clusters: Option<&'a [ClusterPlan]>,
    ) -> Result<VarlenInputs<'a, T>> {
        let places = self.packed(packed.len())?;
        let StridedInputs { q, k, v, extras } = places.inputs(self.mechanism(), packed, extras);
        Ok(VarlenInputs { q, k, v, extras, clusters })
    }

    /// [`VarlenOperator::backward`] that writes the gradients side by side, as [`VarlenOperator::packed_inputs`] reads.
    ///
    /// # Errors
    /// As [`VarlenOperator::backward`] and [`VarlenOperator::packed_inputs`].
    #[allow(clippy::too_many_arguments)] // as [`VarlenOperator::backward`]
    pub fn backward_packed<T: Element>(
        &self,
        inputs: &VarlenInputs<'_, T>,
        mask: &Mask<'_>,
        out: Strided<&[T]>,
        stats: &[f32],
        dout: Strided<&[T]>,
        (packed, extras): (&mut [T], &mut ExtraGradients<'_>),
        scratch: &mut Scratch,
    ) -> Result<()> {
        let places = self.packed(packed.len())?;
        let finished = self.finished(inputs, mask, (out, stats, dout))?;
        let packed = Parts::new(packed);
        let into = places.written(&packed, |role| self.sizes(role), extras.reborrow());
        self.differentiate(inputs, mask, &finished, into, scratch)
    }

    fn packed(&self, len: usize) -> Result<Packed> {
        let (tokens, keys) = (self.sequences.tokens(), self.sequences.keys());
        if tokens != keys {
            let got = format!("{tokens} queries and {keys} keys");
            return Err(Error::OutOfRange { field: "sequences", got, expected: "as many queries as keys" });
        }
        let places = Packed::new(self.mechanism(), self.heads, tokens);
        let remedy = "expected tokens * the channels of queries, keys and values";
        check::length("packed", "packed", len, places.len(1), remedy)?;
        Ok(places)
    }

    /// What the forward pass left of a call that fits.
    fn finished<'a, T: Element>(
        &self,
        inputs: &VarlenInputs<'_, T>,
        mask: &Mask<'_>,
        (out, stats, dout): (Strided<&'a [T]>, &'a [f32], Strided<&'a [T]>),
    ) -> Result<ForwardPass<'a, T>> {
        const OP: &str = "backward";
        self.check(OP, inputs, mask)?;
        out.check(OP, "out", self.sizes(Role::Output))?;
        dout.check(OP, "dout", self.sizes(Role::Output))?;
        check::length(OP, "stats", stats.len(), self.plan.stats, "pass what forward wrote")?;
        Ok(ForwardPass { out: self.view(out, Role::Output), stats, dout: self.view(dout, Role::Output) })
    }

    fn differentiate<T: Element>(
        &self,
        inputs: &VarlenInputs<'_, T>,
        mask: &Mask<'_>,
        finished: &ForwardPass<'_, T>,
        into: Written<'_, T>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let Written { dq, dk, dv, mut extras } = into;
        if self.has_maps_of_a_length() && extras.iter().any(|(parameter, _)| parameter.is_map()) {
            let (what, why) = OF_A_LENGTH;
            return Err(Error::Unsupported { mechanism: self.mechanism().id(), what, why });
        }
        check::parameter_gradients("backward", self.mechanism(), self.operators[0].shape(), &mut extras)?;
        let wanted: Vec<_> = extras.iter().map(|(parameter, x)| (parameter, x.len())).collect();
        let own_len = wanted.iter().map(|(_, len)| len).sum::<usize>();
        let mut each = vec![0.0; self.parts.len() * own_len];
        let (x, parameters) = (self.operands(inputs), Parts::new(&mut each));
        // What a sequence reads and writes.
        // SAFETY: every sequence has tokens and parameters of its own.
        let of_sequence = |n: usize| unsafe {
            let (queries, keys) = (self.sequences.range(n), self.sequences.key_range(n));
            let own = parameters.part(n * own_len..(n + 1) * own_len);
            let extras = ExtraGradients::of_parts(own, wanted.iter().copied());
            let dq = dq.as_ref().map(|dq| dq.part(queries.clone()));
            let dk = dk.as_ref().map(|dk| dk.part(keys.clone()));
            let stats = &finished.stats[self.parts[n].stats..][..self.operator(n).plan().stats];
            let [out, dout] = [finished.out, finished.dout].map(|x| x.part(queries.clone()));
            (ForwardPass { out, stats, dout }, Written { dq, dk, dv: dv.part(keys), extras })
        };
        let needed = |n: usize| {
            let (own, mask) = (self.of_sequence(n, &x, inputs), self.mask_of(n, mask));
            let (finished, mut into) = of_sequence(n);
            self.operator(n).backward_memory(&own, &mask, &finished, &mut into)
        };
        let done = self.each(needed, scratch, |n, memory| {
            let (operator, own, mask) = (self.operator(n), self.of_sequence(n, &x, inputs), self.mask_of(n, mask));
            operator.check_call("backward", &own.extras, &mask)?;
            let (finished, into) = of_sequence(n);
            operator.run_backward(&own, &mask, &finished, into, memory)
        });
        done.and(sum_parameters(&each, own_len, &mut extras))
    }

    /// The plans of a clustered call, one per sequence: made once and passed to both passes, they spare planning again.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for mechanisms without clusters; else as [`VarlenOperator::forward`].
    pub fn clusters<T: Element>(
        &self,
        inputs: &VarlenInputs<'_, T>,
        mask: &Mask<'_>,
        scratch: &mut Scratch,
    ) -> Result<Vec<ClusterPlan>> {
        const OP: &str = "clusters";
        self.mechanism().clusters()?;
        self.check(OP, inputs, mask)?;
        let made = Mutex::new(vec![None; self.parts.len()]);
        let x = self.operands(inputs);
        self.each(
            |_| 1,
            scratch,
            |n, _| {
                let (own, mask) = (self.of_sequence(n, &x, inputs), self.mask_of(n, mask));
                self.operator(n).check_call(OP, &own.extras, &mask)?;
                let plan = self.operator(n).plan_clusters(&own, &mask)?.into_owned();
                made.lock().unwrap_or_else(PoisonError::into_inner)[n] = Some(plan);
                Ok(())
            },
        )?;
        Ok(made.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().flatten().collect())
    }

    /// Runs `task(n, memory)` on `needed(n)` f32 for every sequence; the first sequence's error is returned, whatever the threads.
    fn each(
        &self,
        needed: impl Fn(usize) -> usize,
        scratch: &mut Scratch,
        task: impl Fn(usize, &mut [f32]) -> Result<()> + Sync,
    ) -> Result<()> {
        let [alone, per_worker] = self.needed(needed);
        let work = scratch.take_for("sequences", self.scratch([alone, per_worker]), 0)?;
        let failed = FirstError::default();
        let attempt = |n: usize, memory: &mut [f32]| failed.take(n, task(n, memory));
        self.alone.iter().for_each(|&n| attempt(n, work));
        let of_task = |at: usize, memory: &mut [f32]| attempt(self.shared_out[at], memory);
        parallel::for_each(self.shared_out.len(), work, per_worker, of_task);
        failed.into_inner().map_or(Ok(()), |(n, error)| Err(error.of_sequence(n)))
    }

    fn view<'a, T: Element>(&self, x: Strided<&'a [T]>, role: Role) -> View<'a, T> {
        let sizes = self.sizes(role);
        View::new(x.data, Layout::of(&x, sizes, self.heads.heads / sizes[1]))
    }

    /// The tensors of all sequences.
    fn operands<'a, T: Element>(&self, inputs: &VarlenInputs<'a, T>) -> CallTensors<'a, T> {
        let VarlenInputs { q, k, v, extras, .. } = *inputs;
        let k = k.map(|k| self.view(k, Role::Key));
        CallTensors::new(self.view(q, Role::Query), k, self.view(v, Role::Value), extras)
    }

    /// Those of a sequence.
    fn of_sequence<'a, T: Element>(
        &self,
        n: usize,
        all: &CallTensors<'a, T>,
        inputs: &VarlenInputs<'a, T>,
    ) -> CallTensors<'a, T> {
        let (queries, keys) = (self.sequences.range(n), self.sequences.key_range(n));
        let extras = inputs.clusters.map_or(all.extras, |plans| all.extras.with_clusters(&plans[n]));
        let extras = match extras.dropout {
            Some(dropout) => extras.with_dropout(dropout.reseeded(n as u64)),
            None => extras,
        };
        let k = all.k.map(|k| k.part(keys.clone()));
        CallTensors { q: all.q.part(queries), k, v: all.v.part(keys), extras, sharing: all.sharing }
    }

    fn mask_of<'a>(&self, n: usize, mask: &Mask<'a>) -> Mask<'a> {
        let key = mask.key.map(|keep| &keep[self.sequences.key_range(n)]);
        let query = mask.query.map(|keep| &keep[self.sequences.range(n)]);
        Mask { causal: mask.causal, key, query }
    }

    /// The sizes of a tensor or its gradient.
    fn sizes(&self, role: Role) -> [usize; 4] {
        let (h, s) = (self.heads, &self.sequences);
        match role {
            Role::Query => [1, h.heads, s.tokens(), h.head_dim],
            Role::Key => [1, h.kv_heads, s.keys(), h.head_dim],
            Role::Value => [1, h.kv_heads, s.keys(), h.value_dim],
            Role::Output => [1, h.heads, s.tokens(), h.value_dim],
        }
    }

    /// Whether tensors and masks fit the sequences.
    fn check<T>(&self, op: &'static str, inputs: &VarlenInputs<'_, T>, mask: &Mask<'_>) -> Result<()> {
        inputs.q.check(op, "q", self.sizes(Role::Query))?;
        inputs.v.check(op, "v", self.sizes(Role::Value))?;
        check::keys(op, inputs.k.is_some(), self.mechanism())?;
        inputs.k.map_or(Ok(()), |k| k.check(op, "k", self.sizes(Role::Key)))?;
        let s = &self.sequences;
        for (tensor, keep, tokens) in [("key_mask", mask.key, s.keys()), ("query_mask", mask.query, s.tokens())] {
            let len = keep.map_or(tokens, <[bool]>::len);
            check::length(op, tensor, len, tokens, "expected an element per token of all sequences")?;
        }
        if let Some(plans) = inputs.clusters {
            check::length(op, "clusters", plans.len(), s.len(), "expected a plan per sequence")?;
        }
        self.check_extras(op, &inputs.extras)
    }

    /// Whether maps of tokens are as wide as a call has keys.
    fn has_maps_of_a_length(&self) -> bool {
        self.mechanism().projected().is_some_and(|m| m.max_tokens.is_none())
    }

    fn check_extras(&self, op: &'static str, extras: &Extras<'_>) -> Result<()> {
        self.accepts(extras)?;
        check::extras(op, self.mechanism(), self.operators[0].shape(), extras)
    }

    /// Whether `extras` can be given to several sequences at once: everything but what is of single tokens or of a batch.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming what cannot, and what can in its place.
    pub fn accepts(&self, extras: &Extras<'_>) -> Result<()> {
        let mechanism = self.mechanism();
        let of_tokens = matches!(mechanism.bias, Some(Bias::Tensor(m)) if m.batch || m.queries || m.keys);
        let has_map = extras.iter().any(|(parameter, _)| parameter.is_map());
        let refused = [
            (has_map && self.has_maps_of_a_length(), OF_A_LENGTH.0, OF_A_LENGTH.1),
            (extras.clusters.is_some(), "one plan for all sequences", "give a plan per sequence, in `clusters`"),
            (extras.landmark_indices.is_some(), "landmark_indices of sequences", "they are of a batch; leave them out"),
            (extras.get(Parameter::GivenLandmarks).is_some(), "given landmarks of sequences", "they are of a batch"),
            (
                of_tokens,
                "a bias tensor of tokens of sequences",
                "it has no place for several lengths; take alibi or buckets",
            ),
        ];
        if let Some((_, what, why)) = refused.into_iter().find(|(given, ..)| *given) {
            return Err(Error::Unsupported { mechanism: mechanism.id(), what, why });
        }
        Ok(())
    }
}

/// Why maps that have a column for each token of a sequence are refused for several, or their gradients.
const OF_A_LENGTH: (&str, &str) =
    ("maps of sequences of several lengths", "set structure.max_tokens to the longest; others take the first columns");

/// Adds up the gradients of each sequence, in their order.
fn sum_parameters(each: &[f32], own_len: usize, extras: &mut ExtraGradients<'_>) -> Result<()> {
    let mut first = 0;
    for (parameter, into) in extras.iter() {
        for (at, into) in into.iter_mut().enumerate() {
            let of_sequences = each.iter().skip(first + at).step_by(own_len);
            *into = of_sequences.map(|&x| f64::from(x)).sum::<f64>() as f32;
        }
        first += into.len();
        if let Some(index) = into.iter().position(|x| !x.is_finite()) {
            return Err(Error::Overflow { tensor: parameter.gradient_name(), index });
        }
    }
    Ok(())
}
