//! The sizes of a call.

use crate::{Error, Result};

/// The sizes of one attention call. Every tensor is dense and row-major:
/// `q [batch, heads, seq_q, head_dim]`, `k [batch, heads, seq_kv, head_dim]`,
/// `v [batch, heads, seq_kv, value_dim]`, `out [batch, heads, seq_q, value_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Independent sequences.
    pub batch: usize,
    /// Independent heads of one sequence.
    pub heads: usize,
    /// Query tokens.
    pub seq_q: usize,
    /// Key and value tokens.
    pub seq_kv: usize,
    /// Channels of a query or key.
    pub head_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
}

impl Shape {
    /// Self-attention of `seq` tokens with as many value as key channels.
    pub const fn square(batch: usize, heads: usize, seq: usize, dim: usize) -> Self {
        Self { batch, heads, seq_q: seq, seq_kv: seq, head_dim: dim, value_dim: dim }
    }

    /// Number of independent problems: `batch * heads`. This and the lengths below saturate where a product leaves `usize`:
    /// no slice is as long, and so none fits such a shape.
    pub const fn slices(&self) -> usize {
        self.batch.saturating_mul(self.heads)
    }

    /// Elements of `q`.
    pub const fn q_len(&self) -> usize {
        self.slices().saturating_mul(self.seq_q).saturating_mul(self.head_dim)
    }

    /// Elements of `k`.
    pub const fn k_len(&self) -> usize {
        self.slices().saturating_mul(self.seq_kv).saturating_mul(self.head_dim)
    }

    /// Elements of `v`.
    pub const fn v_len(&self) -> usize {
        self.slices().saturating_mul(self.seq_kv).saturating_mul(self.value_dim)
    }

    /// Elements of a full-length `out`.
    pub const fn out_len(&self) -> usize {
        self.slices().saturating_mul(self.seq_q).saturating_mul(self.value_dim)
    }

    /// Whether counts of elements, and of operations on all pairs, stay far from wrapping: more than that no machine attends.
    pub(crate) fn check(&self) -> Result<()> {
        let Self { batch, heads, seq_q, seq_kv, head_dim, value_dim } = *self;
        let product = |axes: &[usize]| axes.iter().try_fold(1_u64, |all, &axis| all.checked_mul(axis.max(1) as u64));
        let channels = head_dim.max(value_dim);
        let fits = |axes: &[usize], most: u64| product(axes).is_some_and(|n| n <= most);
        let most_elements = (1 << 40).min(isize::MAX as u64 / size_of::<f32>() as u64);
        if fits(&[batch, heads, seq_q.max(seq_kv), channels], most_elements)
            && fits(&[batch, heads, seq_q, seq_kv, channels], 1 << 52)
        {
            return Ok(());
        }
        let got = format!("{batch} x {heads} x {seq_q} queries, {seq_kv} keys x {head_dim}, {value_dim} channels");
        Err(Error::OutOfRange { field: "shape", got, expected: "at most 2^40 elements per tensor and 2^52 per pair" })
    }
}
