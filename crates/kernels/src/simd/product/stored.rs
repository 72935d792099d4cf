//! Products that were stored before they are handed to a sink, as those of bf16 are: the sink turns them into what takes their place.

use std::ops::Range;

use pulp::Simd;

use super::{Sink, Store, vectors};

/// A sink that turns products into what takes their place.
pub(crate) trait InPlace {
    /// Where the products are.
    fn products(&mut self) -> Store<'_>;
}

/// Hands the products of some rows over, blocks of `M` of them where there are as many.
#[inline(always)]
pub(crate) fn take_rows<S: Simd, const M: usize>(
    simd: S,
    rows: Range<usize>,
    cols: usize,
    sink: &mut (impl Sink<S> + InPlace),
) {
    let mut row = rows.start;
    while row + M <= rows.end {
        take_row::<S, M>(simd, row, cols, sink);
        row += M;
    }
    while row < rows.end {
        take_row::<S, 1>(simd, row, cols, sink);
        row += 1;
    }
}

#[inline(always)]
fn take_row<S: Simd, const M: usize>(simd: S, row: usize, cols: usize, sink: &mut (impl Sink<S> + InPlace)) {
    let mut col = 0;
    if const { S::F32_LANES > 1 } {
        while col + 4 * S::F32_LANES <= cols {
            take_block::<S, M, 4>(simd, [row, col], sink);
            col += 4 * S::F32_LANES;
        }
    }
    while col < cols {
        take_block::<S, M, 1>(simd, [row, col], sink);
        col += S::F32_LANES;
    }
}

#[inline(always)]
fn take_block<S: Simd, const M: usize, const N: usize>(
    simd: S,
    [row, col]: [usize; 2],
    sink: &mut (impl Sink<S> + InPlace),
) {
    let mut block = [[simd.splat_f32s(0.0); N]; M];
    let Store { data, stride } = sink.products();
    for (m, block) in block.iter_mut().enumerate() {
        block.copy_from_slice(vectors::<S, N>(data, (row + m) * stride + col));
    }
    sink.take(simd, row, col, block);
}
