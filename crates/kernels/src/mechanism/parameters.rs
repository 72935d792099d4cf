//! The learnable tensors of a mechanism: which it has, their shapes, and the values that stand for them.

use super::{Form, Mechanism, Structure};
use crate::{Parameter, Shape};

impl Mechanism {
    /// The tensors that a call may carry in [`crate::Extras`], and whose gradients it may ask for: of a preset with fields of its own those
    /// that its paper learns.
    pub fn parameters(&self) -> Vec<Parameter> {
        self.own().map_or_else(|| self.of_values(), |form| form.parameters().to_vec())
    }

    /// The learnable tensors of all four values.
    fn of_values(&self) -> Vec<Parameter> {
        let mut all = match self.structure {
            // A map of features knows the score's scale alone, and one of pooled weights the activation.
            Structure::Pooled(_) => Vec::new(),
            _ => self.score.parameters().to_vec(),
        };
        if let Structure::Nystrom(m) = &self.structure {
            let of_landmarks = m.soft().parameters().iter().copied().filter(|&p| p != Parameter::Scale);
            all.extend(of_landmarks);
        }
        if let Structure::Projected(_) = &self.structure {
            all.extend([Parameter::KeyMap, Parameter::ValueMap]);
        }
        all.extend(self.bias.map(|_| Parameter::Bias));
        all.push(Parameter::Gamma);
        all
    }

    /// Whether `parameter` is one of [`Mechanism::parameters`]. A call of a preset, or one that gives none, allocates nothing for it.
    pub(crate) fn has(&self, parameter: Parameter) -> bool {
        // Only landmarks and filters have what a call must give.
        if parameter.required() && !self.has_landmarks() {
            return false;
        }
        match self.own() {
            Some(form) => form.parameters().contains(&parameter),
            None if parameter == Parameter::Bias => self.bias.is_some(),
            None => self.of_values().contains(&parameter),
        }
    }

    const fn has_landmarks(&self) -> bool {
        matches!(self.structure, Structure::Nystrom(_))
    }

    /// A tensor that a call of sizes `shape` has to give and that is not among those `given`.
    pub(crate) fn missing(&self, shape: &Shape, given: impl Fn(Parameter) -> bool) -> Option<Parameter> {
        if !given(Parameter::Bias) && self.requires(Parameter::Bias, shape) {
            return Some(Parameter::Bias);
        }
        // What the mechanism is, is asked once, and of landmarks alone.
        if !self.has_landmarks() {
            return None;
        }
        let absent = |p: &Parameter| p.required() && !given(*p);
        match self.own() {
            Some(form) => form.parameters().iter().copied().find(absent),
            None => self.of_values().into_iter().find(absent),
        }
    }

    /// Whether a call of sizes `shape` has to give `parameter`: the configuration has no values that stand for it.
    pub fn requires(&self, parameter: Parameter, shape: &Shape) -> bool {
        match parameter {
            Parameter::Bias => self.bias.is_some_and(|bias| bias.default_values(shape).is_none()),
            _ => parameter.required() && self.has(parameter),
        }
    }

    /// Which elements of one of [`Mechanism::parameters`] in a call of sizes `shape` belong to a batch element and head, `slice`: batch
    /// entry times heads plus head.
    ///
    /// # Panics
    /// For a slice of a call without heads.
    pub fn parameter_part(&self, parameter: Parameter, shape: &Shape, slice: usize) -> std::ops::Range<usize> {
        match (self.bias, parameter) {
            (Some(bias), Parameter::Bias) => bias.part(shape, slice),
            _ if parameter.is_map() && self.projected().is_some_and(|m| !m.per_head) => {
                0..self.parameter_len(parameter, shape)
            }
            _ => parameter.part(self.parameter_len(parameter, shape), shape, slice),
        }
    }

    /// The shape of one of [`Mechanism::parameters`] in a call of sizes `shape`.
    pub fn parameter_shape(&self, parameter: Parameter, shape: &Shape) -> Vec<usize> {
        let (axes, rank) = self.parameter_axes(parameter, shape);
        axes[..rank].to_vec()
    }

    /// Elements of one of [`Mechanism::parameters`] in a call of sizes `shape`.
    pub fn parameter_len(&self, parameter: Parameter, shape: &Shape) -> usize {
        self.parameter_axes(parameter, shape).0.iter().product()
    }

    /// The axes of a parameter, and 1s beyond the last; how many there are.
    fn parameter_axes(&self, parameter: Parameter, shape: &Shape) -> ([usize; 4], usize) {
        if let Some(Form::Laplacian(m)) = self.own() {
            return m.parameter_axes(parameter, shape);
        }
        match &self.structure {
            _ if parameter == Parameter::Bias => self.bias.map_or(([0; 4], 1), |bias| bias.axes(shape)),
            Structure::Nystrom(m) if !self.score.parameters().contains(&parameter) => {
                m.soft().parameter_axes(parameter, shape)
            }
            Structure::Projected(m) if parameter.is_map() => m.axes(shape),
            _ => ([shape.heads, 1, 1, 1], 1),
        }
    }

    /// The values that stand for one of [`Mechanism::parameters`] where a call does not give it, of
    /// [`Mechanism::parameter_shape`]; what a module starts from.
    pub fn parameter_default(&self, parameter: Parameter, shape: &Shape) -> Vec<f32> {
        if let Some(Form::Laplacian(m)) = self.own() {
            return m.parameter_default(parameter, shape);
        }
        let value = match (parameter, &self.structure) {
            (Parameter::Gamma, _) => self.series.gamma(),
            (Parameter::Bias, _) => {
                let zeros = || vec![0.0; self.parameter_axes(parameter, shape).0.iter().product()];
                return self.bias.and_then(|bias| bias.default_values(shape)).unwrap_or_else(zeros);
            }
            (_, Structure::Nystrom(m)) if !self.score.parameters().contains(&parameter) => {
                return m.soft().parameter_default(parameter, shape);
            }
            (_, Structure::Projected(m)) if parameter.is_map() => {
                return m.map(parameter, shape.heads, m.columns(shape.seq_kv));
            }
            _ => self.score.value(parameter, shape.head_dim, shape.heads),
        };
        vec![value as f32; shape.heads]
    }
}
