//! Decoding with causal segments: a token looks at its own segment, at the means of what came before, and at the keys of its routes.

use super::{Cache, Tokens, part};
use crate::{
    Mechanism, Parameter, Shape,
    mechanism::{Composed, Normalisation, Score, Series, Ssa, Structure},
    structure::clustered::Routed,
};

/// The clusters of a composition whose past is kept in them: one hop of softmax whose queries choose for themselves.
pub(super) fn clusters(m: &Composed) -> Option<Ssa> {
    let softmax = matches!(&m.score, Score::DotExp(score) if score.softcap.is_none())
        && matches!(&m.normalisation, Normalisation::Row(row) if row.density_exponent == 0.0)
        && matches!(m.series, Series::OneHop(_));
    match &m.structure {
        Structure::Clustered(structure) if softmax && m.bias.is_none() && !m.tied => {
            Some(structure.ssa(m.planned_scale(), true)).filter(Ssa::routes_queries)
        }
        _ => None,
    }
}

impl Cache {
    /// Takes the tokens in and writes their rows, where they are asked for, one after the other.
    pub(super) fn attend_routed(&mut self, m: &Ssa, tokens: &Tokens<'_>, out: Option<&mut [f32]>) {
        let Mechanism::Composed(values) = &self.mechanism else { return };
        let Shape { heads, head_dim, value_dim, .. } = self.token;
        let of = |parameter: Parameter, head: usize, configured: f64| -> f64 {
            tokens.extras.get(parameter).map_or(configured, |given| given[head].into())
        };
        let (scale, gamma) = (values.score.value(Parameter::Scale, head_dim, heads), values.series.gamma());
        if self.routed.is_empty() {
            let past = |slice: usize| Routed::new([(slice / heads) as u64, (slice % heads) as u64]);
            self.routed = (0..self.token.slices()).map(past).collect();
        }
        let (sharing, new, at) = (self.sharing, tokens.new, (m, self.level));
        Self::go_on((&mut self.routed, &mut self.sums), (tokens, heads), out, |past, [slice, n], sum| {
            let (row, key, head) = (slice * new + n, slice / sharing * new + n, slice % heads);
            let codebook = tokens.extras.codebook.map(|book| part(book, head * book.len() / heads, book.len() / heads));
            let v = part(&tokens.v, key * value_dim, value_dim);
            let keep = tokens.keeps_key(slice / heads, n);
            past.push(at, codebook, [part(&tokens.k, key * head_dim, head_dim), v], keep);
            let q = part(&tokens.q, row * head_dim, head_dim);
            let gamma = of(Parameter::Gamma, head, gamma);
            sum.map_or(0.0, |sum| gamma * past.row(at, of(Parameter::Scale, head, scale), q, sum))
        });
    }
}
