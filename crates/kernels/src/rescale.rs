//! Queries and keys of magnitudes whose products would leave f32.
//!
//! InfSA depends on the lengths of queries and keys only through its `eps`. Where a head's largest entry is far from 1,
//! queries and keys are divided by powers of two (exact), the mechanism works on them with `eps` divided likewise, and the
//! gradients are divided at the end. Only such calls, which no trained model makes, pay for it with two copies.

use rayon::prelude::*;

use crate::{Mechanism, Shape, mechanism::Activation, operator::Call, simd::rows};

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
            Mechanism::Infsa(m) => m.activation != Activation::Gelu,
            Mechanism::InfsaResolvent(m) => m.activation != Activation::Gelu,
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

/// The exponents of one slice's largest query and key entries; one for both where queries are keys.
fn unit(call: &Call<'_>, tied: bool, slice: usize) -> [i32; 2] {
    let [q, k] = largest(call, slice).map(|most| if most == 0.0 { 0 } else { most.log2().floor() as i32 });
    if tied { [q.max(k); 2] } else { [q, k] }
}

/// The largest magnitudes among one slice's kept queries and kept keys.
pub(crate) fn largest(call: &Call<'_>, slice: usize) -> [f32; 2] {
    let Shape { heads, seq_q, seq_kv, head_dim, .. } = call.shape;
    let sides = [(call.q, call.mask.query, seq_q), (call.k, call.mask.key, seq_kv)];
    sides.map(|(x, keep, seq)| {
        let x = &x[slice * seq * head_dim..][..seq * head_dim];
        let Some(keep) = keep else { return rows::max_abs(call.level, x) };
        let keep = &keep[slice / heads * seq..][..seq];
        let kept = x.chunks_exact(head_dim).zip(keep).filter(|(_, keep)| **keep);
        kept.fold(0.0, |most, (row, _)| most.max(rows::max_abs(call.level, row)))
    })
}

/// Divides every slice of `x` by its power of two.
fn divide(x: &mut [f32], units: &[[i32; 2]], side: usize) {
    let len = x.len() / units.len();
    x.par_chunks_mut(len).zip(units).for_each(|(x, unit)| {
        // In f64, which has room for the powers of every f32 and its reciprocal.
        let by = 2f64.powi(-unit[side]);
        x.iter_mut().for_each(|x| *x = (f64::from(*x) * by) as f32);
    });
}
