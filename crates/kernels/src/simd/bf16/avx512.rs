//! The product by `vdpbf16ps`, and rounding and transposing by AVX-512.

use std::arch::x86_64::*;

use super::{Left, Output, Right, Size, pack};

/// Whether the processor has AVX512-BF16.
pub(super) fn available() -> bool {
    std::arch::is_x86_feature_detected!("avx512bf16") && pulp::x86::V4::try_new().is_some()
}

/// The product of whole panels.
///
/// # Safety
/// [`available`]; the rows of `size`, its columns and pairs lie in the slices.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn multiply(size: Size, left: Left<'_>, right: Right<'_>, mut into: Output<'_>) {
    let mut row = 0;
    while row < size.rows {
        // SAFETY: by this function's contract, for the rows that are left.
        row += unsafe {
            match size.rows - row {
                6.. => band::<6>(size, row, left, right, &mut into),
                4.. => band::<4>(size, row, left, right, &mut into),
                2.. => band::<2>(size, row, left, right, &mut into),
                _ => band::<1>(size, row, left, right, &mut into),
            }
        };
    }
}

/// All columns of the `M` rows from `row`; returns `M`.
///
/// # Safety
/// That of [`multiply`], with these rows in the slices.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn band<const M: usize>(
    size: Size,
    row: usize,
    left: Left<'_>,
    right: Right<'_>,
    into: &mut Output<'_>,
) -> usize {
    let mut col = 0;
    while col < size.cols {
        // SAFETY: by this function's contract, for the columns that are left.
        unsafe {
            if col + 64 <= size.cols {
                block::<M, 4>(size.pairs, [row, col], left, right, into);
                col += 64;
            } else {
                block::<M, 1>(size.pairs, [row, col], left, right, into);
                col += 16;
            }
        }
    }
    M
}

/// The micro-kernel: `M x N` vectors of the product, in registers.
///
/// # Safety
/// That of [`multiply`], with these rows and columns in the slices.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn block<const M: usize, const N: usize>(
    pairs: usize,
    [row, col]: [usize; 2],
    left: Left<'_>,
    right: Right<'_>,
    into: &mut Output<'_>,
) {
    let a = left.data.as_ptr().wrapping_add(row * left.stride);
    let b = right.data.as_ptr().wrapping_add(col);
    let c = into.data.as_mut_ptr().wrapping_add(row * into.stride + col);
    // SAFETY: all that is read and written lies in the slices by this function's contract; loads and stores need no alignment, and
    // pairs of bf16 are any 32 bits.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); N]; M];
        for pair in 0..pairs {
            let mut vectors = [_mm512_setzero_si512(); N];
            for (n, vector) in vectors.iter_mut().enumerate() {
                *vector = _mm512_loadu_si512(b.add(pair * right.stride + 16 * n).cast());
            }
            for (m, sums) in sums.iter_mut().enumerate() {
                let x: __m512bh =
                    std::mem::transmute(_mm512_set1_epi32((*a.add(m * left.stride + pair)).cast_signed()));
                for (sum, vector) in sums.iter_mut().zip(vectors) {
                    *sum = _mm512_dpbf16_ps(*sum, x, std::mem::transmute::<__m512i, __m512bh>(vector));
                }
            }
        }
        for (m, sums) in sums.iter().enumerate() {
            for (n, &sum) in sums.iter().enumerate() {
                let out = c.add(m * into.stride + 16 * n);
                let sum = if into.add { _mm512_add_ps(_mm512_loadu_ps(out), sum) } else { sum };
                _mm512_storeu_ps(out, sum);
            }
        }
    }
}

/// As [`super::pack::round_row`].
///
/// # Safety
/// [`available`]; the row's pairs lie in `out`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn round<const SECOND: bool>(row: &[f32], out: &mut [u32]) {
    let whole = row.len() / 32 * 16;
    for pair in (0..whole).step_by(16) {
        // SAFETY: `row` has 32 numbers more and `out` 16 pairs.
        unsafe {
            let from = row.as_ptr().add(2 * pair);
            let both = both::<SECOND>(_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16)));
            _mm512_storeu_si512(out.as_mut_ptr().add(pair).cast(), both);
        }
    }
    for pair in (whole..out.len()).step_by(16) {
        let from = (2 * pair).min(row.len());
        // SAFETY: the masks leave out what lies beyond the ends of both slices.
        unsafe {
            let [low, high] = [from, from + 16].map(|from| load(row, from));
            let both = both::<SECOND>(low, high);
            _mm512_mask_storeu_epi32(out.as_mut_ptr().add(pair).cast(), first(out.len() - pair), both);
        }
    }
}

/// As [`super::pack::weave`].
///
/// # Safety
/// [`available`]; both rows are as long, and `out` no shorter.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn weave<const SECOND: bool>([even, odd]: [&[f32]; 2], out: &mut [u32]) {
    let whole = even.len() / 16 * 16;
    for at in (0..whole).step_by(16) {
        // SAFETY: all three slices have 16 more.
        unsafe {
            let [even, odd] = [even, odd].map(|row| _mm512_loadu_ps(row.as_ptr().add(at)));
            let woven = woven::<SECOND>(even, odd);
            _mm512_storeu_si512(out.as_mut_ptr().add(at).cast(), woven);
        }
    }
    for at in (whole..out.len()).step_by(16) {
        let from = at.min(even.len());
        // SAFETY: the masks leave out what lies beyond the ends of the slices.
        unsafe {
            let woven = woven::<SECOND>(load(even, from), load(odd, from));
            _mm512_mask_storeu_epi32(out.as_mut_ptr().add(at).cast(), first(out.len() - at), woven);
        }
    }
}

/// A part of two vectors, one after the other.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn both<const SECOND: bool>(low: __m512, high: __m512) -> __m512i {
    // SAFETY: both are 512 bits, of which all are numbers.
    let rounded = |low, high| unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) };
    let first = rounded(low, high);
    if !SECOND {
        return first;
    }
    let widened = |half| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)));
    let [of_low, of_high] = [_mm512_castsi512_si256(first), _mm512_extracti64x4_epi64::<1>(first)].map(widened);
    rounded(_mm512_sub_ps(low, of_low), _mm512_sub_ps(high, of_high))
}

/// A part of two vectors as pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn woven<const SECOND: bool>(even: __m512, odd: __m512) -> __m512i {
    const ORDER: [u16; 32] = {
        let mut order = [0; 32];
        let mut n = 0;
        while n < 32 {
            order[n] = (n / 2 + n % 2 * 16) as u16;
            n += 1;
        }
        order
    };
    // SAFETY: 32 lanes of 16 bits.
    let order = unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) };
    _mm512_permutexvar_epi16(order, both::<SECOND>(even, odd))
}

/// As [`super::pack::each_rounded`].
///
/// # Safety
/// [`available`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn round_tile<const SECOND: bool>(x: (&[f32], usize), sizes: [usize; 2], out: (&mut [u32], usize)) {
    // SAFETY: what takes a row has room for its pairs.
    pack::each_rounded(x, sizes, out, |row, out| unsafe { round::<SECOND>(row, out) });
}

/// As [`super::pack::weave_in_place`].
///
/// # Safety
/// [`available`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn weave_in_place<const TWO: bool>(x: (&mut [f32], usize), sizes: [usize; 2]) {
    pack::each_pair(x, sizes, |even, odd| {
        for (even, odd) in even.as_chunks_mut::<16>().0.iter_mut().zip(odd.as_chunks_mut::<16>().0) {
            // SAFETY: both are 16 numbers, and any bits are f32.
            unsafe {
                let [a, b] = [_mm512_loadu_ps(even.as_ptr()), _mm512_loadu_ps(odd.as_ptr())];
                _mm512_storeu_si512(even.as_mut_ptr().cast(), woven::<false>(a, b));
                if TWO {
                    _mm512_storeu_si512(odd.as_mut_ptr().cast(), woven::<true>(a, b));
                }
            }
        }
    });
}

/// A mask of the first `count` lanes of 16.
#[inline(always)]
fn first(count: usize) -> __mmask16 {
    if count >= 16 { u16::MAX } else { (1 << count) - 1 }
}

/// The vector at `from` of `row`, zeros beyond its end.
///
/// # Safety
/// AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn load(row: &[f32], from: usize) -> __m512 {
    let left = row.len().saturating_sub(from);
    // SAFETY: the mask leaves out what lies beyond the end.
    unsafe { _mm512_maskz_loadu_ps(first(left), row.as_ptr().wrapping_add(from)) }
}

/// As [`super::pack::transpose`].
///
/// # Safety
/// AVX-512; whole blocks of 16 x 16 lie in both slices.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn transpose([rows, cols]: [usize; 2], x: (&[u32], usize), out: (&mut [u32], usize)) {
    for row in (0..rows).step_by(16) {
        for col in (0..cols).step_by(16) {
            let from = x.0.as_ptr().wrapping_add(row * x.1 + col);
            let to = out.0.as_mut_ptr().wrapping_add(col * out.1 + row);
            // SAFETY: by this function's contract, for this block.
            unsafe { transpose_block((from, x.1), (to, out.1)) };
        }
    }
}

/// One block of 16 x 16, whose rows lie so far apart.
///
/// # Safety
/// AVX-512; the block lies in what the pointers may read and write.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn transpose_block((from, from_stride): (*const u32, usize), (to, to_stride): (*mut u32, usize)) {
    let mut a = [_mm512_setzero_si512(); 16];
    for (n, row) in a.iter_mut().enumerate() {
        // SAFETY: by this function's contract.
        *row = unsafe { _mm512_loadu_si512(from.add(n * from_stride).cast()) };
    }
    // Within lanes of 128 bits: pairs of rows, then pairs of pairs.
    let mut b = a;
    for n in 0..8 {
        b[2 * n] = _mm512_unpacklo_epi32(a[2 * n], a[2 * n + 1]);
        b[2 * n + 1] = _mm512_unpackhi_epi32(a[2 * n], a[2 * n + 1]);
    }
    for n in 0..4 {
        a[4 * n] = _mm512_unpacklo_epi64(b[4 * n], b[4 * n + 2]);
        a[4 * n + 1] = _mm512_unpackhi_epi64(b[4 * n], b[4 * n + 2]);
        a[4 * n + 2] = _mm512_unpacklo_epi64(b[4 * n + 1], b[4 * n + 3]);
        a[4 * n + 3] = _mm512_unpackhi_epi64(b[4 * n + 1], b[4 * n + 3]);
    }
    // Lane l of a[4 g + c] is now column 4 l + c of the rows of group g: the lanes are transposed in turn.
    for c in 0..4 {
        let low = _mm512_shuffle_i32x4::<0b1000_1000>(a[c], a[4 + c]);
        let high = _mm512_shuffle_i32x4::<0b1101_1101>(a[c], a[4 + c]);
        let low_2 = _mm512_shuffle_i32x4::<0b1000_1000>(a[8 + c], a[12 + c]);
        let high_2 = _mm512_shuffle_i32x4::<0b1101_1101>(a[8 + c], a[12 + c]);
        b[c] = _mm512_shuffle_i32x4::<0b1000_1000>(low, low_2);
        b[4 + c] = _mm512_shuffle_i32x4::<0b1000_1000>(high, high_2);
        b[8 + c] = _mm512_shuffle_i32x4::<0b1101_1101>(low, low_2);
        b[12 + c] = _mm512_shuffle_i32x4::<0b1101_1101>(high, high_2);
    }
    for (n, row) in b.iter().enumerate() {
        // SAFETY: by this function's contract.
        unsafe { _mm512_storeu_si512(to.add(n * to_stride).cast(), *row) };
    }
}
