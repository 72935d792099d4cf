//! Where the tokens are put before their distances are taken.

use super::{
    super::{
        head::{Head, Rows, dot, padded, panels as write_panels},
        pairing::Tokens,
    },
    Distances,
};
use crate::{
    call::{Call, TokenRows, magnitude::largest},
    mechanism::Manifold,
    parallel,
    scratch::{cut, scratch_len},
    simd::bf16::nearest,
};

impl Distances<'_> {
    /// The factor on the products of queries and keys.
    pub fn product_factor(&self) -> f32 {
        if self.manifold == Manifold::Sphere { 1.0 } else { -2.0 }
    }
}

/// The origin and the unit in which one head's tokens are measured.
#[derive(Clone, Copy)]
pub(in super::super) struct Frame<'a> {
    /// Near the keys, in the frame's unit.
    pub centre: &'a [f32],
    /// One over the unit, a power of two.
    pub inverse_unit: f32,
}

/// Channels whose means are summed together.
const CHANNELS: usize = 8;

/// Rows no longer than this have no direction.
const NO_LENGTH: f64 = 1e-12;

/// Writes the mean kept key of every head (causal: the first one) to `centres [slices, head_dim]` and one over the unit to `units [slices]`. The
/// unit is 1 unless squares of tokens would leave the range of f32; one over it is at most `limit(slice)`.
pub(in super::super) fn frames(
    call: &Call<'_>,
    limit: impl Fn(usize) -> f64 + Sync,
    centres: &mut [f32],
    units: &mut [f32],
) {
    let dim = call.shape.head_dim;
    parallel::each(centres.chunks_mut(dim).zip(units).enumerate(), |(slice, (centre, unit))| {
        let head = Head::of(call, slice);
        let most = largest(call, slice).into_iter().fold(0.0, f32::max);
        *unit = inverse_unit(most).min(limit(slice).clamp(1e-37, 1e37).log2().floor().exp2() as f32);
        if call.bf16.is_some() {
            // Rounded tokens keep what bf16 holds of them: see the module.
            return centre.fill(0.0);
        }
        // Of a causal sequence the first key, since a mean of later ones would show in the rounding of earlier rows.
        let most = if call.mask.causal { 1 } else { head.seq_kv };
        let kept = || (0..head.seq_kv).filter(|&j| head.keep_key.is_none_or(|keep| keep[j])).take(most);
        let count = kept().count().max(1) as f64;
        for (n, centre) in centre.chunks_mut(CHANNELS).enumerate() {
            let mut sums = [0.0; CHANNELS];
            for j in kept() {
                let row = &head.k.row(j)[n * CHANNELS..][..centre.len()];
                sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x * *unit));
            }
            centre.iter_mut().zip(sums).for_each(|(centre, sum)| *centre = (sum / count) as f32);
        }
    });
}

/// The power of two that brings `most`, the largest magnitude, into a range whose squares are harmless; 1 if it is there.
fn inverse_unit(most: f32) -> f32 {
    let exponent = if most > 0.0 { f64::from(most).log2().floor() } else { 0.0 };
    (exponent.clamp(-20.0, 56.0) - exponent).clamp(-126.0, 126.0).exp2() as f32
}

fn row_sizes(count: usize, head_dim: usize) -> [usize; 5] {
    let rows = count * padded(head_dim);
    [rows, rows, count, count, count]
}

pub(super) fn key_buffer_len(count: usize, head_dim: usize) -> usize {
    scratch_len(row_sizes(count, head_dim))
}

/// `count` is whole vectors.
pub(super) fn query_buffer_len(count: usize, head_dim: usize) -> usize {
    key_buffer_len(count, head_dim) + scratch_len([count * head_dim; 2])
}

pub(super) fn keys<'t>(of: Distances<'_>, head: &Head<'t>, kept: &[u32], memory: &'t mut [f32]) -> Tokens<'t> {
    let ([rows, exact, norms, bias, _], _) = cut(memory, row_sizes(kept.len(), head.head_dim));
    place(of, head.k, kept, rows, exact, norms);
    if let Some(density) = of.density {
        bias.iter_mut().zip(kept).for_each(|(bias, &j)| *bias = density.bias[j as usize]);
    }
    let stride = padded(head.head_dim);
    let (rows, exact) = (Rows { data: rows, stride }, Rows { data: exact, stride });
    Tokens { rows, exact, norms, terms: [bias, &[]], ..Tokens::NONE }
}

pub(super) fn queries<'t>(of: Distances<'_>, head: &Head<'t>, kept: &[u32], memory: &'t mut [f32]) -> Tokens<'t> {
    let (count, dim, stride) = (padded(kept.len()), head.head_dim, padded(head.head_dim));
    let ([rows, exact, norms, shift, gradient], memory) = cut(memory, row_sizes(count, dim));
    let ([panels, exact_panels], _) = cut(memory, [count * dim; 2]);
    place(of, head.q, kept, rows, exact, norms);
    norms[kept.len()..].fill(0.0);
    for (to, from) in [(&mut *shift, of.density.map(|d| d.shift)), (&mut *gradient, of.density.map(|d| d.gradient))] {
        to.fill(0.0);
        if let Some(from) = from.filter(|from| !from.is_empty()) {
            to.iter_mut().zip(kept).for_each(|(to, &i)| *to = from[i as usize]);
        }
    }
    if !of.rounded {
        write_panels(kept.len(), dim, |n| (&rows[n * stride..][..dim], of.product_factor()), panels);
    }
    write_panels(kept.len(), dim, |n| (&exact[n * stride..][..dim], 1.0), exact_panels);
    let (rows, exact) = (Rows { data: rows, stride }, Rows { data: exact, stride });
    Tokens { panels, exact_panels, rows, exact, norms, terms: [shift, gradient] }
}

/// Writes the `kept` tokens as the products take them and as they are, both in the frame's unit, and their squared norms.
/// On the sphere: both times at length one, and the lengths.
fn place(
    of: Distances<'_>,
    tensor: TokenRows<'_>,
    kept: &[u32],
    rows: &mut [f32],
    exact: &mut [f32],
    norms: &mut [f32],
) {
    let (dim, stride) = (tensor.channels, padded(tensor.channels));
    let Frame { centre, inverse_unit } = of.frame;
    let places = rows.chunks_exact_mut(stride).zip(exact.chunks_exact_mut(stride)).zip(norms);
    for (((row, exact), norm), &i) in places.zip(kept) {
        let x = tensor.row(i as usize);
        row[dim..].fill(0.0);
        exact[dim..].fill(0.0);
        let (row, exact) = (&mut row[..dim], &mut exact[..dim]);
        match of.manifold {
            Manifold::Euclidean => {
                exact.iter_mut().zip(x).for_each(|(exact, x)| *exact = x * inverse_unit);
                if of.rounded {
                    row.iter_mut().zip(&*exact).for_each(|(row, &x)| *row = nearest(x));
                } else {
                    row.iter_mut().zip(&*exact).zip(centre).for_each(|((row, x), c)| *row = x - c);
                }
                *norm = dot(row, row) as f32;
            }
            Manifold::Sphere => {
                let length = dot(x, x).sqrt();
                let inverse = if length > NO_LENGTH { 1.0 / length } else { 0.0 };
                row.iter_mut().zip(x).for_each(|(row, &x)| *row = (f64::from(x) * inverse) as f32);
                exact.copy_from_slice(row);
                *norm = inverse as f32;
            }
        }
    }
}

/// `sum_j s_j (y_j - x)` on the plane, from `sum_j s_j y_j` and the margin `sum_j s_j`; on the sphere through `x / |x|`.
pub(super) fn gradient(of: Distances<'_>, tokens: &Tokens<'_>, n: usize, margin: f32, sums: &[f32], out: &mut [f32]) {
    let row = &tokens.rows.data[n * tokens.rows.stride..][..out.len()];
    let (along, factor) = match of.manifold {
        Manifold::Euclidean => (margin, of.frame.inverse_unit),
        Manifold::Sphere => (dot(&sums[..out.len()], row) as f32, tokens.norms[n]),
    };
    out.iter_mut().zip(sums).zip(row).for_each(|((out, sum), x)| *out = (sum - along * x) * factor);
}
