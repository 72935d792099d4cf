//! x
use crate::{
    mechanism,
    operator::{Call, Saved},
    *,
};
pub(crate) fn uniform_forward(_c: &Call<'_>, _out: &mut [f32], _stats: &mut [f32], _work: &mut [f32]) -> Result<()> {
    unimplemented!()
}
pub(crate) fn uniform_backward(
    _c: &Call<'_>,
    _saved: &Saved<'_>,
    _g: Gradients<'_, f32>,
    _work: &mut [f32],
) -> Result<()> {
    unimplemented!()
}
pub(crate) fn linear_forward(
    _c: &Call<'_>,
    _m: &mechanism::LinearInfsa,
    _out: &mut [f32],
    _stats: &mut [f32],
    _work: &mut [f32],
) -> Result<()> {
    unimplemented!()
}
pub(crate) fn linear_backward(
    _c: &Call<'_>,
    _m: &mechanism::LinearInfsa,
    _saved: &Saved<'_>,
    _g: Gradients<'_, f32>,
    _work: &mut [f32],
) -> Result<()> {
    unimplemented!()
}
pub(crate) fn plan(_m: &Mechanism, _s: &Shape, _causal: bool) -> Plan {
    unimplemented!()
}
