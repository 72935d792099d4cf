//! The products of a task: in f32, or of operands that are rounded to bf16 as they are multiplied.

use super::tile::{CHUNK, Sizes};
use crate::{
    scratch::{cut, scratch_len},
    simd::{
        Level,
        bf16::{self, Bf16Products, Multiplier, Rows, pairs},
        product::{Add, Left, Right, Size, Store, multiply, multiply_add},
    },
    structure::dense::padded,
};

/// Depth of one step of a product in f32: the rows of the right operand that pass through the first-level cache.
const DEPTH: usize = 128;

/// How a task multiplies, and room for what it rounds.
pub(super) struct Products<'m> {
    level: Level,
    rounded: Option<Rounded<'m>>,
}

struct Rounded<'m> {
    tiles: Multiplier,
    /// Operands, one that is turned, and a product of whole tiles.
    left: &'m mut [u32],
    right: &'m mut [u32],
    woven: &'m mut [u32],
    product: &'m mut [f32],
}

/// f32 of the room of [`Products`].
pub(super) fn room(sizes: &Sizes) -> usize {
    scratch_len(lens(sizes))
}

/// One side of every operand and product is tokens of a chunk or channels, the other these or features.
fn lens(sizes: &Sizes) -> [usize; 4] {
    let small = CHUNK.max(sizes.dim).max(sizes.channels + 1);
    let large = small.max(sizes.features);
    let operand = sizes.parts * (pairs(large) * padded(small)).max(padded(large) * pairs(small));
    let product = if sizes.parts > 0 { padded(small) * padded(large) } else { 0 };
    [operand, operand, operand, product]
}

impl<'m> Products<'m> {
    /// In f32.
    pub fn full(level: Level) -> Self {
        Self { level, rounded: None }
    }

    /// In f32 or bf16, with room from `memory`.
    pub fn cut(
        memory: &'m mut [f32],
        sizes: &Sizes,
        (level, bf16): (Level, Option<Bf16Products>),
    ) -> (Self, &'m mut [f32]) {
        let ([left, right, woven, product], rest) = cut(memory, lens(sizes));
        let [left, right, woven] = [left, right, woven].map(bytemuck::cast_slice_mut);
        let rounded = bf16.map(|bf16| Rounded { tiles: bf16.enter(), left, right, woven, product });
        (Self { level, rounded }, rest)
    }

    /// Whether operands are rounded.
    pub fn rounds(&self) -> bool {
        self.rounded.is_some()
    }

    /// As [`Products::multiply`], but the last step of the depth is never rounded: it takes out what the others sum to, and what is
    /// left is as small as their rounding.
    pub fn multiply_and_take_out(
        &mut self,
        size: Size,
        left: Left<'_>,
        right: Right<'_>,
        (into, stride): (&mut [f32], usize),
        add: bool,
    ) {
        if !self.rounds() {
            return self.multiply(size, left, right, (into, stride), add);
        }
        let last = size.depth - 1;
        self.multiply(Size { depth: last, ..size }, left, right, (into, stride), add);
        let left = Left { data: &left.data[last * left.depth_stride..], ..left };
        let right = Right { data: &right.data[last * right.stride..], ..right };
        Self::full(self.level).multiply(Size { depth: 1, ..size }, left, right, (into, stride), true);
    }

    /// Writes `left * right` to rows of `into.0`, `into.1` apart, or adds it.
    pub fn multiply(
        &mut self,
        size: Size,
        left: Left<'_>,
        right: Right<'_>,
        (into, stride): (&mut [f32], usize),
        add: bool,
    ) {
        let level = self.level;
        if let Some(rounded) = &mut self.rounded {
            return rounded.multiply(level, size, left, right, (into, stride, add));
        }
        for start in (0..size.depth).step_by(DEPTH) {
            let size = Size { depth: DEPTH.min(size.depth - start), ..size };
            let left = Left { data: &left.data[start * left.depth_stride..], ..left };
            let right = Right { data: &right.data[start * right.stride..], ..right };
            if add || start > 0 {
                multiply_add(level, size, left, right, Add { data: &mut *into, stride });
            } else {
                multiply(level, size, left, right, Store { data: &mut *into, stride });
            }
        }
    }
}

impl Rounded<'_> {
    fn multiply(
        &mut self,
        level: Level,
        Size { rows, cols, depth }: Size,
        left: Left<'_>,
        right: Right<'_>,
        into: (&mut [f32], usize, bool),
    ) {
        if rows == 0 {
            return;
        }
        let Self { tiles, product, .. } = self;
        let (parts, all, deep) = (tiles.parts(), padded(rows), pairs(depth));
        let operand = &mut self.left[..all * parts * deep];
        let left = if left.depth_stride == 1 {
            let rows = Rows { data: left.data, stride: left.row_stride, channels: depth, count: rows };
            rows.round_into(level, tiles, operand)
        } else {
            let rows = Rows { data: left.data, stride: left.depth_stride, channels: rows, count: depth };
            let woven = rows.weave_into(level, tiles, &mut self.woven[..deep * parts * all]);
            level.dispatch(|| woven.turn(tiles, [deep, all], operand));
            bf16::Left { data: operand, stride: parts * deep, second: deep }
        };
        let rows_of_right = Rows { data: right.data, stride: right.stride, channels: cols, count: depth };
        let right = rows_of_right.weave_into(level, tiles, &mut self.right[..deep * parts * padded(cols)]);
        bf16::write(level, tiles, bf16::Size { rows, cols, pairs: deep }, (left, right), into, product);
    }
}
