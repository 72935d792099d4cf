//! One hop over the graph of tokens.

use burn::tensor::Tensor;

/// An operator from values to values: weights, or factors of them, over a divisor per row.
pub(super) struct Hop<'a> {
    weights: Weights,
    /// `[batch, heads, seq_q, 1]`, nowhere 0.
    divisor: Option<Tensor<4>>,
    /// What is added to the weighted values.
    filter: Option<Filter<'a>>,
}

/// A map of values.
pub(super) type Filter<'a> = Box<dyn Fn(&Tensor<4>) -> Tensor<4> + 'a>;

#[allow(clippy::large_enum_variant)] // one per call
enum Weights {
    /// `[batch, heads, seq_q, seq_kv]`.
    Whole(Tensor<4>),
    /// Their product: `[batch, heads, seq_q, rank]`, `[batch, heads, rank, seq_kv]`.
    Factors(Tensor<4>, Tensor<4>),
}

impl<'a> Hop<'a> {
    pub fn whole(weights: Tensor<4>) -> Self {
        Self { weights: Weights::Whole(weights), divisor: None, filter: None }
    }

    pub fn factors(left: Tensor<4>, right: Tensor<4>) -> Self {
        Self { weights: Weights::Factors(left, right), divisor: None, filter: None }
    }

    /// Every row divided; where the divisor is 0, the row is 0 and stays it.
    pub fn divided(self, divisor: Tensor<4>) -> Self {
        let zero = divisor.clone().equal_elem(0.0);
        Self { divisor: Some(divisor.mask_fill(zero, 1.0)), ..self }
    }

    pub fn with_filter(self, filter: Filter<'a>) -> Self {
        Self { filter: Some(filter), ..self }
    }

    /// `W v`.
    pub fn apply(&self, v: &Tensor<4>) -> Tensor<4> {
        let out = self.over(match &self.weights {
            Weights::Whole(weights) => weights.clone().matmul(v.clone()),
            Weights::Factors(left, right) => left.clone().matmul(right.clone().matmul(v.clone())),
        });
        match &self.filter {
            Some(filter) => out + filter(v),
            None => out,
        }
    }

    /// `W` without its filter.
    pub fn matrix(&self) -> Tensor<4> {
        self.over(match &self.weights {
            Weights::Whole(weights) => weights.clone(),
            Weights::Factors(left, right) => left.clone().matmul(right.clone()),
        })
    }

    fn over(&self, x: Tensor<4>) -> Tensor<4> {
        match &self.divisor {
            Some(divisor) => x / divisor.clone(),
            None => x,
        }
    }
}
