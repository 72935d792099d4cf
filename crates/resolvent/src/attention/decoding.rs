//! Attention of a few new queries over what is kept of earlier tokens, for decoding token by token.

use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use resolvent_kernels::{self as kernels, Cache, Parameter};

use super::{
    MultiHeadAttention,
    config::{clusters_a_span, reads_values_alone, with_tied},
    input::present,
};
use crate::{
    Error, Inputs, Mask, Mechanism, Result, Strategy, attend,
    mechanism::Normalisation,
    ops::{is_flex, merge_heads},
    ternary::host,
};

/// Projected keys and values of another sequence.
#[derive(Debug, Clone)]
pub struct KeyValues {
    /// `[batch, seq_kv, kv_heads * head_dim]`; the values again for `uniform`, whose keys are not read.
    keys: Tensor<3>,
    /// `[batch, seq_kv, kv_heads * head_dim]`.
    values: Tensor<3>,
}

impl KeyValues {
    /// The sequences at `rows` of the batch, which may repeat.
    pub fn select(self, rows: Tensor<1, Int>) -> Self {
        Self { keys: self.keys.select(0, rows.clone()), values: self.values.select(0, rows) }
    }
}

/// What a layer keeps of the tokens so far.
#[derive(Debug, Clone)]
pub struct Past {
    kept: Kept,
}

/// Boxed, so that a layer of either kind is moved as one pointer: a tensor that can lie on any of several backends is large.
#[derive(Debug, Clone)]
enum Kept {
    /// What the kernels need for the next row.
    Cache(Box<Cache>),
    /// `[batch, seq, columns]`: keys and values, turned by their positions; queries too where rows depend on those of other
    /// tokens.
    Projections(Box<Tensor<3>>),
}

impl Past {
    /// Tokens so far.
    pub fn len(&self) -> usize {
        match &self.kept {
            Kept::Cache(cache) => cache.len(),
            Kept::Projections(kept) => kept.dims()[1],
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of what is kept, with the room for tokens to come. In the kernels' cache of a mechanism with a window they are bounded, however
    /// many tokens there are.
    pub fn bytes(&self) -> usize {
        match &self.kept {
            Kept::Cache(cache) => cache.bytes(),
            Kept::Projections(kept) => kept.shape().num_elements() * kept.dtype().size(),
        }
    }

    /// The sequences at `rows` of the batch, which may repeat.
    pub fn select(self, rows: Tensor<1, Int>) -> Self {
        let kept = match self.kept {
            Kept::Cache(cache) => {
                let rows: Vec<usize> = rows.into_data().iter::<i64>().map(|row| row as usize).collect();
                Kept::Cache(Box::new(cache.select(&rows)))
            }
            Kept::Projections(kept) => Kept::Projections(Box::new(kept.select(0, rows))),
        };
        Self { kept }
    }
}

/// Checks that each row of `mechanism` depends on its own query alone, as decoding token by token and attention from
/// a sequence that is still being written need.
///
/// # Errors
/// [`Error::Mechanism`] saying why not.
pub fn check_row_local(mechanism: &Mechanism) -> Result<()> {
    if mechanism.is_row_local() {
        return Ok(());
    }
    let why = if mechanism.as_fna().is_some() {
        "norm_exponent (density_exponent of a composition) mixes the degrees of other rows in; set it to 0"
    } else {
        "its rows depend on other queries, which a decoder has not written yet; use softmax, fna, uniform, local, cosine, sigmoid, relu, linear, performer or routed"
    };
    Err(Error::Mechanism(kernels::Error::Unsupported { mechanism: mechanism.id(), what: "a decoder", why }))
}

impl MultiHeadAttention {
    /// Causal self-attention of the next `tokens [batch, seq, d_model]`, which are added to `past` (`None` before the first): the
    /// rows that [`MultiHeadAttention::forward`] gives them in the whole sequence.
    ///
    /// On Flex in f32 the kernels keep what the next row needs ([`Cache`]): a token costs O(N) for N tokens so far with `softmax`,
    /// `fna`, `infsa` and dense compositions, about `sqrt(N)` with `ssa` and a [`causal_span`](MultiHeadAttention::causal_span), the
    /// same however many there are with `uniform` and in a window, of which no more than it and its sinks are kept. Elsewhere it costs O(N), and a copy of what is kept, where each row depends on its
    /// own query alone ([`check_row_local`]); else the operator is applied to all projections so far, and the new rows are taken: as
    /// much as a forward pass of the operator, but no past token is projected again. With a precision of bf16 the kernels' cache still
    /// multiplies in f32.
    ///
    /// # Errors
    /// A mechanism without a causal form, and whatever else [`crate::attend`] refuses.
    pub fn attend_next(&self, tokens: Tensor<3>, past: &mut Option<Past>) -> Result<Tensor<3>> {
        self.check_precision(&tokens)?;
        let [_, seq, _] = tokens.dims();
        if self.grid.is_some() {
            let why = "tokens on a grid do not come one after the other";
            return Err(kernels::Error::Unsupported { mechanism: self.mechanism.id(), what: "decoding", why }.into());
        }
        let first = past.as_ref().map_or(0, Past::len);
        let packed = self.project(tokens, &(first..first + seq).collect::<Vec<_>>(), None)?;
        let cache = match past.take() {
            None => self.cache(&packed).map(Box::new),
            Some(Past { kept: Kept::Cache(cache) }) => Some(cache),
            other => {
                *past = other;
                None
            }
        };
        let attended = if let Some(mut cache) = cache {
            let attended = self.attend_cached(packed, &mut cache)?;
            *past = Some(Past { kept: Kept::Cache(cache) });
            attended
        } else if self.value_filter.is_none() && self.head_groups.is_empty() && check_row_local(&self.mechanism).is_ok()
        {
            self.attend_rows(packed, past)?
        } else {
            let whole = add(past, packed);
            let attended = self.attend_projected(whole, None, &self.mechanism, self.extras(), &Mask::causal())?;
            attended.narrow(1, first, seq)
        };
        Ok(self.dropout.forward(self.output(attended)))
    }

    /// An empty cache, where the kernels have one for these projections.
    fn cache(&self, packed: &Tensor<3>) -> Option<Cache> {
        let ([batch, seq, _], device) = (packed.dims(), packed.device());
        let here = is_flex(&device) && !device.is_autodiff() && packed.dtype() == DType::F32;
        let free = matches!(self.strategy, Strategy::Auto | Strategy::Fused);
        let whole = self.value_filter.is_some() || !self.head_groups.is_empty();
        if !here || !free || whole || self.observer.is_some() {
            return None;
        }
        let capacity = match (&self.mechanism, self.causal_span) {
            // How many clusters there are must not depend on how many tokens there are so far.
            (mechanism, span) if clusters_a_span(mechanism) => span?,
            (_, span) => span.unwrap_or(seq),
        };
        let dim = self.head_dim();
        let cache = Cache::new(&self.mechanism, batch, self.n_heads, dim, dim, capacity);
        // What has no cache is refused, or done in another way, by those that say why.
        cache.and_then(|cache| cache.with_kv_heads(self.kv_heads)).ok()
    }

    /// The rows of new projections, which `cache` takes in.
    fn attend_cached(&self, packed: Tensor<3>, cache: &mut Cache) -> Result<Tensor<3>> {
        let ([batch, seq, width], device) = (packed.dims(), packed.device());
        let (keys, queries) = (self.key_width(), self.n_heads * self.head_dim());
        let heads = |x: Tensor<3>| host(self.heads(x).into_data());
        let part = |first: usize, width: usize| heads(packed.clone().narrow(2, first, width));
        let v = part(width - keys, keys);
        let (q, k) = match self.mechanism.projections() {
            // Only the shapes are read.
            1 => (heads(self.shared(packed.clone())), Some(v.clone())),
            2 => (part(0, queries), None),
            _ => (part(0, queries), Some(part(queries, keys))),
        };
        let learned = self.extras();
        let learned: Vec<(Parameter, Vec<f32>)> = self
            .mechanism
            .parameters()
            .iter()
            .filter_map(|&parameter| Some((parameter, host(learned.get(parameter)?.to_data()))))
            .collect();
        let codebook = self.codebook.as_ref().map(|codebook| codebook.values());
        let extras = learned.iter().fold(kernels::Extras::default(), |extras, (p, values)| extras.with(*p, values));
        let extras = codebook.iter().fold(extras, |extras, codebook| extras.with_codebook(codebook));
        let inputs = kernels::Inputs { q: &q, k: k.as_deref(), v: &v, extras };
        let prompt = cache.is_empty() && seq > 1;
        // A norm is a sum over rows, which the cache has to go through anyway.
        if prompt && !matches!(self.mechanism.normalisation, Normalisation::Frobenius(_)) {
            cache.append(&inputs)?;
            return self.attend_projected(packed, None, &self.mechanism, self.extras(), &Mask::causal());
        }
        let mut out = vec![0.0; q.len()];
        cache.step(&inputs, &mut out)?;
        let shape = [batch, self.n_heads, seq, self.head_dim()];
        Ok(merge_heads(Tensor::from_data(TensorData::new(out, shape), &device)))
    }

    /// The rows of new projections, each of which depends on its own query and all keys up to it.
    fn attend_rows(&self, packed: Tensor<3>, past: &mut Option<Past>) -> Result<Tensor<3>> {
        let ([_, _, width], keys) = (packed.dims(), self.key_width());
        let (parts, d_model) = (self.mechanism.projections(), self.n_heads * self.head_dim());
        // Tied, the queries are the keys.
        let first = if parts == 3 { d_model } else { 0 };
        let kept = add(past, packed.clone().narrow(2, first, width - first));
        let part = |part: usize| self.heads(self.shared(kept.clone().narrow(2, part * keys, keys)));
        let mut inputs = match parts {
            // Only the shapes are read.
            1 => Inputs::new(self.heads(self.shared(packed)), part(0), part(0)),
            _ => Inputs::new(self.heads(packed.narrow(2, 0, d_model)), part(0), part(1)),
        };
        inputs.extras = self.extras_of_tokens();
        // Tied, one projection makes queries and keys, but of different tokens.
        let mechanism = with_tied(self.mechanism.clone(), false);
        Ok(merge_heads(attend(&inputs, &mechanism, &Mask::causal(), self.strategy)?.out))
    }

    /// Keys and values of `tokens [batch, seq_kv, d_model]`.
    pub fn key_values(&self, tokens: Tensor<3>) -> KeyValues {
        let parts = self.mechanism.projections();
        let values = self.project_part(tokens.clone(), parts - 1);
        let keys = if reads_values_alone(&self.mechanism) {
            values.clone()
        } else {
            self.project_part(tokens, usize::from(!self.mechanism.tied))
        };
        KeyValues { keys, values }
    }

    /// Every query of `query [batch, seq_q, d_model]` over all keys of `source`: what [`MultiHeadAttention::forward`] gives in
    /// cross-attention. `padding [batch, seq_kv]` is true where there is no key.
    ///
    /// # Errors
    /// As [`check_row_local`] and [`crate::attend`].
    pub fn attend_over(
        &self,
        query: Tensor<3>,
        source: &KeyValues,
        padding: Option<Tensor<2, Bool>>,
    ) -> Result<Tensor<3>> {
        self.check_precision(&query)?;
        self.check_one_mechanism()?;
        check_row_local(&self.mechanism)?;
        self.check_cross(&self.mechanism)?;
        // Of `uniform` only the shapes are read.
        let q = self.heads(if reads_values_alone(&self.mechanism) { query } else { self.project_part(query, 0) });
        let whole = |x: &Tensor<3>| self.heads(self.shared(x.clone()));
        let mut inputs = Inputs::new(q, whole(&source.keys), whole(&source.values));
        inputs.extras = self.extras();
        let mask = Mask { causal: false, key: padding.map(present), query: None };
        // Tied, one projection makes queries and keys, but of different tokens.
        let mechanism = with_tied(self.mechanism.clone(), false);
        let attended = merge_heads(attend(&inputs, &mechanism, &mask, self.strategy)?.out);
        Ok(self.dropout.forward(self.output(attended)))
    }
}

/// All projections so far, the new ones last.
fn add(past: &mut Option<Past>, new: Tensor<3>) -> Tensor<3> {
    let kept = match past.take() {
        Some(Past { kept: Kept::Projections(kept) }) => Tensor::cat(vec![*kept, new], 1),
        _ => new,
    };
    *past = Some(Past { kept: Kept::Projections(Box::new(kept.clone())) });
    kept
}
