//! What a call through landmarks is about, and how tiles of its tokens meet them.

use std::{borrow::Cow, ops::Range};

use super::{
    activation::Norm,
    layout::{LandmarkRows, Saved, Sizes, buffers},
    pass::TOKENS,
    source::LandmarkSource,
    tile::{Tile, Zip, width, zip},
};
use crate::{
    Mechanism, Parameter,
    call::{Call, TokenRows},
    linalg::{Method, Order},
    mechanism::{Factor, Form, Landmarks, Normalisation, Nystrom, Whitened},
    score::{
        builtin,
        map::Map,
        tiles::{self, TileScore},
    },
    simd::product::{Left, Right, Size, Store, sum_terms},
    structure::dense::{Rows, positions},
};

/// What a preset has that the values do not say.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Preset {
    /// For errors.
    pub mechanism: &'static str,
    /// Filters of landmarks mix all channels, and leave partial windows out.
    pub full: bool,
    /// The mask of the keys is that of the queries too.
    pub one_mask: bool,
    /// Gradients that landmarks too close to each other leave without digits are refused.
    pub refuses_close: bool,
    /// Outputs may be multiplied by a decay.
    pub decays: bool,
}

impl Preset {
    pub const COMPOSED: Self =
        Self { mechanism: "composed", full: true, one_mask: false, refuses_close: true, decays: true };

    /// That of a mechanism through landmarks.
    pub fn of(mechanism: &Mechanism) -> Option<Self> {
        let form = mechanism.own()?;
        let preset = Self { mechanism: form.id(), decays: false, ..Self::COMPOSED };
        match form {
            Form::Soft(m) | Form::SoftPp(m) if m.landmarks != Landmarks::All => {
                Some(Self { one_mask: true, refuses_close: false, ..preset })
            }
            Form::Laplacian(_) => Some(Self { full: false, ..preset }),
            _ => None,
        }
    }
}

/// Images of the tokens, as the score's map makes them.
pub(super) struct Images<'a> {
    q: Cow<'a, [f32]>,
    k: Cow<'a, [f32]>,
}

impl<'a> Images<'a> {
    pub fn of(call: &Call<'a>, m: &Mechanism) -> Self {
        let (map, dim) = (Map::of(&m.score), call.shape.head_dim);
        let image = |x: &'a [f32]| {
            if map == Map::Identity {
                return Cow::Borrowed(x);
            }
            let stride = map.stride(dim);
            let mut images = vec![0.0; x.len() / dim * stride];
            let rows = images.chunks_exact_mut(stride).zip(x.chunks_exact(dim));
            // Tokens meet landmarks alone: all of them may lie on the side of the queries.
            rows.for_each(|(image, row)| map.apply(row, true, 0.0, image));
            Cow::Owned(images)
        };
        Self { q: image(call.q.dense()), k: image(call.k.dense()) }
    }
}

/// Queries or keys; both where they are the same tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Query,
    Key,
}

/// What a call is about, and its sizes.
#[derive(Clone, Copy)]
pub(super) struct Core<'a> {
    pub call: &'a Call<'a>,
    pub m: &'a Mechanism,
    pub structure: &'a Nystrom,
    pub preset: Preset,
    pub producer: LandmarkSource<'a>,
    pub sizes: Sizes,
    pub map: Map,
    images: &'a Images<'a>,
}

/// One slice: its score, and its landmarks as tokens meet them.
pub(super) struct Head<'h> {
    pub slice: usize,
    pub score: &'h dyn TileScore,
    pub landmarks: LandmarkRows<&'h [f32]>,
    pub count: usize,
    /// Factors on the columns, if one is not 1.
    pub factors: Option<&'h [f32]>,
}

buffers! {
    /// What a tile of tokens is loaded to.
    TileBuffers(s) {
        positions: TOKENS,
        tokens: TOKENS * s.dp,
        terms: TOKENS * s.mp,
        affinities: TOKENS * s.mp,
    }
}

/// A tile of kept tokens with their affinities to the landmarks.
pub(super) struct Loaded<'t> {
    pub kept: &'t [u32],
    pub tokens: Rows<'t>,
    /// The score's terms, where they are kept, and the affinities; rows of `stride`.
    pub terms: &'t [f32],
    pub c: &'t mut [f32],
    pub stride: usize,
    pub landmarks: usize,
}

impl Loaded<'_> {
    pub fn count(&self) -> usize {
        self.kept.len()
    }

    pub fn tile(&self) -> Tile<'_> {
        Tile { data: self.c, stride: self.stride, tokens: self.count(), landmarks: self.landmarks }
    }
}

impl<'a> Core<'a> {
    pub fn new(
        call: &'a Call<'a>,
        m: &'a Mechanism,
        structure: &'a Nystrom,
        preset: Preset,
        images: &'a Images<'a>,
    ) -> Self {
        let producer = LandmarkSource::new(structure.landmarks, structure.grid, preset.full, call);
        let sizes = Sizes::of(m, structure, preset.full, &call.shape);
        Self { call, m, structure, preset, producer, sizes, map: Map::of(&m.score), images }
    }

    pub fn method(&self) -> Method {
        method(self.structure, self.preset)
    }

    /// A parameter of a slice's score: the call's, or the configured one.
    fn value(&self, parameter: Parameter, slice: usize) -> f64 {
        let s = &self.call.shape;
        let given = self.call.extras.get(parameter).map(|values| f64::from(values[slice % s.heads]));
        given.unwrap_or_else(|| self.m.score.value(parameter, s.head_dim, s.heads))
    }

    /// Calls `f` with the score of a slice.
    pub fn with_score<R>(&self, slice: usize, f: impl FnOnce(&dyn TileScore) -> R) -> R {
        let s = &self.call.shape;
        builtin::with_head(&self.m.score, s.head_dim, s.heads, |parameter| self.value(parameter, slice), f)
    }

    /// Calls `f` with a slice; `landmarks` has the landmarks of all.
    pub fn with_head<R>(
        &self,
        slice: usize,
        landmarks: &[f32],
        column_factors: &[f32],
        f: impl FnOnce(&Head<'_>) -> R,
    ) -> R {
        let len = LandmarkRows::scratch_len(&self.sizes);
        let landmarks = LandmarkRows::of(&self.sizes, &landmarks[slice * len..][..len]);
        let factors = column_factors.contains(&0.0).then_some(column_factors);
        let count = self.producer.live(slice);
        self.with_score(slice, |score| f(&Head { slice, score, landmarks, count, factors }))
    }

    /// What a slice has saved.
    pub fn saved<'s>(&self, stats: &'s [f32], slice: usize) -> Saved<&'s [f32]> {
        let len = Saved::scratch_len(&self.sizes);
        Saved::of(&self.sizes, &stats[slice * len..][..len])
    }

    pub fn order(&self, slice: usize) -> Order {
        Order { n: self.producer.live(slice), stride: self.sizes.mp }
    }

    pub fn norm(&self) -> Option<Norm<'a>> {
        let get = |parameter| self.call.extras.get(parameter).unwrap_or_default();
        let (gamma, beta) = (get(Parameter::LandmarkNormGamma), get(Parameter::LandmarkNormBeta));
        self.structure.landmark_act.then_some(Norm { gamma, beta })
    }

    pub fn whitened(&self) -> Option<&'a Whitened> {
        if let Normalisation::Whitened(w) = &self.m.normalisation { Some(w) } else { None }
    }

    pub fn seq(&self, side: Side) -> usize {
        if side == Side::Query { self.call.shape.seq_q } else { self.call.shape.seq_kv }
    }

    pub fn keep(&self, side: Side, slice: usize) -> Option<&'a [bool]> {
        let of_key = side == Side::Key || self.preset.one_mask;
        let mask = if of_key { self.call.mask.key } else { self.call.mask.query };
        let seq = self.seq(side);
        mask.map(|keep| &keep[slice / self.call.shape.heads * seq..][..seq])
    }

    /// How many tokens of a slice are kept.
    pub fn kept(&self, side: Side, slice: usize) -> usize {
        self.keep(side, slice).map_or(self.seq(side), |keep| keep.iter().filter(|&&keep| keep).count())
    }

    /// The image of the first kept query.
    pub fn first_query(&self, slice: usize) -> Option<&'a [f32]> {
        let (seq, dim) = (self.seq(Side::Query), self.sizes.token_stride());
        let images: &'a Images<'a> = self.images;
        let first = self.keep(Side::Query, slice).map_or(Some(0), |keep| keep.iter().position(|&keep| keep))?;
        images.q.get((slice * seq + first) * dim..)?.get(..dim)
    }

    /// Whether queries and keys are the same tokens, so that one pass may serve both.
    pub fn is_shared(&self) -> bool {
        let one_mask = self.preset.one_mask || self.call.mask.key == self.call.mask.query;
        self.m.tied && one_mask && self.sizes.may_share()
    }

    /// The factor on all values of a slice.
    pub fn value_factor(&self, slice: usize) -> f64 {
        let keys = || self.kept(Side::Key, slice).max(1);
        match &self.m.normalisation {
            Normalisation::Whitened(w) => w.weight_scale.value(keys()),
            Normalisation::None(n) if n.factor == Factor::InvN => 1.0 / keys() as f64,
            _ => 1.0,
        }
    }

    /// One slice's part of a tensor of values or outputs.
    pub fn part<'x>(&self, x: &'x [f32], side: Side, slice: usize) -> &'x [f32] {
        let len = self.seq(side) * self.call.shape.value_dim;
        &x[slice * len..][..len]
    }

    /// The kept rows of values, or of what belongs to outputs, to be read as `vectors` or one by one; in the channel that is
    /// appended stands `appended`.
    pub fn rows<'x>(
        &self,
        x: &'x [f32],
        kept: &[u32],
        (appended, vectors): (f32, bool),
        buffer: &'x mut [f32],
    ) -> Rows<'x> {
        let (dim, stride) = (self.call.shape.value_dim, self.sizes.vp);
        if !self.sizes.by_row {
            return Rows::gather(TokenRows::in_one_piece(x, dim), kept, vectors, buffer);
        }
        for (row, &i) in buffer.chunks_exact_mut(stride).zip(kept) {
            row[..dim].copy_from_slice(&x[i as usize * dim..][..dim]);
            row[dim..].fill(0.0);
            row[dim] = appended;
        }
        Rows { data: &buffer[..kept.len() * stride], stride }
    }

    /// Writes terms between `rows` rows of `x` and the landmarks.
    pub fn terms(&self, head: &Head<'_>, x: Left<'_>, rows: usize, out: Store<'_>) {
        let size = Size { rows, cols: width(head.count), depth: self.sizes.dim };
        let landmarks = Right { data: head.landmarks.transposed, stride: self.sizes.mp };
        sum_terms(self.call.level, head.score.term(), size, x, landmarks, out);
    }

    /// Writes terms and affinities between `count` rows of `x` and the landmarks, to rows of `stride`.
    pub fn attend(&self, head: &Head<'_>, x: Left<'_>, rows: usize, stride: usize, [terms_out, c]: [&mut [f32]; 2]) {
        let (level, width) = (self.call.level, width(head.count));
        self.terms(head, x, rows, Store { data: &mut *c, stride });
        if !terms_out.is_empty() {
            terms_out[..rows * stride].copy_from_slice(&c[..rows * stride]);
        }
        // Rows without gaps are one.
        let tile = if stride == width {
            tiles::Tile { data: c, stride: (rows * width).max(1), rows: 1, width: rows * width }
        } else {
            tiles::Tile { data: c, stride, rows, width }
        };
        head.score.affinities(level, tile);
    }

    /// Loads the kept tokens of `range` and their affinities, the columns of coinciding landmarks counted as one.
    pub fn load<'t>(
        &self,
        head: &Head<'_>,
        side: Side,
        range: Range<usize>,
        keeps_terms: bool,
        buffers: TileBuffers<&'t mut [f32]>,
    ) -> Loaded<'t>
    where
        'a: 't,
    {
        let images: &'a [f32] = if side == Side::Query { &self.images.q } else { &self.images.k };
        let (seq, dim) = (self.seq(side), self.sizes.token_stride());
        let images = &images[head.slice * seq * dim..][..seq * dim];
        let kept = positions(range, self.keep(side, head.slice), buffers.positions);
        let tokens = Rows::gather(TokenRows::in_one_piece(images, dim), kept, false, buffers.tokens);
        let (count, stride) = (kept.len(), width(head.count));
        let terms = if keeps_terms { buffers.terms } else { &mut [] };
        let c = &mut buffers.affinities[..count * stride];
        self.attend(head, tokens.as_left(), count, stride, [&mut *terms, &mut *c]);
        if self.sizes.by_row && side == Side::Query && head.score.is_log() {
            self.lift(head, tokens, stride, c);
        }
        if let Some(factors) = head.factors {
            zip(self.call.level, c, &factors[..stride], Zip::Multiply);
        }
        Loaded { kept, tokens, terms, c, stride, landmarks: head.count }
    }
}

/// How the matrix among landmarks is inverted.
pub(super) fn method(structure: &Nystrom, preset: Preset) -> Method {
    Method {
        mechanism: preset.mechanism,
        inverse: structure.inverse,
        steps: structure.newton_iterations,
        init: structure.newton_init,
        start: None,
        ridge: structure.ridge,
        gradient: structure.gradient,
        cutoff: structure.eigen_cutoff,
    }
}
