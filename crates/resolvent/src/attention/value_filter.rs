//! A filter over the values beside the attention.

use burn::{
    module::{Initializer, Module, Param},
    tensor::{Bool, Device, Tensor},
};

use super::landmarks::value_filter;
use crate::{Result, ops::depthwise};

/// The filter over the values whose result is added to the output of the heads, before the output projection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ValueConv {
    /// None.
    #[default]
    None,
    /// One kernel per head, the same for all its channels, without bias. The authors' code of "Softmax-free Linear
    /// Transformers".
    PerHead {
        /// Side of the kernel, odd.
        side: usize,
    },
    /// One kernel per channel, with bias. "LaplacianFormer", eq. 7.
    PerChannel {
        /// Side of the kernel, odd.
        side: usize,
    },
}

impl ValueConv {
    /// Side of the kernel, if there is one.
    pub fn side(self) -> Option<usize> {
        match self {
            Self::None => None,
            Self::PerHead { side } | Self::PerChannel { side } => Some(side),
        }
    }

    /// Weights and biases for a module of `heads` heads over `channels` channels.
    pub(super) fn count(self, heads: usize, channels: usize, planar: bool) -> usize {
        let taps = |side: usize| if planar { side * side } else { side };
        match self {
            Self::None => 0,
            Self::PerHead { side } => heads * taps(side),
            Self::PerChannel { side } => channels * (taps(side) + 1),
        }
    }
}

/// The filter as a module.
#[derive(Module, Debug)]
pub struct ValueFilter {
    /// `[heads, taps]` or `[channels, taps]`; the taps are `side`, on a grid `side * side`.
    pub weight: Param<Tensor<2>>,
    /// `[channels]`, of kernels per channel.
    pub bias: Option<Param<Tensor<1>>>,
}

impl ValueFilter {
    pub(super) fn init(conv: ValueConv, heads: usize, channels: usize, planar: bool, device: &Device) -> Option<Self> {
        let side = conv.side()?;
        let per_channel = matches!(conv, ValueConv::PerChannel { .. });
        let rows = if per_channel { channels } else { heads };
        Some(Self {
            weight: value_filter([rows, if planar { side * side } else { side }], device),
            bias: per_channel.then(|| Initializer::Zeros.init([channels], device)),
        })
    }

    /// The filtered `v [batch, seq, channels]`; padding, where `keep [batch, seq]` is false, is as what lies beyond the edges.
    pub(super) fn forward(
        &self,
        v: Tensor<3>,
        grid: Option<[usize; 2]>,
        keep: Option<&Tensor<2, Bool>>,
    ) -> Result<Tensor<3>> {
        let [_, _, channels] = v.dims();
        let v = match keep {
            Some(keep) => v.clone().mask_fill(keep.clone().bool_not().unsqueeze_dim::<3>(2).expand(v.shape()), 0.0),
            None => v,
        };
        let [rows, taps] = self.weight.dims();
        let weight = self.weight.val().reshape([rows, 1, taps]).expand([rows, channels / rows, taps]);
        let filtered = depthwise(v, weight.reshape([channels, taps]), grid)?;
        Ok(match &self.bias {
            Some(bias) => filtered + bias.val().reshape([1, 1, channels]),
            None => filtered,
        })
    }
}
