//! Decoding with causal segments: a token looks at its own segment, at the means of what came before, and at the keys of its routes.

use super::{Cache, Tokens, part};
use crate::{
    Mechanism, Parameter, Shape,
    mechanism::{Normalisation, Score, Series, Ssa, Structure},
    parallel,
    structure::clustered::Routed,
};

/// The clusters of a composition whose past is kept in them: one hop of softmax whose queries choose for themselves.
pub(super) fn clusters(m: &Mechanism) -> Option<Ssa> {
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
    /// Takes the tokens in and writes their rows, where they are asked for, one after the other. What is kept belongs to a head of keys, and
    /// with a codebook, of which every head of queries has its own, to each of these.
    pub(super) fn attend_routed(&mut self, m: &Ssa, tokens: &Tokens<'_>, out: Option<&mut [f32]>) {
        let Shape { heads, head_dim, value_dim, .. } = self.token;
        let (sharing, new, at) = (self.sharing, tokens.new, (m, self.level));
        if self.routed.is_empty() {
            let past = |slice: usize| Routed::new([(slice / heads) as u64, m.draws_of(slice % heads)]);
            self.routed = (0..self.token.slices()).step_by(sharing).map(past).collect();
        }
        if tokens.extras.codebook.is_some() && self.routed.len() < self.token.slices() {
            self.routed = self.routed.iter().flat_map(|past| std::iter::repeat_n(past.clone(), sharing)).collect();
        }
        // Heads of queries to what is kept once.
        let serves = self.token.slices() / self.routed.len();
        let take = |n: usize, slice: usize, past: &mut Routed| {
            let (key, head) = (slice / sharing * new + n, slice % heads);
            let codebook = tokens.extras.codebook.map(|book| part(book, head * book.len() / heads, book.len() / heads));
            let [k, v] = [(&tokens.k, head_dim), (&tokens.v, value_dim)].map(|(x, dim)| part(x, key * dim, dim));
            past.push(at, codebook, [k, v], tokens.keeps_key(slice / heads, n));
        };
        let Some(out) = out else {
            let pasts = self.routed.iter_mut().enumerate();
            return parallel::each(pasts, |(at, past)| (0..new).for_each(|n| take(n, at * serves, past)));
        };
        for n in 0..new {
            parallel::each(self.routed.iter_mut().enumerate(), |(at, past)| take(n, at * serves, past));
            self.rows_of_routed((m, serves), (n, tokens), out);
        }
    }

    /// The rows of the newest token, the `n`-th of a step. What is kept once is of so many heads of queries as it `serves`.
    fn rows_of_routed(&mut self, (m, serves): (&Ssa, usize), (n, tokens): (usize, &Tokens<'_>), out: &mut [f32]) {
        let (Shape { heads, head_dim, value_dim, .. }, new, level) = (self.token, tokens.new, self.level);
        let of = |parameter: Parameter, head: usize, configured: f64| -> f64 {
            tokens.extras.get(parameter).map_or(configured, |given| given[head].into())
        };
        let (scale, gamma) =
            (self.mechanism.score.value(Parameter::Scale, head_dim, heads), self.mechanism.series.gamma());
        let routed = &self.routed;
        let rows = out.chunks_exact_mut(new * value_dim).zip(self.sums.chunks_exact_mut(1 + value_dim));
        parallel::each(rows.enumerate(), |(slice, (rows, sums))| {
            let (head, row) = (slice % heads, &mut rows[n * value_dim..][..value_dim]);
            if !tokens.keeps_query(slice / heads, n) {
                return row.fill(0.0);
            }
            sums.fill(0.0);
            let q = part(&tokens.q, (slice * new + n) * head_dim, head_dim);
            let scale = of(Parameter::Scale, head, scale);
            let factor =
                of(Parameter::Gamma, head, gamma) * routed[slice / serves].row((m, level), scale, q, &mut sums[1..]);
            row.iter_mut().zip(&sums[1..]).for_each(|(out, sum)| *out = (factor * sum) as f32);
        });
    }
}
