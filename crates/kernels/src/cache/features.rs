//! Decoding with the structure `features`: a token costs the same however many came before.

use super::{Cache, Tokens, part, reach};
use crate::{
    Error, Extras, Mechanism, Parameter, Result, Shape,
    mechanism::{Features, Series, Structure},
    structure::features::Decoder,
};

/// The structure of a composition whose past is kept as sums.
///
/// # Errors
/// [`Error::Unsupported`] for any other composition.
pub(super) fn structure(m: &Mechanism) -> Result<&Features> {
    let why = "only one hop over pairs or features, and softmax over causal segments, keep what stands for the past; call the \
               mechanism on the sequence so far, and take the last row";
    let why = reach::why_not(m).unwrap_or(why);
    match (&m.structure, &m.series) {
        (Structure::Features(features), Series::OneHop(_)) => Ok(features),
        _ => Err(Error::Unsupported { mechanism: m.id(), what: "decoding token by token", why }),
    }
}

impl Cache {
    /// The decoder of a step of a composition with features; none of other mechanisms.
    pub(super) fn decoder(&self, extras: &Extras<'_>) -> Option<(Decoder, Vec<f64>)> {
        let m = &self.mechanism;
        let Shape { heads, head_dim, .. } = self.token;
        let of = |parameter: Parameter, configured: f64| -> Vec<f64> {
            let given = extras.get(parameter);
            given.map_or(vec![configured; heads], |given| given.iter().map(|&x| x.into()).collect())
        };
        let scales = of(Parameter::Scale, m.score.value(Parameter::Scale, head_dim, heads));
        let decoder = Decoder::new(structure(m).ok()?, self.level, &self.token, scales);
        Some((decoder, of(Parameter::Gamma, m.series.gamma())))
    }

    /// Takes the tokens in and writes their rows, where they are asked for, one after the other.
    pub(super) fn attend_features(&mut self, tokens: &Tokens<'_>, out: Option<&mut [f32]>) {
        let Some((decoder, gammas)) = self.decoder(&tokens.extras) else { return };
        let Shape { heads, head_dim, value_dim, .. } = self.token;
        if self.features.is_empty() {
            self.features = vec![decoder.past(); self.token.slices()];
        }
        let (sharing, new) = (self.sharing, tokens.new);
        Self::go_on((&mut self.features, &mut self.sums), (tokens, heads), out, |past, [slice, n], sum| {
            let (row, key, head) = (slice * new + n, slice / sharing * new + n, slice % heads);
            if tokens.keeps_key(slice / heads, n) {
                let v = part(&tokens.v, key * value_dim, value_dim);
                decoder.push(past, head, part(&tokens.k, key * head_dim, head_dim), v);
            }
            // A row whose weights f32 has no room for is no number, which is found where rows are checked.
            let q = part(&tokens.q, row * head_dim, head_dim);
            let seen = tokens.seen(slice / heads, n);
            sum.filter(|_| seen > 0).map_or(0.0, |sum| gammas[head] / decoder.row(past, head, q, sum))
        });
    }
}
