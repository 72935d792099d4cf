//! x
use crate::{
    mechanism,
    operator::{Call, Saved},
    *,
};
pub(crate) fn forward(
    _c: &Call<'_>,
    _m: &mechanism::InfsaResolvent,
    _out: &mut [f32],
    _stats: &mut [f32],
    _work: &mut [f32],
) -> Result<()> {
    unimplemented!()
}
pub(crate) fn backward(
    _c: &Call<'_>,
    _m: &mechanism::InfsaResolvent,
    _saved: &Saved<'_>,
    _g: Gradients<'_, f32>,
    _work: &mut [f32],
) -> Result<()> {
    unimplemented!()
}
pub(crate) fn plan(_m: &mechanism::InfsaResolvent, _s: &Shape) -> Plan {
    unimplemented!()
}
