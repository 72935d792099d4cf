//! Sources and sinks: what sums over tokens of one side give to those of the other.
//!
//! `out_i = sum_j psi_i.psi_j 2^(l_j - m_i) v_j / D_i` takes from keys and gives to queries; so does the gradient of queries' features.
//! Those of keys and of values take from queries and give to keys, with levels `-m_i` and `-l_j`, and causal from the last to the first.
//! Within a chunk of causal tokens pairs are met one by one, before the chunk is added to the sums: no row, and no unit that it is
//! computed in, knows of a later token.

use super::{
    head::{Head, Side},
    map::Map,
    product::{Products, room},
    state::{Form, State},
    tile::{CHUNK, Sizes, Tile, Triangle, power, scale_rows, settle_pairs, transpose},
};
use crate::{
    scratch::{cut, scratch_len},
    simd::{
        product::{Left, Right, Size},
        rows,
    },
    structure::dense::padded,
};

/// What a pass computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pass {
    /// What takes.
    pub sinks: Side,
    /// Whether sums of the sources' values are wanted: outputs of queries, gradients of values.
    pub values: bool,
    /// Whether gradients of the sinks' features are.
    pub features: bool,
}

impl Pass {
    pub fn sources(&self) -> Side {
        if self.sinks == Side::Queries { Side::Keys } else { Side::Queries }
    }

    /// Whether what the weights of a query sum to is found: with the outputs.
    pub fn finds_sums(&self) -> bool {
        self.values && self.sinks == Side::Queries
    }

    /// The sums over sources that it takes.
    pub fn form(&self, sizes: Sizes) -> Form {
        Form { sizes, plain: self.values, across: self.features }
    }
}

/// Working memory of a task.
pub(super) struct Workspace<'m> {
    pub products: Products<'m>,
    pub source: Tile<'m>,
    pub sink: Tile<'m>,
    transposed: &'m mut [f32],
    pairs: &'m mut [f32],
    /// `[rows][columns]`: sums of values, and what every sink's weights sum to.
    pub out: &'m mut [f32],
    pub sums: &'m mut [f32],
    /// `[rows][width]`.
    pub dfeatures: &'m mut [f32],
    /// Room for rows of tokens.
    pub pulled: &'m mut [f32],
}

/// f32 of a [`Workspace`].
pub(super) fn workspace(sizes: &Sizes, pass: Pass) -> usize {
    2 * sizes.tile() + scratch_len(parts(sizes, pass)) + room(sizes)
}

fn parts(sizes: &Sizes, pass: Pass) -> [usize; 6] {
    let across = if pass.values { sizes.features } else { 0 }.max(if pass.features { sizes.channels + 1 } else { 0 });
    let gradients = if pass.features { CHUNK } else { 0 };
    [
        across * CHUNK,
        CHUNK * CHUNK,
        CHUNK * sizes.columns(),
        CHUNK,
        gradients * sizes.width(),
        gradients * padded(sizes.dim),
    ]
}

impl<'m> Workspace<'m> {
    pub fn cut(memory: &'m mut [f32], sizes: &Sizes, pass: Pass, map: &Map<'_>) -> (Self, &'m mut [f32]) {
        let (products, memory) = Products::cut(memory, sizes, (map.level, map.bf16));
        let (source, memory) = Tile::cut(memory, sizes);
        let (sink, memory) = Tile::cut(memory, sizes);
        let ([transposed, pairs, out, sums, dfeatures, pulled], rest) = cut(memory, parts(sizes, pass));
        (Self { products, source, sink, transposed, pairs, out, sums, dfeatures, pulled }, rest)
    }

    /// Loads tokens of a side, as sources or as sinks of a pass.
    pub fn load(&mut self, head: &Head<'_>, pass: Pass, side: Side, positions: &std::ops::Range<usize>) {
        let tile = if side == pass.sinks { &mut self.sink } else { &mut self.source };
        head.load(&mut self.products, side, head.tokens(side, positions), tile);
        if pass.sinks == Side::Keys {
            tile.levels[..tile.rows].iter_mut().for_each(|level| *level = -*level);
        }
    }

    /// The exponents of queries' row sums, as the keys so far give them: those before the chunk, and those within it up to each query.
    pub fn find_levels(&mut self, head: &Head<'_>, unit: f32, shift: usize) {
        let (rows, mut most, mut seen) = (self.sink.rows, unit, 0);
        for row in 0..rows {
            if head.causal {
                let visible = (row + shift + 1).min(self.source.rows);
                most = self.source.levels[seen.min(visible)..visible].iter().copied().fold(most, f32::max);
                seen = visible;
            }
            self.sink.levels[row] = most;
        }
    }

    /// Writes what the sinks get from the sums over sources.
    pub fn take(&mut self, head: &Head<'_>, pass: Pass, state: &State<'_>) {
        let (level, sizes, unit) = (head.map.level, head.sizes, *state.unit);
        let (rows, width, stride, columns) = (self.sink.rows, sizes.width(), sizes.stride(), sizes.columns());
        let Self { products, sink, out, sums, dfeatures, .. } = self;
        let exponents = || sink.levels[..rows].iter().map(|level| unit - level);
        let left = Left { data: sink.features, row_stride: width, depth_stride: 1 };
        if pass.values {
            let size = Size { rows, cols: columns, depth: sizes.features };
            products.multiply(size, left, Right { data: state.plain, stride: columns }, (out, columns), false);
            scale_rows(level, out, columns, exponents());
        }
        if pass.finds_sums() {
            rows::dots(level, &sink.features[..rows * width], state.across, &mut sums[..rows]);
            sums.iter_mut().zip(exponents()).for_each(|(sum, exponent)| *sum *= power(exponent));
        }
        if pass.features {
            let size = Size { rows, cols: width, depth: sizes.channels + 1 };
            let left = Left { data: sink.values, row_stride: stride, depth_stride: 1 };
            let right = Right { data: state.across, stride: width };
            products.multiply_and_take_out(size, left, right, (dfeatures, width), false);
            scale_rows(level, dfeatures, width, exponents());
        }
    }

    /// Adds what the sinks get from the sources of their own chunk.
    pub fn attend(&mut self, head: &Head<'_>, pass: Pass, seen: Triangle) {
        let (level, sizes) = (head.map.level, head.sizes);
        let (width, stride, columns) = (sizes.width(), sizes.stride(), sizes.columns());
        let Self { products, source, sink, transposed, pairs, out, sums, dfeatures, .. } = self;
        let (rows, depth) = (sink.rows, source.rows);
        let size = |channels: usize| Size { rows, cols: padded(depth), depth: channels };
        fn operands<'x>(x: &'x [f32], stride: usize, buffer: &'x [f32]) -> (Left<'x>, Right<'x>) {
            (Left { data: x, row_stride: stride, depth_stride: 1 }, Right { data: buffer, stride: CHUNK })
        }
        let summed = |cols: usize| Size { rows, cols, depth };
        if pass.values {
            transpose(source.features, depth, width, sizes.features, transposed);
            let (left, right) = operands(sink.features, width, transposed);
            products.multiply(size(sizes.features), left, right, (pairs, CHUNK), false);
            settle_pairs(level, pairs, sink, source, seen);
            let left = Left { data: pairs, row_stride: CHUNK, depth_stride: 1 };
            products.multiply(summed(columns), left, Right { data: source.values, stride }, (out, columns), true);
        }
        if pass.finds_sums() {
            let rows = pairs.chunks_exact(CHUNK).map(|pairs| pairs[..depth].iter().sum::<f32>());
            sums.iter_mut().zip(rows).take(sink.rows).for_each(|(sum, x)| *sum += x);
        }
        if pass.features {
            transpose(source.values, depth, stride, sizes.channels + 1, transposed);
            let (left, right) = operands(sink.values, stride, transposed);
            products.multiply_and_take_out(size(sizes.channels + 1), left, right, (pairs, CHUNK), false);
            settle_pairs(level, pairs, sink, source, seen);
            let left = Left { data: pairs, row_stride: CHUNK, depth_stride: 1 };
            let right = Right { data: source.features, stride: width };
            products.multiply(summed(width), left, right, (dfeatures, width), true);
        }
    }
}
