//! The tensors of a call, and places for its results.

use resolvent_kernels::Strided;

use super::call::{Call, TensorLayout};

/// The tensors of one size in the layout of the call, shared by all contenders, and places for results. Side by side, `q` holds
/// queries, keys and values, and `dq` their gradients.
pub(super) struct Buffers {
    pub call: Call,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub dout: Vec<f32>,
    pub out: Vec<f32>,
    pub dq: Vec<f32>,
    pub dk: Vec<f32>,
    pub dv: Vec<f32>,
}

impl Buffers {
    pub fn new(call: &Call) -> Self {
        let ([q, k, v], rows) = (Self::lengths(call), call.len(call.shape.heads));
        let zeros = |len| vec![0.0; len];
        let [dq, dk, dv] = [q, k, v].map(zeros);
        let ([q, k, v], dout) = ([(q, 1), (k, 2), (v, 3)].map(|(len, seed)| numbers(len, seed)), numbers(rows, 4));
        Self { call: call.clone(), q, k, v, dout, out: zeros(rows), dq, dk, dv }
    }

    /// Elements of queries, keys and values; where they lie side by side, of all of them first.
    fn lengths(call: &Call) -> [usize; 3] {
        let [q, kv] = [call.shape.heads, call.kv_heads].map(|heads| call.len(heads));
        if call.layout == TensorLayout::Packed { [q.saturating_add(kv).saturating_add(kv), 0, 0] } else { [q, kv, kv] }
    }

    /// What they take.
    pub fn bytes(call: &Call) -> u64 {
        let [q, kv] = [call.shape.heads, call.kv_heads].map(|heads| call.len(heads));
        4 * (size_of::<f32>() as u64).saturating_mul(q.saturating_add(kv) as u64)
    }

    /// Makes results that nobody writes show.
    pub fn poison(&mut self) {
        for results in [&mut self.out, &mut self.dq, &mut self.dk, &mut self.dv] {
            results.fill(f32::NAN);
        }
    }
}

/// What a call leaves, `[batch, heads, tokens, channels]`; gradients as far as there are any.
pub(super) struct Results {
    pub out: Vec<f32>,
    pub dq: Option<Vec<f32>>,
    pub dk: Option<Vec<f32>>,
    pub dv: Option<Vec<f32>>,
}

/// The elements of `[batch, heads, tokens, channels]` in that order.
pub(super) fn gather<T: Copy>(x: &Strided<&[T]>, [batch, heads, tokens, channels]: [usize; 4]) -> Vec<T> {
    let mut gathered = Vec::with_capacity(batch * heads * tokens * channels);
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        for n in 0..tokens {
            let at = b * x.batch_stride + h * x.head_stride + n * x.token_stride;
            gathered.extend_from_slice(&x.data[at..at + channels]);
        }
    }
    gathered
}

/// Deterministic numbers of about unit variance.
pub(super) fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    // The sum of three uniform numbers has variance 1/4.
    (0..len).map(|_| 2.0 * (uniform() + uniform() + uniform())).collect()
}
