//! The learnable tensors of a mechanism: which it has, their shapes, and the values that stand for them.

use super::{Mechanism, Structure};
use crate::{Parameter, Shape};

impl Mechanism {
    /// The tensors that a call may carry in [`crate::Extras`], and whose gradients it may ask for.
    pub fn parameters(&self) -> Vec<Parameter> {
        if let Self::Composed(m) = self { m.parameters() } else { self.of_preset().to_vec() }
    }

    /// Whether `parameter` is one of [`Mechanism::parameters`]; a preset's call, and one that gives none, allocates nothing.
    pub(crate) fn has(&self, parameter: Parameter) -> bool {
        match self {
            // Only landmarks and filters have what a call must give.
            Self::Composed(_) if parameter == Parameter::Bias => self.bias().is_some(),
            Self::Composed(m) if parameter.required() && !matches!(m.structure, Structure::Nystrom(_)) => false,
            Self::Composed(m) => m.parameters().contains(&parameter),
            _ => self.of_preset().contains(&parameter),
        }
    }

    /// Whether a call of sizes `shape` has to give `parameter`: the configuration has no values that stand for it.
    pub fn requires(&self, parameter: Parameter, shape: &Shape) -> bool {
        match parameter {
            Parameter::Bias => self.bias().is_some_and(|bias| bias.default_values(shape).is_none()),
            _ => parameter.required() && self.has(parameter),
        }
    }

    /// Which elements of one of [`Mechanism::parameters`] belong to a batch element and head.
    pub(crate) fn parameter_part(&self, parameter: Parameter, shape: &Shape, slice: usize) -> std::ops::Range<usize> {
        match (self.bias(), parameter) {
            (Some(bias), Parameter::Bias) => bias.part(shape, slice),
            _ if parameter.is_map() && self.projected().is_some_and(|m| !m.per_head) => {
                0..self.parameter_len(parameter, shape)
            }
            _ => parameter.part(self.parameter_len(parameter, shape), shape, slice),
        }
    }

    /// The parameters of a preset that has fields of its own.
    const fn of_preset(&self) -> &'static [Parameter] {
        match self {
            Self::Softmax(_) | Self::Uniform(_) | Self::Ssa(_) => &[],
            Self::Infsa(_) | Self::InfsaResolvent(_) | Self::LinearInfsa(_) => &[Parameter::Gamma],
            // At alpha = 2 the kernel jumps: there is no slope in alpha.
            Self::Fna(m) if m.is_gaussian() => &[Parameter::Kappa],
            Self::Fna(_) => &[Parameter::Alpha, Parameter::Kappa],
            Self::Soft(m) | Self::SoftPp(m) => m.parameters(),
            Self::Laplacian(m) => m.parameters(),
            Self::LaplacianExact(_) => &[Parameter::Lambda],
            Self::Composed(_) => &[],
        }
    }

    /// The values that stand for one of [`Mechanism::parameters`] where a call does not give it, of
    /// [`Mechanism::parameter_shape`]; what a module starts from.
    pub fn parameter_default(&self, parameter: Parameter, shape: &Shape) -> Vec<f32> {
        match self {
            Self::Soft(m) | Self::SoftPp(m) => return m.parameter_default(parameter, shape),
            Self::Laplacian(m) => return m.parameter_default(parameter, shape),
            Self::Composed(m) => return m.parameter_default(parameter, shape),
            _ => {}
        }
        let len = self.parameter_shape(parameter, shape).iter().product();
        let value = match parameter {
            Parameter::Gamma => self.gamma().unwrap_or(1.0),
            _ => match self {
                Self::Fna(m) => m.parameter(parameter, shape),
                Self::LaplacianExact(m) => m.lambda,
                _ => 0.0,
            },
        };
        vec![value as f32; len]
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
        match self {
            Self::Soft(m) | Self::SoftPp(m) => m.parameter_axes(parameter, shape),
            Self::Laplacian(m) => m.parameter_axes(parameter, shape),
            Self::Composed(m) => m.parameter_axes(parameter, shape),
            _ => ([shape.heads, 1, 1, 1], 1),
        }
    }
}
