//! Queries and keys of magnitudes whose products would leave f32.
//!
//! InfSA depends on the lengths of queries and keys only through its `eps`. Where a head's largest entry is far from 1,
//! queries and keys are divided by powers of two (exact), the mechanism works on them with `eps` divided likewise, and the
//! gradients are divided at the end. Only such calls, which no trained model makes, pay for it with two copies.
//!
//! Of a causal sequence the first tokens set the units: what comes later must change no bit of earlier rows.
//!
//! Output gradients are divided likewise where their products with values would leave f32: all gradients are linear in them.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::{
    Error, Mechanism, Result,
    call::{
        Call, GradientTargets, Layout, Target, View,
        magnitude::{Masked, exponent_of, largest},
    },
    mechanism::{Activation, Form},
    parallel,
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
    pub fn of(form: &Form, call: &Call<'_>) -> Option<Self> {
        match form {
            Form::Infsa(m) if homogeneous(m.activation) => Self::needed(call, m.tied),
            Form::InfsaResolvent(m) if homogeneous(m.activation) => Self::needed(call, m.tied),
            _ => None,
        }
    }

    /// `None` where all magnitudes are comfortable.
    pub fn needed(call: &Call<'_>, tied: bool) -> Option<Self> {
        let comfortable = |slice| unit(call, tied, slice).into_iter().all(is_comfortable);
        (!parallel::all(0..call.shape.slices(), comfortable)).then(|| Self::measured(call, tied))
    }

    /// By each slice's largest magnitudes.
    pub fn measured(call: &Call<'_>, tied: bool) -> Self {
        Self::by(call, tied, parallel::map(0..call.shape.slices(), |slice| unit(call, tied, slice)))
    }

    /// By the exponents `units` of queries and keys, one pair per slice.
    pub fn by(call: &Call<'_>, tied: bool, units: Vec<[i32; 2]>) -> Self {
        let divided = |view: View<'_>, side: usize| {
            let mut x = vec![0.0; view.layout().len()];
            view.gather(&mut x);
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
        let view = |x: &'a [f32], like: View<'a>| {
            let Layout { tokens, channels, .. } = *like.layout();
            View::in_one_piece(x, call.shape.slices(), [tokens, channels])
        };
        let (q, k) = (view(&self.q, call.q), view(self.k.as_deref().unwrap_or(&self.q), call.k));
        Call { q, k, units: Some(&self.units), ..*call }
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
        true => [Masked::queries(call), Masked::keys(call)].map(|side| side.first_and_largest(call.level, slice)[0]),
        false => largest(call, slice).map(exponent_of),
    };
    if tied { [q.max(k); 2] } else { [q, k] }
}

/// Divides every slice of `x` by its power of two.
fn divide(x: &mut [f32], units: &[[i32; 2]], side: usize) {
    multiply(x, units.len(), |slice| 2f64.powi(-units[slice][side]));
}

/// Multiplies every slice of `x` by its factor: in f64, which has room for the powers of every f32 and its reciprocal.
pub(crate) fn multiply(x: &mut [f32], slices: usize, factor: impl Fn(usize) -> f64 + Sync) {
    let len = (x.len() / slices).max(1);
    parallel::each(x.chunks_mut(len).enumerate(), |(slice, x)| {
        let by = factor(slice);
        x.iter_mut().for_each(|x| *x = (f64::from(*x) * by) as f32);
    });
}

/// [`multiply`], of a tensor that lies anywhere.
pub(crate) fn multiply_rows(x: &mut Target<'_>, factor: impl Fn(usize) -> f64 + Sync) {
    x.for_each_row(|slice, _, row| {
        let by = factor(slice);
        row.iter_mut().for_each(|x| *x = (f64::from(*x) * by) as f32);
    });
}

/// Powers of two between which products of values and output gradients have room on all sides.
const ROOM: std::ops::RangeInclusive<f64> = -40.0..=60.0;
/// The exponent of the least product of a value and an output gradient that leaves digits to what it is multiplied by.
const LEAST_PRODUCT: f64 = -60.0;

/// The exponent of a power of two by which to divide the output gradients, 0 if they may stay. Causal ones are not divided for
/// the sake of later tokens.
///
/// # Errors
/// [`Error::Range`] where of tokens with smaller products nothing would be left.
pub(crate) fn gradient_exponent(mechanism: &Mechanism, call: &Call<'_>, dout: View<'_>) -> Result<i32> {
    if mechanism.is_pooled() {
        return Ok(0);
    }
    let sides = [Masked::of_queries(call, dout), Masked::values(call)];
    let largest = |side: Masked<'_>| {
        // Numbers that are not negative have the order of their bits.
        let most = AtomicU32::new(0);
        parallel::each(0..side.slices(), |slice| {
            most.fetch_max(side.largest(call.level, slice).max(0.0).to_bits(), Ordering::Relaxed);
        });
        f64::from(f32::from_bits(most.into_inner()))
    };
    let [g, v] = sides.map(largest);
    let exponent = product_exponent(g, v);
    if exponent <= 0 || call.mask.causal {
        return Ok(exponent.min(0));
    }
    let least = |side: Masked<'_>| {
        let sizes = (0..side.slices()).flat_map(|slice| side.sizes(call.level, slice));
        f64::from(sizes.filter(|&size| size > 0.0).fold(f32::INFINITY, f32::min))
    };
    let [least_g, least_v] = sides.map(least);
    if (least_g * least_v).log2() - f64::from(exponent) >= LEAST_PRODUCT {
        return Ok(exponent);
    }
    let (tensor, largest) = if g / least_g >= v / least_v { ("dout", g) } else { ("v", v) };
    let limit = largest * (LEAST_PRODUCT + f64::from(exponent)).exp2().recip() * least_g * least_v;
    let remedy = "nothing is left of the gradients of tokens with far smaller values: scale them to be more alike";
    Err(Error::Range { tensor, largest, bound: "up to", limit, remedy })
}

/// Whether the output gradients by themselves need no dividing.
pub(crate) fn are_comfortable(call: &Call<'_>, dout: View<'_>) -> bool {
    let side = Masked::of_queries(call, dout);
    (0..side.slices()).all(|slice| is_comfortable(exponent_of(side.largest(call.level, slice))))
}

/// The exponent of a power of two by which to divide `g`, for its products with `v` to have room; 0 if they have.
pub(crate) fn product_exponent(g: f64, v: f64) -> i32 {
    let product = g.log2() + v.log2();
    if !product.is_finite() || ROOM.contains(&product) {
        return 0;
    }
    // What is divided has to stay a number itself, and its sums over tokens, too.
    (g.log2() - (-v.log2()).clamp(-90.0, 90.0)).floor() as i32
}

/// `x` divided by a power of two.
pub(crate) fn divided(view: View<'_>, exponent: i32) -> Vec<f32> {
    let mut x = vec![0.0; view.layout().len()];
    view.gather(&mut x);
    multiply(&mut x, 1, |_| 2f64.powi(-exponent));
    x
}

/// Multiplies all gradients by a power of two.
pub(crate) fn multiply_gradients(gradients: &mut GradientTargets<'_>, exponent: i32) {
    let GradientTargets { dq, dk, dv, extras } = gradients;
    let by = |_| 2f64.powi(exponent);
    [Some(dq), dk.as_mut(), Some(dv)].into_iter().flatten().for_each(|x| multiply_rows(x, by));
    extras.iter().for_each(|(_, x)| multiply(x, 1, by));
}
