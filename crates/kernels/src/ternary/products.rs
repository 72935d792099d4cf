//! Products of ternary matrices with tokens of eight bits.
//!
//! A byte `p` holds five digits `d_n = w_n + 1` to base 3, which are `d_n = q_n - 3 q_(n+1)` with `q_n = floor(p / 3^n)`: a few
//! operations on 32 bytes at once give all first digits, all second ones and so on. Tokens are laid out alike, so that a row
//! times a token is a product of two contiguous runs, and `sum_i w_i x_i = sum_i d_i x_i - sum_i x_i`.

use pulp::{Simd, WithSimd};

use super::{LEAST, PER_BYTE};
use crate::simd::Level;

/// Codes that are multiplied at once.
const BLOCK: usize = 32;
/// Pairs of bytes in a block.
const PAIRS: usize = BLOCK / 2;
/// Rows and tokens of one tile: eight sums of 16 lanes, which AVX2's registers hold beside their factors.
const ROWS: usize = 2;
const COLUMNS: usize = 4;
/// Products of two digits and codes are at most 512 in size: so many of them fit 16 bits.
#[cfg(target_arch = "x86_64")]
const NARROW: usize = 32;

type Block = [i8; BLOCK];

/// What makes the last bits of an f32 those of an integer, the nearest, halves to even.
const SHIFT: f32 = 1.5 * (1 << 23) as f32;
/// Inputs of a *chunk*: those of 32 bytes of a packed row, as five blocks.
const CHUNK: usize = PER_BYTE * BLOCK;
type Chunk = [Block; PER_BYTE];

/// Tokens in eight bits.
pub(super) struct Tokens {
    inputs: usize,
    codes: Vec<Chunk>,
    /// Of each token.
    pub scales: Vec<f32>,
    /// Sums of the codes of each token.
    pub totals: Vec<i32>,
}

impl Tokens {
    /// `x [tokens, inputs]`, finite: `a = max(max |x|, 1e-5) / 127`, codes `clip(round(x / a), -128, 127)`.
    pub fn round(level: Level, x: &[f32], inputs: usize) -> Self {
        let (tokens, chunks) = (x.len() / inputs, inputs.div_ceil(CHUNK));
        let codes = vec![[[0; BLOCK]; PER_BYTE]; tokens * chunks];
        let mut all = Self { inputs, codes, scales: vec![0.0; tokens], totals: vec![0; tokens] };
        level.dispatch(Round { x, tokens: &mut all });
        all
    }

    pub fn count(&self) -> usize {
        self.scales.len()
    }

    fn token(&self, t: usize) -> &[Block] {
        let chunks = self.inputs.div_ceil(CHUNK);
        self.codes[t * chunks..][..chunks].as_flattened()
    }

    /// `sums [rows, tokens]`: the digits of every packed row with the codes of every token.
    pub fn multiply(&self, level: Level, packed: &[u8], sums: &mut [i32]) {
        match level {
            // 512 bits at a time were no faster.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Avx2 => match pulp::x86::V3::try_new() {
                Some(simd) => simd.vectorize(
                    #[inline(always)]
                    || multiply(simd, self, packed, sums),
                ),
                None => multiply(pulp::Scalar, self, packed, sums),
            },
            _ => multiply(pulp::Scalar, self, packed, sums),
        }
    }
}

struct Round<'a> {
    x: &'a [f32],
    tokens: &'a mut Tokens,
}

impl WithSimd for Round<'_> {
    type Output = ();

    /// Left to the compiler, which knows the instruction set here.
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Tokens { inputs, codes, scales, totals } = self.tokens;
        let tokens = self.x.chunks_exact(*inputs).zip(codes.chunks_exact_mut(inputs.div_ceil(CHUNK)));
        for ((x, chunks), (scale, total)) in tokens.zip(scales.iter_mut().zip(totals)) {
            // Sizes of finite numbers are ordered as their bits.
            let most = x.iter().fold(0, |most, x| x.abs().to_bits().max(most));
            *scale = f32::from_bits(most).max(LEAST) / 127.0;
            for (x, chunk) in x.chunks(CHUNK).zip(chunks) {
                let mut row = [0; CHUNK];
                for (code, x) in row.iter_mut().zip(x) {
                    // No quotient is beyond 127 by more than its rounding: nothing is left to clip.
                    *code = (x / *scale + SHIFT).to_bits() as i8;
                }
                *total += row.iter().map(|&code| i32::from(code)).sum::<i32>();
                for (i, codes) in row.as_chunks::<PER_BYTE>().0.iter().enumerate() {
                    (0..PER_BYTE).for_each(|n| chunk[n][i] = codes[n]);
                }
            }
        }
    }
}

#[inline(always)]
fn multiply<D: Dots>(simd: D, tokens: &Tokens, packed: &[u8], sums: &mut [i32]) {
    let (bytes, count) = (tokens.inputs.div_ceil(PER_BYTE), tokens.count());
    let mut rows = [(); ROWS].map(|()| vec![[[0; BLOCK]; PER_BYTE]; tokens.inputs.div_ceil(CHUNK)]);
    for (packed, sums) in packed.chunks(ROWS * bytes).zip(sums.chunks_mut(ROWS * count)) {
        for (packed, row) in packed.chunks_exact(bytes).zip(&mut rows) {
            let (whole, rest) = packed.as_chunks();
            whole.iter().zip(&mut *row).for_each(|(bytes, chunk)| unpack(bytes, chunk));
            if let Some(last) = row.get_mut(whole.len()) {
                let mut bytes = [0; BLOCK];
                bytes[..rest.len()].copy_from_slice(rest);
                unpack(&bytes, last);
            }
        }
        let digits = rows.each_ref().map(|row| row.as_flattened());
        let tiled = count - count % COLUMNS;
        for t in (0..tiled).step_by(COLUMNS) {
            let found = simd.dots(digits, std::array::from_fn::<_, COLUMNS, _>(|n| tokens.token(t + n)));
            for (sums, found) in sums.chunks_exact_mut(count).zip(found) {
                sums[t..t + COLUMNS].copy_from_slice(&found);
            }
        }
        for t in tiled..count {
            let found = simd.dots(digits, [tokens.token(t)]);
            for (sums, [found]) in sums.chunks_exact_mut(count).zip(found) {
                sums[t] = found;
            }
        }
    }
}

/// The digits of 32 bytes, in pairs of bytes.
#[inline(always)]
fn unpack(bytes: &[u8; BLOCK], digits: &mut Chunk) {
    let packed: [u16; PAIRS] = pulp::cast(*bytes);
    let mut quotients = packed;
    // `ceil(2^16 / 3^n)`: the upper half of the product is `floor(p / 3^n)` for every byte.
    for (n, reciprocal) in [21_846_u32, 7282, 2428, 810].into_iter().enumerate() {
        let divided = |byte: u16| ((u32::from(byte) * reciprocal) >> 16) as u16;
        let mut of_pairs = [0_u16; PAIRS];
        for i in 0..PAIRS {
            let next = divided(packed[i] & 0xff) | divided(packed[i] >> 8) << 8;
            // No byte of the difference is negative, so that none borrows from its neighbour.
            of_pairs[i] = quotients[i] - 3 * next;
            quotients[i] = next;
        }
        digits[n] = pulp::cast(of_pairs);
    }
    digits[PER_BYTE - 1] = pulp::cast(quotients);
}

/// How an instruction set multiplies digits of 0 to 2 with codes of eight bits.
trait Dots: Copy {
    /// The products of `R` rows with `T` tokens of as many blocks.
    fn dots<const R: usize, const T: usize>(self, digits: [&[Block]; R], codes: [&[Block]; T]) -> [[i32; T]; R];
}

impl Dots for pulp::Scalar {
    #[inline(always)]
    fn dots<const R: usize, const T: usize>(self, digits: [&[Block]; R], codes: [&[Block]; T]) -> [[i32; T]; R] {
        let product = |(&d, &x): (&i8, &i8)| i32::from(d) * i32::from(x);
        let dot = |d: &[Block], x: &[Block]| d.as_flattened().iter().zip(x.as_flattened()).map(product).sum();
        digits.map(|digits| codes.map(|codes| dot(digits, codes)))
    }
}

#[cfg(target_arch = "x86_64")]
impl Dots for pulp::x86::V3 {
    #[inline(always)]
    fn dots<const R: usize, const T: usize>(self, digits: [&[Block]; R], codes: [&[Block]; T]) -> [[i32; T]; R] {
        let blocks = digits[0].len();
        let (digits, codes) = (digits.map(|row| &row[..blocks]), codes.map(|token| &token[..blocks]));
        let (one, mut wide) = (self.splat_i16x16(1), [[self.splat_i32x8(0); T]; R]);
        for from in (0..blocks).step_by(NARROW) {
            let mut narrow = [[self.splat_i16x16(0); T]; R];
            for i in from..blocks.min(from + NARROW) {
                for r in 0..R {
                    for t in 0..T {
                        let (d, x) = (pulp::cast(digits[r][i]), pulp::cast(codes[t][i]));
                        let pairs = self.multiply_saturating_add_adjacent_i8x32(d, x);
                        narrow[r][t] = self.wrapping_add_i16x16(narrow[r][t], pairs);
                    }
                }
            }
            for (wide, narrow) in wide.as_flattened_mut().iter_mut().zip(narrow.as_flattened()) {
                let pairs = self.multiply_wrapping_add_adjacent_i16x16(*narrow, one);
                *wide = self.wrapping_add_i32x8(*wide, pairs);
            }
        }
        wide.map(|row| row.map(|sums| pulp::cast::<_, [i32; 8]>(sums).into_iter().sum()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every instruction set multiplies to the same integers, at the largest products of whole narrow sums too.
    #[test]
    fn levels_agree() {
        for inputs in [1_usize, 4, 5, 31, 160, 161, 1000, 6000] {
            let (rows, count) = (5, 7);
            let bytes = inputs.div_ceil(PER_BYTE);
            let packed: Vec<u8> =
                (0..rows * bytes).map(|i| if i < bytes { 242 } else { (i * 7919 % 243) as u8 }).collect();
            let x: Vec<f32> =
                (0..count * inputs).map(|i| if i < inputs { -1.0 } else { (i * 31 % 255) as f32 - 127.0 }).collect();
            let products = |level: Level| {
                let mut sums = vec![i32::MIN; rows * count];
                Tokens::round(level, &x, inputs).multiply(level, &packed, &mut sums);
                sums
            };
            let expected = products(Level::Portable);
            assert_eq!(expected[0], -254 * inputs as i32);
            assert!(Level::available().into_iter().all(|level| products(level) == expected), "{inputs}");
        }
    }
}
