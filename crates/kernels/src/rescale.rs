//! Queries and keys of magnitudes whose products would leave f32.
//!
//! InfSA depends on the lengths of queries and keys only through its `eps`. Where a head's largest entry is far from 1,
//! queries and keys are divided by powers of two (exact), the mechanism works on them with `eps` divided likewise, and the
//! gradients are divided at the end. Only such calls, which no trained model makes, pay for it with two copies.

use rayon::prelude::*;

use crate::{Mechanism, mechanism::Activation, operator::Call};

/// Binary orders of magnitude around 1 that need no rescaling: the product of two such numbers, and its reciprocal times
/// a third, stay far inside f32.
const COMFORTABLE: i32 = 40;

/// A call's queries and keys, divided by powers of two.
pub(crate) struct Rescaled {
    q: Vec<f32>,
    k: Option<Vec<f32>>,
    units: Vec<[i32; 2]>,
}

impl Rescaled {
    /// `None` where the mechanism needs no rescaling, or this call does not.
    pub fn of(mechanism: &Mechanism, call: &Call<'_>) -> Option<Self> {
        let takes = match mechanism {
            Mechanism::Infsa(m) => m.activation != Activation::Gelu,
            Mechanism::InfsaResolvent(m) => m.activation != Activation::Gelu,
            Mechanism::LinearInfsa(_) => true,
            _ => false,
        };
        if !takes {
            return None;
        }
        let (shape, tied) = (call.shape, mechanism.tied());
        let unit = |slice: usize| {
            let batch = slice / shape.heads;
            let q = exponent(call.q, call.mask.query, slice, batch, [shape.seq_q, shape.head_dim]);
            let k = exponent(call.k, call.mask.key, slice, batch, [shape.seq_kv, shape.head_dim]);
            if tied { [q.max(k); 2] } else { [q, k] }
        };
        let slices = || (0..shape.slices()).into_par_iter();
        if slices().all(|slice| unit(slice).iter().all(|unit| unit.abs() <= COMFORTABLE)) {
            return None;
        }
        let units: Vec<_> = slices().map(unit).collect();
        let divided = |x: &[f32], side: usize| {
            let mut x = x.to_vec();
            divide(&mut x, &units, side);
            x
        };
        let (q, k) = (divided(call.q, 0), (!tied).then(|| divided(call.k, 1)));
        Some(Self { q, k, units })
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

/// The exponent of the largest magnitude among the kept rows of a slice; 0 for only zeros.
fn exponent(x: &[f32], keep: Option<&[bool]>, slice: usize, batch: usize, [seq, dim]: [usize; 2]) -> i32 {
    let rows = x[slice * seq * dim..][..seq * dim].chunks_exact(dim).enumerate();
    let kept = rows.filter(|(i, _)| keep.is_none_or(|keep| keep[batch * seq + i]));
    let most = kept.flat_map(|(_, row)| row).fold(0_f32, |most, x| most.max(x.abs()));
    if most == 0.0 { 0 } else { most.log2().floor() as i32 }
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
