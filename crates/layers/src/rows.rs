//! Matrices of rows: written in parallel parts, counted and summed.

use std::mem::MaybeUninit;

use rayon::prelude::*;

/// Writes `len` values in parts of `part`, in parallel, and collects what `task` returns for each. A part begins as
/// repetitions of `pattern`, which divides it, and `task` completes it while it lies in the cache: memory that is zeroed
/// beforehand passes through the caches twice.
pub(crate) fn written<R: Send>(
    len: usize,
    part: usize,
    pattern: &[f32],
    task: impl Fn(usize, &mut [f32]) -> R + Sync,
) -> (Vec<f32>, Vec<R>) {
    let mut out = Vec::with_capacity(len);
    if len == 0 {
        return (out, Vec::new());
    }
    assert!(!pattern.is_empty(), "values are written by repeating a pattern");
    let complete = |(index, part): (usize, &mut [MaybeUninit<f32>])| {
        for row in part.chunks_mut(pattern.len()) {
            row.iter_mut().zip(pattern).for_each(|(out, &value)| _ = out.write(value));
        }
        // SAFETY: the loop above has written every element of the part, `chunks_mut` leaves none out.
        task(index, unsafe { std::slice::from_raw_parts_mut(part.as_mut_ptr().cast::<f32>(), part.len()) })
    };
    let returned = out.spare_capacity_mut()[..len].par_chunks_mut(part).enumerate().map(complete).collect();
    // SAFETY: the parts are the first `len` elements of the capacity, all of them written.
    unsafe { out.set_len(len) };
    (out, returned)
}

/// `rows * width`, the length of a matrix.
///
/// # Panics
/// If there is no such length.
pub(crate) fn area(rows: usize, width: usize) -> usize {
    rows.checked_mul(width).expect("a matrix has more elements than can be counted")
}

/// The sums of rows of `width`, in f64 and in their order.
pub(crate) fn sums(rows: &[Vec<f32>], width: usize) -> Vec<f32> {
    (0..width).map(|column| rows.iter().map(|row| f64::from(row[column])).sum::<f64>() as f32).collect()
}
