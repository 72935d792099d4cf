//! Three factors over landmarks of the queries and of the keys, each normalised by its rows: `F A^+ B`.

use burn::tensor::{FloatDType, Tensor, activation};

use super::{
    super::Extras,
    Call, absent,
    hop::Hop,
    landmarks::{Marks, Producer, identity},
    score::Affinity,
};
use crate::mechanism::{InverseGradient, Nystrom};

/// One hop.
pub(super) fn hop<'a>(call: &Call, affinity: &Affinity<'_>, m: &Nystrom, extras: &Extras) -> Hop<'a> {
    let landmarks =
        |x: &Tensor<4>, keep| Producer { landmarks: m.landmarks, grid: m.grid, full: false, extras, keep }.make(x);
    let rows = landmarks(&call.q, call.keep_query());
    let columns = landmarks(&call.k, call.keep_key());
    let softmax = |x: &Tensor<4>, y: &Tensor<4>, seen: Tensor<4>| {
        let values = affinity.values(affinity.terms(x, y), &Tensor::ones([1, 1, 1, 1], (&x.device(), x.dtype())));
        let shape = values.shape();
        let seen = seen.expand(shape);
        let weights = activation::softmax(values.mask_fill(seen.clone().equal_elem(0.0), -1e30), 3);
        // A row that sees nothing is zero.
        weights * seen
    };
    let ones = |tokens: usize| Tensor::ones([call.shape.batch, 1, tokens, 1], (&call.q.device(), call.q.dtype()));
    let queries = absent(ones(call.shape.seq_q), &call.no_query);
    let keys = call.of_keys(ones(call.shape.seq_kv));
    let seen = |x: &Tensor<4>, y: &Tensor<4>| x.clone() * y.clone().swap_dims(2, 3);
    let left = softmax(&call.q, &columns.u, seen(&queries, &columns.live));
    let right = softmax(&rows.u, &call.k, seen(&rows.live, &keys));
    let among = softmax(&rows.u, &columns.u, seen(&rows.live, &columns.live));
    let among = among + ridge(m, &rows, &columns);
    Hop::factors(left, pseudo_inverse(among, m).matmul(right))
}

/// The ridge at the landmarks that queries and keys both have.
fn ridge(m: &Nystrom, rows: &Marks, columns: &Marks) -> Tensor<4> {
    let both = rows.live.clone() * columns.live.clone().swap_dims(2, 3);
    let [.., n, k] = both.dims();
    let eye: Tensor<2> = Tensor::eye(n.max(k), &both.device());
    let dtype = FloatDType::from(both.dtype());
    both * eye.narrow(0, 0, n).narrow(1, 0, k).cast(dtype).unsqueeze::<4>() * m.ridge
}

/// Newton-Schulz from `1.8 A^T / (|A|_1 |A|_inf)`.
fn pseudo_inverse(a: Tensor<4>, m: &Nystrom) -> Tensor<4> {
    let unrolled = m.gradient == InverseGradient::Unrolled;
    let used = if unrolled { a.clone() } else { a.clone().detach() };
    let largest = |dim: usize| used.clone().abs().sum_dim(dim).max_dim(5 - dim);
    let norms = largest(2) * largest(3);
    let none = norms.clone().equal_elem(0.0);
    let mut z = used.clone().swap_dims(2, 3) * 1.8 / norms.mask_fill(none, 1.0);
    for _ in 0..m.newton_iterations {
        z = z.clone() * 2.0 - z.clone().matmul(used.clone().matmul(z));
    }
    if unrolled {
        return z;
    }
    // The value of `z`, and the gradient of a pseudo-inverse of constant rank.
    let moved = a - used.clone();
    let (zt, across) = (z.clone().swap_dims(2, 3), moved.clone().swap_dims(2, 3));
    let rest = |x: Tensor<4>| identity(&x) - x;
    let left = z.clone().matmul(zt.clone()).matmul(across.clone()).matmul(rest(used.clone().matmul(z.clone())));
    let right = rest(z.clone().matmul(used)).matmul(across).matmul(zt.matmul(z.clone()));
    z.clone() - z.clone().matmul(moved).matmul(z) + left + right
}
