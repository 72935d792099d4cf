//! Tokens laid out channel by channel, so that distances to one centre need no sum across a register.

use pulp::{Simd, WithSimd};

use crate::{
    call::TokenRows,
    parallel::{self, grain},
    simd::{
        Level,
        product::{Left, Right, Sink, Size, product, vectors, vectors_mut},
    },
    structure::dense::{PANEL, padded, transpose},
};

/// Panels of one task: 1024 tokens of 64 channels (256 KiB) stay in a 2 MiB second level from one centre to the next.
const GROUP: usize = 16 * PANEL;

/// Groups that a task has at least. One centre takes 5 us for each: fewer are not worth waking a thread for.
const GROUPS: usize = 4;

/// Tokens `x [n, dim]` as panels of [`PANEL`] columns.
pub(super) struct Panels<'a> {
    data: &'a [f32],
    n: usize,
    dim: usize,
    level: Level,
}

/// Whether what is done with the panels of `n` tokens is shared by several threads.
pub(super) fn is_shared(n: usize) -> bool {
    n.div_ceil(GROUP) >= grain(GROUPS).saturating_mul(2)
}

/// f32 that the panels of `n` tokens take.
pub(super) fn scratch_len(n: usize, dim: usize) -> usize {
    padded(n) * dim
}

impl<'a> Panels<'a> {
    /// The rows `tokens` of `x [.., dim]`, written to `buffer`.
    pub fn new(x: &[f32], dim: usize, tokens: &[u32], level: Level, buffer: &'a mut [f32]) -> Self {
        let groups = buffer.chunks_mut(GROUP * dim).zip(tokens.chunks(GROUP));
        parallel::each_grained(grain(GROUPS), groups, |(buffer, tokens)| {
            transpose(TokenRows::in_one_piece(x, dim), tokens, |_| 1.0, buffer)
        });
        Self { data: buffer, n: tokens.len(), dim, level }
    }

    /// Takes in one more `centre`: where it is nearer (in squared distance) than `nearest`, that distance and `label` are
    /// written. Returns the sums of `nearest` over groups of [`Panels::group`] tokens.
    pub fn nearer(&self, centre: &[f32], label: u32, nearest: &mut [f32], labels: &mut [u32]) -> Vec<f64> {
        let groups = self.data.chunks(GROUP * self.dim).zip(nearest.chunks_mut(GROUP)).zip(labels.chunks_mut(GROUP));
        parallel::map_grained(grain(GROUPS), groups, |((panels, nearest), labels)| {
            self.level.dispatch(Nearer { panels, centre, label, nearest, labels });
            sum(nearest)
        })
    }

    /// Tokens per sum of [`Panels::nearer`].
    pub const fn group() -> usize {
        GROUP
    }

    /// The label of the nearest of `centres [.., dim]` for every token; the first where several are nearest.
    /// `half_squares`: half the squared norms of the centres, by which products become distances.
    pub fn assign(&self, centres: &[f32], half_squares: &[f32], labels: &mut [u32]) {
        let groups = self.data.chunks(GROUP * self.dim).zip(labels.chunks_mut(GROUP));
        parallel::each_grained(grain(GROUPS), groups, |(panels, labels)| {
            self.level.dispatch(Assign { panels, dim: self.dim, centres, half_squares, labels });
        });
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.n
    }
}

struct Nearer<'a> {
    panels: &'a [f32],
    centre: &'a [f32],
    label: u32,
    nearest: &'a mut [f32],
    labels: &'a mut [u32],
}

impl WithSimd for Nearer<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { panels, centre, label, nearest, labels } = self;
        let panels = panels.chunks(PANEL * centre.len());
        for ((panel, nearest), labels) in panels.zip(nearest.chunks_mut(PANEL)).zip(labels.chunks_mut(PANEL)) {
            let width = padded(nearest.len());
            let mut distances = [0.0; PANEL];
            let mut col = 0;
            while col + 4 * S::F32_LANES <= width {
                squares::<S, 4>(simd, panel, width, col, centre, &mut distances);
                col += 4 * S::F32_LANES;
            }
            while col < width {
                squares::<S, 1>(simd, panel, width, col, centre, &mut distances);
                col += S::F32_LANES;
            }
            for ((nearest, old), &distance) in nearest.iter_mut().zip(labels).zip(&distances) {
                *old = if distance < *nearest { label } else { *old };
                *nearest = if distance < *nearest { distance } else { *nearest };
            }
        }
    }
}

/// Squared distances of `N` vectors of columns to `centre`.
#[inline(always)]
fn squares<S: Simd, const N: usize>(
    simd: S,
    panel: &[f32],
    width: usize,
    col: usize,
    centre: &[f32],
    distances: &mut [f32],
) {
    let mut sums = [simd.splat_f32s(0.0); N];
    for (x, &c) in panel.chunks_exact(width).zip(centre) {
        let c = simd.splat_f32s(c);
        for (sum, &x) in sums.iter_mut().zip(vectors::<S, N>(x, col)) {
            let difference = simd.sub_f32s(x, c);
            *sum = simd.mul_add_e_f32s(difference, difference, *sum);
        }
    }
    vectors_mut::<S, N>(distances, col).copy_from_slice(&sums);
}

/// The sum of some numbers, by running sums that do not wait for each other.
fn sum(x: &[f32]) -> f64 {
    const SUMS: usize = 16;
    let mut sums = [0.0; SUMS];
    let (whole, rest) = x.as_chunks::<SUMS>();
    whole.iter().for_each(|x| sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum += f64::from(x)));
    sums.iter_mut().zip(rest).for_each(|(sum, &x)| *sum += f64::from(x));
    sums.iter().sum()
}

struct Assign<'a> {
    panels: &'a [f32],
    dim: usize,
    centres: &'a [f32],
    half_squares: &'a [f32],
    labels: &'a mut [u32],
}

impl WithSimd for Assign<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { panels, dim, centres, half_squares, labels } = self;
        for (panel, labels) in panels.chunks(PANEL * dim).zip(labels.chunks_mut(PANEL)) {
            let width = padded(labels.len());
            let mut best = Best { half_squares, most: [f32::NEG_INFINITY; PANEL], label: [0; PANEL] };
            let size = Size { rows: half_squares.len(), cols: width, depth: dim };
            let left = Left { data: centres, row_stride: dim, depth_stride: 1 };
            product(simd, size, left, Right { data: panel, stride: width }, &mut best);
            labels.copy_from_slice(&best.label[..labels.len()]);
        }
    }
}

/// Keeps the centre with the largest `x.c - |c|^2 / 2`, which is the nearest.
struct Best<'a> {
    half_squares: &'a [f32],
    most: [f32; PANEL],
    label: [u32; PANEL],
}

impl<S: Simd> Sink<S> for Best<'_> {
    #[inline(always)]
    fn take<const M: usize, const N: usize>(&mut self, simd: S, row: usize, col: usize, block: [[S::f32s; N]; M]) {
        let label: &mut [f32] = bytemuck::cast_slice_mut(&mut self.label);
        let (most, label) = (vectors_mut::<S, N>(&mut self.most, col), vectors_mut::<S, N>(label, col));
        for (m, products) in block.iter().enumerate() {
            let half_square = simd.splat_f32s(self.half_squares[row + m]);
            let this = simd.transmute_f32s_u32s(simd.splat_u32s((row + m) as u32));
            for n in 0..N {
                let x = simd.sub_f32s(products[n], half_square);
                let better = simd.less_than_f32s(most[n], x);
                most[n] = simd.select_f32s(better, x, most[n]);
                label[n] = simd.select_f32s(better, this, label[n]);
            }
        }
    }
}
