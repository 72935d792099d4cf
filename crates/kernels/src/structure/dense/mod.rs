//! x
use crate::{
    mechanism,
    operator::{Call, Saved},
    *,
};
pub(crate) fn softmax_forward(
    _c: &Call<'_>,
    _m: &mechanism::Softmax,
    _out: &mut [f32],
    _stats: &mut [f32],
    _work: &mut [f32],
) -> Result<()> {
    unimplemented!()
}
pub(crate) fn softmax_backward(
    _c: &Call<'_>,
    _m: &mechanism::Softmax,
    _saved: &Saved<'_>,
    _g: Gradients<'_, f32>,
    _work: &mut [f32],
) -> Result<()> {
    unimplemented!()
}
pub(crate) fn infsa_forward(
    _c: &Call<'_>,
    _m: &mechanism::Infsa,
    _out: &mut [f32],
    _stats: &mut [f32],
    _work: &mut [f32],
) -> Result<()> {
    unimplemented!()
}
pub(crate) fn infsa_backward(
    _c: &Call<'_>,
    _m: &mechanism::Infsa,
    _saved: &Saved<'_>,
    _g: Gradients<'_, f32>,
    _work: &mut [f32],
) -> Result<()> {
    unimplemented!()
}
pub(crate) fn plan(_m: &Mechanism, _s: &Shape, _causal: bool) -> Plan {
    unimplemented!()
}
