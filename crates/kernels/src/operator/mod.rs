//! The one call surface of the CPU kernels: validate once, then apply forward and backward as often as wanted.

mod apply;
mod grouped;
mod naive;
mod planning;
mod precision;
mod saved;
mod storage;
mod token_weights;
mod varlen;

pub use planning::plan;
pub use token_weights::TokenWeights;
pub use varlen::{Heads, VarlenGradients, VarlenInputs, VarlenOperator};

use std::borrow::Cow;

use storage::{as_f32, narrow, widen, widened};

use crate::{
    ClusterPlan, Element, Error, Gradients, Inputs, Mask, Mechanism, Plan, Precision, Result, Scratch, Shape, Strategy,
    call::Saved,
    check,
    scratch::{cut, scratch_len},
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
    shape: Shape,
    causal: bool,
    plan: Plan,
    level: Level,
    /// Whether calls go through the reference.
    by_reference: bool,
    /// The preset that a composition is, which serves the calls that it can.
    preset: Option<Box<Operator>>,
    /// Heads of keys and values.
    kv_heads: usize,
    /// The precision and the bf16 instructions that were asked for, and what multiplies in bf16 where the operator does.
    precision: Precision,
    unit: Option<Bf16Unit>,
    bf16: Option<Bf16Products>,
}

impl Operator {
    /// Checks `mechanism` against `shape` and plans the calls. `causal` is OR-ed with the configuration's.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a combination the mechanism is not defined for (an empty axis among them),
    /// [`Error::OutOfRange`] for an invalid field.
    pub fn new(mechanism: &Mechanism, shape: Shape, causal: bool, strategy: Strategy) -> Result<Self> {
        let causal = causal || mechanism.causal();
        let plan = plan(mechanism, &shape, causal, strategy)?;
        let preset = match mechanism {
            Mechanism::Composed(m) => m.preset().and_then(|preset| Self::new(&preset, shape, causal, strategy).ok()),
            _ => None,
        };
        let by_reference = planning::by_reference(mechanism, &plan, causal, &shape, strategy);
        let (level, preset) = (Level::selected()?, preset.map(Box::new));
        let (mechanism, kv_heads, precision) = (mechanism.clone(), shape.heads, Precision::Full);
        let (unit, bf16) = (None, None);
        Ok(Self { mechanism, shape, causal, plan, level, by_reference, preset, kv_heads, precision, unit, bf16 })
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
        if let Some(preset) = self.preset.take() {
            self.preset = Some(Box::new(preset.with_level(level)?));
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
        if self.is_grouped() {
            return self.forward_grouped(inputs, mask, out, stats, scratch);
        }
        self.check_inputs("forward", inputs, mask)?;
        check::length("forward", "out", out.len(), self.out_len(), "size it with `Operator::out_len`")?;
        check::length("forward", "stats", stats.len(), self.plan.stats, "size it with `plan().stats`")?;
        let sizes = [widened(inputs.q), inputs.k.map_or(0, widened), widened(inputs.v), widened(out)];
        let all = scratch.take(scratch_len(sizes) + self.plan.scratch_forward);
        let ([q, k, v, o], work) = cut(all, sizes);
        let Inputs { extras, .. } = *inputs;
        let wide = Inputs { q: widen(inputs.q, q), k: inputs.k.map(|x| widen(x, k)), v: widen(inputs.v, v), extras };
        match bytemuck::try_cast_slice_mut(out) {
            Ok(out) if T::NAME == f32::NAME => self.forward_f32(&wide, mask, out, stats, work),
            _ => {
                self.forward_f32(&wide, mask, o, stats, work)?;
                narrow(o, out);
                Ok(())
            }
        }
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
        if self.is_grouped() {
            return self.backward_grouped(inputs, mask, out, stats, dout, gradients, scratch);
        }
        self.check_inputs("backward", inputs, mask)?;
        self.check_backward(out.len(), stats.len(), dout.len(), gradients)?;
        let k_len = gradients.dk.as_deref().map_or(0, widened);
        let (q_len, v_len, o_len) = (widened(inputs.q), widened(inputs.v), widened(out));
        let sizes = [q_len, k_len, v_len, o_len, o_len, q_len, k_len, v_len];
        let all = scratch.take(scratch_len(sizes) + self.plan.scratch_backward);
        let ([q, k, v, o, g, dq, dk, dv], work) = cut(all, sizes);
        let Inputs { extras, .. } = *inputs;
        let wide = Inputs { q: widen(inputs.q, q), k: inputs.k.map(|x| widen(x, k)), v: widen(inputs.v, v), extras };
        let saved = Saved { out: widen(out, o), stats, dout: widen(dout, g) };
        let Gradients { dq: dq_out, dk: dk_out, dv: dv_out, extras } = gradients;
        let extras = extras.reborrow();
        if T::NAME == f32::NAME {
            let dk = dk_out.as_deref_mut().map(bytemuck::cast_slice_mut);
            let (dq, dv) = (bytemuck::cast_slice_mut(dq_out), bytemuck::cast_slice_mut(dv_out));
            return self.backward_f32(&wide, mask, &saved, Gradients { dq, dk, dv, extras }, work);
        }
        let has_k = dk_out.is_some();
        let into = Gradients { dq: &mut *dq, dk: has_k.then_some(&mut *dk), dv: &mut *dv, extras };
        let done = self.backward_f32(&wide, mask, &saved, into, work);
        narrow(dq, dq_out);
        narrow(dv, dv_out);
        if let Some(dk_out) = dk_out {
            narrow(dk, dk_out);
        }
        done
    }

    /// The plan of a clustered call (`ssa`): the one in [`Extras::clusters`], or the one that [`Operator::forward`] and
    /// [`Operator::backward`] each make where there is none. Made once and passed to both, it spares the second planning.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for mechanisms without clusters; else as [`Operator::forward`].
    pub fn clusters<'a, T: Element>(&self, inputs: &Inputs<'a, T>, mask: &Mask<'_>) -> Result<Cow<'a, ClusterPlan>> {
        let m = self.mechanism.clusters()?;
        if self.is_grouped() {
            return self.clusters_grouped(inputs, mask);
        }
        self.check_inputs("clusters", inputs, mask)?;
        if let Some(plan) = inputs.extras.clusters {
            return Ok(Cow::Borrowed(plan));
        }
        if let Some(preset) = self.preset_for(&inputs.extras, mask) {
            return preset.clusters(inputs, mask);
        }
        let (q, k) = (as_f32(inputs.q), inputs.k.map(as_f32));
        let wide = Inputs { q: &q, k: k.as_deref(), v: &[], extras: inputs.extras };
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
    fn check_inputs<T>(&self, op: &'static str, inputs: &Inputs<'_, T>, mask: &Mask<'_>) -> Result<()> {
        if mask.causal && !self.causal {
            let problem = "is causal although the operator was made without; pass `causal` to `Operator::new`";
            return Err(Error::Tensor { op, tensor: "mask", problem });
        }
        check::inputs(op, &self.mechanism, &self.shape, inputs, mask)
    }

    fn check_backward<T>(&self, out: usize, stats: usize, dout: usize, gradients: &mut Gradients<'_, T>) -> Result<()> {
        const OP: &str = "backward";
        check::length(OP, "out", out, self.out_len(), "pass what forward wrote")?;
        check::length(OP, "stats", stats, self.plan.stats, "pass what forward wrote")?;
        check::length(OP, "dout", dout, self.out_len(), "expected the shape of out")?;
        check::length(OP, "dq", gradients.dq.len(), self.shape.q_len(), "expected the shape of q")?;
        check::length(OP, "dv", gradients.dv.len(), self.shape.v_len(), "expected the shape of v")?;
        match (&gradients.dk, self.mechanism.tied()) {
            (Some(_), true) => {
                let problem = "is given although the mechanism is tied; `dq` holds both paths";
                return Err(Error::Tensor { op: OP, tensor: "dk", problem });
            }
            (None, false) => return Err(Error::Tensor { op: OP, tensor: "dk", problem: "is missing" }),
            (Some(dk), false) => check::length(OP, "dk", dk.len(), self.shape.k_len(), "expected the shape of k")?,
            (None, true) => {}
        }
        gradients.extras.iter().try_for_each(|(parameter, buffer)| {
            check::parameter_length(
                OP,
                &self.mechanism,
                &self.shape,
                parameter,
                parameter.gradient_name(),
                buffer.len(),
            )
        })
    }
}
