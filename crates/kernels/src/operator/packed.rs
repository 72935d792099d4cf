//! Queries, keys and values that one layer has projected side by side, `[batch, tokens, width]`.

use super::{
    Operator,
    tensors::{Role, Written},
};
use crate::{
    Element, Error, ExtraGradients, Extras, Heads, Mask, Mechanism, Result, Scratch, Strided, StridedInputs,
    call::{Layout, Target},
    check,
    parallel::Parts,
};

/// Where the projections of self-attention lie: of every token those of all heads of queries, then of keys, then of values, where the
/// mechanism has them ([`Mechanism::projections`]).
#[derive(Debug, Clone, Copy)]
pub(super) struct Packed {
    heads: Heads,
    tokens: usize,
    /// Channels before keys and before values; of a token.
    keys: usize,
    values: usize,
    width: usize,
}

impl Packed {
    pub fn new(mechanism: &Mechanism, heads: Heads, tokens: usize) -> Self {
        let parts = mechanism.projections();
        let of = |heads_of: usize, is_there: bool| if is_there { heads_of * heads.head_dim } else { 0 };
        let (queries, keys) = (of(heads.heads, parts > 1), of(heads.kv_heads, parts > 2));
        let values = queries + keys;
        Self { heads, tokens, keys: queries, values, width: values + heads.kv_heads * heads.value_dim }
    }

    /// Elements of the projections.
    pub fn len(&self, batch: usize) -> usize {
        batch * self.tokens * self.width
    }

    /// Whether queries and keys lie beside the values.
    fn has_tokens(&self) -> bool {
        self.values > 0
    }

    fn strided<D>(&self, data: D, channels: usize) -> Strided<D> {
        Strided { data, batch_stride: self.tokens * self.width, head_stride: channels, token_stride: self.width }
    }

    pub fn inputs<'a, T>(&self, mechanism: &Mechanism, packed: &'a [T], extras: Extras<'a>) -> StridedInputs<'a, T> {
        let Heads { head_dim, value_dim, .. } = self.heads;
        let at = |first: usize, channels| self.strided(&packed[first.min(packed.len())..], channels);
        // `uniform` reads but the sizes of queries and keys: every token is the first.
        let tokens = |first| match self.has_tokens() {
            true => at(first, head_dim),
            false => Strided { data: packed, batch_stride: 0, head_stride: 0, token_stride: 0 },
        };
        let k = (!mechanism.tied).then(|| tokens(self.keys));
        StridedInputs { q: tokens(0), k, v: at(self.values, value_dim), extras }
    }

    /// The gradients that lie side by side, in the sizes of each. Those that have no place among them are left out.
    pub fn written<'a, T: Element>(
        &self,
        packed: &'a Parts<'a, T>,
        sizes: impl Fn(Role) -> [usize; 4],
        extras: ExtraGradients<'a>,
    ) -> Written<'a, T> {
        let Heads { head_dim, value_dim, .. } = self.heads;
        let target = |first: usize, role, channels| {
            let layout = Layout::of(&self.strided((), channels), sizes(role), 1).from(first);
            // SAFETY: the projections of a token lie side by side, none in the place of another.
            unsafe { Target::of_parts(packed, layout) }
        };
        let dq = self.has_tokens().then(|| target(0, Role::Query, head_dim));
        let dk = (self.values > self.keys).then(|| target(self.keys, Role::Key, head_dim));
        Written { dq, dk, dv: target(self.values, Role::Value, value_dim), extras }
    }
}

impl Operator {
    fn packed(&self) -> Result<Packed> {
        let s = self.shape;
        if s.seq_q != s.seq_kv {
            let got = format!("{} queries and {} keys", s.seq_q, s.seq_kv);
            return Err(Error::OutOfRange { field: "shape", got, expected: "as many queries as keys, side by side" });
        }
        let heads = Heads { heads: s.heads, kv_heads: self.kv_heads, head_dim: s.head_dim, value_dim: s.value_dim };
        Ok(Packed::new(&self.mechanism, heads, s.seq_q))
    }

    /// Views of what one layer has projected: of every token of `packed [batch, tokens, width]` the channels of all heads of queries, then of keys, then
    /// of values. A tied mechanism has no keys, `uniform` values alone.
    ///
    /// # Errors
    /// [`Error::Length`] for another number of elements; [`Error::OutOfRange`] where there are more keys than queries, or fewer.
    pub fn packed_inputs<'a, T>(&self, packed: &'a [T], extras: Extras<'a>) -> Result<StridedInputs<'a, T>> {
        let places = self.packed()?;
        let remedy = "expected batch * tokens * the channels of queries, keys and values";
        check::length("packed", "packed", packed.len(), places.len(self.shape.batch), remedy)?;
        Ok(places.inputs(&self.mechanism, packed, extras))
    }

    /// [`Operator::backward_strided`] that writes the gradients side by side, as [`Operator::packed_inputs`] reads.
    ///
    /// # Errors
    /// As [`Operator::backward_strided`] and [`Operator::packed_inputs`].
    #[allow(clippy::too_many_arguments)] // as [`Operator::backward`]
    pub fn backward_packed<T: Element>(
        &self,
        inputs: &StridedInputs<'_, T>,
        mask: &Mask<'_>,
        out: Strided<&[T]>,
        stats: &[f32],
        dout: Strided<&[T]>,
        (packed, extras): (&mut [T], &mut ExtraGradients<'_>),
        scratch: &mut Scratch,
    ) -> Result<()> {
        const OP: &str = "backward";
        let places = self.packed()?;
        let remedy = "expected as many elements as the projections have";
        check::length(OP, "packed", packed.len(), places.len(self.shape.batch), remedy)?;
        let x = self.of_strided(OP, inputs, mask)?;
        let finished = self.finished(out, stats, dout)?;
        let packed = Parts::new(packed);
        let into = places.written(&packed, |role| self.sizes(role), extras.reborrow());
        self.differentiate_into(&x, mask, &finished, into, scratch)
    }
}
