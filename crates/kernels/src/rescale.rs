//! Queries and keys of magnitudes whose products would leave f32.
//!
//! InfSA depends on the lengths of queries and keys only through its `eps`. Where a head's largest entry is far from 1,
//! queries and keys are divided by powers of two (exact), the mechanism works on them with `eps` divided likewise, and the
//! gradients are divided at the end. Only such calls, which no trained model makes, pay for it with two copies.
//!
//! Of a causal sequence the first tokens set the units: what comes later must change no bit of earlier rows.

use rayon::prelude::*;

use crate::{
    Mechanism, Shape,
    mechanism::Activation,
    operator::Call,
    simd::{Level, rows},
};

/// Binary orders of magnitude around 1 that need no rescaling: the product of two such numbers, and its reciprocal times
/// a third, stay far inside f32.
const COMFORTABLE: i32 = 40;

/// Whether a magnitude needs no rescaling.
pub(crate) fn is_comfortable(exponent: i32) -> bool {
    exponent.abs() <= COMFORTABLE
}

/// A call's queries and keys, divided by powers of two.
pub(crate) struct Rescaled {
    q: Vec<f32>,
    /// `None` where queries are keys.
    k: Option<Vec<f32>>,
    units: Vec<[i32; 2]>,
}

impl Rescaled {
    /// `None` where the mechanism needs no rescaling (or sees to it itself), or this call does not.
    pub fn of(mechanism: &Mechanism, call: &Call<'_>) -> Option<Self> {
        let takes = match mechanism {
            Mechanism::Infsa(m) => homogeneous(m.activation),
            Mechanism::InfsaResolvent(m) => homogeneous(m.activation),
            _ => false,
        };
        if takes { Self::needed(call, mechanism.tied()) } else { None }
    }

    /// `None` where all magnitudes are comfortable.
    pub fn needed(call: &Call<'_>, tied: bool) -> Option<Self> {
        let slices = (0..call.shape.slices()).into_par_iter();
        let comfortable = slices.all(|slice| unit(call, tied, slice).into_iter().all(is_comfortable));
        (!comfortable).then(|| Self::measured(call, tied))
    }

    /// By each slice's largest magnitudes.
    pub fn measured(call: &Call<'_>, tied: bool) -> Self {
        Self::by(call, tied, (0..call.shape.slices()).into_par_iter().map(|slice| unit(call, tied, slice)).collect())
    }

    /// By the exponents `units` of queries and keys, one pair per slice.
    pub fn by(call: &Call<'_>, tied: bool, units: Vec<[i32; 2]>) -> Self {
        let divided = |x: &[f32], side: usize| {
            let mut x = x.to_vec();
            divide(&mut x, &units, side);
            x
        };
        let (q, k) = (divided(call.q, 0), (!tied).then(|| divided(call.k, 1)));
        Self { q, k, units }
    }

    /// The exponents that each slice was divided by.
    pub fn units(&self) -> &[[i32; 2]] {
        &self.units
    }

    /// The call on the divided queries and keys.
    pub fn call<'a>(&'a self, call: &Call<'a>) -> Call<'a> {
        Call { q: &self.q, k: self.k.as_deref().unwrap_or(&self.q), units: Some(&self.units), ..*call }
    }

    /// Makes the gradients of the divided queries and keys those of the given ones.
    pub fn restore(&self, dq: &mut [f32], dk: Option<&mut [f32]>) {
        divide(dq, &self.units, 0);
        if let Some(dk) = dk {
            divide(dk, &self.units, 1);
        }
    }
}

/// Whether the activation knows no unit: that of a multiple is the multiple.
pub(crate) fn homogeneous(activation: Activation) -> bool {
    activation != Activation::Gelu
}

/// The exponents of one slice's largest query and key entries, causal of its first ones; one for both where queries are keys.
fn unit(call: &Call<'_>, tied: bool, slice: usize) -> [i32; 2] {
    let [q, k] = match call.mask.causal {
        true => prefixes(call, slice).map(|[first, _]| first),
        false => largest(call, slice).map(exponent_of),
    };
    if tied { [q.max(k); 2] } else { [q, k] }
}

/// The power of two that is at most `x`; that of 1 for 0.
pub(crate) fn exponent_of(x: f32) -> i32 {
    if x == 0.0 { 0 } else { f64::from(x).log2().floor() as i32 }
}

/// One side of a slice: its tokens, and which of them count.
fn side<'a>(call: &Call<'a>, slice: usize, keys: bool) -> (&'a [f32], Option<&'a [bool]>) {
    let Shape { heads, seq_q, seq_kv, head_dim, .. } = call.shape;
    let (x, keep, seq) = if keys { (call.k, call.mask.key, seq_kv) } else { (call.q, call.mask.query, seq_q) };
    (&x[slice * seq * head_dim..][..seq * head_dim], keep.map(|keep| &keep[slice / heads * seq..][..seq]))
}

/// The largest magnitudes among one slice's kept queries and kept keys.
pub(crate) fn largest(call: &Call<'_>, slice: usize) -> [f32; 2] {
    [false, true].map(|keys| {
        let (x, keep) = side(call, slice, keys);
        largest_of(call.level, x, call.shape.head_dim, keep)
    })
}

/// Whether an entry of one slice's kept queries or keys is as large as `least`: of ordinary tokens one of the first is.
pub(crate) fn reaches(call: &Call<'_>, slice: usize, least: f64) -> bool {
    [false, true].into_iter().any(|keys| {
        let (x, keep) = side(call, slice, keys);
        let mut rows = x.chunks_exact(call.shape.head_dim).enumerate();
        rows.any(|(i, row)| keep.is_none_or(|keep| keep[i]) && row.iter().any(|x| f64::from(x.abs()) >= least))
    })
}

/// The largest magnitude in the rows that are kept.
pub(crate) fn largest_of(level: Level, x: &[f32], dim: usize, keep: Option<&[bool]>) -> f32 {
    let Some(keep) = keep else { return rows::max_abs(level, x) };
    let kept = x.chunks_exact(dim).zip(keep).filter(|(_, keep)| **keep);
    kept.fold(0.0, |most, (row, _)| most.max(rows::max_abs(level, row)))
}

/// How many times the largest kept row of one slice's queries, and of its keys, is as large as the smallest that is not zero.
pub(crate) fn spreads(call: &Call<'_>, slice: usize) -> [f32; 2] {
    [false, true].map(|keys| {
        let (x, keep) = side(call, slice, keys);
        let rows = x.chunks_exact(call.shape.head_dim).enumerate().filter(|(i, _)| keep.is_none_or(|keep| keep[*i]));
        let sizes = rows.map(|(_, row)| rows::max_abs(call.level, row)).filter(|&size| size > 0.0);
        let [least, most] = sizes.fold([f32::INFINITY, 0.0], |[least, most], x| [least.min(x), most.max(x)]);
        if most > 0.0 { most / least } else { 1.0 }
    })
}

/// The exponents of the first kept token of one slice that is not zero, and of the largest, of queries and of keys.
pub(crate) fn prefixes(call: &Call<'_>, slice: usize) -> [[i32; 2]; 2] {
    [false, true].map(|keys| {
        let ((x, keep), dim) = (side(call, slice, keys), call.shape.head_dim);
        let kept = x.chunks_exact(dim).enumerate().filter(|(i, _)| keep.is_none_or(|keep| keep[*i]));
        let first = kept.map(|(_, row)| rows::max_abs(call.level, row)).find(|&most| most > 0.0).unwrap_or(0.0);
        [first, largest_of(call.level, x, dim, keep)].map(exponent_of)
    })
}

/// For every query the exponent of the largest product with a key that it, or one before it, could have, as far as magnitudes
/// tell: what a causal row is computed in units of.
pub(crate) fn row_exponents(call: &Call<'_>, slice: usize) -> impl Iterator<Item = i32> {
    let ([(q, keep_q), (k, keep_k)], dim) = ([false, true].map(|keys| side(call, slice, keys)), call.shape.head_dim);
    let level = call.level;
    let kept = |keep: Option<&[bool]>, i: usize| keep.is_none_or(|keep| keep[i]);
    let rows = q.chunks_exact(dim).zip(k.chunks_exact(dim)).enumerate();
    rows.scan([0_f32; 2], move |[most_q, most_k], (i, (q, k))| {
        if kept(keep_q, i) {
            *most_q = most_q.max(rows::max_abs(level, q));
        }
        if kept(keep_k, i) {
            *most_k = most_k.max(rows::max_abs(level, k));
        }
        Some((exponent_of(*most_q) + exponent_of(*most_k)).clamp(-126, 126))
    })
}

/// Divides every slice of `x` by its power of two.
fn divide(x: &mut [f32], units: &[[i32; 2]], side: usize) {
    multiply(x, units.len(), |slice| 2f64.powi(-units[slice][side]));
}

/// Multiplies every slice of `x` by its factor: in f64, which has room for the powers of every f32 and its reciprocal.
pub(crate) fn multiply(x: &mut [f32], slices: usize, factor: impl Fn(usize) -> f64 + Sync) {
    let len = (x.len() / slices).max(1);
    x.par_chunks_mut(len).enumerate().for_each(|(slice, x)| {
        let by = factor(slice);
        x.iter_mut().for_each(|x| *x = (f64::from(*x) * by) as f32);
    });
}
