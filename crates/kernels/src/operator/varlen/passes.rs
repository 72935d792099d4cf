//! Forward and backward pass, sequence by sequence.

use std::sync::{Mutex, PoisonError};

use super::{
    Pass, VarlenGradients, VarlenInputs, VarlenOperator,
    rows::{Rows, Target},
    sizes,
};
use crate::{
    ClusterPlan, Element, Error, ExtraGradients, Extras, Gradients, Inputs, Mask, Parameter, Result, Scratch, Strided,
    call::Saved,
    check,
    mechanism::Bias,
    parallel::{self, Parts},
    scratch::cut,
};

/// What a tensor is in a call; its gradient has the same sizes.
#[derive(Debug, Clone, Copy)]
enum Role {
    Query,
    Key,
    Value,
    Output,
}

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
        let (out, stats) = (Target::new(out), Parts::new(stats));
        self.each(Pass::Forward, scratch, |n, memory| {
            let operator = self.operator(n);
            let ([q, k, v, o, ..], work) = cut(memory, sizes(operator, Pass::Forward));
            let own = self.gathered(n, inputs, [q, k, v]);
            let first = self.parts[n].stats;
            // SAFETY: every sequence has statistics of its own.
            let stats = unsafe { stats.part(first..first + operator.plan().stats) };
            let mask = self.mask_of(n, mask);
            operator.check_inputs(OP, &own, &mask)?;
            operator.forward_f32(&own, &mask, o, stats, work)?;
            // SAFETY: every sequence has rows of its own, and the strides were found to keep rows apart.
            unsafe { self.rows(n, Role::Output).scatter(o, &out) };
            Ok(())
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
        gradients: &mut VarlenGradients<'_, T>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        const OP: &str = "backward";
        self.check(OP, inputs, mask)?;
        out.check(OP, "out", self.sizes(Role::Output))?;
        dout.check(OP, "dout", self.sizes(Role::Output))?;
        check::length(OP, "stats", stats.len(), self.plan.stats, "pass what forward wrote")?;
        self.check_gradients(OP, gradients)?;
        let wanted: Vec<_> = gradients.extras.iter().map(|(parameter, x)| (parameter, x.len())).collect();
        let own_len = wanted.iter().map(|(_, len)| len).sum::<usize>();
        let mut rooms = vec![0.0; self.parts.len() * own_len];
        let VarlenGradients { dq, dk, dv, extras } = gradients;
        let [dq, dv] = [dq, dv].map(|x| Target::new(x.reborrow()));
        let dk = dk.as_mut().map(|dk| Target::new(dk.reborrow()));
        let parameters = Parts::new(&mut rooms);
        let done = self.each(Pass::Backward, scratch, |n, memory| {
            let operator = self.operator(n);
            let ([q, k, v, o, g, dq_each, dk_each, dv_each], work) = cut(memory, sizes(operator, Pass::Backward));
            let (own, mask) = (self.gathered(n, inputs, [q, k, v]), self.mask_of(n, mask));
            self.rows(n, Role::Output).gather(&out, o);
            self.rows(n, Role::Output).gather(&dout, g);
            operator.check_inputs(OP, &own, &mask)?;
            // SAFETY: every sequence has a room of its own.
            let mut room = unsafe { parameters.part(n * own_len..(n + 1) * own_len) };
            let mut extras = ExtraGradients::default();
            for &(parameter, len) in &wanted {
                let (own, rest) = room.split_at_mut(len);
                (extras, room) = (extras.with(parameter, own), rest);
            }
            let saved = Saved { out: o, stats: &stats[self.parts[n].stats..][..operator.plan().stats], dout: g };
            let into =
                Gradients { dq: &mut *dq_each, dk: dk.is_some().then_some(&mut *dk_each), dv: &mut *dv_each, extras };
            let done = operator.backward_f32(&own, &mask, &saved, into, work);
            // SAFETY: as in the forward pass.
            unsafe {
                self.rows(n, Role::Query).scatter(dq_each, &dq);
                self.rows(n, Role::Value).scatter(dv_each, &dv);
                if let Some(dk) = &dk {
                    self.rows(n, Role::Key).scatter(dk_each, dk);
                }
            }
            done
        });
        done.and(sum_parameters(&rooms, own_len, extras))
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
        let mut made: Vec<Option<ClusterPlan>> = vec![None; self.parts.len()];
        let plans = Parts::new(&mut made);
        self.each(Pass::Forward, scratch, |n, memory| {
            let ([q, k, v, ..], _) = cut(memory, sizes(self.operator(n), Pass::Forward));
            let own = self.gathered(n, inputs, [q, k, v]);
            let plan = self.operator(n).clusters(&own, &self.mask_of(n, mask))?.into_owned();
            // SAFETY: every sequence has a plan of its own.
            let place = unsafe { plans.part(n..n + 1) };
            place[0] = Some(plan);
            Ok(())
        })?;
        Ok(made.into_iter().flatten().collect())
    }

    /// Runs `task(n, memory)` for every sequence; the first sequence's error is returned, whatever the threads.
    fn each(
        &self,
        pass: Pass,
        scratch: &mut Scratch,
        task: impl Fn(usize, &mut [f32]) -> Result<()> + Sync,
    ) -> Result<()> {
        let work = scratch.take(self.scratch(pass));
        let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
        let attempt = |n: usize, memory: &mut [f32]| {
            let Err(error) = task(n, memory) else { return };
            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
            if failed.as_ref().is_none_or(|(first, _)| n < *first) {
                *failed = Some((n, error));
            }
        };
        self.alone.iter().for_each(|&n| attempt(n, work));
        let of_task = |at: usize, memory: &mut [f32]| attempt(self.shared_out[at], memory);
        parallel::for_each(self.shared_out.len(), work, self.per_worker(pass), of_task);
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((n, error)) => Err(error.of_sequence(n)),
            None => Ok(()),
        }
    }

    /// The inputs of a sequence, in one piece.
    fn gathered<'a, T: Element>(
        &self,
        n: usize,
        inputs: &VarlenInputs<'a, T>,
        [q, k, v]: [&'a mut [f32]; 3],
    ) -> Inputs<'a, f32> {
        self.rows(n, Role::Query).gather(&inputs.q, q);
        self.rows(n, Role::Value).gather(&inputs.v, v);
        let k = inputs.k.map(|tensor| {
            self.rows(n, Role::Key).gather(&tensor, k);
            &*k
        });
        let extras = inputs.clusters.map_or(inputs.extras, |plans| inputs.extras.with_clusters(&plans[n]));
        let extras = match extras.dropout {
            Some(dropout) => extras.with_dropout(dropout.reseeded(n as u64)),
            None => extras,
        };
        Inputs { q, k, v, extras }
    }

    fn mask_of<'a>(&self, n: usize, mask: &Mask<'a>) -> Mask<'a> {
        let key = mask.key.map(|keep| &keep[self.sequences.key_range(n)]);
        let query = mask.query.map(|keep| &keep[self.sequences.range(n)]);
        Mask { causal: mask.causal, key, query }
    }

    /// Where the rows of a sequence lie in a tensor.
    fn rows(&self, n: usize, role: Role) -> Rows {
        let [heads, _, channels] = self.sizes(role);
        let of_keys = matches!(role, Role::Key | Role::Value);
        let tokens = if of_keys { self.sequences.key_range(n) } else { self.sequences.range(n) };
        Rows { tokens, heads, serves: self.heads.heads / heads, channels }
    }

    /// The sizes of a tensor or its gradient.
    fn sizes(&self, role: Role) -> [usize; 3] {
        let (h, s) = (self.heads, &self.sequences);
        match role {
            Role::Query => [h.heads, s.tokens(), h.head_dim],
            Role::Key => [h.kv_heads, s.keys(), h.head_dim],
            Role::Value => [h.kv_heads, s.keys(), h.value_dim],
            Role::Output => [h.heads, s.tokens(), h.value_dim],
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

    fn check_extras(&self, op: &'static str, extras: &Extras<'_>) -> Result<()> {
        let mechanism = self.mechanism();
        let of_tokens = matches!(mechanism.bias(), Some(Bias::Tensor(m)) if m.batch || m.queries || m.keys);
        let refused = [
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
        check::extras(op, mechanism, self.operators[0].shape(), extras)
    }

    fn check_gradients<T>(&self, op: &'static str, gradients: &mut VarlenGradients<'_, T>) -> Result<()> {
        let VarlenGradients { dq, dk, dv, extras } = gradients;
        dq.check(op, "dq", self.sizes(Role::Query))?;
        dv.check(op, "dv", self.sizes(Role::Value))?;
        match (dk, self.mechanism().tied()) {
            (Some(dk), false) => dk.check(op, "dk", self.sizes(Role::Key))?,
            (Some(_), true) => {
                let problem = "is given although the mechanism is tied; `dq` holds both paths";
                return Err(Error::Tensor { op, tensor: "dk", problem });
            }
            (None, false) => return Err(Error::Tensor { op, tensor: "dk", problem: "is missing" }),
            (None, true) => {}
        }
        let (mechanism, shape) = (self.mechanism(), self.operators[0].shape());
        extras.iter().try_for_each(|(parameter, buffer)| {
            check::parameter_length(op, mechanism, shape, parameter, parameter.gradient_name(), buffer.len())
        })
    }
}

/// Adds up what the sequences have left in `rooms`, in their order.
fn sum_parameters(rooms: &[f32], own_len: usize, extras: &mut ExtraGradients<'_>) -> Result<()> {
    let mut first = 0;
    for (parameter, into) in extras.iter() {
        for (at, into) in into.iter_mut().enumerate() {
            let of_sequences = rooms.iter().skip(first + at).step_by(own_len);
            *into = of_sequences.map(|&x| f64::from(x)).sum::<f64>() as f32;
        }
        first += into.len();
        if let Some(index) = into.iter().position(|x| !x.is_finite()) {
            return Err(Error::Overflow { tensor: parameter.gradient_name(), index });
        }
    }
    Ok(())
}
