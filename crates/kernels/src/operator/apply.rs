//! A checked call in f32: by the preset that a composition is, by the reference, or by the streams of a structure.

use super::{Operator, naive};
use crate::{
    Extras, Gradients, Inputs, Mask, Mechanism, Result, Scratch,
    call::{Call, Saved},
    engine,
    mechanism::Landmarks,
    range,
    rescale::{self, Rescaled},
    series,
    structure::{self, nystrom},
};

impl Operator {
    /// The preset that carries out a call of a composition: where it has the parameters that are given, and takes the masks.
    pub(super) fn preset_for(&self, extras: &Extras<'_>, mask: &Mask<'_>) -> Option<&Operator> {
        let preset = self.preset.as_deref()?;
        let parameters = preset.mechanism.parameters();
        let one_mask = !preset.mechanism.masks_tokens_once() || mask.key == mask.query;
        (one_mask && extras.iter().all(|(parameter, _)| parameters.contains(&parameter))).then_some(preset)
    }

    /// [`Operator::forward`] of tensors that fit, on `work` of `plan().scratch_forward`.
    pub(super) fn forward_f32(
        &self,
        inputs: &Inputs<'_, f32>,
        mask: &Mask<'_>,
        out: &mut [f32],
        stats: &mut [f32],
        work: &mut [f32],
    ) -> Result<()> {
        if let Some(preset) = self.preset_for(&inputs.extras, mask) {
            preset.check_inputs("forward", inputs, mask)?;
            let (stats, rest) = stats.split_at_mut(preset.plan.stats);
            rest.fill(0.0);
            return preset.forward_f32(inputs, mask, out, stats, work);
        }
        self.check_precision()?;
        self.apply(&self.call(inputs, mask), out, stats, work)
    }

    /// [`Operator::backward`] of tensors that fit, on `work` of `plan().scratch_backward`.
    pub(super) fn backward_f32(
        &self,
        inputs: &Inputs<'_, f32>,
        mask: &Mask<'_>,
        saved: &Saved<'_>,
        mut gradients: Gradients<'_, f32>,
        work: &mut [f32],
    ) -> Result<()> {
        let Some(preset) = self.preset_for(&inputs.extras, mask) else {
            self.check_precision()?;
            return self.apply_backward(&self.call(inputs, mask), saved, gradients, work);
        };
        let parameters = preset.mechanism.parameters();
        if gradients.extras.iter().all(|(parameter, _)| parameters.contains(&parameter)) {
            preset.check_inputs("backward", inputs, mask)?;
            let saved = Saved { stats: &saved.stats[..preset.plan.stats], ..*saved };
            return preset.backward_f32(inputs, mask, &saved, gradients, work);
        }
        self.check_precision()?;
        // A gradient that the preset has not: what it saved means nothing to the engine.
        let own = Self { preset: None, ..self.clone() };
        let (mut out, mut stats) = (vec![0.0; saved.out.len()], vec![0.0; saved.stats.len()]);
        let mut scratch = Scratch::default();
        own.forward_f32(inputs, mask, &mut out, &mut stats, scratch.take(own.plan.scratch_forward))?;
        own.backward_f32(inputs, mask, &Saved { out: &out, stats: &stats, ..*saved }, gradients, work)
    }

    pub(super) fn call<'a>(&self, inputs: &Inputs<'a, f32>, mask: &Mask<'a>) -> Call<'a> {
        let Inputs { q, k, v, extras } = *inputs;
        let mask = Mask { causal: self.causal, ..*mask };
        let (level, bf16) = (self.level, self.bf16);
        Call { shape: self.shape, q, k: k.unwrap_or(q), v, extras, mask, level, bf16, units: None }
    }

    pub(super) fn apply(&self, call: &Call<'_>, out: &mut [f32], stats: &mut [f32], work: &mut [f32]) -> Result<()> {
        if self.by_reference {
            naive::forward(&self.mechanism, call, out, stats)?;
        } else {
            range::check(&self.mechanism, call)?;
            let rescaled = Rescaled::of(&self.mechanism, call);
            let call = &rescaled.as_ref().map_or(*call, |rescaled| rescaled.call(call));
            self.stream(call, out, stats, work)?;
            range::check_rows(&self.mechanism, call, stats)?;
        }
        // The one value that all rows repeat is checked where it is made.
        if self.mechanism.is_pooled() { Ok(()) } else { range::check_results(call, None, [("out", &*out)]) }
    }

    fn stream(&self, call: &Call<'_>, out: &mut [f32], stats: &mut [f32], work: &mut [f32]) -> Result<()> {
        match &self.mechanism {
            Mechanism::Softmax(m) => structure::dense::softmax_forward(call, m, out, stats, work),
            Mechanism::Uniform(_) => structure::pooled::uniform_forward(call, out, stats, work),
            Mechanism::Infsa(m) => structure::dense::infsa_forward(call, m, out, stats, work),
            Mechanism::InfsaResolvent(m) => series::resolvent::forward(call, m, out, stats, work),
            Mechanism::LinearInfsa(m) => structure::pooled::linear_forward(call, m, out, stats, work),
            Mechanism::Ssa(m) => structure::clustered::forward(call, m, out, stats, work),
            Mechanism::Fna(m) => structure::dense::fna_forward(call, m, out, stats, work),
            Mechanism::Soft(m) | Mechanism::SoftPp(m) if m.landmarks == Landmarks::All => {
                structure::dense::soft_all_forward(call, m, out, stats, work)
            }
            Mechanism::Soft(_) | Mechanism::SoftPp(_) | Mechanism::Laplacian(_) => {
                nystrom::with_preset(&self.mechanism, |values, preset| {
                    nystrom::forward(call, values, preset, out, stats, work)
                })?
            }
            Mechanism::LaplacianExact(m) => structure::dense::laplacian_exact_forward(call, m, out, stats, work),
            Mechanism::Composed(m) => engine::forward(call, m, out, stats, work),
        }
    }

    pub(super) fn apply_backward(
        &self,
        call: &Call<'_>,
        saved: &Saved<'_>,
        gradients: Gradients<'_, f32>,
        work: &mut [f32],
    ) -> Result<()> {
        let dout = saved.dout;
        let (mut gradients, mut done) = (gradients, Ok(()));
        if self.by_reference {
            naive::backward(&self.mechanism, call, dout, gradients.reborrow())?;
        } else {
            // What queries and keys may hold the forward pass has seen to.
            let exponent = rescale::gradient_exponent(&self.mechanism, call, dout)?;
            let divided = (exponent != 0).then(|| rescale::divided(dout, exponent));
            let saved = Saved { dout: divided.as_deref().unwrap_or(dout), ..*saved };
            let rescaled = Rescaled::of(&self.mechanism, call);
            let scaled = rescaled.as_ref().map_or(*call, |rescaled| rescaled.call(call));
            done = self.differentiate(&scaled, &saved, gradients.reborrow(), work);
            if exponent != 0 {
                rescale::multiply_gradients(&mut gradients, exponent);
            }
        }
        if self.mechanism.is_pooled() || done.is_err() {
            return done;
        }
        let Gradients { dq, dk, dv, mut extras } = gradients;
        let tokens = [("dq", &*dq), ("dk", dk.as_deref().unwrap_or_default()), ("dv", &*dv)];
        let parameters = extras.iter().map(|(parameter, x)| (parameter.gradient_name(), &*x));
        range::check_results(call, Some(dout), tokens.into_iter().chain(parameters))
    }

    fn differentiate(
        &self,
        call: &Call<'_>,
        saved: &Saved<'_>,
        gradients: Gradients<'_, f32>,
        work: &mut [f32],
    ) -> Result<()> {
        match &self.mechanism {
            Mechanism::Softmax(m) => structure::dense::softmax_backward(call, m, saved, gradients, work),
            Mechanism::Uniform(_) => structure::pooled::uniform_backward(call, saved, gradients, work),
            Mechanism::Infsa(m) => structure::dense::infsa_backward(call, m, saved, gradients, work),
            Mechanism::InfsaResolvent(m) => series::resolvent::backward(call, m, saved, gradients, work),
            Mechanism::LinearInfsa(m) => structure::pooled::linear_backward(call, m, saved, gradients, work),
            Mechanism::Ssa(m) => structure::clustered::backward(call, m, saved, gradients, work),
            Mechanism::Fna(m) => structure::dense::fna_backward(call, m, saved, gradients, work),
            Mechanism::Soft(m) | Mechanism::SoftPp(m) if m.landmarks == Landmarks::All => {
                structure::dense::soft_all_backward(call, m, saved, gradients, work)
            }
            Mechanism::Soft(_) | Mechanism::SoftPp(_) | Mechanism::Laplacian(_) => {
                nystrom::with_preset(&self.mechanism, |values, preset| {
                    nystrom::backward(call, values, preset, saved, gradients, work)
                })?
            }
            Mechanism::LaplacianExact(m) => structure::dense::laplacian_exact_backward(call, m, saved, gradients, work),
            Mechanism::Composed(m) => engine::backward(call, m, saved, gradients, work),
        }
    }
}
