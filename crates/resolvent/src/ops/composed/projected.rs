//! Keys and values mapped to a fixed number of combinations of them: `E k` and `F v`.

use burn::tensor::Tensor;
use resolvent_kernels::{Parameter, mechanism::Projected};

use super::{super::Extras, Call, landmarks::constant};
use crate::Shape;

/// The call over projected keys and values, all of which every query sees.
pub(super) fn call(call: &Call, m: &Projected, extras: &Extras) -> Call {
    let Shape { batch, heads, seq_kv, .. } = call.shape;
    let columns = m.max_tokens.unwrap_or(seq_kv);
    let project = |parameter, x: &Tensor<4>| {
        let maps = if m.per_head { heads } else { 1 };
        let sizes = [1, maps, m.count, columns];
        let map = match extras.like(parameter, x) {
            Some(map) => map.reshape(sizes),
            None => constant::<4>(m.map(parameter, heads, columns), sizes, x),
        };
        map.narrow(3, 0, seq_kv).expand([batch, heads, m.count, seq_kv]).matmul(x.clone())
    };
    Call {
        shape: Shape { seq_kv: m.count, ..call.shape },
        q: call.q.clone(),
        k: project(Parameter::KeyMap, &call.k),
        v: project(Parameter::ValueMap, &call.v),
        causal: false,
        no_key: None,
        no_query: call.no_query.clone(),
        dropout: None,
        bias: None,
    }
}
