//! Products of bf16 operands with sums in f32, by whichever instructions the processor has for them.
//!
//! An operand is of one part, its numbers rounded, or of two: the second is what rounding left of each, rounded. A product of such
//! operands is the sum of three, without that of the second parts, and relative errors are about 2^-16.
//!
//! Two bf16 that follow each other along the depth lie in one u32, the even one in its low half: that is what both the AVX-512 and the
//! AMX instructions read. Pairs of the left operand lie `[row][pair]`, those of the right `[pair][col]`, so that the products of a tile of
//! attention, forward and backward, read scores that are held `[key][query]` either as they are or with two rows woven together.

#[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
mod amx;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx512;
mod pack;
mod rows;
mod widened;

pub(crate) use pack::{nearest, round};
pub(crate) use rows::{Rows, multiply, pairs_of, write};

use std::marker::PhantomData;

use pulp::Simd;

use super::Level;

/// The instructions that multiply bf16 operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Bf16Unit {
    /// Those of f32, after widening in registers: on every processor, and slower than f32.
    Widened,
    /// `vdpbf16ps` of AVX512-BF16.
    Avx512,
    /// `tdpbf16ps` on the tiles of AMX (Linux alone, whose kernel is asked for them).
    Amx,
}

impl Bf16Unit {
    /// Name as in plans and benchmarks.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Widened => "widened",
            Self::Avx512 => "avx512-bf16",
            Self::Amx => "amx-bf16",
        }
    }

    /// Those that this processor has beside the instruction set `level`; the last is what a call uses unless it names another.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))] // no other level has more than one
    pub fn available(level: Level) -> Vec<Self> {
        let is_there = |&unit: &Self| match unit {
            Self::Widened => true,
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Self::Avx512 => level == Level::Avx512 && avx512::available(),
            #[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
            Self::Amx => level == Level::Avx512 && avx512::available() && amx::available(),
            #[allow(unreachable_patterns)] // where all units may be there
            _ => false,
        };
        [Self::Widened, Self::Avx512, Self::Amx].into_iter().filter(is_there).collect()
    }
}

/// A unit that this processor has, and the parts of its operands.
#[derive(Debug, Clone, Copy)]
pub struct Bf16Products {
    unit: Bf16Unit,
    parts: usize,
}

impl Bf16Products {
    /// `None` where the processor or the `level` lacks the unit.
    pub fn new(unit: Bf16Unit, level: Level) -> Option<Self> {
        Bf16Unit::available(level).contains(&unit).then_some(Self { unit, parts: 1 })
    }

    /// The same with operands of so many parts, one or two.
    pub(crate) fn of_parts(self, parts: usize) -> Self {
        Self { parts, ..self }
    }

    pub(crate) fn parts(self) -> usize {
        self.parts
    }

    /// What is read of `x`, the sum of its parts.
    pub(crate) fn read(self, x: f32) -> f32 {
        let first = nearest(x);
        if self.parts == 1 { first } else { first + nearest(x - first) }
    }

    /// Readies the unit on this thread until the result is dropped, the last of them if there are several: meanwhile the thread must
    /// not wait for tasks of its pool, which could be others that enter and leave.
    pub fn enter(self) -> Multiplier {
        #[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
        if self.unit == Bf16Unit::Amx {
            amx::configure();
        }
        Multiplier { unit: self.unit, parts: self.parts, thread: PhantomData }
    }
}

/// A unit that is ready on this thread.
#[derive(Debug)]
pub struct Multiplier {
    unit: Bf16Unit,
    parts: usize,
    /// The state of the tiles belongs to a thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Multiplier {
    fn drop(&mut self) {
        #[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
        if self.unit == Bf16Unit::Amx {
            amx::release();
        }
    }
}

/// Rows, columns and depths of buffers are padded to these: the sides of a tile of AMX.
pub const ROWS: usize = 16;
/// Pairs along the depth in a tile of AMX.
pub const PAIRS: usize = 16;

/// Products of the parts of two operands.
const TERMS: usize = 4;

/// Pairs that hold `depth` numbers, whole tiles of them.
pub const fn pairs(depth: usize) -> usize {
    depth.div_ceil(2 * PAIRS) * PAIRS
}

/// Pair `p` of row `r` is `data[r * stride + p]`.
#[derive(Debug, Clone, Copy)]
pub struct Left<'a> {
    /// The pairs.
    pub data: &'a [u32],
    /// From a row to the next.
    pub stride: usize,
    /// From a pair to its second part, which is not read where operands have one.
    pub second: usize,
}

/// Pair `p` of column `c` is `data[p * stride + c]`.
#[derive(Debug, Clone, Copy)]
pub struct Right<'a> {
    /// The pairs.
    pub data: &'a [u32],
    /// From a pair to the next.
    pub stride: usize,
    /// From a pair to its second part, which is not read where operands have one.
    pub second: usize,
}

impl<'a> Left<'a> {
    /// Operands of one part.
    pub fn new(data: &'a [u32], stride: usize) -> Self {
        Self { data, stride, second: 0 }
    }

    /// From this row on.
    pub fn from(self, row: usize) -> Self {
        Self { data: &self.data[row * self.stride..], ..self }
    }

    fn second_part(self) -> Self {
        Self { data: &self.data[self.second..], ..self }
    }
}

impl<'a> Right<'a> {
    /// Operands of one part.
    pub fn new(data: &'a [u32], stride: usize) -> Self {
        Self { data, stride, second: 0 }
    }

    /// From this pair on.
    pub fn from(self, pair: usize) -> Self {
        Self { data: &self.data[pair * self.stride..], ..self }
    }

    fn second_part(self) -> Self {
        Self { data: &self.data[self.second..], ..self }
    }
}

/// Rows that a product is written to, or added to.
#[derive(Debug)]
pub struct Output<'a> {
    /// The rows.
    pub data: &'a mut [f32],
    /// From a row to the next.
    pub stride: usize,
    /// Whether the product is added to what is there.
    pub add: bool,
}

/// Sizes of a product. The buffers have rows up to a multiple of [`ROWS`], of which those beyond `rows` take unspecified
/// numbers; columns and pairs are multiples of [`ROWS`] and [`PAIRS`].
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Rows of the left operand and of the product.
    pub rows: usize,
    /// Columns of the right operand and of the product.
    pub cols: usize,
    /// Pairs along the depth.
    pub pairs: usize,
}

impl Multiplier {
    /// Rows of a product to be made before what becomes of them: whole blocks of the unit's kernel, that stay in the first-level cache.
    /// Tiles are stored long after they are begun, so that more of them wait less.
    pub fn band(&self) -> usize {
        if self.unit == Bf16Unit::Amx { 128 } else { 48 }
    }

    /// Parts that operands have: what is written of a row by [`Multiplier::round`] is so many times as long.
    pub(crate) fn parts(&self) -> usize {
        self.parts
    }

    /// `into = left * right`, or `into += left * right`. Of two parts the product of the second ones is left out.
    pub fn multiply<S: Simd>(&self, simd: S, size: Size, left: Left<'_>, right: Right<'_>, into: Output<'_>) {
        self.multiply_parts(simd, size, (left, right), false, into);
    }

    /// The same; `all` leaves nothing out: what is multiplied is then what is read of both operands.
    #[inline(always)]
    pub(crate) fn multiply_parts<S: Simd>(
        &self,
        simd: S,
        size: Size,
        (left, right): (Left<'_>, Right<'_>),
        all: bool,
        into: Output<'_>,
    ) {
        if self.parts == 1 {
            return self.add_up(simd, size, &[(left, right)], into);
        }
        let seconds = (left.second_part(), right.second_part());
        // The smallest first.
        let terms: [_; TERMS] = [seconds, (seconds.0, right), (left, seconds.1), (left, right)];
        self.add_up(simd, size, &terms[usize::from(!all)..], into);
    }

    /// The sum of some products.
    #[inline(always)]
    fn add_up<S: Simd>(
        &self,
        simd: S,
        size: Size,
        terms: &[(Left<'_>, Right<'_>)],
        Output { data, stride, mut add }: Output<'_>,
    ) {
        let Size { rows, cols, pairs } = size;
        if rows == 0 || cols == 0 {
            return;
        }
        assert!(cols.is_multiple_of(ROWS) && pairs.is_multiple_of(PAIRS), "buffers are padded");
        let last = rows.next_multiple_of(ROWS) - 1;
        assert!(stride >= cols && last * stride + cols <= data.len());
        for (left, right) in terms.iter().filter(|_| pairs > 0) {
            assert!(left.stride >= pairs && last * left.stride + pairs <= left.data.len());
            assert!(right.stride >= cols && (pairs - 1) * right.stride + cols <= right.data.len());
        }
        #[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
        if self.unit == Bf16Unit::Amx {
            // SAFETY: the unit is available and configured, as `Bf16Products` and `Multiplier` say; whole tiles of all operands lie in
            // their slices, as was asserted.
            return unsafe { amx::multiply(size, terms, Output { data, stride, add }) };
        }
        for &(left, right) in terms {
            let into = Output { data: &mut *data, stride, add: std::mem::replace(&mut add, true) };
            match self.unit {
                // SAFETY: the unit is available, and all operands lie in their slices, as above.
                #[cfg(all(target_arch = "x86_64", not(miri)))]
                Bf16Unit::Avx512 => unsafe { avx512::multiply(size, left, right, into) },
                _ => {
                    simd.vectorize(widened::Product { size, left, right, into });
                }
            }
        }
    }

    /// Whether the processor rounds and transposes by AVX-512 instructions.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    fn by_avx512(&self) -> bool {
        self.unit != Bf16Unit::Widened
    }

    /// Rounds one row to pairs of neighbours; pairs beyond it are zeros. Parts follow each other in `out`, each as long.
    #[inline(always)]
    pub fn round(&self, row: &[f32], out: &mut [u32]) {
        let len = out.len() / self.parts;
        assert!(row.len().div_ceil(2) <= len && len * self.parts == out.len());
        let (first, second) = out.split_at_mut(len);
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.by_avx512() {
            // SAFETY: AVX512-BF16 is available wherever this unit is; the row's pairs lie in each part.
            unsafe {
                avx512::round::<false>(row, first);
                if !second.is_empty() {
                    avx512::round::<true>(row, second);
                }
            }
            return;
        }
        pack::round_row::<false>(row, first);
        if !second.is_empty() {
            pack::round_row::<true>(row, second);
        }
    }

    /// Rounds two rows to pairs of what stands above each other; pairs beyond them are zeros. Parts as in [`Multiplier::round`].
    #[inline(always)]
    pub fn weave(&self, [even, odd]: [&[f32]; 2], out: &mut [u32]) {
        let len = out.len() / self.parts;
        assert!(even.len() == odd.len() && even.len() <= len && len * self.parts == out.len());
        let (first, second) = out.split_at_mut(len);
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.by_avx512() {
            // SAFETY: AVX512-BF16 is available wherever this unit is; both rows are as long, and no part shorter.
            unsafe {
                avx512::weave::<false>([even, odd], first);
                if !second.is_empty() {
                    avx512::weave::<true>([even, odd], second);
                }
            }
            return;
        }
        pack::weave::<false>([even, odd], first);
        if !second.is_empty() {
            pack::weave::<true>([even, odd], second);
        }
    }

    /// [`Multiplier::round`] of the first `rows` rows of a tile; rows from there to whole tiles are zeros. Of each part of a row of `out`
    /// the pairs of `cols` columns are written, whole tiles of them.
    #[inline(always)]
    pub fn round_tile<'t>(
        &self,
        x: (&[f32], usize),
        [rows, cols]: [usize; 2],
        (out, stride): (&'t mut [u32], usize),
    ) -> Left<'t> {
        let (all, depth, second) = (rows.next_multiple_of(ROWS), pairs(cols), stride / self.parts);
        assert!(second >= depth && (all == 0 || (all - 1) * stride + (self.parts - 1) * second + depth <= out.len()));
        for part in 0..self.parts {
            let out = (&mut out[part * second..], stride);
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            if self.by_avx512() {
                // SAFETY: AVX512-BF16 is available wherever this unit is.
                unsafe {
                    match part {
                        0 => avx512::round_tile::<false>(x, [rows, cols], out),
                        _ => avx512::round_tile::<true>(x, [rows, cols], out),
                    }
                }
                continue;
            }
            match part {
                0 => pack::each_rounded(x, [rows, cols], out, pack::round_row::<false>),
                _ => pack::each_rounded(x, [rows, cols], out, pack::round_row::<true>),
            }
        }
        Left { data: out, stride, second }
    }

    /// [`Multiplier::weave`] of the first `rows` rows of a tile, and of zeros from there to whole tiles, in the place of the even rows,
    /// second parts in that of the odd ones: the tile is then the right operand of a product, its rows twice as far apart. `cols` is a
    /// multiple of 16.
    #[inline(always)]
    pub fn weave_in_place<'t>(&self, x: (&'t mut [f32], usize), [rows, cols]: [usize; 2]) -> Right<'t> {
        assert!(cols.is_multiple_of(16) && cols <= x.1 && 2 * pairs(rows) * x.1 <= x.0.len());
        let (data, stride, two) = (x.0, x.1, self.parts == 2);
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.by_avx512() {
            // SAFETY: AVX512-BF16 is available wherever this unit is.
            unsafe {
                match two {
                    false => avx512::weave_in_place::<false>((&mut *data, stride), [rows, cols]),
                    true => avx512::weave_in_place::<true>((&mut *data, stride), [rows, cols]),
                }
            }
            return Right { data: bytemuck::cast_slice(data), stride: 2 * stride, second: stride };
        }
        pack::weave_in_place((&mut *data, stride), [rows, cols], two);
        Right { data: bytemuck::cast_slice(data), stride: 2 * stride, second: stride }
    }

    /// `out[c][r] = x[r][c]` for `rows` and `cols`, both multiples of 16.
    #[inline(always)]
    pub fn transpose(&self, [rows, cols]: [usize; 2], x: (&[u32], usize), out: (&mut [u32], usize)) {
        if rows == 0 || cols == 0 {
            return;
        }
        assert!(rows.is_multiple_of(16) && cols.is_multiple_of(16));
        assert!(x.1 >= cols && (rows - 1) * x.1 + cols <= x.0.len());
        assert!(out.1 >= rows && (cols - 1) * out.1 + rows <= out.0.len());
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.by_avx512() {
            // SAFETY: AVX-512 is available wherever this unit is; whole blocks lie in both slices, as was asserted.
            return unsafe { avx512::transpose([rows, cols], x, out) };
        }
        pack::transpose([rows, cols], x, out);
    }
}

#[cfg(test)]
mod tests;
