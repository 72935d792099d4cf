//! Sizes of a call, and the buffers that are cut from memory: each a struct, whose fields have names.

use crate::{
    Mechanism, Shape,
    linalg::is_implicit,
    mechanism::{Centering, Degree, Landmarks, Normalisation, Nystrom, Whitening},
    score::map::Map,
    structure::dense::padded,
};

/// Structs of buffers with the length of each, as they are cut one behind the other.
macro_rules! buffers {
    ($($(#[$doc:meta])* $name:ident($s:ident) { $($(#[$of:meta])* $field:ident: $len:expr,)+ })+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name<B> {
            $($(#[$of])* pub $field: B,)+
        }

        impl $name<()> {
            /// f32 that the buffers take.
            pub fn scratch_len($s: &Sizes) -> usize {
                crate::scratch::scratch_len([$($len),+])
            }
        }

        impl<'m> $name<&'m mut [f32]> {
            /// Cuts the buffers off the front of `memory`; the rest is the last result.
            pub fn cut($s: &Sizes, memory: &'m mut [f32]) -> (Self, &'m mut [f32]) {
                let ([$($field),+], rest) = crate::scratch::cut(memory, [$($len),+]);
                (Self { $($field),+ }, rest)
            }
        }

        impl<'m> $name<&'m [f32]> {
            /// The buffers as they were written.
            #[allow(dead_code)] // not all are read again
            pub fn of($s: &Sizes, memory: &'m [f32]) -> Self {
                let [$($field),+] = crate::scratch::parts(memory, [$($len),+]);
                Self { $($field),+ }
            }
        }
    )+};
}

pub(super) use buffers;

/// Sizes of the parts of a call, and what it needs of them. `landmarks` counts dead landmarks too: it is the same for all slices.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub shape: Shape,
    pub landmarks: usize,
    /// Landmarks in whole vectors.
    pub mp: usize,
    /// Channels of a token's image.
    pub dim: usize,
    /// Channels of landmarks, of images, and of values with what is appended to them, in whole vectors.
    pub rp: usize,
    pub dp: usize,
    pub vp: usize,
    /// Whether images of tokens and of landmarks differ.
    pub mapped: bool,
    pub activated: bool,
    /// Whether the gradient of the inverse may be that of how it is computed.
    pub explicit: bool,
    /// Whether columns are divided by their deviations, and whether means of columns or rows are taken off.
    pub whitens: bool,
    pub per_key: bool,
    pub per_query: bool,
    /// Whether rows are divided by their sums, which a channel of ones gives that is appended to the values.
    pub by_row: bool,
    /// Whether degrees are those of tokens, and whether a mean value is added.
    pub token_degrees: bool,
    pub biased: bool,
    /// Whether filters of landmarks mix all channels, and their places in a window; 0 without filters.
    pub full: bool,
    pub slots: usize,
}

impl Sizes {
    /// Filters of landmarks that are `full` leave partial windows out.
    pub fn of(m: &Mechanism, structure: &Nystrom, full: bool, shape: &Shape) -> Self {
        let landmarks = structure.landmarks.count(shape.seq_kv, structure.grid, !full);
        let (whitening, centering, biased) = match &m.normalisation {
            Normalisation::Whitened(w) => (w.whitening, w.centering, w.bias_one_over_n),
            _ => (Whitening::None, Centering::None, false),
        };
        let by_row = matches!(m.normalisation, Normalisation::Row(_));
        let token_degrees = matches!(&m.normalisation, Normalisation::Symmetric(s) if s.degree == Some(Degree::Token));
        let map = Map::of(&m.score);
        Self {
            shape: *shape,
            landmarks,
            mp: padded(landmarks),
            dim: shape.head_dim + map.channels(),
            rp: padded(shape.head_dim),
            dp: map.stride(shape.head_dim),
            vp: padded(shape.value_dim + usize::from(by_row)),
            mapped: map != Map::Identity,
            activated: structure.landmark_act,
            explicit: !is_implicit(structure.inverse, structure.gradient),
            whitens: whitening != Whitening::None,
            per_key: centering == Centering::PerKey,
            per_query: centering == Centering::PerQuery,
            by_row,
            token_degrees,
            biased,
            full,
            slots: match structure.landmarks {
                Landmarks::Conv { ratio } if structure.grid.is_some() => ratio * ratio,
                Landmarks::Conv { ratio } => ratio,
                _ => 0,
            },
        }
    }

    /// Whether one pass may serve tokens that are queries and keys: variances take one more, and rows that are divided are loaded otherwise.
    pub fn may_share(&self) -> bool {
        !(self.whitens || self.by_row)
    }

    /// Whether the mean of the queries' affinities is taken.
    pub fn has_query_mean(&self) -> bool {
        self.whitens || self.per_key
    }

    /// Channels of the values with what is appended to them.
    pub fn channels(&self) -> usize {
        self.shape.value_dim + usize::from(self.by_row)
    }

    /// Distance of the rows of images in memory.
    pub fn token_stride(&self) -> usize {
        if self.mapped { self.dp } else { self.shape.head_dim }
    }

    /// f32 that all slices save, but for the factors on values.
    pub fn heads(&self) -> usize {
        self.shape.slices() * Saved::scratch_len(self)
    }

    /// f32 that a call saves.
    pub fn stats(&self) -> usize {
        self.heads() + if self.whitens { self.shape.slices() * self.shape.seq_kv } else { 0 }
    }

    pub const fn only(needed: bool, len: usize) -> usize {
        if needed { len } else { 0 }
    }
}

buffers! {
    /// What the forward pass saves of a slice.
    Saved(s) {
        /// Landmarks before they are activated and mapped, `[landmarks, rp]`.
        raw: s.landmarks * s.rp,
        /// On the columns of landmarks, of which several may count as one, and the first of those that each coincides with.
        column_factors: s.mp,
        first: s.mp,
        /// By how much the largest similarity of two landmarks is below that of one to itself.
        nearest: 1,
        /// 1 where the gradient of the inverse is that of the exact one.
        settled: 1,
        /// The inverse `[landmarks, mp]`, and what f32 leaves off it.
        high: s.landmarks * s.mp,
        low: s.landmarks * s.mp,
        /// Inverse square roots of the degrees; ones without degrees.
        c: s.mp,
        /// The covariance `S` of the rows of `Cq`, and `X S X`, with what f32 leaves off them.
        covariance: Sizes::only(s.whitens, s.landmarks * s.mp),
        covariance_low: Sizes::only(s.whitens, s.landmarks * s.mp),
        form: Sizes::only(s.whitens, s.landmarks * s.mp),
        form_low: Sizes::only(s.whitens, s.landmarks * s.mp),
        /// The means of the rows of `Cq`, with what f32 leaves off it, and of `Ck`.
        query_mean: s.mp,
        query_mean_low: Sizes::only(s.has_query_mean(), s.mp),
        key_mean: s.mp,
        /// The sums of the columns of `Ck`, where they are degrees.
        degrees: Sizes::only(s.token_degrees, s.mp),
        /// `B = Ck^T V`, and `T = c X c B`.
        b: s.landmarks * s.vp,
        t: s.landmarks * s.vp,
        /// The mean of the weighted values, and what is added to every output.
        value_mean: s.vp,
        bias: s.vp,
    }

    /// A slice's landmarks as tokens meet them.
    LandmarkRows(s) {
        /// Images, `[landmarks, dp]`, and the same transposed, `[dim, mp]`.
        rows: s.landmarks * s.dp,
        transposed: s.dim * s.mp,
        /// Images as those of tokens, where these differ.
        tokens: Sizes::only(s.mapped, s.landmarks * s.dp),
        /// Activated landmarks, where their images are others.
        active: Sizes::only(s.mapped && s.activated, s.landmarks * s.rp),
    }
}
