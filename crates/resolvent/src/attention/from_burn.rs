//! What Burn's own module has and this one has in another place: its weights, and the matrix of attention weights.

use burn::{
    module::Param,
    nn::{Linear, attention as burns},
    tensor::{Device, Tensor},
};
use resolvent_kernels as kernels;

use super::{
    MhaInput, MultiHeadAttention, MultiHeadAttentionConfig,
    config::{clusters_a_span, with_tied},
    field,
};
use crate::{Mechanism, Result, attend, ops::split_heads};

impl MultiHeadAttention {
    /// Burn's own module, with its weights, as one of `softmax`: a checkpoint of Burn's module is loaded into Burn's module first.
    ///
    /// ```
    /// use burn::{nn::attention, tensor::{Device, Tensor}};
    /// use resolvent::attention::{MhaInput, MultiHeadAttention};
    /// let device = Device::flex();
    /// let burns = attention::MultiHeadAttentionConfig::new(32, 4).init(&device);
    /// let attention = MultiHeadAttention::from_burn(burns)?;
    /// let tokens = Tensor::<3>::zeros([2, 10, 32], &device);
    /// assert_eq!(attention.forward(MhaInput::self_attn(tokens)).context.dims(), [2, 10, 32]);
    /// # Ok::<(), resolvent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Mechanism`] for a quiet softmax; [`crate::Error::Field`] where some of the input projections have a bias and
    /// others none.
    pub fn from_burn(module: burns::MultiHeadAttention) -> Result<Self> {
        let mechanism = Mechanism::preset("softmax")?;
        if module.quiet_softmax {
            let (what, why) = ("quiet_softmax", "its rows do not sum to one");
            return Err(kernels::Error::Unsupported { mechanism: mechanism.id(), what, why }.into());
        }
        let parts = [module.query, module.key, module.value];
        let biases: Vec<Tensor<1>> = parts.iter().filter_map(|part| Some(part.bias.as_ref()?.val())).collect();
        field("query_bias, key_bias, value_bias", biases.len(), [0, 3].contains(&biases.len()), "all or none of them")?;
        let weight = Tensor::cat(parts.iter().map(|part| part.weight.val()).collect(), 1);
        let config = MultiHeadAttentionConfig::new(module.d_model, module.n_heads, mechanism);
        let config = config.with_weight_dropout(module.dropout.prob).with_qkv_bias(!biases.is_empty());
        // The weights that it starts with are replaced: they need not be drawn on the device of Burn's.
        let built = config.with_output_bias(module.output.bias.is_some()).try_init(&Device::flex())?;
        let bias = (!biases.is_empty()).then(|| Param::from_tensor(Tensor::cat(biases, 0).detach()));
        let projection = Linear { weight: Param::from_tensor(weight.detach()), bias };
        Ok(Self { projection, output: module.output, ..built })
    }

    /// The matrix by which every head multiplies the values, `[batch, n_heads, seq_q, seq_kv]`: the weights of `softmax`, and of any
    /// other mechanism what it does in their place. It is the operator applied to the identity, for N tokens N x N numbers per head;
    /// [`MultiHeadAttention::forward`] forms none of it. Without dropout, and without the filter over the values, which is beside it.
    ///
    /// # Errors
    /// As [`MultiHeadAttention::try_forward`]; several sequences end to end, and clusters of a [`super::ClusterConfig::causal_span`].
    pub fn weights(&self, mut input: MhaInput) -> Result<Tensor<4>> {
        self.check_precision(&input.query)?;
        self.check(&input)?;
        input.recognise_causal(&self.mechanism)?;
        field("sequences", "several", input.sequences.is_none(), "one sequence for weights")?;
        let spanned = self.causal_span.filter(|_| clusters_a_span(&self.mechanism));
        field("causal_span", spanned.unwrap_or(0), spanned.is_none(), "null for weights")?;
        let extras = if input.memory.is_none() { self.extras_of_tokens() } else { self.extras() };
        let mask = input.mask();
        let (mechanism, extras) = input.hide_pairs(self.called(&input), extras)?;
        let (mut inputs, mechanism) = match input.memory {
            Some((key, value)) => {
                let inputs = self.cross_inputs(input.query, key, value, &mechanism)?;
                (inputs, with_tied(mechanism, false))
            }
            None => {
                let packed = self.shared_packed(self.project_alone(input.query, input.grid.or(self.grid))?).packed;
                (split_heads(packed, self.n_heads, &mechanism), mechanism)
            }
        };
        let [batch, heads, seq_kv, _] = inputs.v.dims();
        let identity = Tensor::<2>::eye(seq_kv, &inputs.v.device()).cast(inputs.v.dtype());
        inputs.v = identity.unsqueeze::<4>().expand([batch, heads, seq_kv, seq_kv]);
        inputs.extras = extras;
        Ok(attend(&inputs, &mechanism, &mask, self.strategy)?.out)
    }
}
