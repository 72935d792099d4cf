//! The backward sweep over the pairs of one head: five products of a tile, and what is taken out of its gradients.

use std::ops::Range;

use super::{
    columns::{Block, Columns},
    pool::Buffers,
    sweep::{Channels, Gradients, Place, Sweep, Taken, Weights, lanes, row_factors, transpose},
    tile::{self, KEYS, Operands, STRIDE},
};
use crate::{
    score::{
        self,
        tiles::{Backward, Factors, ParameterSums, Projection, Shares, Tile},
    },
    simd::{
        Level,
        product::{Add, Left, Right, Size, Store, Term, multiply, multiply_add},
    },
    structure::dense::padded,
};

impl Sweep<'_> {
    /// Adds what the pairs of a block with the columns in `span` give to the gradients; of the values alone where nothing is `taken`.
    pub fn backward(
        &self,
        (block, span): (&Block, &Range<usize>),
        (weights, taken): (&Weights, Option<&Taken>),
        x: Channels<'_>,
        into: &mut Gradients<'_, '_>,
    ) {
        let stride = padded(x.dim);
        self.pool.with(|buffers| {
            let mut panel = 0..0;
            block.tiles(span, |rows, columns, constants| {
                let place = (&rows, &columns, constants);
                if panel != rows {
                    self.load_gradients(buffers, &rows, (x.gradients, stride), taken.is_some());
                    panel = rows.clone();
                }
                if let Some(taken) = taken {
                    buffers.slopes.resize(KEYS * STRIDE);
                    self.differentiate(buffers, place, (weights, taken), (x.values, stride), into);
                    self.tokens(buffers, place, into);
                } else {
                    self.weights(buffers, place, weights);
                }
                if into.dv.is_empty() {
                    return;
                }
                if let Some(rounding) = self.rounding {
                    let Buffers { values, operands, .. } = buffers;
                    let size = [columns.len(), padded(rows.len())];
                    let dv = rows_from(&columns, into.first_column, &mut *into.dv, stride);
                    return rounding.values(self.level, (values, size), operands, (dv, stride));
                }
                let size = Size { rows: columns.len(), cols: stride, depth: rows.len() };
                let left = Left { data: &buffers.values, row_stride: STRIDE, depth_stride: 1 };
                let dout = self.head.rows_of(x.gradients, stride, &rows, &buffers.copies[1]);
                add(
                    self.level,
                    size,
                    left,
                    Right { data: dout, stride },
                    (&columns, into.first_column),
                    (&mut *into.dv, stride),
                );
            });
        });
    }

    /// Readies the output gradients of a block's rows; as a panel, too, where they are to be `transposed`.
    fn load_gradients(
        &self,
        buffers: &mut Buffers,
        rows: &Range<usize>,
        (gradients, stride): (&[f32], usize),
        transposed: bool,
    ) {
        let Buffers { dout, copies: [_, copy], operands, .. } = buffers;
        self.head.copy_rows(gradients, stride, rows, copy);
        let gradients = self.head.rows_of(gradients, stride, rows, copy);
        match self.rounding {
            Some(rounding) => rounding.gradients(self.level, (gradients, stride), operands),
            None if transposed => transpose(gradients, stride, padded(rows.len()), dout),
            None => {}
        }
    }

    /// Leaves weights in the values, and the gradients of the terms in the slopes.
    fn differentiate(
        &self,
        buffers: &mut Buffers,
        (rows, columns, constants): Place<'_>,
        (weights, taken): (&Weights, &Taken),
        (v, stride): (&[f32], usize),
        into: &mut Gradients<'_, '_>,
    ) {
        let v = columns.of(v, stride);
        let width = padded(rows.len());
        let dout = std::mem::take(&mut buffers.dout);
        let operands = Operands {
            size: Size { rows: columns.len(), cols: width, depth: stride },
            keys: Left { data: &v, row_stride: stride, depth_stride: 1 },
            queries: Right { data: &dout, stride: width },
        };
        if taken.whitened.is_some() {
            self.whitened(buffers, (rows, columns, constants), operands, (weights, taken), into);
        } else {
            self.terms(buffers, rows, columns);
            self.load_bias(buffers, rows, columns);
            let Buffers { slopes, operands: rounded, .. } = &mut *buffers;
            if let Some(rounding) = self.rounding {
                let shared = self.shared.and_then(|shared| shared.rows(&shared.values, columns, stride));
                rounding.products(self.level, (&v, stride, shared), rounded, width, slopes);
            } else {
                tile::terms(self.level, Term::Product, operands, slopes);
            }
            if into.bias.is_some() {
                buffers.of_bias.resize(KEYS * STRIDE);
            }
            let [of_rows, fine] = row_factors(weights, rows, self.score.is_log());
            let [a, c, tau] = [&taken.a, &taken.c, &taken.tau].map(|x| lanes(x, rows));
            let [of_columns, p, d] = [&weights.columns, &taken.p, &taken.d].map(|x| columns.of(x, 1));
            let [shares, share_logs] = [&taken.shares, &taken.share_logs].map(|x| lanes(x, rows));
            let shares = (!taken.shares.is_empty()).then_some(Shares { x: &shares, logs: &share_logs });
            let typical = (!weights.typical.is_empty()).then(|| lanes(&weights.typical, rows));
            self.with_pairs(buffers, columns, constants, |known, buffers| {
                let typical = typical.as_ref().map(|x| &x[..width]);
                let into = Backward {
                    factors: Factors { rows: &of_rows, fine: &fine, columns: &of_columns },
                    projection: Projection { a: &a, c: &c, tau: &tau, p: &p, d: &d },
                    shares,
                    weights: &mut buffers.values,
                    slopes: &mut buffers.slopes,
                    of_bias: into.bias.is_some().then_some(&mut buffers.of_bias),
                    stride: STRIDE,
                    parameters: into.parameters.as_deref_mut().map(|sums| ParameterSums { sums, typical }),
                };
                self.score.backward(self.level, [columns.len(), width], known, into);
            });
        }
        if let (Some(sums), Some(bias)) = (into.bias.as_deref_mut(), &self.head.bias) {
            let positions = [&self.head.queries[rows.clone()], &columns.of(&self.head.keys, 1)];
            sums.add(bias, rows.start, positions, &buffers.of_bias);
        }
        buffers.dout = dout;
    }

    /// The same where weights are whitened.
    fn whitened(
        &self,
        buffers: &mut Buffers,
        (rows, columns, constants): Place<'_>,
        operands: Operands<'_>,
        (weights, taken): (&Weights, &Taken),
        into: &mut Gradients<'_, '_>,
    ) {
        let (Some(statistics), Some(back)) = (&weights.whitened, &taken.whitened) else { return };
        self.terms(buffers, rows, columns);
        let len = columns.len() * STRIDE;
        buffers.terms.resize(KEYS * STRIDE);
        buffers.terms[..len].copy_from_slice(&buffers.values[..len]);
        self.score.row(self.level, &mut buffers.values[..len], None);
        tile::terms(self.level, Term::Product, operands, &mut buffers.slopes);
        self.with_pairs(buffers, columns, constants, |known, Buffers { values, slopes, width, .. }| {
            let (of, size) = ((&mut **values, &mut **slopes), [columns.len(), *width]);
            statistics.differentiate(self.level, of, size, (rows, columns.at(0)), known.visible, back);
        });
        let Buffers { slopes, terms, width, .. } = buffers;
        let mut unused = Default::default();
        let sums = ParameterSums { sums: into.parameters.as_deref_mut().unwrap_or(&mut unused), typical: None };
        let tile = Tile { data: slopes, stride: STRIDE, rows: columns.len(), width: *width };
        self.score.gradients(self.level, terms, tile, sums);
    }

    /// Adds the gradients of the images.
    fn tokens(&self, buffers: &mut Buffers, (rows, columns, _): Place<'_>, into: &mut Gradients<'_, '_>) {
        let level = self.level;
        if let Some(rounding) = self.rounding {
            let stride = self.head.stride;
            let dq = &mut into.dq[(rows.start - into.first) * stride..(rows.end - into.first) * stride];
            let dk = rows_from(columns, into.first_column, &mut *into.dk, stride);
            return self.rounded_tokens(rounding, buffers, (rows, columns), dq, dk);
        }
        let Buffers { slopes, differences: [of_keys, of_queries], copies: [copy, _], .. } = buffers;
        let (stride, keys, slopes) = (self.head.stride, columns.len(), &*slopes);
        let k = columns.of(self.k, stride);
        let q = self.head.rows_of(self.q, stride, rows, copy);
        let dq = &mut into.dq[(rows.start - into.first) * stride..(rows.end - into.first) * stride];
        if self.score.term() == Term::Product {
            let size = Size { rows: rows.len(), cols: stride, depth: keys };
            let left = Left { data: slopes, row_stride: 1, depth_stride: STRIDE };
            multiply_add(level, size, left, Right { data: &k, stride }, Add { data: dq, stride });
            let size = Size { rows: keys, cols: stride, depth: rows.len() };
            let left = Left { data: slopes, row_stride: STRIDE, depth_stride: 1 };
            add(level, size, left, Right { data: q, stride }, (columns, into.first_column), (&mut *into.dk, stride));
            return;
        }
        let pairs = score::Pairs { tokens: &k, landmarks: q, dim: stride, e: slopes, stride: STRIDE, pivots: None };
        of_keys.resize(keys * stride);
        of_queries.resize(dq.len());
        of_queries.fill(0.0);
        let factor = match self.score.term() {
            Term::SquaredDifference | Term::Chord => {
                score::gradients(level, score::Squared, pairs, of_keys, of_queries);
                2.0
            }
            _ => {
                score::gradients(level, score::Manhattan, pairs, of_keys, of_queries);
                1.0
            }
        };
        level.dispatch(|| {
            dq.iter_mut().zip(&**of_queries).for_each(|(dq, x)| *dq -= factor * x);
            for (n, row) in of_keys.chunks_exact(stride).enumerate() {
                let dk = &mut into.dk[(columns.at(n) - into.first_column) * stride..][..stride];
                dk.iter_mut().zip(row).for_each(|(dk, x)| *dk += factor * x);
            }
        });
    }
}

/// The rows of a tile's columns, and those behind them, of `into`, which begins with those of `first`: of dense heads.
fn rows_from<'x>(columns: &Columns<'_>, first: usize, into: &'x mut [f32], stride: usize) -> &'x mut [f32] {
    &mut into[(columns.at(0) - first) * stride..]
}

/// Adds a product whose rows are columns of the head, wherever these lie, to those from `first` on.
fn add(
    level: Level,
    size: Size,
    left: Left<'_>,
    right: Right<'_>,
    (columns, first): (&Columns<'_>, usize),
    (into, stride): (&mut [f32], usize),
) {
    if let Columns::Run(range) = columns {
        let data = &mut into[(range.start - first) * stride..];
        return multiply_add(level, size, left, right, Add { data, stride });
    }
    let mut part = vec![0.0; columns.len() * stride];
    multiply(level, size, left, right, Store { data: &mut part, stride });
    for (n, part) in part.chunks_exact(stride.max(1)).enumerate() {
        let sums = &mut into[(columns.at(n) - first) * stride..][..stride];
        sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
    }
}
