//! Products of bf16 operands with sums in f32, by whichever instructions the processor has for them.
//!
//! Two bf16 that follow each other along the depth lie in one u32, the even one in its low half: that is what both the AVX-512 and the
//! AMX instructions read. Pairs of the left operand lie `[row][pair]`, those of the right `[pair][col]`, so that the products of a tile of
//! attention, forward and backward, read scores that are held `[key][query]` either as they are or with two rows woven together.

#[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
mod amx;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx512;
mod pack;
mod widened;

pub(crate) use pack::{nearest, round};

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

/// A unit that this processor has.
#[derive(Debug, Clone, Copy)]
pub struct Bf16Products(Bf16Unit);

impl Bf16Products {
    /// `None` where the processor or the `level` lacks the unit.
    pub fn new(unit: Bf16Unit, level: Level) -> Option<Self> {
        Bf16Unit::available(level).contains(&unit).then_some(Self(unit))
    }

    /// Readies the unit on this thread until the result is dropped, the last of them if there are several: meanwhile the thread must
    /// not wait for tasks of its pool, which could be others that enter and leave.
    pub fn enter(self) -> Multiplier {
        #[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
        if self.0 == Bf16Unit::Amx {
            amx::configure();
        }
        Multiplier { unit: self.0, thread: PhantomData }
    }
}

/// A unit that is ready on this thread.
#[derive(Debug)]
pub struct Multiplier {
    unit: Bf16Unit,
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
}

/// Pair `p` of column `c` is `data[p * stride + c]`.
#[derive(Debug, Clone, Copy)]
pub struct Right<'a> {
    /// The pairs.
    pub data: &'a [u32],
    /// From a pair to the next.
    pub stride: usize,
}

impl<'a> Left<'a> {
    /// From this row on.
    pub fn from(self, row: usize) -> Self {
        Self { data: &self.data[row * self.stride..], ..self }
    }
}

impl<'a> Right<'a> {
    /// From this pair on.
    pub fn from(self, pair: usize) -> Self {
        Self { data: &self.data[pair * self.stride..], ..self }
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

    /// `into = left * right`, or `into += left * right`.
    pub fn multiply<S: Simd>(&self, simd: S, size: Size, left: Left<'_>, right: Right<'_>, into: Output<'_>) {
        let Size { rows, cols, pairs } = size;
        if rows == 0 || cols == 0 {
            return;
        }
        assert!(cols.is_multiple_of(ROWS) && pairs.is_multiple_of(PAIRS), "buffers are padded");
        let last = rows.next_multiple_of(ROWS) - 1;
        assert!(into.stride >= cols && last * into.stride + cols <= into.data.len());
        assert!(pairs == 0 || left.stride >= pairs && last * left.stride + pairs <= left.data.len());
        assert!(pairs == 0 || right.stride >= cols && (pairs - 1) * right.stride + cols <= right.data.len());
        match self.unit {
            // SAFETY: the unit is available and configured, as `Bf16Products` and `Multiplier` say; whole tiles of all operands
            // lie in their slices, as was asserted.
            #[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
            Bf16Unit::Amx => unsafe { amx::multiply(size, left, right, into) },
            // SAFETY: as above.
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Bf16Unit::Avx512 => unsafe { avx512::multiply(size, left, right, into) },
            _ => {
                simd.vectorize(widened::Product { size, left, right, into });
            }
        }
    }

    /// Whether the processor rounds and transposes by AVX-512 instructions.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    fn by_avx512(&self) -> bool {
        self.unit != Bf16Unit::Widened
    }

    /// Rounds one row to pairs of neighbours; pairs beyond it are zeros.
    #[inline(always)]
    pub fn round(&self, row: &[f32], out: &mut [u32]) {
        assert!(row.len().div_ceil(2) <= out.len());
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.by_avx512() {
            // SAFETY: AVX512-BF16 is available wherever this unit is; the row's pairs lie in `out`.
            return unsafe { avx512::round(row, out) };
        }
        pack::round_row(row, out);
    }

    /// Rounds two rows to pairs of what stands above each other; pairs beyond them are zeros.
    #[inline(always)]
    pub fn weave(&self, [even, odd]: [&[f32]; 2], out: &mut [u32]) {
        assert!(even.len() == odd.len() && even.len() <= out.len());
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.by_avx512() {
            // SAFETY: AVX512-BF16 is available wherever this unit is; both rows are as long, and `out` no shorter.
            return unsafe { avx512::weave([even, odd], out) };
        }
        pack::weave([even, odd], out);
    }

    /// [`Multiplier::round`] of the first `rows` rows of a tile; rows from there to whole tiles are zeros. Of `out` the pairs of `cols`
    /// columns are written, whole tiles of them.
    #[inline(always)]
    pub fn round_tile(&self, x: (&[f32], usize), [rows, cols]: [usize; 2], out: (&mut [u32], usize)) {
        let (all, depth) = (rows.next_multiple_of(ROWS), pairs(cols));
        assert!(out.1 >= depth && (all == 0 || (all - 1) * out.1 + depth <= out.0.len()));
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.by_avx512() {
            // SAFETY: AVX512-BF16 is available wherever this unit is.
            return unsafe { avx512::round_tile(x, [rows, cols], out) };
        }
        pack::each_rounded(x, [rows, cols], out, pack::round_row);
    }

    /// [`Multiplier::weave`] of the first `rows` rows of a tile, and of zeros from there to whole tiles, in the place of the even rows:
    /// the tile is then the right operand of a product, its rows twice as far apart. `cols` is a multiple of 16.
    #[inline(always)]
    pub fn weave_in_place<'t>(&self, x: (&'t mut [f32], usize), [rows, cols]: [usize; 2]) -> Right<'t> {
        assert!(cols.is_multiple_of(16) && cols <= x.1 && 2 * pairs(rows) * x.1 <= x.0.len());
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.by_avx512() {
            // SAFETY: AVX512-BF16 is available wherever this unit is.
            unsafe { avx512::weave_in_place((&mut *x.0, x.1), [rows, cols]) };
            return Right { data: bytemuck::cast_slice(x.0), stride: 2 * x.1 };
        }
        pack::weave_in_place((&mut *x.0, x.1), [rows, cols]);
        Right { data: bytemuck::cast_slice(x.0), stride: 2 * x.1 }
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
