//! The tensors of mechanisms beside q, k and v: the differentiable ones by name, and how a call carries all of them.

use std::ops::Range;

use super::{ClusterPlan, Dropout, Shape};

/// A differentiable tensor that a mechanism may take beside q, k and v. [`crate::Mechanism::parameters`] lists those of a
/// mechanism, [`crate::Mechanism::parameter_shape`] their shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Parameter {
    /// Decay per head; replaces the field `gamma`. `infsa`, `infsa-resolvent`, `linear-infsa`.
    Gamma,
    /// Order of the Levy kernel per head; replaces the field `alpha`. `fna`.
    Alpha,
    /// Bandwidth per head; replaces the field `kappa`. `fna`.
    Kappa,
    /// Bandwidth per head; replaces the field `lambda`. `laplacian`, `laplacian-exact`.
    Lambda,
    /// Scale of the distances per head; replaces the field `scale`. `soft`, `soft-pp`.
    Scale,
    /// Weights of the convolution that makes landmarks. `soft`, `soft-pp`, `laplacian`.
    LandmarkWeight,
    /// Gain of the landmarks' layer norm. `soft`, `soft-pp`.
    LandmarkNormGamma,
    /// Offset of the landmarks' layer norm. `soft`, `soft-pp`.
    LandmarkNormBeta,
    /// Weights of the convolution over the values. `soft`, `soft-pp`.
    ValueWeight,
    /// The landmarks themselves. `soft`, `soft-pp`.
    GivenLandmarks,
    /// Added to the logit, per head; replaces the field `offset` of the score `dot-sigmoid`.
    Offset,
    /// Added to the logits of pairs for where their tokens are: the numbers of a [`crate::mechanism::Bias`]. Whether a call has to give
    /// them [`crate::Mechanism::requires`] says.
    Bias,
    /// What projected keys are made with, `[count, tokens]` or `[heads, count, tokens]`; replaces the map drawn by the `seed` of the structure
    /// `projected`.
    KeyMap,
    /// The same of values.
    ValueMap,
}

impl Parameter {
    /// Every parameter.
    pub const ALL: [Self; 14] = [
        Self::Gamma,
        Self::Alpha,
        Self::Kappa,
        Self::Lambda,
        Self::Scale,
        Self::LandmarkWeight,
        Self::LandmarkNormGamma,
        Self::LandmarkNormBeta,
        Self::ValueWeight,
        Self::GivenLandmarks,
        Self::Offset,
        Self::Bias,
        Self::KeyMap,
        Self::ValueMap,
    ];

    /// The tensor's name in files.
    pub const fn name(self) -> &'static str {
        self.gradient_name().split_at(1).1
    }

    /// The name of its gradient: `d` and the name.
    pub const fn gradient_name(self) -> &'static str {
        match self {
            Self::Gamma => "dgamma",
            Self::Alpha => "dalpha",
            Self::Kappa => "dkappa",
            Self::Lambda => "dlambda",
            Self::Scale => "dscale",
            Self::LandmarkWeight => "dlandmark_weight",
            Self::LandmarkNormGamma => "dlandmark_norm_gamma",
            Self::LandmarkNormBeta => "dlandmark_norm_beta",
            Self::ValueWeight => "dvalue_weight",
            Self::GivenLandmarks => "dgiven_landmarks",
            Self::Offset => "doffset",
            Self::Bias => "dbias",
            Self::KeyMap => "dkey_map",
            Self::ValueMap => "dvalue_map",
        }
    }

    /// Whether no configuration has values that stand for the parameter; see also [`crate::Mechanism::requires`].
    pub const fn required(self) -> bool {
        matches!(
            self,
            Self::LandmarkWeight
                | Self::LandmarkNormGamma
                | Self::LandmarkNormBeta
                | Self::ValueWeight
                | Self::GivenLandmarks
        )
    }

    /// Whether it is a map from tokens to projected tokens.
    pub const fn is_map(self) -> bool {
        matches!(self, Self::KeyMap | Self::ValueMap)
    }

    /// Whether it is made of weights, which a module learns in any case, and not a number per head, which it may.
    pub const fn is_weights(self) -> bool {
        self.required() || self.is_map()
    }

    /// Which of the `len` elements of a parameter, but a bias or a map that heads share, belong to batch element and head `slice`.
    pub(crate) const fn part(self, len: usize, shape: &Shape, slice: usize) -> Range<usize> {
        let (parts, part) = match self {
            Self::LandmarkWeight | Self::LandmarkNormGamma | Self::LandmarkNormBeta => (1, 0),
            Self::GivenLandmarks => (shape.slices(), slice),
            _ => (shape.heads, slice % shape.heads),
        };
        part * (len / parts)..(part + 1) * (len / parts)
    }
}

/// Tensors that belong to single mechanisms.
///
/// ```
/// use resolvent_kernels::{Extras, Parameter};
/// let extras = Extras::default().with(Parameter::Gamma, &[0.5, 0.9]);
/// assert_eq!(extras.get(Parameter::Gamma), Some(&[0.5, 0.9][..]));
/// assert_eq!(extras.get(Parameter::Kappa), None);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct Extras<'a> {
    parameters: [Option<&'a [f32]>; Parameter::ALL.len()],
    /// Fixed centroids `[heads, clusters, head_dim]` that replace k-means. `ssa`. Constants of the call.
    pub codebook: Option<&'a [f32]>,
    /// A plan that replaces planning. `ssa`. A constant of the call.
    pub clusters: Option<&'a ClusterPlan>,
    /// Tokens that are the landmarks, `[batch, count]`; replaces the draw of landmarks of kind `random`. `soft`, `soft-pp`.
    pub landmark_indices: Option<&'a [i64]>,
    /// Pairs to be left out at random. `softmax`, `fna`. A constant of the call: give the backward pass the same.
    pub dropout: Option<Dropout>,
    /// The number of the first sequence, from which the others are counted: clusters and landmarks are drawn by it, so that a part of a
    /// batch gets what it has in the whole. Default 0.
    pub first_sequence: usize,
}

impl<'a> Extras<'a> {
    /// The same extras with `parameter`, of [`crate::Mechanism::parameter_shape`].
    #[must_use]
    pub const fn with(mut self, parameter: Parameter, values: &'a [f32]) -> Self {
        self.parameters[parameter as usize] = Some(values);
        self
    }

    /// The same extras with fixed centroids, `[heads, clusters, head_dim]`.
    #[must_use]
    pub const fn with_codebook(self, codebook: &'a [f32]) -> Self {
        Self { codebook: Some(codebook), ..self }
    }

    /// The same extras with a plan, which replaces planning.
    #[must_use]
    pub const fn with_clusters(self, plan: &'a ClusterPlan) -> Self {
        Self { clusters: Some(plan), ..self }
    }

    /// The same extras for a call whose first sequence is number `first` of a larger batch.
    #[must_use]
    pub const fn with_first_sequence(self, first: usize) -> Self {
        Self { first_sequence: first, ..self }
    }

    /// The same extras with pairs left out at random.
    #[must_use]
    pub const fn with_dropout(self, dropout: Dropout) -> Self {
        Self { dropout: Some(dropout), ..self }
    }

    /// The same extras without `parameter`.
    #[must_use]
    pub(crate) const fn without(mut self, parameter: Parameter) -> Self {
        self.parameters[parameter as usize] = None;
        self
    }

    /// The values of `parameter`, if the call has them.
    pub const fn get(&self, parameter: Parameter) -> Option<&'a [f32]> {
        self.parameters[parameter as usize]
    }

    /// The parameters that the call has.
    pub fn iter(&self) -> impl Iterator<Item = (Parameter, &'a [f32])> {
        let parameters = self.parameters;
        Parameter::ALL.into_iter().filter_map(move |p| Some((p, parameters[p as usize]?)))
    }
}

/// Where the gradients of [`Extras`] go, each summed over the batch. One may be asked for whether or not the call
/// gives the parameter's values: it is then the gradient of the configured ones.
#[derive(Debug, Default)]
pub struct ExtraGradients<'a> {
    parameters: [Option<&'a mut [f32]>; Parameter::ALL.len()],
}

impl<'a> ExtraGradients<'a> {
    /// The same with room for the gradient of `parameter`, of the parameter's shape.
    #[must_use]
    pub fn with(mut self, parameter: Parameter, buffer: &'a mut [f32]) -> Self {
        self.parameters[parameter as usize] = Some(buffer);
        self
    }

    /// Gradients of `wanted`, so many elements each, one after another in `buffer`.
    ///
    /// # Panics
    /// Where `buffer` has fewer elements than all of them together.
    pub fn of_parts(mut buffer: &'a mut [f32], wanted: impl IntoIterator<Item = (Parameter, usize)>) -> Self {
        wanted.into_iter().fold(Self::default(), |all, (parameter, len)| {
            let (own, rest) = std::mem::take(&mut buffer).split_at_mut(len);
            buffer = rest;
            all.with(parameter, own)
        })
    }

    /// Where the gradient of `parameter` goes, if it is asked for.
    pub fn get(&mut self, parameter: Parameter) -> Option<&mut [f32]> {
        self.parameters[parameter as usize].as_deref_mut()
    }

    /// Takes out where the gradient of `parameter` goes, if it is asked for.
    pub(crate) fn take(&mut self, parameter: Parameter) -> Option<&'a mut [f32]> {
        self.parameters[parameter as usize].take()
    }

    /// The same room for a shorter time.
    pub fn reborrow(&mut self) -> ExtraGradients<'_> {
        ExtraGradients { parameters: self.parameters.each_mut().map(Option::as_deref_mut) }
    }

    /// The gradients that are asked for.
    pub fn iter(&mut self) -> impl Iterator<Item = (Parameter, &mut [f32])> {
        Parameter::ALL.into_iter().zip(&mut self.parameters).filter_map(|(p, buffer)| Some((p, buffer.as_deref_mut()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_indexed_in_the_order_of_the_list() {
        for (i, parameter) in Parameter::ALL.into_iter().enumerate() {
            assert_eq!(parameter as usize, i, "{}", parameter.name());
            assert_eq!(format!("d{}", parameter.name()), parameter.gradient_name());
        }
    }
}
