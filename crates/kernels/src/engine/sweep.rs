//! A sweep over the pairs of one head: tiles of terms and values, and what is summed of them.

use std::{borrow::Cow, ops::Range};

use super::{
    bias::BiasSums,
    columns::{ALL, Block, Columns},
    head::Head,
    pool::{Buffers, Pool},
    rounded::{Rounding, Shared},
    sight,
    sums::RowSum,
    tile::{KEYS, Lanes, Operands, QUERIES, Running, STRIDE, rescale, terms, weigh},
    whiten::{self, Back, Moments, Statistics},
};
use crate::{
    score::{
        contract::MOST_PARAMETERS,
        tiles::{Factors, Known, TileScore, Values},
    },
    scratch::Aligned,
    simd::{
        Level,
        bf16::Rows,
        product::{Add, Left, Right, Size, Store, multiply, multiply_add},
    },
    structure::dense::padded,
};

/// One head, the score of its pairs and the instruction set.
#[derive(Clone, Copy)]
pub(super) struct Sweep<'a> {
    pub head: &'a Head<'a>,
    /// The images of its queries' own rows and of its columns.
    pub q: &'a [f32],
    pub k: &'a [f32],
    /// Per column, where sums of rows are of affinities divided by something: what is added to their logarithms.
    pub constants: Option<&'a [f32]>,
    pub score: &'a dyn TileScore,
    pub level: Level,
    pub pool: &'a Pool,
    /// Where products are of bf16, and what all blocks then share.
    pub rounding: Option<Rounding>,
    pub shared: Option<&'a Shared<'a>>,
}

/// What is summed of a row, and what becomes of its values.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Summed {
    Magnitudes,
    Squares,
    /// Magnitudes, by which the values are divided.
    Divided,
}

/// A tile: rows, columns, and what is added to the logarithms of their affinities.
pub(super) type Place<'t> = (&'t Range<usize>, &'t Columns<'t>, Option<&'t [f32]>);

/// What weighs the pairs of a head: numbers per row and per column, see [`Factors`].
#[derive(Debug, Clone, Default)]
pub(super) struct Weights {
    pub rows: Vec<f32>,
    pub fine: Vec<f32>,
    pub columns: Vec<f32>,
    /// Of rows that are normalised: the terms of their heaviest pairs.
    pub typical: Vec<f32>,
    /// In place of both, where weights are whitened.
    pub whitened: Option<Statistics>,
}

/// What is taken out of the gradients, per row (`a`, `c`, `tau`) and per column (`p`, `d`); see
/// [`Projection`](crate::score::tiles::Projection).
#[derive(Debug, Clone, Default)]
pub(super) struct Taken {
    pub a: Vec<f32>,
    pub c: Vec<f32>,
    pub tau: Vec<f32>,
    pub p: Vec<f32>,
    pub d: Vec<f32>,
    /// Per row, and the logarithms of the sums: see [`Shares`](crate::score::tiles::Shares). Empty for none.
    pub shares: Vec<f32>,
    pub share_logs: Vec<f32>,
    /// Per row and per column, of weights `w_ij = exp(l_ij - r_i - c_j)`: `x_i exp(l_ij - 2 r_i) + y_j exp(l_ij - 2 c_j)`, where sums are so
    /// far apart that `a`, `c`, `p` and `d`, factors on `w`, would leave f32.
    pub halves: Option<[Vec<f32>; 2]>,
    /// In place of all, where weights are whitened.
    pub whitened: Option<Back>,
}

/// Tensors of a head whose rows are whole vectors: values by column; output gradients by the queries' own rows.
#[derive(Clone, Copy)]
pub(super) struct Channels<'a> {
    pub values: &'a [f32],
    pub gradients: &'a [f32],
    pub dim: usize,
}

/// Gradients of a head's images and values, in the order of its rows and columns.
pub(super) struct Gradients<'a, 'g> {
    /// Of the rows from `first` on.
    pub dq: &'a mut [f32],
    pub first: usize,
    /// Of the columns from `first_column` on.
    pub dk: &'a mut [f32],
    /// Empty where they are known already.
    pub dv: &'a mut [f32],
    pub first_column: usize,
    /// Where they are wanted.
    pub parameters: Option<&'a mut [f64; MOST_PARAMETERS]>,
    pub bias: Option<&'a mut BiasSums<'g>>,
}

impl<'a> Sweep<'a> {
    /// The sums of a block's rows, and `out [rows, padded(dim)] = sum_j g_ij v_j` for values `v` (which may be none): in units of
    /// the rows' peaks, or, to be `divided`, over the sums.
    pub fn rows(&self, block: &Block, how: Summed, v: &[f32], out: &mut [f32]) -> Vec<RowSum> {
        let (stride, squares) = (v.len() / self.head.keys.len().max(1), how == Summed::Squares);
        let log = self.score.is_log();
        let mut all = Running::new(log);
        let mut begun = false;
        self.pool.with(|buffers| {
            block.tiles(&ALL, |rows, columns, constants| {
                let at = rows.start - block.rows.start;
                let whole = rows.len() == block.rows.len();
                let mut one = (!whole).then(|| all.alone(at));
                let running = one.as_mut().unwrap_or(&mut all);
                running.open();
                self.values(buffers, &rows, &columns, constants, squares, running);
                let size = [columns.len(), buffers.width];
                let counts = self.counts(&columns);
                running.settle(self.level, &mut buffers.values, size, counts.as_deref(), squares);
                if !whole && !begun {
                    out.fill(0.0);
                }
                begun |= !whole;
                let sums = &mut out[at * stride..(at + rows.len()) * stride];
                if begun {
                    rescale(sums, stride, &running.rescale);
                }
                self.spread(buffers, rows.len(), &columns, (v, stride), (sums, begun));
                begun = true;
                if let Some(one) = one {
                    all.replace(at, &one);
                }
            });
        });
        if !begun {
            out.fill(0.0);
        }
        let sums: Vec<_> = (0..block.rows.len()).map(|at| all.sum(at, squares)).collect();
        if how == Summed::Divided {
            let divisor = |sum: &RowSum| if sum.total > 0.0 { (1.0 / sum.total) as f32 } else { 0.0 };
            let rows = out.chunks_exact_mut(stride.max(1)).zip(&sums);
            rows.for_each(|(row, sum)| row.iter_mut().for_each(|x| *x *= divisor(sum)));
        }
        sums
    }

    /// Adds `sum_j w_ij v_j` of a block's rows to `out [rows, padded(dim)]`.
    pub fn apply(&self, block: &Block, weights: &Weights, v: &[f32], out: &mut [f32]) {
        let stride = v.len() / self.head.keys.len().max(1);
        self.pool.with(|buffers| {
            block.tiles(&ALL, |rows, columns, constants| {
                self.weights(buffers, (&rows, &columns, constants), weights);
                let at = rows.start - block.rows.start;
                let sums = &mut out[at * stride..(at + rows.len()) * stride];
                self.spread(buffers, rows.len(), &columns, (v, stride), (sums, true));
            });
        });
    }

    /// Makes the weights of a tile.
    pub fn weights(&self, buffers: &mut Buffers, (rows, columns, constants): Place<'_>, weights: &Weights) {
        let log = self.score.is_log();
        let mut unused = Running::new(log);
        self.values(buffers, rows, columns, constants, false, &mut unused);
        let size = [columns.len(), buffers.width];
        match &weights.whitened {
            Some(statistics) => self.with_pairs(buffers, columns, constants, |known, buffers| {
                statistics.weigh(self.level, &mut buffers.values, size, (rows, columns.at(0)), known.visible);
            }),
            None => {
                let [of_rows, fine] = row_factors(weights, rows, log);
                let of_columns = columns.of(&weights.columns, 1);
                let factors = Factors { rows: &of_rows, fine: &fine, columns: &of_columns };
                weigh(self.level, log, &mut buffers.values, size, factors, self.counts(columns).as_deref());
            }
        }
    }

    /// Writes a tile's values, by their weights, to the sums of its rows, or adds them where these have `begun`.
    fn spread(
        &self,
        buffers: &mut Buffers,
        rows: usize,
        columns: &Columns<'_>,
        (v, stride): (&[f32], usize),
        (sums, begun): (&mut [f32], bool),
    ) {
        if stride == 0 {
            return; // only the rows' sums are wanted
        }
        if let Some(rounding) = self.rounding {
            let Buffers { values, operands, width, .. } = buffers;
            let shared = self.shared.and_then(|shared| shared.pairs(&shared.value_pairs, columns, stride));
            let v = columns.of(v, stride);
            let v = (Rows::new(&v, stride, stride), shared);
            let scores = (&mut values[..], [columns.len(), *width]);
            return rounding.by_query(self.level, scores, v, operands, (sums, stride, begun));
        }
        let size = Size { rows, cols: stride, depth: columns.len() };
        let left = Left { data: &buffers.values, row_stride: 1, depth_stride: STRIDE };
        let v = columns.of(v, stride);
        let right = Right { data: &v, stride };
        if begun {
            multiply_add(self.level, size, left, right, Add { data: sums, stride });
        } else {
            multiply(self.level, size, left, right, Store { data: sums, stride });
        }
    }

    /// The moments of every row of a block, of a log score without edges.
    pub fn row_moments(&self, block: &Block) -> Vec<Moments> {
        let mut moments = [Moments::default(); QUERIES];
        self.pool.with(|buffers| {
            block.tiles(&ALL, |rows, columns, constants| {
                self.values(buffers, &rows, &columns, constants, false, &mut Running::new(true));
                let size = [columns.len(), buffers.width];
                self.with_pairs(buffers, &columns, constants, |known, buffers| {
                    whiten::add_moments(self.level, &mut buffers.values, size, known.visible, &mut moments);
                });
            });
        });
        moments[..block.rows.len()].to_vec()
    }

    /// Equal entries that columns stand for, where there are any.
    pub fn counts(&self, columns: &Columns<'_>) -> Option<Cow<'a, [f32]>> {
        let head = self.head;
        (!head.counts.is_empty()).then(|| columns.of(&head.counts, 1))
    }

    /// Writes the values of a tile; see [`Values`].
    pub fn values(
        &self,
        buffers: &mut Buffers,
        rows: &Range<usize>,
        columns: &Columns<'_>,
        constants: Option<&[f32]>,
        squares: bool,
        running: &mut Running,
    ) {
        self.load_bias(buffers, rows, columns);
        self.terms(buffers, rows, columns);
        let size = [columns.len(), buffers.width];
        self.with_pairs(buffers, columns, constants, |known, buffers| {
            let into = Values {
                data: &mut buffers.values,
                stride: STRIDE,
                sums: &mut running.next,
                terms: &mut running.terms,
                squares,
            };
            self.score.values(self.level, size, known, into);
        });
    }

    /// Writes the terms of a tile into `values`.
    pub fn terms(&self, buffers: &mut Buffers, rows: &Range<usize>, columns: &Columns<'_>) {
        self.panel(buffers, rows);
        if let Some(rounding) = self.rounding {
            let Buffers { values, operands, width, .. } = buffers;
            let keys = columns.of(self.k, self.head.stride);
            let shared = self.shared.and_then(|shared| shared.rows(&shared.keys, columns, rounding.dim));
            return rounding.terms(self.level, (&keys, self.head.stride, shared), operands, *width, values);
        }
        let (keys, stride) = (columns.of(self.k, self.head.stride), self.head.stride);
        let Buffers { values, panel, width, .. } = buffers;
        let operands = Operands {
            size: Size { rows: columns.len(), cols: *width, depth: stride },
            keys: Left { data: &keys, row_stride: stride, depth_stride: 1 },
            queries: Right { data: panel, stride: *width },
        };
        terms(self.level, self.score.term(), operands, values);
    }

    /// Calls `f` with what is known of a tile's pairs.
    pub fn with_pairs(
        &self,
        buffers: &mut Buffers,
        columns: &Columns<'_>,
        constants: Option<&[f32]>,
        f: impl FnOnce(Known<'_>, &mut Buffers),
    ) {
        let (head, bias) = (self.head, std::mem::take(&mut buffers.bias));
        let lanes = std::mem::replace(&mut buffers.lanes, sight::PanelSight::ALL);
        let counts = self.counts(columns);
        let of_columns = self.constants.map(|x| columns.of(x, 1));
        let constants = constants.or(of_columns.as_deref());
        // A constant added to a logarithm is a factor on the affinity.
        let constants = constants.map(|x| match self.score.is_log() {
            true => Cow::Borrowed(x),
            false => x.iter().map(|x| x.exp()).collect(),
        });
        let visible = match columns {
            Columns::Run(range) => lanes.visible(&head.keys[range.clone()]),
            Columns::List(_) => None,
        };
        let known = Known {
            constants: constants.as_deref(),
            counts: counts.as_deref(),
            visible,
            bias: head.adds_to(columns).then_some(&bias[..]),
        };
        f(known, buffers);
        (buffers.lanes, buffers.bias) = (lanes, bias);
    }

    /// Writes what is added to the logits of a tile, where something is.
    pub fn load_bias(&self, buffers: &mut Buffers, rows: &Range<usize>, columns: &Columns<'_>) {
        if self.head.adds_to(columns) {
            buffers.bias.resize(KEYS * STRIDE);
            self.head.load_added(rows, columns, &mut buffers.bias);
        }
    }

    /// Lays the images of some rows out as a panel, unless they are there.
    fn panel(&self, buffers: &mut Buffers, rows: &Range<usize>) {
        if buffers.rows == *rows {
            return;
        }
        let stride = self.head.stride;
        (buffers.rows, buffers.width) = (rows.clone(), padded(rows.len()));
        let (head, Buffers { panel, copies: [copy, _], operands, .. }) = (self.head, &mut *buffers);
        head.copy_rows(self.q, stride, rows, copy);
        let queries = head.rows_of(self.q, stride, rows, copy);
        match self.rounding {
            Some(rounding) => rounding.queries(self.level, (queries, stride), operands),
            None => transpose(queries, stride, padded(rows.len()), panel),
        }
        buffers.lanes.set(&self.head.sight, &self.head.queries[rows.clone()]);
    }
}

/// Some rows' numbers, and zeros; zeros where there are no numbers.
pub(super) fn lanes(all: &[f32], rows: &Range<usize>) -> Lanes {
    let mut lanes = [0.0; QUERIES];
    if let Some(all) = all.get(rows.clone()) {
        lanes[..rows.len()].copy_from_slice(all);
    }
    lanes
}

/// The rows' factors, and beyond the last what makes weights zero.
pub(super) fn row_factors(weights: &Weights, rows: &Range<usize>, log: bool) -> [Lanes; 2] {
    let mut factors = [if log { f32::MAX } else { 0.0 }; QUERIES];
    factors[..rows.len()].copy_from_slice(&weights.rows[rows.clone()]);
    let fine = if weights.fine.is_empty() { [1.0; QUERIES] } else { lanes(&weights.fine, rows) };
    [factors, fine]
}

/// Writes rows `stride` apart as `[stride][width]`, zeros beyond the last.
pub(super) fn transpose(rows: &[f32], stride: usize, width: usize, out: &mut Aligned) {
    out.resize(stride * width);
    out.fill(0.0);
    for (n, row) in rows.chunks_exact(stride.max(1)).enumerate() {
        out[n..].iter_mut().step_by(width).zip(row).for_each(|(x, &y)| *x = y);
    }
}
