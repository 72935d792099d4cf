//! Landmarks from tokens, and the gradient back to the tokens. Landmarks without a kept token are left out altogether: the
//! rows that the equations give them are those of the identity, which nothing else meets.

use crate::{
    Extras, Parameter, Shape,
    call::Call,
    mechanism::{Landmarks, Windows},
    random,
    simd::{
        Level,
        product::{Add, Left, Right, Size, Store, multiply, multiply_add},
    },
    structure::dense::padded,
};

/// Channels of which a mean is taken at once. Means are sums in f64, rounded once: those that are equal are equal to the last bit, of whatever
/// tokens, and so have no slope towards each other where a score is not smooth.
const CHANNELS: usize = 16;

/// How landmarks are made.
#[derive(Clone, Copy)]
pub(crate) struct LandmarkSource<'a> {
    pub landmarks: Landmarks,
    pub grid: Option<[usize; 2]>,
    /// Filters of `conv` mix all channels, and leave partial windows out.
    pub full: bool,
    pub shape: Shape,
    pub extras: Extras<'a>,
    pub keep: Option<&'a [bool]>,
}

/// The tokens of one slice, which landmarks are made from.
#[derive(Clone, Copy)]
pub(crate) struct Tokens<'a> {
    pub slice: usize,
    /// `[seq, dim]`
    pub x: &'a [f32],
}

impl<'a> LandmarkSource<'a> {
    pub fn new(landmarks: Landmarks, grid: Option<[usize; 2]>, full: bool, call: &Call<'a>) -> Self {
        Self { landmarks, grid, full, shape: call.shape, extras: call.extras, keep: call.mask.key }
    }

    /// The tokens that the landmarks of `slice` are made from.
    pub fn tokens<'x>(&self, slice: usize, x: &'x [f32]) -> Tokens<'x> {
        let len = self.shape.seq_kv * self.shape.head_dim;
        Tokens { slice, x: &x[slice * len..][..len] }
    }

    fn keeps(&self, slice: usize, token: usize) -> bool {
        let at = slice / self.shape.heads * self.shape.seq_kv + token;
        self.keep.is_none_or(|keep| keep[at])
    }

    /// The windows, where landmarks are made from windows.
    fn windows(&self) -> Option<Windows> {
        self.landmarks.windows(self.shape.seq_kv, self.grid, !self.full)
    }

    /// Calls `visit(landmark, token)` for every live landmark that is a token.
    fn each_pick(&self, slice: usize, mut visit: impl FnMut(usize, usize)) {
        let mut live = 0;
        let mut pick = |token: usize| {
            if self.keeps(slice, token) {
                visit(live, token);
                live += 1;
            }
        };
        match self.landmarks {
            Landmarks::First { count } => (0..count).for_each(pick),
            Landmarks::Random { count, seed } => match self.extras.landmark_indices {
                Some(all) => {
                    let entry = &all[slice / self.shape.heads * count..][..count];
                    entry.iter().for_each(|&token| pick(token as usize));
                }
                None => {
                    let sequence = self.extras.first_sequence + slice / self.shape.heads;
                    random::sample(seed, sequence, self.shape.seq_kv, count).for_each(pick);
                }
            },
            _ => {}
        }
    }

    /// Calls `visit(landmark, window)` for every window with a kept token.
    fn each_window(&self, slice: usize, mut visit: impl FnMut(usize, usize)) {
        let Some(windows) = self.windows() else { return };
        let mut live = 0;
        for w in 0..windows.len() {
            if self.keep.is_none() || windows.tokens(w).any(|(token, _)| self.keeps(slice, token)) {
                visit(live, w);
                live += 1;
            }
        }
    }

    /// How many landmarks `slice` has.
    pub fn live(&self, slice: usize) -> usize {
        if let Landmarks::Given { count } = self.landmarks {
            return count.unwrap_or(0);
        }
        let mut live = 0;
        self.each_pick(slice, |_, _| live += 1);
        self.each_window(slice, |_, _| live += 1);
        live
    }

    /// The kept tokens of a window, with their slots.
    fn members(&self, slice: usize, windows: Windows, w: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        windows.tokens(w).filter(move |&(token, _)| self.keeps(slice, token))
    }

    /// The member that `stride` picks.
    fn nearest(&self, slice: usize, windows: Windows, w: usize) -> Option<usize> {
        let Landmarks::Stride { ratio } = self.landmarks else { return None };
        let centre = Landmarks::centre(ratio, self.grid.is_some());
        let nearest = self.members(slice, windows, w).min_by_key(|&(_, slot)| (slot.abs_diff(centre), slot));
        nearest.map(|(token, _)| token)
    }

    /// `landmark_weight`, where there is one.
    fn weight(&self) -> &'a [f32] {
        self.extras.get(Parameter::LandmarkWeight).unwrap_or_default()
    }

    /// f32 that [`LandmarkSource::make`] and [`LandmarkSource::backward`] work with, for up to `count` landmarks.
    pub fn work(landmarks: Landmarks, full: bool, shape: &Shape, count: usize) -> usize {
        let (d, dp) = (shape.head_dim, padded(shape.head_dim));
        if full && matches!(landmarks, Landmarks::Conv { .. }) { d * dp + count * dp } else { 0 }
    }

    /// Writes the landmarks, `[live, stride]`, zeros beyond the last channel.
    pub fn make(&self, level: Level, tokens: Tokens<'_>, out: &mut [f32], stride: usize, work: &mut [f32]) {
        let (Tokens { slice, x }, d) = (tokens, self.shape.head_dim);
        let row = |token: usize| &x[token * d..][..d];
        out.fill(0.0);
        if let Some(given) = self.extras.get(Parameter::GivenLandmarks) {
            let part = Parameter::GivenLandmarks.part(given.len(), &self.shape, slice);
            for (out, given) in out.chunks_exact_mut(stride).zip(given[part].chunks_exact(d)) {
                out[..d].copy_from_slice(given);
            }
            return;
        }
        self.each_pick(slice, |landmark, token| out[landmark * stride..][..d].copy_from_slice(row(token)));
        let Some(windows) = self.windows() else { return };
        if self.is_full() {
            return self.filter(level, tokens, out, stride, work);
        }
        let weight = self.weight();
        self.each_window(slice, |landmark, w| {
            let out = &mut out[landmark * stride..][..d];
            match self.landmarks {
                Landmarks::Stride { .. } => {
                    self.nearest(slice, windows, w).iter().for_each(|&token| out.copy_from_slice(row(token)));
                }
                Landmarks::Conv { .. } => {
                    let slots = weight.len() / d;
                    for (token, slot) in self.members(slice, windows, w) {
                        (0..d).for_each(|c| out[c] += weight[c * slots + slot] * x[token * d + c]);
                    }
                }
                _ => {
                    for (n, out) in out.chunks_mut(CHANNELS).enumerate() {
                        let (mut sums, mut count) = ([0.0; CHANNELS], 0.0);
                        for (token, _) in self.members(slice, windows, w) {
                            let x = &row(token)[n * CHANNELS..];
                            sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum += f64::from(x));
                            count += 1.0;
                        }
                        out.iter_mut().zip(sums).for_each(|(out, sum)| *out = (sum / count) as f32);
                    }
                }
            }
        });
    }

    /// Whether landmarks are filtered across channels.
    fn is_full(&self) -> bool {
        self.full && matches!(self.landmarks, Landmarks::Conv { .. })
    }

    /// Adds what `du [live, stride]` says of the tokens to `dx [seq, dim]`; of filters see [`LandmarkSource::filter_gradient`].
    pub fn backward(&self, level: Level, slice: usize, du: &[f32], stride: usize, dx: &mut [f32], work: &mut [f32]) {
        let d = self.shape.head_dim;
        let add = |dx: &mut [f32], token: usize, du: &[f32], factor: f32| {
            dx[token * d..][..d].iter_mut().zip(du).for_each(|(dx, du)| *dx += factor * du);
        };
        self.each_pick(slice, |landmark, token| add(dx, token, &du[landmark * stride..], 1.0));
        let Some(windows) = self.windows() else { return };
        if self.is_full() {
            return self.filter_backward(level, slice, du, stride, dx, work);
        }
        let weight = self.weight();
        self.each_window(slice, |landmark, w| {
            let du = &du[landmark * stride..][..d];
            match self.landmarks {
                Landmarks::Stride { .. } => {
                    self.nearest(slice, windows, w).iter().for_each(|&token| add(dx, token, du, 1.0));
                }
                Landmarks::Conv { .. } => {
                    let slots = weight.len() / d;
                    for (token, slot) in self.members(slice, windows, w) {
                        (0..d).for_each(|c| dx[token * d + c] += weight[c * slots + slot] * du[c]);
                    }
                }
                _ => {
                    let share = 1.0 / self.members(slice, windows, w).count() as f32;
                    self.members(slice, windows, w).for_each(|(token, _)| add(dx, token, du, share));
                }
            }
        });
    }

    /// The token at `slot` of every live window, `[live, stride]`; zeros for a masked one.
    fn slot(&self, tokens: Tokens<'_>, slot: usize, stride: usize, out: &mut [f32]) {
        let (Some(windows), d) = (self.windows(), self.shape.head_dim) else { return };
        self.each_window(tokens.slice, |landmark, w| {
            let out = &mut out[landmark * stride..][..stride];
            out.fill(0.0);
            if let Some((token, _)) = windows.tokens(w).find(|t| t.1 == slot)
                && self.keeps(tokens.slice, token)
            {
                out[..d].copy_from_slice(&tokens.x[token * d..][..d]);
            }
        });
    }

    /// Landmarks by a filter over all channels: one product per slot.
    fn filter(&self, level: Level, tokens: Tokens<'_>, out: &mut [f32], stride: usize, work: &mut [f32]) {
        let (weight, d, live) = (self.weight(), self.shape.head_dim, self.live(tokens.slice));
        let (matrix, rows) = work.split_at_mut(d * stride);
        let slots = weight.len() / (d * d);
        for slot in 0..slots {
            self.slot(tokens, slot, stride, rows);
            for (i, row) in matrix.chunks_exact_mut(stride).enumerate() {
                row.fill(0.0);
                (0..d).for_each(|o| row[o] = weight[(o * d + i) * slots + slot]);
            }
            let left = Left { data: rows, row_stride: stride, depth_stride: 1 };
            let size = Size { rows: live, cols: stride, depth: d };
            multiply_add(level, size, left, Right { data: matrix, stride }, Add { data: out, stride });
        }
    }

    fn filter_backward(&self, level: Level, slice: usize, du: &[f32], stride: usize, dx: &mut [f32], work: &mut [f32]) {
        let (weight, d, live) = (self.weight(), self.shape.head_dim, self.live(slice));
        let (Some(windows), slots) = (self.windows(), weight.len() / (d * d)) else { return };
        let (matrix, rows) = work.split_at_mut(d * stride);
        for slot in 0..slots {
            for (o, row) in matrix.chunks_exact_mut(stride).enumerate() {
                row.fill(0.0);
                (0..d).for_each(|i| row[i] = weight[(o * d + i) * slots + slot]);
            }
            let left = Left { data: du, row_stride: stride, depth_stride: 1 };
            let size = Size { rows: live, cols: stride, depth: d };
            multiply(level, size, left, Right { data: matrix, stride }, Store { data: rows, stride });
            self.each_window(slice, |landmark, w| {
                if let Some((token, _)) = self.members(slice, windows, w).find(|t| t.1 == slot) {
                    let row = &rows[landmark * stride..][..d];
                    dx[token * d..][..d].iter_mut().zip(row).for_each(|(dx, x)| *dx += x);
                }
            });
        }
    }

    /// Adds one slice's gradient of `landmark_weight` at one slot, to `out [d, stride]` (`[1, stride]` for filters within
    /// channels).
    pub fn filter_gradient(
        &self,
        level: Level,
        tokens: Tokens<'_>,
        slot: usize,
        du: &[f32],
        out: &mut [f32],
        rows: &mut [f32],
    ) {
        let (d, stride, live) = (self.shape.head_dim, padded(self.shape.head_dim), self.live(tokens.slice));
        self.slot(tokens, slot, stride, rows);
        if !self.full {
            for (du, x) in du.chunks_exact(stride).zip(rows.chunks_exact(stride)).take(live) {
                (0..stride).for_each(|c| out[c] += du[c] * x[c]);
            }
            return;
        }
        let left = Left { data: du, row_stride: 1, depth_stride: stride };
        let size = Size { rows: d, cols: stride, depth: live };
        multiply_add(level, size, left, Right { data: rows, stride }, Add { data: out, stride });
    }
}
