//! What models of pictures cost, without building them.

use resolvent_kernels as kernels;

use super::VitConfig;
use crate::{
    Mechanism, Result, Shape,
    mechanism::{Dense, Score, Series, Structure},
};

impl VitConfig {
    /// Multiply-adds of the logits of one picture of `image`: projections and the attention. Norms, activations, biases and sums are left
    /// out, and of landmarks their inverse and statistics: as the papers count.
    ///
    /// # Errors
    /// As [`VitConfig::validate`], for pictures of that size.
    pub fn multiply_adds(&self, image: [usize; 2]) -> Result<u64> {
        let config = Self { image, ..self.clone() };
        config.validate()?;
        let Self { dim, depth, mlp_dim, classes, .. } = config;
        let (tokens, operator) = (config.tokens(), config.attention(1).operator());
        let matrices = operator.projections() + 1 + usize::from(self.extra_proj);
        let layers = tokens * (matrices * dim * dim + 2 * dim * mlp_dim);
        let attention = attention_multiply_adds(&operator, &Shape::square(1, self.heads, tokens, dim / self.heads))?;
        let patches = config.patches() * config.patch_len() * dim;
        let head = dim * classes + if self.pre_logits { dim * dim } else { 0 };
        Ok((patches + head) as u64 + depth as u64 * (layers as u64 + attention))
    }
}

/// Multiply-adds of an operator: of a kernel of distances one per channel of each distance and each value that is weighed, of
/// others half the operations that their kernels count.
pub(super) fn attention_multiply_adds(operator: &Mechanism, shape: &Shape) -> Result<u64> {
    let tokens = shape.seq_q;
    let Mechanism { score, structure, series, tied, .. } = operator.values();
    let of_distances = matches!(score, Score::Gaussian(_) | Score::Laplacian(_)) && matches!(series, Series::OneHop(_));
    let (pairs, passes) = match structure {
        Structure::Dense(Dense { window: None, .. }) if of_distances => (tokens * tokens, 2),
        // Distances of queries, and of keys that are not these; values in and out.
        Structure::Nystrom(_) if of_distances => {
            (tokens * operator.landmarks(shape).unwrap_or_default(), if tied { 3 } else { 4 })
        }
        _ => return Ok(kernels::plan(operator, shape, false, kernels::Strategy::Auto)?.flops_forward / 2),
    };
    Ok((passes * pairs * shape.heads * shape.head_dim) as u64)
}
