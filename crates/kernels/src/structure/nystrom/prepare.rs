//! Landmarks, what stands for those that coincide, and the inverse among them.

use std::sync::Mutex;

use super::{
    layout::{LandmarkRows, Saved, Sizes},
    merge::Counted,
    operator::{Core, Head},
    pass::share,
    source::LandmarkSource,
    tile::{transpose, width},
};
use crate::{
    Error, Result,
    linalg::{Entries, Method, Order},
    mechanism::{Degree, Normalisation},
    scratch::{cut, scratch_len},
    simd::product::Left,
};

/// f32 of memory that [`Core::prepare`] takes per worker.
pub(super) fn memory(method: &Method, landmarks: crate::mechanism::Landmarks, full: bool, sizes: &Sizes) -> usize {
    let order = Order { n: sizes.landmarks, stride: sizes.mp };
    scratch_len([order.len()])
        + method.work(order).max(LandmarkSource::work(landmarks, full, &sizes.shape, sizes.landmarks))
}

impl Core<'_> {
    /// Writes the landmarks of all slices to `landmarks`, and what is saved of them and of their inverse to `heads`.
    pub fn prepare(&self, heads: &mut [f32], landmarks: &mut [f32], work: &mut [f32]) -> Result<()> {
        // The first slice that has no inverse is told of.
        let failure: Mutex<Option<(usize, Error)>> = Mutex::new(None);
        let memory = memory(&self.method(), self.structure.landmarks, self.preset.full, &self.sizes);
        let slices = heads
            .chunks_exact_mut(Saved::scratch_len(&self.sizes))
            .zip(landmarks.chunks_mut(LandmarkRows::scratch_len(&self.sizes)));
        share(slices.enumerate(), work, memory, |(slice, (saved, landmarks)), memory| {
            if let Err(error) = self.prepare_slice(slice, saved, landmarks, memory)
                && let Ok(mut failure) = failure.lock()
                && failure.as_ref().is_none_or(|(first, _)| slice < *first)
            {
                *failure = Some((slice, error));
            }
        });
        failure.into_inner().unwrap_or_default().map_or(Ok(()), |(_, error)| Err(error))
    }

    fn prepare_slice(&self, slice: usize, saved: &mut [f32], landmarks: &mut [f32], memory: &mut [f32]) -> Result<()> {
        let (sizes, level, order) = (&self.sizes, self.call.level, self.order(slice));
        saved.fill(0.0);
        let (saved, _) = Saved::cut(sizes, saved);
        let ([a], work) = cut(memory, [sizes.landmarks * sizes.mp]);
        let raw = &mut saved.raw[..order.n * sizes.rp];
        self.producer.make(level, self.producer.tokens(slice, self.call.k.dense()), raw, sizes.rp, work);
        self.place(saved.raw, order.n, &mut *landmarks);
        let landmarks = LandmarkRows::of(sizes, landmarks);
        self.with_score(slice, |score| {
            self.among(&Head { slice, score, landmarks, count: order.n, factors: None }, &mut [], a);
        });
        saved.c.fill(1.0);
        if self.landmark_degrees() {
            for (c, row) in saved.c.iter_mut().zip(a.chunks_exact(sizes.mp)).take(order.n) {
                *c = row[..order.n].iter().map(|&x| f64::from(x)).sum::<f64>().powf(-0.5) as f32;
            }
        }
        let counted =
            Counted { factors: &mut *saved.column_factors, first: saved.first, nearest: &mut saved.nearest[0] };
        counted.write(order, a, landmarks.rows, sizes.dp);
        let start = self.merge(order, saved.column_factors, a, work);
        let inverse = Entries { high: saved.high, low: saved.low };
        let settled = Method { start, ..self.method() }.invert(level, order, a, inverse, work)?;
        saved.settled[0] = u8::from(settled).into();
        Ok(())
    }

    /// Whether degrees are those of landmarks.
    pub fn landmark_degrees(&self) -> bool {
        let degree = if let Normalisation::Symmetric(s) = &self.m.normalisation { s.degree } else { return false };
        degree.unwrap_or_default() == Degree::Landmark
    }

    /// Places `n` landmarks where tokens meet them: activated, mapped, and transposed.
    pub fn place(&self, raw: &[f32], n: usize, landmarks: &mut [f32]) {
        let (sizes, d) = (&self.sizes, self.call.shape.head_dim);
        let (landmarks, _) = LandmarkRows::cut(sizes, landmarks);
        let live = n * sizes.rp;
        let before = match (self.norm(), sizes.mapped) {
            (Some(norm), true) => {
                norm.forward(&raw[..live], sizes.rp, &mut landmarks.active[..live]);
                &*landmarks.active
            }
            (Some(norm), false) => {
                norm.forward(&raw[..live], sizes.rp, &mut landmarks.rows[..live]);
                &[]
            }
            (None, true) => raw,
            (None, false) => {
                landmarks.rows[..live].copy_from_slice(&raw[..live]);
                &[]
            }
        };
        let images = landmarks.rows.chunks_exact_mut(sizes.dp).zip(landmarks.tokens.chunks_exact_mut(sizes.dp));
        for ((image, token), row) in images.zip(before.chunks_exact(sizes.rp)).take(n) {
            self.map.apply(&row[..d], false, 0.0, image);
            self.map.apply(&row[..d], true, 0.0, token);
        }
        transpose(&landmarks.rows[..n * sizes.dp], sizes.dp, sizes.dim, landmarks.transposed, sizes.mp);
    }

    /// Writes terms (where there is room for them) and affinities among all landmarks to rows of `mp`, zeros beyond the last.
    pub fn among(&self, head: &Head<'_>, terms: &mut [f32], a: &mut [f32]) {
        let (sizes, n) = (&self.sizes, head.count);
        a.fill(0.0);
        self.attend(
            head,
            Left { data: self.as_tokens(head), row_stride: sizes.dp, depth_stride: 1 },
            n,
            sizes.mp,
            [terms, &mut *a],
        );
        a.chunks_exact_mut(sizes.mp).take(n).for_each(|row| row[n..width(n)].fill(0.0));
    }

    /// The landmarks as landmarks meet them.
    pub fn as_tokens<'h>(&self, head: &Head<'h>) -> &'h [f32] {
        let rows = if self.sizes.mapped { head.landmarks.tokens } else { head.landmarks.rows };
        &rows[..head.count * self.sizes.dp]
    }
}

/// Places the landmarks of all slices again, from what is saved.
pub(super) fn place_all(core: &Core<'_>, stats: &[f32], landmarks: &mut [f32], work: &mut [f32]) {
    let slices = landmarks.chunks_mut(LandmarkRows::scratch_len(&core.sizes)).enumerate();
    share(slices, work, 0, |(slice, landmarks), _| {
        core.place(core.saved(stats, slice).raw, core.producer.live(slice), landmarks);
    });
}
