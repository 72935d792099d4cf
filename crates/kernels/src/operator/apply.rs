//! A checked call in f32: by the preset that a composition is, by the reference, or by the streams of a structure.

use super::{Operator, Pass, naive, tensors::CallTensors};
use crate::{
    ExtraGradients, Extras, Mask, Result, Scratch,
    call::{Call, GradientTargets, Saved, Target, View},
    engine,
    mechanism::{Form, Landmarks},
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

    /// Whether the call's f32 tensors may lie anywhere, and heads of keys and values be shared.
    pub(super) fn works_in_place(
        &self,
        extras: &Extras<'_>,
        mask: &Mask<'_>,
        wanted: Option<&mut ExtraGradients<'_>>,
    ) -> bool {
        let preset = self.preset_for(extras, mask).filter(|preset| wanted.is_none_or(|wanted| preset.takes(wanted)));
        let by = preset.unwrap_or(self);
        !by.by_reference && matches!(*by.form, Form::Softmax(_) | Form::Infsa(_) | Form::Fna(_))
    }

    /// Whether it has all the gradients.
    fn takes(&self, wanted: &mut ExtraGradients<'_>) -> bool {
        let parameters = self.mechanism.parameters();
        wanted.iter().all(|(parameter, _)| parameters.contains(&parameter))
    }

    /// [`Operator::forward`] of tensors that fit.
    pub(super) fn forward_f32(
        &self,
        inputs: &CallTensors<'_>,
        mask: &Mask<'_>,
        out: Target<'_>,
        stats: &mut [f32],
        work: &mut [f32],
    ) -> Result<()> {
        if let Some(preset) = self.preset_for(&inputs.extras, mask) {
            preset.check_call("forward", &inputs.extras, mask)?;
            let (stats, rest) = stats.split_at_mut(preset.plan.stats);
            rest.fill(0.0);
            return preset.forward_f32(inputs, mask, out, stats, work);
        }
        self.check_precision()?;
        self.apply(&self.call(inputs, mask), out, stats, work)
    }

    /// [`Operator::backward`] of tensors that fit.
    pub(super) fn backward_f32(
        &self,
        inputs: &CallTensors<'_>,
        mask: &Mask<'_>,
        saved: &Saved<'_>,
        mut gradients: GradientTargets<'_>,
        work: &mut [f32],
    ) -> Result<()> {
        let Some(preset) = self.preset_for(&inputs.extras, mask) else {
            self.check_precision()?;
            return self.apply_backward(&self.call(inputs, mask), saved, gradients, work);
        };
        if preset.takes(&mut gradients.extras) {
            preset.check_call("backward", &inputs.extras, mask)?;
            let saved = Saved { stats: &saved.stats[..preset.plan.stats], ..*saved };
            return preset.backward_f32(inputs, mask, &saved, gradients, work);
        }
        self.check_precision()?;
        // A gradient that the preset has not: what it saved means nothing to the engine.
        let own = Self { preset: None, ..self.clone() };
        let layout = saved.out.layout();
        let (mut out, mut stats) = (vec![0.0; layout.len()], vec![0.0; saved.stats.len()]);
        let mut scratch = Scratch::default();
        let into = Target::like(&mut out, layout);
        own.forward_f32(inputs, mask, into, &mut stats, scratch.take(own.work(Pass::Forward)))?;
        let out = View::in_one_piece(&out, layout.slices(), [layout.tokens, layout.channels]);
        own.backward_f32(inputs, mask, &Saved { out, stats: &stats, ..*saved }, gradients, work)
    }

    pub(super) fn call<'a>(&self, inputs: &CallTensors<'a>, mask: &Mask<'a>) -> Call<'a> {
        let CallTensors { q, k, v, extras, sharing } = *inputs;
        let mask = Mask { causal: self.causal, ..*mask };
        let (level, bf16) = (self.level, self.bf16);
        Call { shape: self.shape, q, k: k.unwrap_or(q), v, extras, sharing, mask, level, bf16, units: None }
    }

    pub(super) fn apply(
        &self,
        call: &Call<'_>,
        mut out: Target<'_>,
        stats: &mut [f32],
        work: &mut [f32],
    ) -> Result<()> {
        if self.by_reference {
            naive::forward(&self.mechanism, call, out.dense(), stats)?;
        } else {
            range::check(&self.form, call)?;
            let rescaled = Rescaled::of(&self.form, call);
            let call = &rescaled.as_ref().map_or(*call, |rescaled| rescaled.call(call));
            self.stream(call, &mut out, stats, work)?;
            range::check_rows(&self.form, call, stats)?;
        }
        // The one value that all rows repeat is checked where it is made.
        if self.mechanism.is_pooled() { Ok(()) } else { range::check_written(call, None, "out", &mut out) }
    }

    fn stream(&self, call: &Call<'_>, out: &mut Target<'_>, stats: &mut [f32], work: &mut [f32]) -> Result<()> {
        match &*self.form {
            Form::Softmax(m) => structure::dense::softmax_forward(call, m, out, stats, work),
            Form::Uniform(_) => structure::pooled::uniform_forward(call, out.dense(), stats, work),
            Form::Infsa(m) => structure::dense::infsa_forward(call, m, out, stats, work),
            Form::InfsaResolvent(m) => series::resolvent::forward(call, m, out.dense(), stats, work),
            Form::LinearInfsa(m) => structure::pooled::linear_forward(call, m, out.dense(), stats, work),
            Form::Ssa(m) => structure::clustered::forward(call, m, out.dense(), stats, work),
            Form::Fna(m) => structure::dense::fna_forward(call, m, out, stats, work),
            Form::Soft(m) | Form::SoftPp(m) if m.landmarks == Landmarks::All => {
                engine::soft_forward(call, (m, &self.mechanism.values()), out.dense(), stats)
            }
            Form::Soft(_) | Form::SoftPp(_) | Form::Laplacian(_) => {
                nystrom::with_preset(&self.mechanism, |values, preset| {
                    nystrom::forward(call, values, preset, out.dense(), stats, work)
                })?
            }
            Form::LaplacianExact(_) => engine::forward(call, &self.mechanism.values(), out.dense(), stats, work),
            Form::Composed(m) => match self.forward_projected(call, out, stats, work) {
                Some(done) => done,
                None => engine::forward(call, m, out.dense(), stats, work),
            },
        }
    }

    pub(super) fn apply_backward(
        &self,
        call: &Call<'_>,
        saved: &Saved<'_>,
        gradients: GradientTargets<'_>,
        work: &mut [f32],
    ) -> Result<()> {
        let dout = saved.dout;
        let (mut gradients, mut done) = (gradients, Ok(()));
        if self.by_reference {
            naive::backward(&self.mechanism, call, dout.dense(), gradients.dense())?;
        } else {
            // What queries and keys may hold the forward pass has seen to.
            let exponent = rescale::gradient_exponent(&self.mechanism, call, dout)?;
            let divided = (exponent != 0).then(|| rescale::divided(dout, exponent));
            let sizes = [dout.layout().tokens, dout.layout().channels];
            let divided = divided.as_deref().map(|x| View::in_one_piece(x, dout.layout().slices(), sizes));
            let rescaled = Rescaled::of(&self.form, call);
            let scaled = rescaled.as_ref().map_or(*call, |rescaled| rescaled.call(call));
            let alone = exponent > 0 && rescale::are_comfortable(call, dout);
            let of_values =
                alone.then(|| self.gradient_of_values(&scaled, saved, gradients.reborrow(), work)).flatten();
            let saved = Saved { dout: divided.unwrap_or(dout), ..*saved };
            done = self.differentiate(&scaled, &saved, gradients.reborrow(), work);
            if exponent != 0 {
                rescale::multiply_gradients(&mut gradients, exponent);
            }
            if let Some(dv) = of_values {
                gradients.dv.take_finite(&dv);
            }
        }
        if self.mechanism.is_pooled() || done.is_err() {
            return done;
        }
        let GradientTargets { mut dq, mut dk, mut dv, mut extras } = gradients;
        let tokens = [("dq", Some(&mut dq)), ("dk", dk.as_mut()), ("dv", Some(&mut dv))];
        let mut written = tokens.into_iter().filter_map(|(tensor, x)| Some((tensor, x?)));
        written.try_for_each(|(tensor, x)| range::check_written(call, Some(dout), tensor, x))?;
        let parameters = extras.iter().map(|(parameter, x)| (parameter.gradient_name(), &*x));
        range::check_results(call, Some(dout), parameters)
    }

    /// That of the values from output gradients that are not divided: it has no product with a value, and small weights would leave nothing
    /// of it when they are. What the other gradients become is nothing.
    fn gradient_of_values(
        &self,
        call: &Call<'_>,
        saved: &Saved<'_>,
        gradients: GradientTargets<'_>,
        work: &mut [f32],
    ) -> Option<Vec<f32>> {
        let mut dv = vec![0.0; gradients.dv.layout().len()];
        let own = Target::like(&mut dv, gradients.dv.layout());
        self.differentiate(call, saved, GradientTargets { dv: own, ..gradients }, work).ok()?;
        Some(dv)
    }

    fn differentiate(
        &self,
        call: &Call<'_>,
        saved: &Saved<'_>,
        mut gradients: GradientTargets<'_>,
        work: &mut [f32],
    ) -> Result<()> {
        match &*self.form {
            Form::Softmax(m) => structure::dense::softmax_backward(call, m, saved, gradients, work),
            Form::Uniform(_) => structure::pooled::uniform_backward(call, saved, gradients.dense(), work),
            Form::Infsa(m) => structure::dense::infsa_backward(call, m, saved, gradients, work),
            Form::InfsaResolvent(m) => series::resolvent::backward(call, m, saved, gradients.dense(), work),
            Form::LinearInfsa(m) => structure::pooled::linear_backward(call, m, saved, gradients.dense(), work),
            Form::Ssa(m) => structure::clustered::backward(call, m, saved, gradients.dense(), work),
            Form::Fna(m) => structure::dense::fna_backward(call, m, saved, gradients, work),
            Form::Soft(m) | Form::SoftPp(m) if m.landmarks == Landmarks::All => {
                engine::soft_backward(call, (m, &self.mechanism.values()), saved, gradients.dense())
            }
            Form::Soft(_) | Form::SoftPp(_) | Form::Laplacian(_) => {
                nystrom::with_preset(&self.mechanism, |values, preset| {
                    nystrom::backward(call, values, preset, saved, gradients.dense(), work)
                })?
            }
            Form::LaplacianExact(_) => engine::backward(call, &self.mechanism.values(), saved, gradients.dense(), work),
            Form::Composed(m) => match self.backward_projected(call, saved, &mut gradients, work) {
                Some(done) => done,
                None => engine::backward(call, m, saved, gradients.dense(), work),
            },
        }
    }
}
