//! Attention of a few new queries over keys and values that are kept, for decoding token by token.

use burn::tensor::{Bool, Int, Tensor};
use resolvent_kernels as kernels;

use super::{MultiHeadAttention, config::with_tied};
use crate::{
    Error, Inputs, Mask, Mechanism, Result, attend,
    ops::{merge_heads, projections},
};

/// Projected keys and values of the tokens so far, or of another sequence.
#[derive(Debug, Clone)]
pub struct KeyValues {
    /// `[batch, heads, seq_kv, head_dim]`; the values again for `uniform`, whose keys are not read.
    keys: Tensor<4>,
    /// `[batch, heads, seq_kv, head_dim]`.
    values: Tensor<4>,
}

impl KeyValues {
    /// These, followed by `later`.
    pub fn followed_by(self, later: Self) -> Self {
        Self {
            keys: Tensor::cat(vec![self.keys, later.keys], 2),
            values: Tensor::cat(vec![self.values, later.values], 2),
        }
    }

    /// The sequences at `rows` of the batch, which may repeat.
    pub fn select(self, rows: Tensor<1, Int>) -> Self {
        Self { keys: self.keys.select(0, rows.clone()), values: self.values.select(0, rows) }
    }
}

/// Checks that each row of `mechanism` depends on its own query alone, as decoding token by token and attention from
/// a sequence that is still being written need.
///
/// # Errors
/// [`Error::Mechanism`] saying why not.
pub fn check_row_local(mechanism: &Mechanism) -> Result<()> {
    let why = match mechanism {
        Mechanism::Softmax(_) | Mechanism::Uniform(_) => return Ok(()),
        Mechanism::Fna(m) if m.norm_exponent == 0.0 => return Ok(()),
        Mechanism::Fna(_) => "norm_exponent mixes the degrees of other rows in; set it to 0",
        _ => "its rows depend on other queries, which a decoder has not written yet; use softmax, fna or uniform",
    };
    Err(Error::Mechanism(kernels::Error::Unsupported { mechanism: mechanism.id(), what: "a decoder", why }))
}

impl MultiHeadAttention {
    /// Keys and values of `tokens [batch, seq_kv, d_model]`.
    pub fn key_values(&self, tokens: Tensor<3>) -> KeyValues {
        let parts = projections(&self.mechanism);
        let values = self.heads(self.project_part(tokens.clone(), parts - 1));
        let keys = match &self.mechanism {
            Mechanism::Uniform(_) => values.clone(),
            mechanism => self.heads(self.project_part(tokens, usize::from(!mechanism.tied()))),
        };
        KeyValues { keys, values }
    }

    /// Every query of `query [batch, seq_q, d_model]` over all keys: the rows that [`MultiHeadAttention::forward`] gives for tokens
    /// that see exactly these keys. `padding [batch, seq_kv]` is true where there is no key.
    ///
    /// # Errors
    /// As [`check_row_local`] and [`crate::attend`].
    pub fn attend_over(
        &self,
        query: Tensor<3>,
        past: &KeyValues,
        padding: Option<Tensor<2, Bool>>,
    ) -> Result<Tensor<3>> {
        check_row_local(&self.mechanism)?;
        self.check_cross(&self.mechanism)?;
        let q = match &self.mechanism {
            // The sizes alone count.
            Mechanism::Uniform(_) => self.heads(query),
            _ => self.heads(self.project_part(query, 0)),
        };
        let mut inputs = Inputs::new(q, past.keys.clone(), past.values.clone());
        inputs.extras = self.extras();
        let mask = Mask { causal: false, key: padding.map(Tensor::bool_not), query: None };
        // Tied, one projection makes queries and keys, but of different tokens.
        let mechanism = with_tied(self.mechanism.clone(), false);
        let attended = merge_heads(attend(&inputs, &mechanism, &mask, self.strategy)?.out);
        Ok(self.dropout.forward(self.output(attended)))
    }
}
