//! What makes landmarks, and filters values, in mechanisms that approximate a kernel by a few tokens.

use burn::{
    module::{Initializer, Module, Param},
    tensor::{Device, Distribution, Tensor, TensorData},
};

use crate::{Extras, Mechanism, Parameter, Shape, mechanism::Landmarks};

/// The mechanism's own filters and norms, as far as its configuration has them. Filters lie flat, one row per channel or
/// head that they make; [`Mechanism::parameter_shape`] says what a row is.
#[derive(Module, Debug)]
pub struct LandmarkParameters {
    /// The filter that makes landmarks: `[head_dim, head_dim * window]` in `soft` and `soft-pp`, `[head_dim, window]` in
    /// `laplacian`. Starts as the mean of the window.
    pub landmark_weight: Option<Param<Tensor<2>>>,
    /// Gain of the layer norm on landmarks, `[head_dim]`.
    pub norm_gamma: Option<Param<Tensor<1>>>,
    /// Offset of the layer norm on landmarks, `[head_dim]`.
    pub norm_beta: Option<Param<Tensor<1>>>,
    /// The filter over the values, `[heads, taps]`. Starts uniform within `taps^-0.5`, as convolutions do in Burn.
    pub value_weight: Option<Param<Tensor<2>>>,
    /// What projected keys are made with, `[count or heads * count, max_tokens]`. Starts normal of variance `1 / count`, as drawn by the
    /// structure's seed.
    pub key_map: Option<Param<Tensor<2>>>,
    /// The same of values.
    pub value_map: Option<Param<Tensor<2>>>,
}

impl LandmarkParameters {
    pub(super) fn init(mechanism: &Mechanism, heads: usize, head_dim: usize, device: &Device) -> Self {
        let shape = sizes(heads, head_dim);
        let default = |parameter, rows: usize| {
            let has = mechanism.parameters().contains(&parameter);
            has.then(|| {
                let values = mechanism.parameter_default(parameter, &shape);
                let columns = values.len() / rows;
                TensorData::new(values, [rows, columns])
            })
        };
        let matrix = |data| Param::from_tensor(Tensor::from_data(data, device));
        let vector = |data| Param::from_tensor(Tensor::<2>::from_data(data, device).flatten(0, 1));
        let value_weight = default(Parameter::ValueWeight, heads).map(|data| value_filter(data.shape().dims(), device));
        Self {
            landmark_weight: default(Parameter::LandmarkWeight, head_dim).map(matrix),
            norm_gamma: default(Parameter::LandmarkNormGamma, 1).map(vector),
            norm_beta: default(Parameter::LandmarkNormBeta, 1).map(vector),
            value_weight,
            key_map: default(Parameter::KeyMap, rows_of_maps(mechanism, heads)).map(matrix),
            value_map: default(Parameter::ValueMap, rows_of_maps(mechanism, heads)).map(matrix),
        }
    }

    /// `extras` with these tensors as the mechanism takes them.
    pub(super) fn add_to(&self, extras: Extras, mechanism: &Mechanism, heads: usize, head_dim: usize) -> Extras {
        let filters = [
            (Parameter::LandmarkWeight, &self.landmark_weight),
            (Parameter::ValueWeight, &self.value_weight),
            (Parameter::KeyMap, &self.key_map),
            (Parameter::ValueMap, &self.value_map),
        ];
        let norms = [(Parameter::LandmarkNormGamma, &self.norm_gamma), (Parameter::LandmarkNormBeta, &self.norm_beta)];
        let shape = sizes(heads, head_dim);
        let extras = filters.into_iter().fold(extras, |extras, (parameter, weight)| match weight {
            Some(weight) => extras.with_shape(parameter, mechanism.parameter_shape(parameter, &shape), weight.val()),
            None => extras,
        });
        norms.into_iter().fold(extras, |extras, (parameter, values)| match values {
            Some(values) => extras.with(parameter, values.val()),
            None => extras,
        })
    }

    /// Elements of all tensors.
    pub(super) fn count(mechanism: &Mechanism, heads: usize, head_dim: usize) -> usize {
        let own = mechanism.parameters().into_iter();
        let has = own.filter(|parameter| parameter.is_weights() && *parameter != Parameter::GivenLandmarks);
        has.map(|parameter| mechanism.parameter_len(parameter, &sizes(heads, head_dim))).sum()
    }
}

/// Rows of all maps of projected tokens; 1 where there are none.
fn rows_of_maps(mechanism: &Mechanism, heads: usize) -> usize {
    mechanism.projected().map_or(1, |m| if m.per_head { heads * m.count } else { m.count })
}

/// The shapes of parameters do not depend on batch and length.
fn sizes(heads: usize, head_dim: usize) -> Shape {
    Shape::square(1, heads, 1, head_dim)
}

/// `rows` filters of `taps` weights each.
pub(super) fn value_filter([rows, taps]: [usize; 2], device: &Device) -> Param<Tensor<2>> {
    let bound = (taps as f64).powf(-0.5);
    Initializer::Uniform { min: -bound, max: bound }.init([rows, taps], device)
}

/// The mechanism with another draw of its random landmarks, from the device's generator.
pub(super) fn redrawn(mechanism: Mechanism, device: &Device) -> Mechanism {
    mechanism.with_landmarks(|landmarks| match landmarks {
        Landmarks::Random { count, seed } => Landmarks::Random { count, seed: seed ^ drawn_seed(device) },
        other => other,
    })
}

/// 48 bits from the device's generator.
pub(super) fn drawn_seed(device: &Device) -> u64 {
    // An f32 counts to 2^24.
    let draw = Tensor::<1>::random([2], Distribution::Uniform(0.0, 16_777_216.0), device);
    let draw: Vec<f32> = draw.into_data().iter().collect();
    draw.iter().fold(0, |bits, &x| bits << 24 | x as u64)
}
