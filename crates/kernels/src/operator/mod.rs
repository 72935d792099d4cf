//! The one call surface of the CPU kernels: validate once, then apply forward and backward as often as wanted.

mod apply;
mod grouped;
mod naive;
mod packed;
mod planning;
mod precision;
mod projected;
mod saved;
mod tensors;
mod token_weights;
mod varlen;

pub use planning::plan;
pub use token_weights::TokenWeights;
pub use varlen::{Heads, VarlenInputs, VarlenOperator};

use std::borrow::Cow;

use tensors::{CallTensors, ForwardPass, Role, Written};

use crate::{
    ClusterPlan, Element, Error, Extras, Gradients, Inputs, Mask, Mechanism, Plan, Precision, Result, Scratch, Shape,
    Strategy, Strided, StridedGradients, StridedInputs,
    call::{Target, View},
    check,
    mechanism::Form,
    memory::check_memory,
    simd::{Bf16Unit, Level, bf16::Bf16Products},
    structure,
};

/// A mechanism bound to sizes: checked, planned, ready to be applied.
///
/// ```
/// use resolvent_kernels::*;
/// let mechanism = Mechanism::preset("infsa")?;
/// let op = Operator::new(&mechanism, Shape::square(1, 2, 5, 4), false, Strategy::Auto)?;
/// let (q, k, v) = (vec![0.5; 40], vec![0.25; 40], vec![1.0; 40]);
/// let inputs = Inputs { q: &q, k: Some(&k), v: &v, extras: Extras::default() };
/// let (mut out, mut stats) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats]);
/// op.forward(&inputs, &Mask::NONE, &mut out, &mut stats, &mut Scratch::default())?;
/// assert!((out[0] - 0.7).abs() < 1e-4); // identical tokens: the decay times the common value
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Operator {
    mechanism: Mechanism,
    /// What carries it out.
    form: Box<Form>,
    shape: Shape,
    causal: bool,
    plan: Plan,
    level: Level,
    /// Whether calls go through the reference.
    by_reference: bool,
    /// The preset that a composition is, which serves the calls that it can.
    preset: Option<Box<Operator>>,
    /// Over projected keys and values, where the structure makes these.
    over: Option<Box<Operator>>,
    /// Heads of keys and values.
    kv_heads: usize,
    /// The precision and the bf16 instructions that were asked for, and what multiplies in bf16 where the operator does.
    precision: Precision,
    unit: Option<Bf16Unit>,
    bf16: Option<Bf16Products>,
    /// f32 of working memory of the structures, forward and backward.
    work: [usize; 2],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    Forward,
    Backward,
}

impl Operator {
    /// Checks `mechanism` against `shape` and plans the calls. `causal` is OR-ed with the configuration's.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a combination the mechanism is not defined for (an empty axis among them),
    /// [`Error::OutOfRange`] for an invalid field.
    pub fn new(mechanism: &Mechanism, shape: Shape, causal: bool, strategy: Strategy) -> Result<Self> {
        let causal = causal || mechanism.causal;
        let (plan, form) = (plan(mechanism, &shape, causal, strategy)?, Box::new(mechanism.form()));
        let preset = match &*form {
            Form::Composed(m) => m.as_preset().and_then(|form| Self::new(&form.into(), shape, causal, strategy).ok()),
            _ => None,
        };
        let by_reference = planning::by_reference(&form, &plan, causal, &shape, strategy);
        let (level, preset) = (Level::selected()?, preset.map(Box::new));
        let over = projected::over(mechanism, &shape, &plan)?;
        let (kv_heads, work) = (shape.heads, [plan.scratch_forward, plan.scratch_backward]);
        let (mechanism, precision, unit, bf16) = (mechanism.clone(), Precision::Full, None, None);
        Ok(Self {
            mechanism,
            form,
            shape,
            causal,
            plan,
            level,
            by_reference,
            preset,
            over,
            kv_heads,
            precision,
            unit,
            bf16,
            work,
        })
    }

    /// The same operator on another instruction set.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when this processor does not have it.
    pub fn with_level(mut self, level: Level) -> Result<Self> {
        if !Level::available().contains(&level) {
            let why = "this processor does not have it; see `Level::available`";
            return Err(Error::Unsupported { mechanism: self.mechanism.id(), what: "this instruction set", why });
        }
        self.level = level;
        for part in [&mut self.preset, &mut self.over] {
            if let Some(operator) = part.take() {
                *part = Some(Box::new(operator.with_level(level)?));
            }
        }
        self.settle_arithmetic();
        Ok(self)
    }

    /// What will be done and what it needs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The mechanism.
    pub fn mechanism(&self) -> &Mechanism {
        &self.mechanism
    }

    /// The sizes.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Rows of `out` per head: `seq_q`, or 1 where the mechanism returns its pooled value once.
    pub fn out_seq(&self) -> usize {
        self.mechanism.out_seq(&self.shape)
    }

    /// Elements of `out`.
    pub fn out_len(&self) -> usize {
        self.shape.slices() * self.out_seq() * self.shape.value_dim
    }

    /// `out = A(q, k) v`. Writes all of `out` (`[batch, heads, out_seq, value_dim]`) and of `stats` (`plan().stats`
    /// elements: what [`Operator::backward`] needs beside the inputs).
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Tensor`] for tensors that do not fit; [`Error::Range`], [`Error::Close`], [`Error::Overflow`] where f32
    /// has no room or no digits for what they hold; [`Error::NotConverged`] from a solver.
    pub fn forward<T: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        mask: &Mask<'_>,
        out: &mut [T],
        stats: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<()> {
        let x = self.of_slices("forward", inputs, mask)?;
        check::length("forward", "out", out.len(), self.out_len(), "size it with `Operator::out_len`")?;
        self.apply_to(&x, mask, self.in_one_piece(out, Role::Output), stats, scratch)
    }

    /// [`Operator::forward`] of tensors that lie anywhere: the same bits, without a copy where [`Operator::reads_in_place`]; else
    /// they are gathered in `scratch`, beyond what is planned. Of `out`, what lies between its rows stays.
    ///
    /// ```
    /// use resolvent_kernels::*;
    /// let op = Operator::new(&Mechanism::preset("softmax")?, Shape::square(2, 3, 5, 4), false, Strategy::Auto)?;
    /// let tokens = vec![0.5; 2 * 5 * 3 * 4]; // [batch, tokens, heads, channels]
    /// let x = Strided::tokens_first(&tokens[..], [3, 5, 4]);
    /// let inputs = StridedInputs { q: x, k: Some(x), v: x, extras: Extras::default() };
    /// let (mut out, mut stats) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats]);
    /// let into = Strided::tokens_first(&mut out[..], [3, 5, 4]);
    /// op.forward_strided(&inputs, &Mask::NONE, into, &mut stats, &mut Scratch::default())?;
    /// assert!((out[0] - 0.5).abs() < 1e-6);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Operator::forward`]; [`Error::Length`], [`Error::Tensor`] for strides that lead beyond a tensor's end or write an element
    /// twice.
    pub fn forward_strided<T: Element>(
        &self,
        inputs: &StridedInputs<'_, T>,
        mask: &Mask<'_>,
        out: Strided<&mut [T]>,
        stats: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<()> {
        let x = self.of_strided("forward", inputs, mask)?;
        out.check("forward", "out", self.sizes(Role::Output))?;
        self.apply_to(&x, mask, out, stats, scratch)
    }

    fn apply_to<T: Element>(
        &self,
        x: &CallTensors<'_, T>,
        mask: &Mask<'_>,
        out: Strided<&mut [T]>,
        stats: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<()> {
        check::length("forward", "stats", stats.len(), self.plan.stats, "size it with `plan().stats`")?;
        let out = Target::new(out, self.sizes(Role::Output));
        let memory = scratch.take_for("forward", self.memory(x, mask, out.layout()), self.plan.allocated_forward)?;
        self.run(x, mask, out, stats, memory)
    }

    /// Whether f32 tensors are read and written where they lie, whatever their strides, and shared heads read as one: of presets of
    /// pairs of tokens.
    pub fn reads_in_place(&self) -> bool {
        self.works_in_place(&Extras::default(), &Mask::NONE, None)
    }

    /// The gradients of `<dout, out>`. `out` and `stats` are what [`Operator::forward`] wrote for the same inputs.
    ///
    /// # Errors
    /// As [`Operator::forward`]. On [`Error::Overflow`] and [`Error::Close`] all gradients are written, those beyond f32 as infinities
    /// or NaN.
    #[allow(clippy::too_many_arguments)] // the call's tensors, what forward saved, and where to write
    pub fn backward<T: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        mask: &Mask<'_>,
        out: &[T],
        stats: &[f32],
        dout: &[T],
        gradients: &mut Gradients<'_, T>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let x = self.of_slices("backward", inputs, mask)?;
        self.check_backward(out.len(), dout.len(), gradients)?;
        let Gradients { dq, dk, dv, extras } = gradients;
        let dk = dk.as_deref_mut().map(|dk| self.in_one_piece(dk, Role::Key));
        let (dq, dv) = (self.in_one_piece(&mut **dq, Role::Query), self.in_one_piece(&mut **dv, Role::Value));
        let into = StridedGradients { dq, dk, dv, extras: extras.reborrow() };
        let [out, dout] = [out, dout].map(|x| self.in_one_piece(x, Role::Output));
        self.differentiate_at(&x, mask, (out, stats, dout), into, scratch)
    }

    /// [`Operator::backward`] of tensors that lie anywhere; see [`Operator::forward_strided`].
    ///
    /// # Errors
    /// As [`Operator::backward`] and [`Operator::forward_strided`].
    #[allow(clippy::too_many_arguments)] // as [`Operator::backward`]
    pub fn backward_strided<T: Element>(
        &self,
        inputs: &StridedInputs<'_, T>,
        mask: &Mask<'_>,
        out: Strided<&[T]>,
        stats: &[f32],
        dout: Strided<&[T]>,
        gradients: &mut StridedGradients<'_, T>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let x = self.of_strided("backward", inputs, mask)?;
        self.differentiate_at(&x, mask, (out, stats, dout), gradients.reborrow(), scratch)
    }

    fn differentiate_at<T: Element>(
        &self,
        x: &CallTensors<'_, T>,
        mask: &Mask<'_>,
        (out, stats, dout): (Strided<&[T]>, &[f32], Strided<&[T]>),
        gradients: StridedGradients<'_, T>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let finished = self.finished(out, stats, dout)?;
        let into = Written::of(gradients, |role| self.sizes(role), &self.mechanism)?;
        self.differentiate_into(x, mask, &finished, into, scratch)
    }

    fn differentiate_into<T: Element>(
        &self,
        x: &CallTensors<'_, T>,
        mask: &Mask<'_>,
        finished: &ForwardPass<'_, T>,
        mut into: Written<'_, T>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        check::parameter_gradients("backward", &self.mechanism, &self.shape, &mut into.extras)?;
        let needed = self.backward_memory(x, mask, finished, &mut into);
        let memory = scratch.take_for("backward", needed, self.plan.allocated_backward)?;
        self.run_backward(x, mask, finished, into, memory)
    }

    /// The plan of a clustered call (`ssa`): the one in [`Extras::clusters`], or the one that [`Operator::forward`] and
    /// [`Operator::backward`] each make where there is none. Made once and passed to both, it spares the second planning.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for mechanisms without clusters; else as [`Operator::forward`].
    pub fn clusters<'a, T: Element>(&self, inputs: &Inputs<'a, T>, mask: &Mask<'_>) -> Result<Cow<'a, ClusterPlan>> {
        self.mechanism.clusters()?;
        self.plan_clusters(&self.of_slices("clusters", inputs, mask)?, mask)
    }

    /// [`Operator::clusters`] of tensors that lie anywhere.
    ///
    /// # Errors
    /// As [`Operator::clusters`] and [`Operator::forward_strided`].
    pub fn clusters_strided<'a, T: Element>(
        &self,
        inputs: &StridedInputs<'a, T>,
        mask: &Mask<'_>,
    ) -> Result<Cow<'a, ClusterPlan>> {
        self.mechanism.clusters()?;
        self.plan_clusters(&self.of_strided("clusters", inputs, mask)?, mask)
    }

    fn plan_clusters<'a, T: Element>(&self, x: &CallTensors<'a, T>, mask: &Mask<'_>) -> Result<Cow<'a, ClusterPlan>> {
        let m = self.mechanism.clusters()?;
        if let Some(plan) = x.extras.clusters {
            return Ok(Cow::Borrowed(plan));
        }
        if let Some(preset) = self.preset_for(&x.extras, mask) {
            return preset.plan_clusters(x, mask);
        }
        check_memory("clusters", self.plan.allocated_forward as u64)?;
        let [mut q, mut k] = [Some(&x.q), x.k.as_ref()].map(|x| vec![0.0; x.map_or(0, |x| x.widened_len(false))]);
        // A plan does not depend on the values.
        let values = CallTensors { v: View::none(), ..*x };
        let wide = values.widened(false, [&mut q, &mut k, &mut []]);
        let call = self.call(&wide, mask);
        if self.by_reference
            && let Some(plan) = naive::clusters(&self.mechanism, &call)
        {
            return Ok(Cow::Owned(plan));
        }
        structure::clustered::make(&call, &m).map(Cow::Owned)
    }
}

impl Operator {
    /// f32 of working memory of the structures.
    fn work(&self, pass: Pass) -> usize {
        self.work[pass as usize]
    }

    /// Whether all but the tokens fits.
    fn check_call(&self, op: &'static str, extras: &Extras<'_>, mask: &Mask<'_>) -> Result<()> {
        if mask.causal && !self.causal {
            let problem = "is causal although the operator was made without; pass `causal` to `Operator::new`";
            return Err(Error::Tensor { op, tensor: "mask", problem });
        }
        check::beside_tokens(op, &self.mechanism, &self.shape, extras, mask)
    }

    /// The lengths of what is in one piece.
    fn check_backward<T>(&self, out: usize, dout: usize, gradients: &Gradients<'_, T>) -> Result<()> {
        let len = |role| self.sizes(role).into_iter().product();
        let lengths = [
            ("out", out, Role::Output, "pass what forward wrote"),
            ("dout", dout, Role::Output, "expected the shape of out"),
            ("dq", gradients.dq.len(), Role::Query, "expected the shape of q"),
            ("dv", gradients.dv.len(), Role::Value, "expected the shape of v"),
            ("dk", gradients.dk.as_ref().map_or(len(Role::Key), |dk| dk.len()), Role::Key, "expected the shape of k"),
        ];
        let mut lengths = lengths.into_iter();
        lengths.try_for_each(|(tensor, got, role, remedy)| check::length("backward", tensor, got, len(role), remedy))
    }
}
