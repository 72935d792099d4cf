//! Stores that go past the caches.

/// `out_j = w_j y` for every row of `out [w.len(), y.len()]`. Where the processor can, it writes without first reading
/// what is overwritten and without displacing what is cached: right for an `out` that the caches would not hold anyway.
pub(crate) fn stream_outer(w: &[f32], y: &[f32], out: &mut [f32]) {
    debug_assert_eq!(out.len(), w.len() * y.len());
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if y.len().is_multiple_of(4) && out.as_ptr().addr().is_multiple_of(16) {
        return stream_aligned(w, y, out);
    }
    for (w, out) in w.iter().zip(out.chunks_exact_mut(y.len())) {
        out.iter_mut().zip(y).for_each(|(o, y)| *o = w * y);
    }
}

/// [`stream_outer`] for rows of whole 16-byte lanes, `out` aligned to them.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn stream_aligned(w: &[f32], y: &[f32], out: &mut [f32]) {
    use std::arch::x86_64::{_mm_loadu_ps, _mm_mul_ps, _mm_set1_ps, _mm_stream_ps};
    let (lanes, _) = y.as_chunks::<4>();
    for (w, out) in w.iter().zip(out.chunks_exact_mut(y.len())) {
        for (to, from) in out.as_chunks_mut::<4>().0.iter_mut().zip(lanes) {
            // SAFETY: both point to four f32, `to` is aligned to 16 bytes, and SSE is part of every x86-64.
            unsafe { _mm_stream_ps(to.as_mut_ptr(), _mm_mul_ps(_mm_set1_ps(*w), _mm_loadu_ps(from.as_ptr()))) };
        }
    }
}

/// Must follow [`stream_outer`] before another thread reads what it wrote: such stores are ordered by a fence alone.
pub(crate) fn fence() {
    // Miri writes in order, and knows no fence.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: SSE is part of every x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::{fence, stream_outer};

    #[test]
    fn every_row_is_written_at_any_alignment() {
        for dim in [1, 4, 5, 12, 16] {
            for offset in 0..5 {
                let y: Vec<f32> = (0..dim).map(|c| c as f32).collect();
                let mut out = vec![f32::NAN; offset + 7 * dim];
                stream_outer(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], &y, &mut out[offset..]);
                fence();
                let wanted = |n: usize| ((n / dim + 1) * (n % dim)) as f32;
                assert!(out[offset..].iter().enumerate().all(|(n, x)| *x == wanted(n)));
                assert!(out[..offset].iter().all(|x| x.is_nan()));
            }
        }
    }
}
