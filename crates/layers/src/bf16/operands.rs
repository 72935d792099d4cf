//! Operands as the products read them: rounded once, in pairs of neighbours along the depth, whole tiles of them.

use rayon::prelude::*;
use resolvent_kernels::{
    Scratch,
    simd::bf16::{Bf16Products, Left, Multiplier, ROWS, Right, pairs},
};

/// Columns of a panel, a right operand's unit: two blocks of the kernels' product.
pub(super) const PANEL: usize = 64;
/// Columns that are worked on at once, whole panels: with as many rows as a block has they lie in the second-level cache.
pub(super) const SPAN: usize = 4 * PANEL;

/// Memory for pairs, aligned to cache lines.
#[derive(Default)]
pub(super) struct Memory(Scratch);

impl Memory {
    /// As many pairs, of unspecified content.
    pub fn pairs(&mut self, len: usize) -> &mut [u32] {
        bytemuck::cast_slice_mut(self.0.take(len))
    }
}

/// Some columns of a matrix of rows.
#[derive(Clone, Copy)]
pub(super) struct Columns<'a> {
    pub data: &'a [f32],
    pub stride: usize,
    pub rows: usize,
    pub cols: usize,
}

impl<'a> Columns<'a> {
    /// All columns of `rows` rows.
    pub const fn all(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self { data, stride: cols, rows, cols }
    }

    /// At most `count` columns from `first` on.
    pub fn part(self, first: usize, count: usize) -> Self {
        Self { data: &self.data[first.min(self.data.len())..], cols: count.min(self.cols - first), ..self }
    }

    fn row(self, row: usize) -> Option<&'a [f32]> {
        (row < self.rows).then(|| &self.data[row * self.stride..][..self.cols])
    }

    /// Rows `2 pair` and `2 pair + 1` woven, zeros where there is none.
    fn weave(self, tiles: &Multiplier, pair: usize, out: &mut [u32]) {
        const ZEROS: [f32; SPAN] = [0.0; SPAN];
        match (self.row(2 * pair), self.row(2 * pair + 1)) {
            (Some(even), odd) => tiles.weave([even, odd.unwrap_or(&ZEROS[..self.cols])], out),
            (None, _) => out.fill(0),
        }
    }

    /// Writes the matrix as a left operand, `[rows][pairs(cols)]`, whole tiles of rows.
    pub fn round(self, tiles: &Multiplier, (out, stride): (&mut [u32], usize)) {
        if self.cols == 0 {
            return;
        }
        tiles.round_tile((self.data, self.stride), [self.rows, self.cols], (out, stride));
    }

    /// Writes the transpose as a left operand, `[cols][pairs(rows)]`, whole tiles of columns. `woven` holds as many pairs of [`SPAN`]
    /// columns.
    pub fn transpose(self, tiles: &Multiplier, woven: &mut [u32], out: &mut [u32]) {
        let depth = pairs(self.rows);
        for first in (0..self.cols).step_by(SPAN) {
            let part = self.part(first, SPAN);
            let width = part.cols.next_multiple_of(ROWS);
            for (pair, out) in woven[..depth * width].chunks_exact_mut(width).enumerate() {
                part.weave(tiles, pair, out);
            }
            tiles.transpose([depth, width], (woven, width), (&mut out[first * depth..][..width * depth], depth));
        }
    }

    /// Writes the matrix as a right operand, in panels.
    pub fn panels(self, tiles: &Multiplier, out: &mut [u32]) {
        let depth = pairs(self.rows);
        for first in (0..self.cols).step_by(PANEL) {
            let part = self.part(first, PANEL);
            let width = part.cols.next_multiple_of(ROWS);
            for (pair, out) in out[first * depth..][..depth * width].chunks_exact_mut(width).enumerate() {
                part.weave(tiles, pair, out);
            }
        }
    }
}

/// A right operand `[depth, cols]`: panels of [`PANEL`] columns, the last of them as wide as it needs to be.
#[derive(Clone, Copy)]
pub(super) struct Panels<'a> {
    pub data: &'a [u32],
    /// Pairs along the depth.
    pub pairs: usize,
    pub cols: usize,
}

impl<'a> Panels<'a> {
    /// Pairs of an operand of so many pairs along the depth.
    pub const fn len(pairs: usize, cols: usize) -> usize {
        pairs * cols.next_multiple_of(ROWS)
    }

    /// The panels of at most `count` columns from `first` on, a multiple of [`PANEL`].
    pub fn part(self, first: usize, count: usize) -> Self {
        Self { data: &self.data[first * self.pairs..], cols: count.min(self.cols - first), ..self }
    }

    /// Each panel with the column at which it begins and its width in whole tiles.
    pub fn each(self) -> impl Iterator<Item = (usize, usize, Right<'a>)> {
        (0..self.cols).step_by(PANEL).map(move |first| {
            let width = PANEL.min(self.cols - first).next_multiple_of(ROWS);
            let data = &self.data[first * self.pairs..][..width * self.pairs];
            (first, width, Right::new(data, width))
        })
    }

    /// `x [depth, cols]`, panel by panel in parallel.
    pub fn of(products: Bf16Products, x: &[f32], [depth, cols]: [usize; 2], memory: &'a mut Memory) -> Self {
        let x = Columns::all(x, depth, cols);
        Self::filled(products, [depth, cols], memory, |tiles, first, out| x.part(first, PANEL).panels(tiles, out))
    }

    /// The transpose of `x [cols, depth]`, panel by panel in parallel.
    pub fn of_transposed(products: Bf16Products, x: &[f32], [depth, cols]: [usize; 2], memory: &'a mut Memory) -> Self {
        Self::filled(products, [depth, cols], memory, |tiles, first, out| {
            let count = PANEL.min(cols - first);
            let (width, deep) = (count.next_multiple_of(ROWS), pairs(depth));
            let (mut memory, rows) = (Memory::default(), Columns::all(&x[first * depth..], count, depth));
            let rounded = memory.pairs(width * deep);
            rows.round(tiles, (&mut *rounded, deep));
            tiles.transpose([width, deep], (rounded, deep), (out, width));
        })
    }

    fn filled(
        products: Bf16Products,
        [depth, cols]: [usize; 2],
        memory: &'a mut Memory,
        fill: impl Fn(&Multiplier, usize, &mut [u32]) + Sync,
    ) -> Self {
        let pairs = pairs(depth);
        let data = memory.pairs(Self::len(pairs, cols));
        let panels = data.par_chunks_mut((pairs * PANEL).max(1)).enumerate();
        panels.for_each(|(index, out)| fill(&products.enter(), index * PANEL, out));
        Self { data, pairs, cols }
    }
}

/// A left operand of `rows` rows.
#[derive(Clone, Copy)]
pub(super) struct LeftRows<'a> {
    pub rows: usize,
    pub left: Left<'a>,
}
