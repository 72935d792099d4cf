//! Products of bf16 in a sweep: the operands of a tile are rounded as it is loaded, scores and sums stay f32.
//!
//! Of images only the channels of the tokens are multiplied. What a map adds to them is not rounded: a query's offset is added to the
//! terms, and squared chords are made of cosines.

mod rows;

use std::ops::Range;

pub(super) use rows::{Shared, shared_len};
use rows::{pairs_len, rows_len};

use super::{
    columns::Columns,
    pool::{Buffers, Pool},
    sweep::Sweep,
    tile::{KEYS, QUERIES, STRIDE},
};
use crate::{
    Mechanism,
    mechanism::{Normalisation, Score, Series, Structure},
    score::{contract::Term, map::Map},
    scratch::Aligned,
    simd::{
        Level,
        bf16::{Bf16Products, Left, Output, ROWS, Right, Rows, Size, multiply, pairs, pairs_of, write},
    },
    structure::dense::padded,
};

/// Why a composition does not multiply in bf16, if so.
pub(crate) fn refusal(m: &Mechanism) -> Option<&'static str> {
    let product = match &m.score {
        Score::DotExp(_) | Score::CosineExp(_) | Score::DotRelu(_) | Score::DotAbs(_) | Score::DotGelu(_) => true,
        Score::DotSquaredRelu(_) | Score::DotSigmoid(_) => true,
        Score::Custom(score) => score.tiles().term() == Term::Product,
        _ => false,
    };
    let by_rows = match &m.normalisation {
        Normalisation::Row(row) => row.density_exponent == 0.0,
        Normalisation::None(_) | Normalisation::Frobenius(_) => true,
        _ => false,
    };
    match (&m.structure, &m.series) {
        _ if !product => Some("its score is no product: such compositions multiply in f32, but for fna"),
        (Structure::Dense(_), Series::OneHop(_)) if by_rows => None,
        (Structure::Dense(_), Series::OneHop(_)) => Some("densities, sums of columns and statistics of them are f32"),
        (Structure::Features(features), Series::OneHop(_)) if features.map.is_random() => None,
        (Structure::Features(_), Series::OneHop(_)) => {
            Some("sums over as many features as channels take as long in f32")
        }
        (Structure::Dense(_) | Structure::Features(_), _) => Some("more than one hop multiplies in f32"),
        _ => Some("of structures, only dense ones and random features have bf16 products"),
    }
}

/// How a sweep multiplies.
#[derive(Clone, Copy)]
pub(super) struct Rounding {
    pub products: Bf16Products,
    /// Channels of the tokens.
    pub dim: usize,
    pub map: Map,
}

/// Operands of a task, as pairs of bf16.
#[derive(Default)]
pub(super) struct Operands {
    /// Queries and output gradients of a block: panels for the scores; pairs of rows for the gradients.
    queries: Aligned,
    query_rows: Aligned,
    gradients: Aligned,
    gradient_rows: Aligned,
    /// Rows of columns or queries; pairs of them; scores by key or by query.
    rows: Aligned,
    woven: Aligned,
    scores: Aligned,
    /// A product before it is added.
    product: Aligned,
    /// What the queries add to the terms of a key, per unit of it.
    offsets: Vec<f32>,
}

/// f32 of [`Operands`] of so many parts where tokens have `dim` channels and values `value_dim`.
pub(super) fn operands_len([dim, value_dim]: [usize; 2], parts: usize) -> usize {
    let most = padded(dim.max(value_dim));
    let of_block = QUERIES * (pairs(dim) + pairs(value_dim)) + pairs(QUERIES) * (padded(dim) + padded(value_dim));
    let of_tile = KEYS * (2 * pairs(most) + pairs(QUERIES).max(QUERIES / 2));
    parts * (of_block + of_tile) + KEYS * most + QUERIES
}

impl Rounding {
    /// Rounds what all blocks of a slice share: its images and values, of which there may be none.
    pub fn share<'p>(
        &self,
        level: Level,
        pool: &'p Pool,
        (k, stride): (&[f32], usize),
        (v, value_stride): (&[f32], usize),
        backward: bool,
    ) -> Shared<'p> {
        let (tiles, images) = (self.products.enter(), self.images(k, stride));
        let values = Rows::new(v, value_stride, value_stride);
        let (columns, parts) = (images.count, tiles.parts());
        let rounded = |x: Rows<'_>, wanted: bool| {
            let mut out = pool.memory(if wanted { parts * rows_len(columns) * pairs(x.channels) } else { 0 });
            x.round_into(level, &tiles, bytemuck::cast_slice_mut(&mut out));
            out
        };
        let woven = |x: Rows<'_>, wanted: bool| {
            let mut out = pool.memory(if wanted { parts * pairs_len(columns) * padded(x.channels) } else { 0 });
            x.weave_into(level, &tiles, bytemuck::cast_slice_mut(&mut out));
            out
        };
        let with_values = !v.is_empty();
        Shared {
            columns,
            parts,
            keys: rounded(images, true),
            key_pairs: woven(images, backward && with_values),
            values: rounded(values, backward && with_values),
            value_pairs: woven(values, !backward && with_values),
        }
    }

    /// The channels of the tokens in rows of images.
    fn images<'a>(&self, data: &'a [f32], stride: usize) -> Rows<'a> {
        Rows::new(data, stride, self.dim)
    }

    /// Readies the queries of a block, whose images are `rows`.
    pub fn queries(&self, level: Level, (rows, stride): (&[f32], usize), into: &mut Operands) {
        let (tiles, images) = (self.products.enter(), self.images(rows, stride));
        images.panel(level, &tiles, padded(images.count), &mut into.rows, &mut into.queries);
        images.woven(level, &tiles, &mut into.query_rows);
        into.offsets.clear();
        if self.map == Map::Offset {
            into.offsets.resize(padded(images.count), 0.0);
            into.offsets.iter_mut().zip(rows.chunks_exact(stride)).for_each(|(x, row)| *x = row[self.dim]);
        }
    }

    /// Readies the output gradients of a block.
    pub fn gradients(&self, level: Level, (data, stride): (&[f32], usize), into: &mut Operands) {
        let (tiles, rows) = (self.products.enter(), Rows::new(data, stride, stride));
        rows.panel(level, &tiles, padded(rows.count), &mut into.rows, &mut into.gradients);
        rows.woven(level, &tiles, &mut into.gradient_rows);
    }

    /// Writes the terms of keys and the queries that are ready.
    pub fn terms(
        &self,
        level: Level,
        (keys, stride, shared): (&[f32], usize, Option<Left<'_>>),
        of: &mut Operands,
        width: usize,
        out: &mut [f32],
    ) {
        let images = self.images(keys, stride);
        self.scores(level, (images, shared), (&of.queries, &mut of.rows), (width, false), out);
        match self.map {
            Map::Identity => {}
            Map::Offset => level.dispatch(|| {
                for (row, key) in out.chunks_mut(STRIDE).zip(keys.chunks_exact(stride)) {
                    let unit = key[self.dim];
                    row.iter_mut().zip(&of.offsets).for_each(|(x, offset)| *x += unit * offset);
                }
            }),
            // The rounded rows are of nearly unit length.
            Map::Unit => level.dispatch(|| {
                for row in out.chunks_mut(STRIDE).take(images.count) {
                    row[..width].iter_mut().for_each(|x| *x = (2.0 - 2.0 * *x).clamp(0.0, 4.0));
                }
            }),
        }
    }

    /// Writes the products of values and the output gradients that are ready.
    pub fn products(
        &self,
        level: Level,
        (data, stride, shared): (&[f32], usize, Option<Left<'_>>),
        of: &mut Operands,
        width: usize,
        out: &mut [f32],
    ) {
        let values = Rows::new(data, stride, stride);
        // `<dout, out>` is taken of these: both read the same.
        self.scores(level, (values, shared), (&of.gradients, &mut of.rows), (width, true), out);
    }

    fn scores(
        &self,
        level: Level,
        (keys, shared): (Rows<'_>, Option<Left<'_>>),
        (panel, rows): (&Aligned, &mut Aligned),
        (width, all): (usize, bool),
        out: &mut [f32],
    ) {
        let tiles = self.products.enter();
        let left = shared.unwrap_or_else(|| keys.rounded(level, &tiles, rows));
        let depth = left.stride / tiles.parts();
        let right = Right { data: bytemuck::cast_slice(&panel[..]), stride: width, second: width * depth };
        let size = Size { rows: keys.count, cols: width, pairs: depth };
        multiply(level, &tiles, size, (left, right, all), Output { data: out, stride: STRIDE, add: false });
    }

    /// Writes or adds, by query, the sums of rows of columns by the scores `[column][query]`, which are lost.
    pub fn by_query(
        &self,
        level: Level,
        (scores, [columns, width]): (&mut [f32], [usize; 2]),
        (x, shared): (Rows<'_>, Option<Right<'_>>),
        of: &mut Operands,
        into: (&mut [f32], usize, bool),
    ) {
        let tiles = self.products.enter();
        let depth = pairs(columns);
        let turned = pairs_of(&mut of.scores, width * tiles.parts() * depth);
        level.dispatch(|| {
            tiles.weave_in_place((scores, STRIDE), [columns, width]).turn(&tiles, [depth, width], turned);
        });
        let left = Left { data: turned, stride: tiles.parts() * depth, second: depth };
        let woven = shared.unwrap_or_else(|| x.woven(level, &tiles, &mut of.woven));
        let rows = into.0.len() / into.1.max(1);
        let size = Size { rows, cols: woven.stride / tiles.parts(), pairs: depth };
        write(level, &tiles, size, (left, woven), into, whole_tiles(&mut of.product, size));
    }

    /// Adds the gradients of keys: the queries that are ready, by the gradients of the terms `[column][query]`.
    pub fn keys(&self, level: Level, scores: (&[f32], [usize; 2]), of: &mut Operands, into: (&mut [f32], usize)) {
        let stride = padded(self.dim);
        let Operands { query_rows, scores: rounded, product, .. } = of;
        self.by_key(level, scores, (query_rows, stride), (rounded, product), into);
    }

    /// Adds the gradients of values: the output gradients that are ready, by the weights `[column][query]`.
    pub fn values(&self, level: Level, scores: (&[f32], [usize; 2]), of: &mut Operands, into: (&mut [f32], usize)) {
        let Operands { gradient_rows, scores: rounded, product, .. } = of;
        self.by_key(level, scores, (gradient_rows, into.1), (rounded, product), into);
    }

    fn by_key(
        &self,
        level: Level,
        (scores, size): (&[f32], [usize; 2]),
        (woven, stride): (&Aligned, usize),
        (rounded, product): (&mut Aligned, &mut Aligned),
        into: (&mut [f32], usize),
    ) {
        let (tiles, depth) = (self.products.enter(), pairs(size[1]));
        let parts = tiles.parts();
        let rounded = pairs_of(rounded, parts * size[0].next_multiple_of(ROWS) * depth);
        level.dispatch(|| {
            tiles.round_tile((scores, STRIDE), size, (&mut *rounded, parts * depth));
        });
        let left = Left { data: rounded, stride: parts * depth, second: depth };
        let right = Right { data: bytemuck::cast_slice(&woven[..]), stride: parts * stride, second: stride };
        let size = Size { rows: size[0], cols: stride, pairs: depth };
        write(level, &tiles, size, (left, right), (into.0, into.1, true), whole_tiles(product, size));
    }
}

impl<'a> Sweep<'a> {
    /// What all blocks share in either pass, with values that lie `stride` apart.
    pub(super) fn share(&self, (values, stride): (&[f32], usize), backward: bool) -> Option<Shared<'a>> {
        let k = (self.k, self.head.stride);
        Some(self.rounding?.share(self.level, self.pool, k, (values, stride), backward))
    }

    /// Adds the gradients of the images of a tile, from those of its terms.
    pub(super) fn rounded_tokens(
        &self,
        rounding: Rounding,
        buffers: &mut Buffers,
        (rows, columns): (&Range<usize>, &Columns<'_>),
        dq: &mut [f32],
        dk: &mut [f32],
    ) {
        let (level, stride, width) = (self.level, self.head.stride, padded(rows.len()));
        let Buffers { slopes, operands, .. } = buffers;
        let (keys, count) = (columns.of(self.k, stride), columns.len());
        if rounding.map == Map::Unit {
            // Of the squared chord the cosine alone is multiplied; what is along a row is taken out with its length.
            let tile = &mut slopes[..count * STRIDE];
            level.dispatch(|| tile.iter_mut().for_each(|x| *x *= -2.0));
        }
        rounding.keys(level, (slopes, [count, width]), operands, (dk, stride));
        let shared = self.shared.and_then(|shared| shared.pairs(&shared.key_pairs, columns, rounding.dim));
        let images = (rounding.images(&keys, stride), shared);
        rounding.by_query(level, (slopes, [count, width]), images, operands, (dq, stride, true));
    }
}

/// Room for a product of whole tiles, where its rows are no such.
fn whole_tiles(product: &mut Aligned, size: Size) -> &mut [f32] {
    let rows = if size.rows.is_multiple_of(ROWS) { 0 } else { size.rows.next_multiple_of(ROWS) };
    product.resize(rows * size.cols);
    product
}
