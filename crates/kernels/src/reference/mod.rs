//! x
use crate::{
    mechanism,
    operator::{Call, Saved},
    *,
};
pub(crate) fn forward_f32(_m: &Mechanism, _c: &Call<'_>, _out: &mut [f32], _stats: &mut [f32]) -> Result<()> {
    unimplemented!()
}
pub(crate) fn backward_f32(_m: &Mechanism, _c: &Call<'_>, _dout: &[f32], _g: Gradients<'_, f32>) -> Result<()> {
    unimplemented!()
}
pub(crate) fn plan(_fused: Plan, _s: &Shape) -> Plan {
    unimplemented!()
}
