//! In which precision an operator's products are computed.

use super::{Operator, planning::costs};
use crate::{
    Arithmetic, Error, Plan, Precision, Result, Strategy, engine,
    mechanism::Form,
    simd::{Bf16Unit, bf16::Bf16Products},
};

impl Operator {
    /// The same operator with products of another precision; [`Precision::Full`] unless this is called.
    ///
    /// What is known not to run in bf16 runs in full, and the plan says so and why ([`crate::Plan::arithmetic`]): bf16 are `softmax`,
    /// `infsa` and `fna`, by whichever values, and dense compositions of one hop whose score is a product and whose weights are normalised
    /// by rows without a density, by their norm or not at all, as `cosine`, `sigmoid`, `relu`, `local` and any of these with a bias, and
    /// one hop over random features (`performer`); where the strategy is not the reference. [`Precision::Bf16x3`] is for the same but `fna`, and needs tiles of bf16 (AMX), unless
    /// [`Operator::with_bf16_unit`] names what multiplies. A call that turns out not to be theirs, a composition with a tensor that its preset lacks and
    /// its engine multiplies in f32, is refused.
    ///
    /// ```
    /// use resolvent_kernels::*;
    /// let shape = Shape::square(1, 1, 2, 4);
    /// let op = |id| Operator::new(&Mechanism::preset(id).unwrap(), shape, false, Strategy::Auto).unwrap();
    /// assert_eq!(op("softmax").with_precision(Precision::Bf16).plan().arithmetic.runs, Precision::Bf16);
    /// let uniform = op("uniform").with_precision(Precision::Bf16);
    /// assert_eq!(uniform.plan().arithmetic.runs, Precision::Full);
    /// assert!(uniform.plan().arithmetic.reason.contains("f32"));
    /// ```
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self.unit = None;
        self.settle_arithmetic();
        self
    }

    /// The same operator with bf16 products by other instructions than the last of [`Bf16Unit::available`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] where this processor, or the level of the operator, lacks them, or the operator does not run in bf16.
    pub fn with_bf16_unit(mut self, unit: Bf16Unit) -> Result<Self> {
        let unsupported = |what, why| Error::Unsupported { mechanism: self.mechanism.id(), what, why };
        if !Bf16Unit::available(self.level).contains(&unit) {
            let why = "this processor, or the level of the operator, lacks them; see `Bf16Unit::available`";
            return Err(unsupported("these bf16 instructions", why));
        }
        if self.precision == Precision::Full || self.refusal().is_some() {
            let why = "its products are not of bf16; see `plan().arithmetic`";
            return Err(unsupported("bf16 instructions", why));
        }
        self.unit = Some(unit);
        self.settle_arithmetic();
        Ok(self)
    }

    /// Plans for the precision that is asked for, on the level of the operator.
    pub(super) fn settle_arithmetic(&mut self) {
        if let Some(preset) = &mut self.preset {
            (preset.precision, preset.unit) = (self.precision, self.unit);
            preset.settle_arithmetic();
        }
        let in_full = |reason| Arithmetic::full(self.precision, self.level, reason);
        let planned = self.plan.arithmetic.runs;
        self.bf16 = None;
        self.plan.arithmetic = match (self.precision, self.refusal()) {
            (Precision::Full, _) => in_full("nothing is rounded unless a call asks for it"),
            (_, Some(reason)) => in_full(reason),
            (asked, None) => {
                let available = Bf16Unit::available(self.level);
                let chosen = self.unit.filter(|unit| available.contains(unit));
                let unit = chosen.or(available.last().copied()).unwrap_or(Bf16Unit::Widened);
                match asked == Precision::Bf16x3 && chosen.is_none() && unit != Bf16Unit::Amx {
                    true => in_full("without tiles for bf16, three products of it take longer than one of f32"),
                    false => {
                        let products = Bf16Products::new(unit, self.level);
                        self.bf16 = products.map(|products| products.of_parts(asked.parts()));
                        Arithmetic::bf16(asked, unit)
                    }
                }
            }
        };
        let Plan { strategy, arithmetic: Arithmetic { runs, .. }, .. } = self.plan;
        if runs != planned {
            let plan = costs(&self.mechanism, &self.shape, self.causal, strategy, runs);
            let plan = plan.expect("planned before, in another precision");
            self.work = [plan.scratch_forward, plan.scratch_backward];
            let Plan { allocated_forward, allocated_backward, .. } = plan;
            self.plan = Plan { allocated_forward, allocated_backward, ..self.plan };
            self.plan_scratch();
        }
    }

    /// Why the operator does not run in bf16, if so.
    fn refusal(&self) -> Option<&'static str> {
        match &*self.form {
            _ if self.plan.strategy == Strategy::Reference => Some("the naive path computes in f64"),
            Form::Fna(_) if self.precision == Precision::Bf16x3 => {
                Some("its distances cancel digits that three products of bf16 do not keep")
            }
            Form::Softmax(_) | Form::Infsa(_) | Form::Fna(_) => None,
            Form::Composed(m) => match self.preset.as_deref() {
                Some(preset) => preset.refusal(),
                None => engine::bf16_refusal(m),
            },
            _ => Some(
                "this mechanism multiplies in f32: softmax, infsa, fna, dense compositions of products and performer have bf16 products",
            ),
        }
    }

    /// Refuses a call that was to run in bf16 and that only the engine of compositions can serve, in f32.
    pub(super) fn check_precision(&self) -> Result<()> {
        let Form::Composed(m) = &*self.form else { return Ok(()) };
        if self.plan.arithmetic.runs == Precision::Full || engine::bf16_refusal(m).is_none() {
            return Ok(());
        }
        let why = "its preset lacks a tensor or gradient of this call, and the engine of compositions multiplies it in f32; use precision full";
        Err(Error::Unsupported { mechanism: self.mechanism.id(), what: "this call in bf16", why })
    }
}
