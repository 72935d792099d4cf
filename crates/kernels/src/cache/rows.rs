//! The row of a query over the keys and values that are kept, wherever they lie: the pieces are read in place.

use std::{borrow::Cow, ops::Range, sync::Arc};

use super::reach::{CHUNK, Reach};
use crate::{
    Extras, Mechanism, Parameter, Result, Shape,
    engine::{self, LEAST_SUM},
    mechanism::{Bias, Factor, Form, Infsa, Normalisation},
    parallel, range,
    score::{builtin, gate, map::Map, tiles::TileScore},
    simd::{Level, rows},
    structure::dense::Decoder,
};

/// Keys and values of one head so far.
pub(super) trait Past {
    /// The first of some positions that lie in one piece; a piece ends at a multiple of [`CHUNK`], or with the positions.
    fn run(&self, positions: Range<usize>) -> Run<'_>;
}

/// Some tokens in one piece.
pub(super) struct Run<'a> {
    pub keys: &'a [f32],
    pub values: &'a [f32],
    /// Which of them are not masked; all if none.
    pub keep: Option<&'a [bool]>,
    pub len: usize,
}

/// Calls `f` with every piece of some positions, the first of these, and how many are before it.
fn each_run<P: Past>(past: &P, positions: &[Range<usize>; 2], mut f: impl FnMut(usize, usize, Run<'_>)) {
    let mut before = 0;
    for range in positions {
        let mut at = range.start;
        while at < range.end {
            let run = past.run(at..range.end);
            let len = run.len;
            f(at, before, run);
            (at, before) = (at + len, before + len);
        }
    }
}

/// The new tokens whose rows are asked for: some of a step's, for every sequence and head.
pub(super) struct Queries<'a> {
    /// `[slices, all, head_dim]`.
    pub q: &'a [f32],
    pub tokens: Range<usize>,
    pub all: usize,
    /// `[batch, all]`.
    pub keep: Option<&'a [bool]>,
}

/// What makes rows of a call's heads.
pub(super) struct Rows<'a> {
    level: Level,
    token: Shape,
    reach: Reach,
    extras: Extras<'a>,
    heads: Vec<Head<'a>>,
}

/// How the weights of one head are made.
enum Head<'a> {
    Softmax {
        scale: f32,
    },
    Infsa {
        m: &'a Infsa,
        scale: f64,
        gamma: f64,
    },
    Fna(Decoder<'a>),
    Composed {
        m: &'a Mechanism,
        score: Arc<dyn TileScore>,
        map: Map,
        scale: f64,
        gamma: f64,
        bias: Option<Relative<'a>>,
    },
}

/// What is added to the logits of one head by the distance of key and query.
struct Relative<'a> {
    rule: Bias,
    numbers: Vec<f32>,
    buckets: &'a [u32],
}

impl Relative<'_> {
    /// Writes the numbers of keys at some positions for the query at one of them.
    fn fill(&self, at: usize, positions: &[Range<usize>; 2], out: &mut [f32]) {
        let distances = positions.iter().cloned().flatten().map(|j| at - j);
        let slope = self.numbers[0];
        out.iter_mut().zip(distances).for_each(|(out, distance)| {
            *out = match self.rule {
                Bias::Alibi(_) => (-(distance as f64) * f64::from(slope)) as f32,
                // From the largest distance on all are in one bucket.
                _ => self.numbers[self.buckets[distance.min(self.buckets.len() - 1)] as usize],
            };
        });
    }
}

/// The buckets of distances that are asked for so far, where the bias of a mechanism has any.
#[derive(Debug, Clone, Default)]
pub(super) struct BucketTable(Vec<u32>);

impl BucketTable {
    /// Makes it hold the buckets of distances below `len`.
    pub fn extend(&mut self, mechanism: &Mechanism, len: usize) {
        if let Some(rule @ Bias::Buckets(m)) = mechanism.bias {
            let last = len.min(m.max_distance + 1);
            let bucket = |distance: usize| rule.entry(&Shape::square(1, 1, distance + 1, 1), distance, 0).0 as u32;
            self.0.extend((self.0.len()..last).map(bucket));
        }
    }
}

/// What the rows of one thread are made in.
#[derive(Default)]
struct Buffers {
    /// The image of the query.
    image: Vec<f32>,
    /// Scores of the keys that it sees, and then their weights.
    scores: Vec<f32>,
    bias: Vec<f32>,
    sum: Vec<f64>,
}

impl<'a> Rows<'a> {
    /// `mechanism` is one that [`super::reach::keeps_rows`].
    pub fn new(
        (mechanism, form): (&'a Mechanism, &'a Form),
        extras: Extras<'a>,
        token: Shape,
        level: Level,
        buckets: &'a BucketTable,
    ) -> Self {
        let heads = (0..token.heads).map(|head| Head::new((mechanism, form), &extras, &token, head, buckets)).collect();
        Self { level, token, reach: Reach::of(mechanism), extras, heads }
    }

    /// Whether f32 holds the scores of new queries `q [slices, all, head_dim]` over keys with entries up to `largest`, a number
    /// for every head of keys.
    pub fn check(&self, q: &[f32], all: usize, largest: &[f32]) -> Result<()> {
        let Shape { heads, head_dim, .. } = self.token;
        let slices = q.chunks_exact(all * head_dim);
        let sharing = slices.len() / largest.len();
        slices.enumerate().try_for_each(|(slice, q)| {
            let largest = [rows::max_abs(self.level, q), largest[slice / sharing]];
            let m = match &self.heads[slice % heads] {
                Head::Softmax { scale } => {
                    return range::decoded_scores(head_dim, Some(f64::from(*scale)), largest);
                }
                Head::Composed { m, .. } => m,
                Head::Infsa { .. } | Head::Fna(_) => return Ok(()),
            };
            let of = |parameter| {
                let configured = m.score.value(parameter, head_dim, heads);
                given(&self.extras, parameter, slice % heads, configured)
            };
            engine::check_row(&m.score, head_dim, of, largest)
        })
    }

    /// Writes the rows `out [slices, all, value_dim]` of some queries. `past` gives what is kept of a slice, and how many tokens there
    /// were before the step; `norms` are the squared norms of the rows so far, one a slice.
    pub fn attend<P: Past>(
        &self,
        queries: &Queries<'_>,
        out: &mut [f32],
        norms: &mut [f64],
        past: impl Fn(usize) -> (P, usize) + Sync,
    ) {
        let Shape { heads, head_dim, value_dim, .. } = self.token;
        let Queries { q, tokens, all, keep } = queries;
        let slices = out.chunks_exact_mut(all * value_dim).zip(norms).enumerate();
        parallel::each_with(slices, Buffers::default, |buffers, (slice, (out, norm))| {
            let (past, first) = past(slice);
            for n in tokens.clone() {
                let out = &mut out[n * value_dim..][..value_dim];
                if keep.is_some_and(|keep| !keep[slice / heads * all + n]) {
                    out.fill(0.0);
                    continue;
                }
                let q = &q[(slice * all + n) * head_dim..][..head_dim];
                let factor = self.row(&past, first + n, (slice % heads, q), buffers, norm);
                out.iter_mut().zip(&buffers.sum).for_each(|(out, sum)| *out = (factor * sum) as f32);
            }
        });
    }

    /// Sums the values that the query at a position sees, by their weights; returns the factor on the sum.
    fn row<P: Past>(
        &self,
        past: &P,
        at: usize,
        (head, q): (usize, &[f32]),
        buffers: &mut Buffers,
        norm: &mut f64,
    ) -> f64 {
        let (head, level, positions) = (&self.heads[head], self.level, self.reach.visible(at));
        let seen: usize = positions.iter().map(Range::len).sum();
        let (mut kept, mut masked) = (seen, false);
        each_run(past, &positions, |_, _, run| {
            let hidden = run.keep.map_or(0, |keep| keep.iter().filter(|keep| !**keep).count());
            (kept, masked) = (kept - hidden, masked || hidden > 0);
        });
        let Buffers { image, scores, bias, sum } = buffers;
        sum.clear();
        sum.resize(self.token.value_dim, 0.0);
        if kept == 0 {
            return 0.0;
        }
        scores.resize(seen, 0.0);
        let down = head.image(q, kept, image);
        each_run(past, &positions, |_, before, run| {
            head.terms(level, image, run.keys, &mut scores[before..before + run.len]);
        });
        let positive = head.has_affinity(scores);
        head.values(level, (at, &positions), scores, bias);
        if masked {
            each_run(past, &positions, |_, before, run| {
                let scores = scores[before..].iter_mut().zip(run.keep.unwrap_or_default());
                scores.filter(|(_, keep)| !**keep).for_each(|(score, _)| *score = head.absent());
            });
        }
        let factor = head.weigh(level, down, (kept, positive), scores, norm);
        each_run(past, &positions, |first, before, run| {
            accumulate(level, &scores[before..before + run.len], run.values, first, sum);
        });
        factor
    }
}

/// Adds values by their weights, chunk by chunk from position `first` on.
fn accumulate(level: Level, w: &[f32], v: &[f32], first: usize, sum: &mut [f64]) {
    let (dim, head) = (sum.len(), (CHUNK - first % CHUNK).min(w.len()));
    rows::accumulate(level, &w[..head], &v[..head * dim], 1.0, sum);
    for (w, v) in w[head..].chunks(CHUNK).zip(v[head * dim..].chunks(CHUNK * dim)) {
        rows::accumulate(level, w, v, 1.0, sum);
    }
}

impl<'a> Head<'a> {
    fn new(
        (m, form): (&'a Mechanism, &'a Form),
        extras: &Extras<'_>,
        token: &Shape,
        head: usize,
        buckets: &'a BucketTable,
    ) -> Self {
        let Shape { heads, head_dim, .. } = *token;
        let given = |parameter, configured| given(extras, parameter, head, configured);
        let root = (head_dim as f64).powf(-0.5);
        match form {
            Form::Softmax(m) => Self::Softmax { scale: m.scale.unwrap_or(root) as f32 },
            Form::Infsa(m) => {
                Self::Infsa { m, scale: m.scale.unwrap_or(root), gamma: given(Parameter::Gamma, m.gamma) }
            }
            Form::Fna(m) => {
                let [kappa, power] = m.of_head(extras, head_dim, heads, head);
                Self::Fna(Decoder { m, kappa, power })
            }
            _ => {
                let of = |parameter| given(parameter, m.score.value(parameter, head_dim, heads));
                let bias = m.bias.map(|rule| {
                    let own = || rule.default_values(token).unwrap_or_default();
                    let numbers = extras.get(Parameter::Bias).map_or_else(|| Cow::Owned(own()), Cow::Borrowed);
                    Relative { rule, numbers: numbers[rule.part(token, head)].to_vec(), buckets: &buckets.0 }
                });
                Self::Composed {
                    m,
                    score: builtin::of_head(&m.score, head_dim, heads, of),
                    map: Map::of(&m.score),
                    scale: of(Parameter::Scale),
                    gamma: given(Parameter::Gamma, m.series.gamma()),
                    bias,
                }
            }
        }
    }

    /// Writes what becomes of a query that sees `kept` keys before it meets them; returns the power of two that it was divided by.
    fn image(&self, q: &[f32], kept: usize, image: &mut Vec<f32>) -> f64 {
        let map = if let Self::Composed { map, .. } = self { *map } else { Map::Identity };
        image.resize(q.len() + map.channels(), 0.0);
        match self {
            Self::Infsa { .. } => {
                let down = rows::power_of_two(q.iter().fold(0.0, |most: f32, x| most.max(x.abs())));
                image.iter_mut().zip(q).for_each(|(image, q)| *image = q / down);
                return down.into();
            }
            Self::Composed { scale, .. } => map.apply(q, true, (-(kept as f64).ln() / scale) as f32, image),
            _ => image.copy_from_slice(q),
        }
        1.0
    }

    /// Sums over the channels of a query's image and keys.
    fn terms(&self, level: Level, image: &[f32], keys: &[f32], out: &mut [f32]) {
        match self {
            Self::Softmax { .. } | Self::Infsa { .. } => rows::dots(level, keys, image, out),
            Self::Fna(decoder) => decoder.distances(image, keys, out),
            Self::Composed { score, .. } => rows::terms(level, score.term(), keys, image, out),
        }
    }

    /// Whether some pair of these terms has an affinity that is not nothing, of which f32 may have none left.
    fn has_affinity(&self, terms: &[f32]) -> bool {
        let Self::Composed { m, .. } = self else { return false };
        engine::has_affinity(&m.score, || terms.iter().any(|&x| x != 0.0))
    }

    /// Makes logarithms of affinities, or affinities, of the sums of a composed score.
    fn values(
        &self,
        level: Level,
        (at, positions): (usize, &[Range<usize>; 2]),
        scores: &mut [f32],
        buffer: &mut Vec<f32>,
    ) {
        let Self::Composed { score, bias, .. } = self else { return };
        if let Some(bias) = bias {
            buffer.resize(scores.len(), 0.0);
            bias.fill(at, positions, buffer);
        }
        score.row(level, scores, bias.is_some().then_some(buffer));
    }

    /// The score of a pair that is none.
    fn absent(&self) -> f32 {
        match self {
            Self::Softmax { .. } => f32::NEG_INFINITY,
            Self::Infsa { .. } => 0.0,
            Self::Fna(_) => f32::INFINITY,
            Self::Composed { score, .. } => {
                if score.is_log() {
                    f32::NEG_INFINITY
                } else {
                    0.0
                }
            }
        }
    }

    /// Makes weights of scores; returns the factor on them, which is no number where affinities vanish that are `positive` and divided by their
    /// sum. Of a norm, adds the row's squares.
    fn weigh(
        &self,
        level: Level,
        down: f64,
        (kept, positive): (usize, bool),
        scores: &mut [f32],
        norm: &mut f64,
    ) -> f64 {
        match self {
            Self::Softmax { scale } => {
                exponentials(*scale, scores);
                1.0 / total(scores)
            }
            Self::Infsa { m, scale, gamma } => {
                let gain = scale * down;
                gate::activate(level, m.activation, gain as f32, scores);
                let unit = gain * rows::normalise(level, scores).factor;
                *norm += unit * unit * scores.iter().map(|w| f64::from(w * w)).sum::<f64>();
                let over = norm.sqrt() + m.eps;
                if over > 0.0 { gamma * unit / over } else { 0.0 }
            }
            Self::Fna(decoder) => {
                decoder.weigh(scores);
                1.0 / total(scores)
            }
            Self::Composed { m, score, gamma, .. } => {
                let (unit, far) = match score.is_log() {
                    true => {
                        let most = f64::from(exponentials(1.0, scores));
                        (most.exp(), most < -engine::farthest(&m.score))
                    }
                    false => (rows::normalise(level, scores).factor, false),
                };
                match &m.normalisation {
                    Normalisation::None(m) if m.factor == Factor::InvN => gamma * unit / kept as f64,
                    Normalisation::None(_) => gamma * unit,
                    _ => {
                        let total: f64 = scores.iter().map(|w| f64::from(w.abs())).sum();
                        match total {
                            total if far || positive && total * unit < LEAST_SUM => f64::NAN,
                            0.0 => 0.0,
                            total => gamma / total,
                        }
                    }
                }
            }
        }
    }
}

/// Makes `exp(scale (z - max z))` of `z`; returns the maximum.
fn exponentials(scale: f32, z: &mut [f32]) -> f32 {
    let most = z.iter().fold(f32::NEG_INFINITY, |most, z| most.max(*z));
    z.iter_mut().for_each(|z| *z = (scale * (*z - most)).exp());
    most
}

fn total(w: &[f32]) -> f64 {
    w.iter().map(|w| f64::from(*w)).sum()
}

/// What a call gives for a head, or the configuration has.
pub(super) fn given(extras: &Extras<'_>, parameter: Parameter, head: usize, configured: f64) -> f64 {
    extras.get(parameter).map_or(configured, |given| given[head].into())
}
