//! Which tokens an attention layer looks at, for any mechanism, without its matrix.
//!
//! Every mechanism multiplies its values with a matrix `M` that the tokens make. What the answer is read from asks: the class
//! token, `x = e_cls`, or, where the head reads the mean of the tokens, all of them alike, `x = 1 / N`. What each token is looked
//! at with is `M^T x`, the gradient of the values when `x` comes back: the class token's row, or the mean of all rows. What a language
//! model says next is read from the last token, whose row it is then.
//! Where weights may be negative they would cancel in that mean; it is then that of their positive parts, read from some columns
//! of the matrix at a time.

use std::borrow::Cow;

use resolvent_kernels::{
    ClusterPlan, ExtraGradients, Extras, Gradients, Inputs, Mask, Mechanism, Operator, Scratch, Shape, Strategy,
    mechanism::{Normalisation, Structure},
};
use resolvent_lab::Result;

use super::weights::{flattened, positive};
use crate::subject::LayerCall;

/// The attention of a layer's heads, applied by the mechanism's own kernels.
pub struct LayerAttention<'a> {
    call: &'a LayerCall,
    /// Of all tokens that the layer's operator is given.
    operator: Operator,
    q: Cow<'a, [f32]>,
    k: Option<Cow<'a, [f32]>>,
    clusters: Option<ClusterPlan>,
    /// `M 1` of each head, `[heads, span]`.
    sums: Vec<f32>,
    stats: Vec<f32>,
}

impl<'a> LayerAttention<'a> {
    /// Of one layer on one example.
    ///
    /// # Errors
    /// [`resolvent_lab::Error::Kernels`]: what the mechanism refuses.
    pub fn new(call: &'a LayerCall) -> Result<Self> {
        // The graph has a row per token, also where the mechanism would return a common row once.
        let mechanism = call.mechanism.clone().with_every_row();
        let shape = Shape { seq_q: call.span, seq_kv: call.span, value_dim: 1, ..call.shape };
        let operator = Operator::new(&mechanism, shape, call.causal, Strategy::Auto)?;
        let dim = call.shape.head_dim;
        let [q, k] = [Some(&call.q), call.k.as_ref()].map(|x| x.map(|x| lengthened(x, call, dim)));
        let (q, clusters) = (q.unwrap_or_default(), call.clusters.clone());
        let mut layer = Self { call, operator, q, k, clusters, sums: Vec::new(), stats: Vec::new() };
        let ones = vec![1.0; layer.operator.shape().v_len()];
        if mechanism.clustering().is_some() && layer.clusters.is_none() {
            layer.clusters = Some(layer.operator.clusters(&layer.inputs(&ones), &Mask::NONE)?.into_owned());
        }
        let (mut out, mut stats) = (vec![0.0; layer.operator.out_len()], vec![0.0; layer.operator.plan().stats]);
        layer.operator.forward(&layer.inputs(&ones), &Mask::NONE, &mut out, &mut stats, &mut Scratch::default())?;
        (layer.sums, layer.stats) = (out, stats);
        Ok(layer)
    }

    fn inputs<'b>(&'b self, v: &'b [f32]) -> Inputs<'b, f32> {
        let with = |extras: Extras<'b>, (parameter, values): &'b (_, Vec<f32>)| extras.with(*parameter, values);
        let extras = self.call.parameters.iter().fold(Extras::default(), with);
        let extras = self.clusters.as_ref().map_or(extras, |plan| extras.with_clusters(plan));
        Inputs { q: &self.q, k: self.k.as_deref(), v, extras }
    }

    /// What the heads have of the tokens that there are, of `x [heads, span]`.
    fn there<'x>(&self, x: &'x [f32]) -> impl Iterator<Item = &'x [f32]> {
        let tokens = self.call.shape.seq_q;
        x.chunks_exact(self.call.span).map(move |head| &head[..tokens])
    }

    /// `M^T x` of each head: with what weight the tokens are looked at when token `i` asks with weight `x_i`. Both are
    /// `[heads, tokens]`.
    ///
    /// # Errors
    /// [`resolvent_lab::Error::Kernels`].
    pub fn looked_at(&self, asked: &[f32]) -> Result<Vec<f32>> {
        let asked = lengthened(asked, self.call, 1);
        let ones = vec![1.0; asked.len()];
        let (mut dq, mut dk) = (vec![0.0; self.q.len()], self.k.as_ref().map(|k| vec![0.0; k.len()]));
        let mut dv = vec![0.0; asked.len()];
        let mut gradients =
            Gradients { dq: &mut dq, dk: dk.as_deref_mut(), dv: &mut dv, extras: ExtraGradients::default() };
        let (inputs, mut scratch) = (self.inputs(&ones), Scratch::default());
        self.operator.backward(&inputs, &Mask::NONE, &self.sums, &self.stats, &asked, &mut gradients, &mut scratch)?;
        Ok(self.there(&dv).flatten().copied().collect())
    }

    /// The weights of a model's answer on the layer's tokens, a row per head, without the class token; of a class token's row they
    /// may be negative.
    ///
    /// # Errors
    /// [`resolvent_lab::Error::Kernels`].
    pub fn weights(&self) -> Result<Vec<Vec<f32>>> {
        let tokens = self.call.shape.seq_q;
        let alone = self.call.place.class_token || self.call.causal;
        let weights = match alone || !signed(&self.call.mechanism) {
            true => self.looked_at(&first_asked(self.call).repeat(self.call.shape.heads))?,
            false => self.mean_of_positive()?,
        };
        let places = |head: &[f32]| head[usize::from(self.call.place.class_token)..].to_vec();
        Ok(weights.chunks_exact(tokens).map(places).collect())
    }

    /// The row of place number `query`, as it is: the weights that its token looks at all places with, a row per head, without the class
    /// token. Weights may be negative.
    ///
    /// # Errors
    /// [`resolvent_lab::Error::Kernels`].
    pub fn row(&self, query: usize) -> Result<Vec<Vec<f32>>> {
        let (tokens, first) = (self.call.shape.seq_q, usize::from(self.call.place.class_token));
        let asked: Vec<f32> = (0..tokens).map(|token| f32::from(u8::from(token == query + first))).collect();
        let weights = self.looked_at(&asked.repeat(self.call.shape.heads))?;
        Ok(weights.chunks_exact(tokens).map(|head| head[first..].to_vec()).collect())
    }

    /// [`LayerAttention::weights`] with negative ones as 0, and such as differ by rounding alone made equal.
    ///
    /// # Errors
    /// [`resolvent_lab::Error::Kernels`].
    pub fn heads(&self) -> Result<Vec<Vec<f32>>> {
        Ok(self.weights()?.iter().map(|head| flattened(positive(head))).collect())
    }

    /// What the map of the heads is, in words.
    pub fn rule(&self) -> &'static str {
        match (self.call.place.class_token, signed(&self.call.mechanism)) {
            (_, false) if self.call.causal => "the last token's row",
            (_, true) if self.call.causal => "the positive part of the last token's row",
            (true, false) => "the class token's row",
            (true, true) => "the positive part of the class token's row",
            (false, false) => "the mean of all rows",
            (false, true) => "the mean of the positive parts of all rows",
        }
    }

    /// The mean over the rows of what is positive in them, `[heads, tokens]`.
    fn mean_of_positive(&self) -> Result<Vec<f32>> {
        let Shape { heads, seq_q: tokens, .. } = self.call.shape;
        let mut mean = vec![0.0; heads * tokens];
        self.matrices(|head, _, first, weights| {
            let head = &mut mean[head * tokens + first..];
            head.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight.max(0.0) / tokens as f32);
        })?;
        Ok(mean)
    }

    /// What every token looks at, the mean over the heads: a row per token, of the tokens that it sees. Weights may be negative. Takes
    /// O(N^2) memory.
    ///
    /// # Errors
    /// [`resolvent_lab::Error::Kernels`].
    pub fn pairs(&self) -> Result<Vec<Vec<f32>>> {
        let Shape { heads, seq_q: tokens, .. } = self.call.shape;
        let seen = |token: usize| if self.call.causal { token + 1 } else { tokens };
        let mut rows: Vec<Vec<f32>> = (0..tokens).map(|token| vec![0.0; seen(token)]).collect();
        self.matrices(|_, token, first, weights| {
            let row = rows[token].iter_mut().skip(first);
            row.zip(weights).for_each(|(mean, weight)| *mean += weight / heads as f32);
        })?;
        Ok(rows)
    }

    /// Shows the matrices of the heads, some columns at a time: head, row, the first of the columns, and the weights in them.
    fn matrices(&self, mut show: impl FnMut(usize, usize, usize, &[f32])) -> Result<()> {
        /// What a pass over the weights makes of so many columns costs little beside the weights.
        const COLUMNS: usize = 256;
        let (tokens, span) = (self.call.shape.seq_q, self.call.span);
        for first in (0..tokens).step_by(COLUMNS) {
            let width = COLUMNS.min(tokens - first);
            let shape = Shape { value_dim: width, ..*self.operator.shape() };
            let operator = Operator::new(self.operator.mechanism(), shape, self.call.causal, Strategy::Auto)?;
            let unit = |at: usize| f32::from(u8::from(at / width % span == first + at % width));
            let v: Vec<f32> = (0..shape.v_len()).map(unit).collect();
            let (mut out, mut stats) = (vec![0.0; operator.out_len()], vec![0.0; operator.plan().stats]);
            operator.forward(&self.inputs(&v), &Mask::NONE, &mut out, &mut stats, &mut Scratch::default())?;
            let rows = out.chunks_exact(width).enumerate().filter(|(row, _)| row % span < tokens);
            rows.for_each(|(row, weights)| show(row / span, row % span, first, weights));
        }
        Ok(())
    }

    /// What asks one layer earlier when `asked [tokens]` asks here ("Quantifying Attention Flow in Transformers"): half through the residual
    /// connection, half through the mean over heads of each head's rows, divided by their sums. A row without a positive sum
    /// passes on nothing but its residual.
    fn rolled(&self, asked: &[f32]) -> Result<Vec<f32>> {
        let (tokens, heads) = (self.call.shape.seq_q, self.call.shape.heads as f32);
        let sums = self.there(&self.sums);
        let share = |(sum, asked): (&f32, &f32)| if *sum > 0.0 { asked / sum } else { 0.0 };
        let per_head = sums.flat_map(|sums| sums.iter().zip(asked).map(share));
        let through = self.looked_at(&per_head.collect::<Vec<_>>())?;
        let mut rolled: Vec<f32> = asked.iter().map(|x| 0.5 * x).collect();
        for head in through.chunks_exact(tokens) {
            rolled.iter_mut().zip(head).for_each(|(sum, x)| *sum += 0.5 * x / heads);
        }
        Ok(rolled)
    }
}

/// Rows of `width` numbers of the tokens of each head, and zeros for those that the operator is given beyond.
fn lengthened<'x>(x: &'x [f32], call: &LayerCall, width: usize) -> Cow<'x, [f32]> {
    let (own, all) = (call.shape.seq_q * width, call.span * width);
    if own == all {
        return Cow::Borrowed(x);
    }
    let zeros = vec![0.0; all - own];
    Cow::Owned(x.chunks_exact(own.max(1)).flat_map(|head| head.iter().chain(&zeros)).copied().collect())
}

/// Whether weights may be negative, so that they cancel in a mean of rows: a centred kernel's mean is even flat.
fn signed(mechanism: &Mechanism) -> bool {
    let m = mechanism.values();
    let whitened = matches!(m.normalisation, Normalisation::Whitened(_));
    !m.score.is_non_negative() || whitened || matches!(m.structure, Structure::Nystrom(_) | Structure::Projected(_))
}

/// Who asks in the last layer: the class token, the last token where the others are earlier ones, or all tokens alike.
fn first_asked(call: &LayerCall) -> Vec<f32> {
    let tokens = call.shape.seq_q;
    let alone = |asks: usize| (0..tokens).map(|token| f32::from(u8::from(token == asks))).collect();
    match (call.place.class_token, call.causal) {
        (true, _) => alone(0),
        (false, true) => alone(tokens - 1),
        (false, false) => vec![1.0 / tokens as f32; tokens],
    }
}

/// The weights of the answer on the first layer's tokens, through all layers; `None` where layers have different tokens.
///
/// # Errors
/// [`resolvent_lab::Error::Kernels`].
pub fn rollout(layers: &[LayerAttention<'_>]) -> Result<Option<Vec<f32>>> {
    let alike = |pair: &[LayerAttention<'_>]| {
        let [a, b] = [&pair[0], &pair[1]].map(|layer| (layer.call.shape.seq_q, layer.call.place.grid));
        a == b
    };
    let Some(last) = layers.last().filter(|_| layers.windows(2).all(alike)) else { return Ok(None) };
    let asked = layers.iter().rev().try_fold(first_asked(last.call), |asked, layer| layer.rolled(&asked))?;
    Ok(Some(flattened(positive(&asked[usize::from(last.call.place.class_token)..]))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        explain::{MapRule, breadth, scaled},
        subject::Place,
    };

    const HEADS: usize = 2;
    const TOKENS: usize = 10;
    const DIM: usize = 4;

    /// A class token and a grid of 3 x 3, with smooth tokens that are all different.
    fn call(id: &str, class_token: bool) -> LayerCall {
        let wave =
            |seed: usize| (0..HEADS * TOKENS * DIM).map(|i| ((i * 7 + seed) as f32 * 0.61).sin()).collect::<Vec<_>>();
        let mechanism = Mechanism::preset(id).unwrap();
        let grid = class_token.then_some([3, 3]);
        LayerCall {
            place: Place { name: "blocks.0".into(), class_token, grid },
            k: (!mechanism.tied).then(|| wave(3)),
            q: wave(0),
            v: wave(5),
            parameters: Vec::new(),
            shape: Shape::square(1, HEADS, TOKENS, DIM),
            causal: false,
            span: TOKENS,
            clusters: None,
            mechanism,
        }
    }

    #[test]
    fn uniform_attention_is_flat() {
        for class_token in [true, false] {
            let call = call("uniform", class_token);
            let heads = LayerAttention::new(&call).unwrap().heads().unwrap();
            assert_eq!(heads[0].len(), TOKENS - usize::from(class_token));
            assert!(heads.iter().all(|head| head.iter().all(|&weight| weight == head[0] && weight > 0.0)));
            for rule in [MapRule::EqualHeads, MapRule::Paper] {
                let colours = scaled(&rule.map(&heads));
                assert!(
                    colours.iter().all(|&colour| colour == colours[0] && (colour - 0.5).abs() < 1e-6),
                    "{colours:?}"
                );
            }
            assert!((breadth(&heads[0]) - heads[0].len() as f64).abs() < 1e-6);
        }
    }

    #[test]
    fn what_the_class_token_looks_at_is_found_at_its_place() {
        for id in ["softmax", "fna", "ssa", "infsa"] {
            let mut call = call(id, true);
            // The class token's query of the second head is the key of token 7, place 6.
            let (cls, wanted) = (TOKENS * DIM, (TOKENS + 7) * DIM);
            let k = call.k.get_or_insert_with(Vec::new);
            k.iter_mut().for_each(|x| *x *= 0.1);
            k[wanted..wanted + DIM].copy_from_slice(&[3.0, 3.0, 3.0, 3.0]);
            let key = k[wanted..wanted + DIM].to_vec();
            call.q[cls..cls + DIM].copy_from_slice(&key);
            let heads = LayerAttention::new(&call).unwrap().heads().unwrap();
            let most = |head: &[f32]| (0..head.len()).max_by(|&a, &b| head[a].total_cmp(&head[b])).unwrap();
            assert_eq!(most(&heads[1]), 6, "{id}: {:?}", heads[1]);
            assert_eq!(scaled(&heads[1])[6], 1.0);
        }
    }

    #[test]
    fn weights_are_the_rows_of_the_matrix() {
        for id in Mechanism::IDS {
            let call = call(id, false);
            let layer = LayerAttention::new(&call).unwrap();
            let unit = |token: usize| {
                let head: Vec<f32> = (0..TOKENS).map(|i| f32::from(u8::from(i == token))).collect();
                head.repeat(HEADS)
            };
            let rows: Vec<_> = (0..TOKENS).map(|token| layer.looked_at(&unit(token)).unwrap()).collect();
            for (token, row) in rows.iter().enumerate() {
                let sum: f32 = row[..TOKENS].iter().sum();
                assert!((sum - layer.sums[token]).abs() < 1e-4 * (1.0 + sum.abs()), "{id}: {sum}");
            }
            let all = layer.looked_at(&first_asked(&call).repeat(HEADS)).unwrap();
            for (at, weight) in all.iter().enumerate() {
                let mean = rows.iter().map(|row| row[at]).sum::<f32>() / TOKENS as f32;
                assert!((weight - mean).abs() < 1e-5 * (1.0 + mean.abs()), "{id}: {weight} {mean}");
            }
        }
    }

    /// A place's row is that of its token, behind the class token, with its signs.
    #[test]
    fn a_query_has_its_own_row() {
        for (id, class_token) in [("softmax", true), ("laplacian-exact", true), ("softmax", false)] {
            let call = call(id, class_token);
            let layer = LayerAttention::new(&call).unwrap();
            let first = usize::from(class_token);
            let unit: Vec<f32> = (0..TOKENS).map(|i| f32::from(u8::from(i == 4 + first))).collect();
            let all = layer.looked_at(&unit.repeat(HEADS)).unwrap();
            let rows = layer.row(4).unwrap();
            assert_eq!(rows[1], all[TOKENS + first..], "{id}");
            assert_eq!(id == "laplacian-exact", rows.concat().iter().any(|&weight| weight < 0.0), "{id}");
        }
    }

    /// Row by row the matrix is what each token looks at; of a language model nobody looks ahead, and the last token asks.
    #[test]
    fn pairs_are_the_rows() {
        for (id, causal) in [("softmax", true), ("softmax", false), ("fna", true), ("ssa", true), ("infsa", true)] {
            let mut call = call(id, false);
            call.causal = causal;
            let layer = LayerAttention::new(&call).unwrap();
            let pairs = layer.pairs().unwrap();
            for (token, row) in pairs.iter().enumerate() {
                assert_eq!(row.len(), if causal { token + 1 } else { TOKENS }, "{id}");
                let heads = layer.row(token).unwrap();
                for at in 0..TOKENS {
                    let mean = heads.iter().map(|head| head[at]).sum::<f32>() / HEADS as f32;
                    let found = row.get(at).copied().unwrap_or(0.0);
                    assert!((found - mean).abs() < 1e-5 * (1.0 + mean.abs()), "{id} {token} {at}: {found} {mean}");
                }
            }
            if causal {
                assert_eq!(layer.weights().unwrap(), layer.row(TOKENS - 1).unwrap());
                assert_eq!(layer.rule(), "the last token's row");
            }
        }
    }

    #[test]
    fn negative_weights_do_not_cancel() {
        for id in ["laplacian", "laplacian-exact", "soft"] {
            let call = call(id, false);
            let layer = LayerAttention::new(&call).unwrap();
            let unit =
                |token: usize| (0..TOKENS).map(|i| f32::from(u8::from(i == token))).collect::<Vec<_>>().repeat(HEADS);
            let rows: Vec<_> = (0..TOKENS).map(|token| layer.looked_at(&unit(token)).unwrap()).collect();
            let found = layer.heads().unwrap().concat();
            for (at, weight) in found.iter().enumerate() {
                let mean = rows.iter().map(|row| row[at].max(0.0)).sum::<f32>() / TOKENS as f32;
                assert!((weight - mean).abs() < 1e-5 * (1.0 + mean), "{id}: {weight} {mean}");
            }
            assert!(found.iter().any(|&weight| weight != found[0]), "{id}");
        }
    }

    #[test]
    fn rollout_of_flat_layers_keeps_the_residual() {
        let (one, two) = (call("uniform", false), call("uniform", false));
        let layers = [&one, &two].map(|call| LayerAttention::new(call).unwrap());
        let rolled = rollout(&layers).unwrap().unwrap();
        assert!(rolled.iter().all(|&weight| (weight - 0.1).abs() < 1e-6), "{rolled:?}");
        let classed = [call("uniform", true), call("uniform", true)];
        let layers = classed.each_ref().map(|call| LayerAttention::new(call).unwrap());
        // Half stays with the class token, then half of that; of the rest, a tenth is at each place.
        let rolled = rollout(&layers).unwrap().unwrap();
        assert!(rolled.iter().all(|&weight| (weight - 0.075).abs() < 1e-6), "{rolled:?}");
        let mut other = call("uniform", false);
        other.place.grid = Some([2, 5]);
        let layers = [&one, &other].map(|call| LayerAttention::new(call).unwrap());
        assert!(rollout(&layers).unwrap().is_none());
    }
}
