//! From affinities to weights.

use burn::tensor::{Bool, Tensor};
use resolvent_kernels::Result;

use super::{Call, absent, fill, graph::Pairs, hop::Hop, magnitude, root, unsupported, whitened};
use crate::mechanism::{Factor, Normalisation};

/// `exp(scores - highest)` and its sums over the last axis.
struct Rows {
    powers: Tensor<4>,
    sums: Tensor<4>,
    highest: Tensor<4>,
}

impl Rows {
    fn of(scores: Tensor<4>, blocked: &Option<Tensor<4, Bool>>) -> Self {
        let highest = fill(scores.clone().detach(), blocked, f32::MIN).max_dim(3);
        let powers = absent((fill(scores, blocked, f32::MIN) - highest.clone()).exp(), blocked);
        Self { sums: powers.clone().sum_dim(3), powers, highest }
    }

    /// Rows without keys, `[.., 1]`.
    fn empty(&self) -> Tensor<4, Bool> {
        self.sums.clone().equal_elem(0.0)
    }

    /// The logarithms of the sums; 0, that of 1, for empty rows.
    fn logs(&self) -> Tensor<4> {
        (self.highest.clone() + self.sums.clone().mask_fill(self.empty(), 1.0).log()).mask_fill(self.empty(), 0.0)
    }
}

/// One hop, and of rows of a log score that are normalised the logarithms of their sums, `[batch, heads, seq_q, 1]`.
pub(super) fn normalise<'a>(
    call: &Call,
    pairs: Pairs,
    normalisation: &Normalisation,
    mechanism: &'static str,
) -> Result<(Hop<'a>, Option<Tensor<4>>)> {
    let hop = match normalisation {
        Normalisation::Row(m) if pairs.log => return Ok(log_rows(call, &pairs, m.density_exponent)),
        Normalisation::Row(m) => linear_rows(&pairs, m.density_exponent),
        Normalisation::Frobenius(m) if pairs.log => log_frobenius(call, &pairs, m.eps),
        Normalisation::Frobenius(m) => linear_frobenius(call, &pairs, m.eps),
        Normalisation::Symmetric(_) => symmetric(&pairs),
        Normalisation::Whitened(m) => {
            Hop::whole(whitened::weights(call, m, mechanism, affinities(&pairs), &pairs.blocked)?)
        }
        Normalisation::None(m) => {
            let hop = Hop::whole(affinities(&pairs));
            if m.factor == Factor::InvN { hop.divided(pairs.seen) } else { hop }
        }
        _ => return Err(unsupported(mechanism, "this normalisation with Strategy::Composed")),
    };
    Ok((hop, None))
}

/// The affinities themselves.
fn affinities(pairs: &Pairs) -> Tensor<4> {
    if pairs.log {
        return weigh(pairs, None);
    }
    pairs.units.iter().cloned().fold(pairs.present(), |g, unit| g * unit)
}

/// `exp(l - divisor)` of a log score, `divisor` the logarithms of what affinities are divided by.
fn weigh(pairs: &Pairs, divisor: Option<Tensor<4>>) -> Tensor<4> {
    let filled = fill(pairs.values.clone(), &pairs.blocked, f32::MIN);
    let logs = match divisor {
        Some(divisor) => filled - divisor,
        None => filled,
    };
    absent(logs.exp(), &pairs.blocked)
}

/// `g_ij / sum_j g_ij`, after densities have been divided out.
fn log_rows<'a>(call: &Call, pairs: &Pairs, density: f64) -> (Hop<'a>, Option<Tensor<4>>) {
    let mut rows = Rows::of(pairs.values.clone(), &pairs.blocked);
    if density != 0.0 {
        // The density of the query cancels.
        let degrees = rows.logs().swap_dims(2, 3);
        rows = Rows::of(pairs.values.clone() - degrees * density, &pairs.blocked);
    }
    let lse = rows.logs().detach().mask_fill(rows.empty(), f32::NEG_INFINITY);
    (Hop::whole(call.thinned(rows.powers)).divided(rows.sums), Some(lse))
}

/// `g_ij / sum_j |g_ij|`, after densities have been divided out.
fn linear_rows<'a>(pairs: &Pairs, density: f64) -> Hop<'a> {
    let over_largest = |g: Tensor<4>| {
        let largest = positive(g.clone().detach().abs().max_dim(3));
        (g / largest.clone(), largest)
    };
    let (mut g, largest) = over_largest(pairs.present());
    if density != 0.0 {
        let sums = g.clone().abs().sum_dim(3);
        let empty = sums.clone().equal_elem(0.0);
        let units = pairs.units.iter().cloned().fold(largest.log(), |logs, unit| logs + unit.log());
        let degrees = (sums.mask_fill(empty.clone(), 1.0).log() + units).mask_fill(empty, 0.0);
        // The largest factor of a row's keys is 1: a factor on a row cancels.
        let shape = g.dims();
        let logs = (degrees.swap_dims(2, 3) * -density).expand(shape);
        let highest = fill(logs.clone().detach(), &pairs.blocked, f32::MIN).max_dim(3);
        g = over_largest(g * absent(fill(logs - highest, &pairs.blocked, 0.0).exp(), &pairs.blocked)).0;
    }
    let sums = g.clone().abs().sum_dim(3);
    Hop::whole(g).divided(sums)
}

/// `G / (|G|_F + eps)`; causal: row `i` is divided by the norm of the first `i + 1` rows.
fn log_frobenius<'a>(call: &Call, pairs: &Pairs, eps: f64) -> Hop<'a> {
    let rows = Rows::of(pairs.values.clone() * 2.0, &pairs.blocked);
    let [batch, heads, seq_q, _] = rows.sums.dims();
    let across = if call.causal { seq_q } else { 1 };
    let squares = rows.logs().swap_dims(2, 3).expand([batch, heads, across, seq_q]);
    let empty = rows.empty().swap_dims(2, 3).expand([batch, heads, across, seq_q]);
    // Causal calls of this normalisation are square, so that no row sees a later one.
    let later = call.future().map(|future| future.expand([batch, heads, across, seq_q]));
    let blocked = Some(later.into_iter().fold(empty, Tensor::bool_or));
    let all = Rows::of(squares, &blocked);
    let none = all.empty();
    let norm = all.logs() * 0.5;
    let divisor = if eps == 0.0 {
        norm
    } else {
        let eps = norm.zeros_like() + eps.ln();
        let both = Tensor::cat(vec![norm, eps], 3);
        let blocked = Tensor::cat(vec![none.clone(), none.clone().bool_and(none.bool_not())], 3);
        Rows::of(both, &Some(blocked)).logs()
    };
    Hop::whole(weigh(pairs, Some(divisor)))
}

/// The same of a linear score. "Infinite Self-Attention", eq. 11 and 12.
fn linear_frobenius<'a>(call: &Call, pairs: &Pairs, eps: f64) -> Hop<'a> {
    let g = pairs.present();
    // Divided by the largest, their squares cannot overflow.
    let largest = magnitude(&g);
    let g = g / largest.clone();
    let energy = g.clone().square().sum_dim(3);
    let energy = if call.causal { energy.cumsum(2) } else { energy.sum_dim(2) };
    let norm = root(energy);
    if eps == 0.0 {
        return Hop::whole(g).divided(norm);
    }
    let units = pairs.units.iter().cloned().chain([largest]);
    let eps = units.fold(norm.zeros_like() + eps, |eps, unit| eps / unit);
    Hop::whole(g).divided(norm + eps)
}

/// `R^-1/2 G C^-1/2` with the sums of magnitudes of rows and columns; an empty sum divides by 1.
fn symmetric<'a>(pairs: &Pairs) -> Hop<'a> {
    if pairs.log {
        let rows = Rows::of(pairs.values.clone(), &pairs.blocked).logs();
        let turned = pairs.blocked.clone().map(|blocked| blocked.swap_dims(2, 3));
        let columns = Rows::of(pairs.values.clone().swap_dims(2, 3), &turned).logs().swap_dims(2, 3);
        return Hop::whole(weigh(pairs, Some((rows + columns) * 0.5)));
    }
    let g = pairs.present();
    let g = g.clone() / magnitude(&g);
    let sums = |axis: usize| positive(root(g.clone().abs().sum_dim(axis)));
    Hop::whole(g.clone() / sums(3) / sums(2))
}

/// `x`, and 1 where it is 0.
fn positive(x: Tensor<4>) -> Tensor<4> {
    let zero = x.clone().equal_elem(0.0);
    x.mask_fill(zero, 1.0)
}
