//! The filter over the values that is added to the weights of a hop, "Softmax-free Linear Transformers", section 3.3.

use burn::tensor::{
    Tensor,
    module::{conv1d, conv2d},
    ops::ConvOptions,
};
use resolvent_kernels::Parameter;

use super::{Call, absent, hop::Filter};
use crate::{Mechanism, Shape, ops::Extras};

/// The filter of a call that has one.
pub(super) fn of<'a>(call: &'a Call, mechanism: &Mechanism, extras: &Extras) -> Option<Filter<'a>> {
    let weight = extras.like(Parameter::ValueWeight, &call.v)?;
    let size = (mechanism.value_conv(), mechanism.grid());
    Some(Box::new(move |v| absent(call.of_keys(filtered(call, v, size, &weight)), &call.no_query)))
}

/// Every head's values `v` convolved with its one kernel of width `k`.
fn filtered(call: &Call, v: &Tensor<4>, (k, grid): (usize, Option<[usize; 2]>), weight: &Tensor<1>) -> Tensor<4> {
    let Shape { batch, heads, seq_kv: seq, value_dim, .. } = call.shape;
    // Channels are independent: they join the batch.
    let v = call.of_keys(v.clone()).permute([0, 3, 1, 2]);
    let y = match grid {
        Some([height, width]) => {
            let v = v.reshape([batch * value_dim, heads, height, width]);
            let options = ConvOptions::new([1, 1], [k / 2, k / 2], [1, 1], heads);
            conv2d(v, weight.clone().reshape([heads, 1, k, k]), None, options).reshape([batch, value_dim, heads, seq])
        }
        None => {
            let v = v.reshape([batch * value_dim, heads, seq]);
            let options = ConvOptions::new([1], [k / 2], [1], heads);
            conv1d(v, weight.clone().reshape([heads, 1, k]), None, options).reshape([batch, value_dim, heads, seq])
        }
    };
    y.permute([0, 2, 3, 1])
}
