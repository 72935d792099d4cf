//! Products of ternary matrices with tokens of eight bits.
//!
//! A byte `p` holds five digits `d_n = w_n + 1` to base 3, which are `d_n = q_n - 3 q_(n+1)` with `q_n = floor(p / 3^n)`: a few
//! operations on the 64 bytes of a group at once give all first digits, all second ones and so on, and each of them is a
//! *block*: 16 rows by four inputs, which a token's four codes meet at once. `sum_i w_i x_i = sum_i d_i x_i - sum_i x_i`.

#[cfg(target_arch = "x86_64")]
mod x86;

use std::{ops::Range, sync::OnceLock};

use resolvent_kernels::{
    parallel::Parts,
    simd::{Level, Simd, WithSimd},
};

use super::{GROUP, LEAST, PER_BYTE, ROWS};

/// Inputs of a block.
const WIDE: usize = 4;
/// Four codes of a token.
type Quad = [i8; WIDE];
/// The digits of the rows of a panel at four inputs, row by row.
type Block = [u8; ROWS * WIDE];
/// The packed digits of a panel at the inputs of a group, and as many blocks as a byte has digits.
type Group = [u8; ROWS * WIDE];
/// Products of digits and codes are at most 256 in size: the sums of so many pairs of them fit 16 bits.
const NARROW: usize = 32;
/// Tokens that a block is multiplied with at once: so many sums of 16 lanes hide what a product takes to arrive.
const TOGETHER: usize = 8;

/// What makes the last bits of an f32 those of an integer, the nearest, halves to even.
const SHIFT: f32 = 1.5 * (1 << 23) as f32;

/// Tokens in eight bits.
pub(super) struct Tokens {
    /// Of a token.
    quads: usize,
    /// Tile by tile, `[quads, TOGETHER]` of each; the tokens that fill no tile one by one.
    codes: Vec<Quad>,
    /// Of each token.
    scales: Vec<f32>,
    /// Sums of the codes of each token.
    totals: Vec<i32>,
}

impl Tokens {
    /// `x [tokens, inputs]`: `a = max(max |x|, 1e-5) / 127`, codes `clip(round(x / a), -128, 127)`. `None` where a value is not
    /// finite.
    pub fn round(level: Level, x: &[f32], inputs: usize) -> Option<Self> {
        let (tokens, quads) = (x.len() / inputs, inputs.div_ceil(GROUP) * PER_BYTE);
        let codes = vec![[0; WIDE]; tokens * quads];
        let mut all = Self { quads, codes, scales: vec![0.0; tokens], totals: vec![0; tokens] };
        level.dispatch(Round { x, inputs, tokens: &mut all }).then_some(all)
    }

    pub fn count(&self) -> usize {
        self.scales.len()
    }

    /// Writes the products of all tokens with the rows of a panel.
    pub fn multiply(&self, level: Level, panel: &[u8], into: Columns<'_>) {
        level.dispatch(Multiply { tokens: self, multiplier: Multiplier::of(level), panel, into });
    }

    /// The codes of the tile of `T` tokens that begins with token `first`.
    fn tile<const T: usize>(&self, first: usize) -> &[[Quad; T]] {
        self.codes[first * self.quads..][..T * self.quads].as_chunks().0
    }
}

/// Where the products of a panel go.
pub(super) struct Columns<'a> {
    /// `[tokens, width]`, of which nobody else writes the columns of the panel.
    pub out: &'a Parts<'a, f32>,
    pub width: usize,
    /// Those of the panel's rows.
    pub columns: Range<usize>,
    /// Factor on the products beside the tokens' scales.
    pub scale: f32,
    /// What is added to each column.
    pub offsets: [f32; ROWS],
}

struct Round<'a> {
    x: &'a [f32],
    inputs: usize,
    tokens: &'a mut Tokens,
}

impl WithSimd for Round<'_> {
    type Output = bool;

    /// Left to the compiler, which knows the instruction set here.
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> bool {
        let Tokens { quads, codes, scales, totals } = self.tokens;
        let (tiled, mut finite) = (scales.len() - scales.len() % TOGETHER, true);
        let mut row = vec![[0; WIDE]; *quads];
        for (t, x) in self.x.chunks_exact(self.inputs).enumerate() {
            // Sizes of finite numbers are ordered as their bits, and below those of the others.
            let most = x.iter().fold(0, |most, x| x.abs().to_bits().max(most));
            finite &= most < f32::INFINITY.to_bits();
            scales[t] = f32::from_bits(most).max(LEAST) / 127.0;
            let scale = scales[t];
            for (code, x) in row.as_flattened_mut().iter_mut().zip(x) {
                // No quotient is beyond 127 by more than its rounding: nothing is left to clip.
                *code = (x / scale + SHIFT).to_bits() as i8;
            }
            totals[t] = row.as_flattened().iter().fold(0, |total, &code| total + i32::from(code));
            let (first, stride) = if t < tiled { (t - t % TOGETHER, TOGETHER) } else { (t, 1) };
            let codes = &mut codes[first * *quads..][..stride * *quads];
            codes.iter_mut().skip(t - first).step_by(stride).zip(&row).for_each(|(to, quad)| *to = *quad);
        }
        finite
    }
}

struct Multiply<'a> {
    tokens: &'a Tokens,
    multiplier: Multiplier,
    panel: &'a [u8],
    into: Columns<'a>,
}

impl WithSimd for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let (groups, _) = self.panel.as_chunks();
        let mut digits = vec![[0; ROWS * WIDE]; groups.len() * PER_BYTE];
        groups.iter().zip(digits.as_chunks_mut().0).for_each(|(group, blocks)| unpack(group, blocks));
        let count = self.tokens.count();
        let tiled = count - count % TOGETHER;
        for t in (0..tiled).step_by(TOGETHER) {
            self.tile::<TOGETHER>(t, &digits);
        }
        for t in tiled..count {
            self.tile::<1>(t, &digits);
        }
    }
}

impl Multiply<'_> {
    #[inline(always)]
    fn tile<const T: usize>(&self, first: usize, digits: &[Block]) {
        let Columns { out, width, columns, scale, offsets } = &self.into;
        let sums = self.multiplier.dots(digits, self.tokens.tile::<T>(first));
        for (n, sums) in sums.iter().enumerate() {
            let (factor, total) = (self.tokens.scales[first + n] * scale, self.tokens.totals[first + n]);
            let mut products = *offsets;
            for (product, sum) in products.iter_mut().zip(sums) {
                *product += factor * (sum - total) as f32;
            }
            let row = (first + n) * width;
            // SAFETY: the columns are of this panel alone, and its tokens pass one after the other.
            let out = unsafe { out.part(row + columns.start..row + columns.end) };
            match out.as_chunks_mut() {
                ([whole], []) => *whole = products,
                _ => out.copy_from_slice(&products[..out.len()]),
            }
        }
    }
}

/// The digits of 64 bytes, in pairs of bytes.
#[inline(always)]
fn unpack(group: &Group, blocks: &mut [Block; PER_BYTE]) {
    let packed: [u16; ROWS * WIDE / 2] = bytemuck::cast(*group);
    let mut quotients = packed;
    // `ceil(2^16 / 3^n)`: the upper half of the product is `floor(p / 3^n)` for every byte.
    for (n, reciprocal) in [21_846_u32, 7282, 2428, 810].into_iter().enumerate() {
        let divided = |byte: u16| ((u32::from(byte) * reciprocal) >> 16) as u16;
        let mut of_pairs = packed;
        for (digits, (packed, quotient)) in of_pairs.iter_mut().zip(packed.iter().zip(&mut quotients)) {
            let next = divided(packed & 0xff) | divided(packed >> 8) << 8;
            // No byte of the difference is negative, so that none borrows from its neighbour.
            *digits = *quotient - 3 * next;
            *quotient = next;
        }
        blocks[n] = bytemuck::cast(of_pairs);
    }
    blocks[PER_BYTE - 1] = bytemuck::cast(quotients);
}

/// How digits of 0 to 2 are multiplied with codes of eight bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Multiplier {
    Portable,
    /// Pairs of products in 16 bits, 32 products at once.
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    /// Four products and a sum in 32 bits, 64 products at once.
    #[cfg(target_arch = "x86_64")]
    Vnni(x86::Vnni),
}

impl Multiplier {
    /// The fastest of a level. Not all processors with AVX-512 have the product that sums in 32 bits.
    fn of(level: Level) -> Self {
        static ALL: OnceLock<Vec<(Level, Multiplier)>> = OnceLock::new();
        let fastest = ALL.get_or_init(Self::all).iter().rev().find(|&&(least, _)| least <= level);
        fastest.map_or(Self::Portable, |&(_, multiplier)| multiplier)
    }

    /// Those that this processor has, slowest first, and the level that each is part of.
    fn all() -> Vec<(Level, Self)> {
        // Elsewhere nothing is added.
        #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut))]
        let mut all = vec![(Level::Portable, Self::Portable)];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(x86::Avx2::detect().map(|found| (Level::Avx2, Self::Avx2(found))));
            all.extend(x86::Vnni::detect().map(|found| (Level::Avx512, Self::Vnni(found))));
        }
        all
    }

    /// The sums of every token's products with the rows of a panel: as many blocks as each token has quads.
    #[inline(always)]
    fn dots<const T: usize>(self, digits: &[Block], codes: &[[Quad; T]]) -> [[i32; ROWS]; T] {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Vnni(found) => found.dots(digits, codes),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(found) => found.dots(digits, codes),
            Self::Portable => std::array::from_fn(|t| portable(digits, codes, t)),
        }
    }
}

/// The sums of one token's products: four a row in 16 bits, as long as they fit.
#[inline(always)]
fn portable<const T: usize>(digits: &[Block], codes: &[[Quad; T]], t: usize) -> [i32; ROWS] {
    const LANES: usize = 8;
    let mut sums = [0; ROWS];
    for (blocks, codes) in digits.chunks(NARROW).zip(codes.chunks(NARROW)) {
        let mut narrow = [0_i16; ROWS * WIDE];
        for (block, quads) in blocks.iter().zip(codes) {
            let factors: [i16; LANES] = std::array::from_fn(|n| quads[t][n % WIDE].into());
            for (sums, digits) in narrow.as_chunks_mut::<LANES>().0.iter_mut().zip(block.as_chunks::<LANES>().0) {
                for n in 0..LANES {
                    sums[n] += i16::from(digits[n]) * factors[n];
                }
            }
        }
        for (sum, narrow) in sums.iter_mut().zip(narrow.as_chunks::<WIDE>().0) {
            *sum += narrow.iter().map(|&products| i32::from(products)).sum::<i32>();
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every instruction set multiplies to the same integers, at the largest products of whole narrow sums too.
    #[test]
    fn multipliers_agree() {
        for inputs in [1_usize, 4, 5, 20, 21, 160, 1000, 6000] {
            let (blocks, count) = (inputs.div_ceil(GROUP) * PER_BYTE, TOGETHER);
            let digits: Vec<Block> = (0..blocks)
                .map(|q| std::array::from_fn(|n| if n < WIDE { 2 } else { ((q * 7919 + n) % 3) as u8 }))
                .collect();
            let x: Vec<f32> =
                (0..count * inputs).map(|i| if i < inputs { -1.0 } else { (i * 31 % 255) as f32 - 127.0 }).collect();
            let tokens = Tokens::round(Level::Portable, &x, inputs).unwrap();
            let codes = tokens.tile::<TOGETHER>(0);
            let expected = Multiplier::Portable.dots(&digits, codes);
            assert_eq!(expected[0][0], -254 * inputs as i32);
            for (_, multiplier) in Multiplier::all() {
                assert_eq!(multiplier.dots(&digits, codes), expected, "{multiplier:?}, {inputs}");
                for (t, expected) in expected.iter().enumerate() {
                    let alone: Vec<[Quad; 1]> = codes.iter().map(|quads| [quads[t]]).collect();
                    assert_eq!(multiplier.dots(&digits, &alone), [*expected], "{multiplier:?}, {inputs}");
                }
            }
        }
    }

    #[test]
    fn tokens_that_are_not_finite_have_no_codes() {
        for level in Level::available() {
            for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                assert!(Tokens::round(level, &[0.0, 1.0, x, 2.0], 2).is_none());
            }
            assert!(Tokens::round(level, &[f32::MAX, -f32::MAX], 2).is_some());
        }
    }

    /// All 243 bytes have the digits of their number.
    #[test]
    fn division_gives_the_digits() {
        for first in 0..243_u8 {
            let group: Group = std::array::from_fn(|n| (usize::from(first) + n * 101) as u8 % 243);
            let mut blocks = [[0; ROWS * WIDE]; PER_BYTE];
            unpack(&group, &mut blocks);
            for (n, power) in super::super::POWERS.into_iter().enumerate() {
                assert_eq!(blocks[n], group.map(|byte| byte / power % 3));
            }
        }
    }

    #[test]
    fn levels_have_their_multiplier() {
        let all = Multiplier::all();
        for level in Level::available() {
            let of_level = all.iter().rev().find(|(least, _)| *least <= level).unwrap().1;
            assert_eq!(Multiplier::of(level), of_level);
        }
        assert_eq!(Multiplier::of(Level::Portable), Multiplier::Portable);
    }
}
