//! What a call has saved beside its output.

use crate::{Convergence, Operator, Strategy, engine, mechanism::Form, series, structure};

impl Operator {
    /// The log-sum-exp of every row, `[batch, heads, seq_q]`, where there is one: of one hop over pairs whose rows
    /// sum to one, with a log score (`-inf` for a row without keys). `stats` is what [`Operator::forward`] wrote.
    pub fn lse<'s>(&self, stats: &'s [f32]) -> Option<&'s [f32]> {
        match &*self.form {
            Form::Softmax(_) | Form::Ssa(_) | Form::Fna(_) => Some(&stats[..self.shape.slices() * self.shape.seq_q]),
            Form::Composed(m) => match self.preset.as_deref() {
                Some(preset) => preset.lse(stats).and(engine::lse(m, &self.shape, stats)),
                None => engine::lse(m, &self.shape, stats),
            },
            _ => None,
        }
    }

    /// The Frobenius norm of the affinities before `eps`, `[batch, heads]`, or, causal, `[batch, heads, seq_q]` (of the
    /// rows so far), where the mechanism divides by it and the call was fused. f64, as it may not fit f32.
    pub fn frobenius(&self, stats: &[f32]) -> Option<Vec<f64>> {
        match &*self.form {
            _ if self.plan.strategy == Strategy::Reference => None,
            Form::Infsa(m) => Some(structure::dense::frobenius(m, &self.shape, self.causal, stats)),
            Form::InfsaResolvent(m) => Some(series::resolvent::frobenius(m, &self.shape, stats)),
            _ => None,
        }
    }

    /// How the solver ended, `[batch, heads]`, where the mechanism has one and the call was fused.
    pub fn convergence(&self, stats: &[f32]) -> Option<Vec<Convergence>> {
        match &*self.form {
            Form::InfsaResolvent(_) if self.plan.strategy != Strategy::Reference => {
                Some(series::resolvent::convergence(&self.shape, stats))
            }
            Form::Composed(m) if self.plan.strategy != Strategy::Reference => {
                engine::convergence(m, &self.shape, stats)
            }
            _ => None,
        }
    }
}
