//! What is added to the logits of pairs for where their tokens are: tiles of it, and sums of its gradients.

use std::{borrow::Cow, ops::Range};

use super::tile::{QUERIES, STRIDE};
use crate::{
    Parameter, Shape,
    call::Call,
    mechanism::{Bias, Structure},
    simd::rows::prefetch,
};

/// The bias of one head, by the positions of rows and columns.
#[derive(Clone)]
pub(super) struct PairBias<'a> {
    numbers: Numbers<'a>,
    /// Whether rows are keys.
    transposed: bool,
}

#[derive(Clone)]
enum Numbers<'a> {
    /// `strides` apart, of queries and of keys.
    Stored { values: Cow<'a, [f32]>, strides: [usize; 2] },
    /// Of offsets between tokens: that of query `i` and key `j` is at `queries[i] - keys[j]`.
    Relative { table: Vec<f32>, queries: Vec<u32>, keys: Vec<u32> },
}

/// f32 of a cache line.
const LINE: usize = 16;

impl<'a> PairBias<'a> {
    /// The bias of a slice of `call`, where the mechanism has one.
    pub fn of(call: &Call<'a>, rule: Option<Bias>, slice: usize) -> Option<Self> {
        let (rule, shape) = (rule?, call.shape);
        let part = rule.part(&shape, slice);
        let values = match call.extras.get(Parameter::Bias) {
            Some(values) => Cow::Borrowed(&values[part]),
            None => Cow::Owned(rule.default_values(&shape).unwrap_or_default()[part].to_vec()),
        };
        let numbers = match &rule {
            Bias::Tensor(m) => {
                let row = if m.keys { shape.seq_kv } else { 1 };
                Numbers::Stored { values, strides: [usize::from(m.queries) * row, usize::from(m.keys)] }
            }
            _ => {
                let [queries, keys] = positions(&rule, &shape);
                let mut table = vec![0.0; offsets(&rule, &shape)];
                each_offset(&rule, &shape, |at, (n, factor)| table[at] = (factor * f64::from(values[n])) as f32);
                Numbers::Relative { table, queries, keys }
            }
        };
        Some(Self { numbers, transposed: false })
    }

    /// The same with keys for rows.
    pub fn transposed(&self) -> Self {
        Self { transposed: !self.transposed, ..self.clone() }
    }

    /// Whether the pair of a row and a column is absent.
    pub fn is_absent(&self, row: u32, column: u32) -> bool {
        let (query, key) = if self.transposed { (column, row) } else { (row, column) };
        match &self.numbers {
            Numbers::Stored { values, strides } => {
                values[query as usize * strides[0] + key as usize * strides[1]] == f32::NEG_INFINITY
            }
            Numbers::Relative { .. } => false,
        }
    }

    /// Whether there may be pairs that are absent.
    pub fn has_absent(&self) -> bool {
        matches!(&self.numbers, Numbers::Stored { values, .. } if values.contains(&f32::NEG_INFINITY))
    }

    /// Leaves out the tokens that have no pair, so that their content enters nothing; both ascend.
    pub fn retain_paired(&self, queries: &mut Vec<u32>, keys: &mut Vec<u32>) {
        let Numbers::Stored { strides, .. } = &self.numbers else { return };
        let first = |all: usize, stride: usize| if stride == 0 { all.min(1) } else { all };
        queries.retain(|&i| keys[..first(keys.len(), strides[1])].iter().any(|&j| !self.is_absent(i, j)));
        let mut alone = keys.clone();
        // The last query has the most keys where later ones are absent.
        for &i in queries.iter().rev().take(first(queries.len(), strides[0])) {
            alone.retain(|&j| self.is_absent(i, j));
            if alone.is_empty() {
                return;
            }
        }
        let mut alone = alone.into_iter().peekable();
        keys.retain(|j| alone.next_if_eq(j).is_none());
    }

    /// Writes the tile `[column][row]` of rows and columns at some positions, zeros beyond the last row.
    pub fn load(&self, rows: &[u32], columns: &[u32], tile: &mut [f32]) {
        if rows.len() < STRIDE {
            tile.chunks_mut(STRIDE).take(columns.len()).for_each(|row| row[rows.len()..].fill(0.0));
        }
        match &self.numbers {
            Numbers::Stored { values, strides: [query, key] } => {
                let (row, column) = if self.transposed { (*key, *query) } else { (*query, *key) };
                load_stored(values, [row, column], [rows, columns], tile);
            }
            Numbers::Relative { table, queries, keys } => {
                let run = is_run(rows);
                for (out, &c) in tile.chunks_mut(STRIDE).zip(columns) {
                    let at = |r: u32| {
                        let (i, j) = if self.transposed { (c, r) } else { (r, c) };
                        (queries[i as usize] - keys[j as usize]) as usize
                    };
                    let first = at(rows[0]);
                    if run && at(rows[rows.len() - 1]) == first + rows.len() - 1 {
                        out[..rows.len()].copy_from_slice(&table[first..first + rows.len()]);
                    } else {
                        out.iter_mut().zip(rows).for_each(|(x, &r)| *x = table[at(r)]);
                    }
                }
            }
        }
    }
}

/// Whether positions follow one another.
fn is_run(positions: &[u32]) -> bool {
    positions.windows(2).all(|pair| pair[1] == pair[0] + 1)
}

/// A tile of numbers that lie `strides` apart by row and by column.
fn load_stored(values: &[f32], strides: [usize; 2], [rows, columns]: [&[u32]; 2], tile: &mut [f32]) {
    let [row, column] = strides;
    let of_columns = tile.chunks_mut(STRIDE).zip(columns);
    if row == 0 {
        return of_columns.for_each(|(out, &c)| out[..rows.len()].fill(values[c as usize * column]));
    }
    if column == 0 {
        let mut of_rows = [0.0; QUERIES];
        of_rows.iter_mut().zip(rows).for_each(|(x, &r)| *x = values[r as usize * row]);
        return of_columns.for_each(|(out, _)| out[..rows.len()].copy_from_slice(&of_rows[..rows.len()]));
    }
    if column != 1 || !is_run(columns) {
        return of_columns.for_each(|(out, &c)| {
            out.iter_mut().zip(rows).for_each(|(x, &r)| *x = values[r as usize * row + c as usize * column]);
        });
    }
    for (n, &r) in rows.iter().enumerate() {
        let from = &values[r as usize * row + columns[0] as usize..][..columns.len()];
        from.chunks(LINE).for_each(|line| prefetch(&line[0]));
        tile[n..].iter_mut().step_by(STRIDE).zip(from).for_each(|(x, &y)| *x = y);
    }
}

/// Where queries and keys are, so that the difference of two is their offset.
fn positions(rule: &Bias, shape: &Shape) -> [Vec<u32>; 2] {
    let (queries, keys) = (0..shape.seq_q as u32, 0..shape.seq_kv as u32);
    match rule {
        Bias::Grid(m) => {
            let (h, w) = (m.height as u32, m.width as u32);
            let row = 2 * w - 1;
            let of_query = |i: u32| (i / w + h - 1) * row + i % w + w - 1;
            [queries.map(of_query).collect(), keys.map(|j| j / w * row + j % w).collect()]
        }
        _ => [queries.map(|i| i + shape.seq_kv as u32 - 1).collect(), keys.collect()],
    }
}

/// How many offsets there are.
fn offsets(rule: &Bias, shape: &Shape) -> usize {
    match rule {
        Bias::Grid(m) => (2 * m.height - 1) * (2 * m.width - 1),
        _ => shape.seq_q + shape.seq_kv - 1,
    }
}

/// Calls `f` with every offset, where its number is among those of the head, and the factor on it.
fn each_offset(rule: &Bias, shape: &Shape, mut f: impl FnMut(usize, (usize, f64))) {
    for at in 0..offsets(rule, shape) {
        match rule {
            Bias::Grid(_) => f(at, (at, 1.0)),
            _ => {
                // Any pair that is so far apart.
                let j = (shape.seq_kv - 1).saturating_sub(at);
                f(at, rule.entry(shape, at + j + 1 - shape.seq_kv, j));
            }
        }
    }
}

/// Where gradients of a bias are summed over some rows of a head.
pub(super) enum BiasSums<'g> {
    /// One for every pair, `stride` apart by position from `first` on: where they go in the end.
    Pairs {
        out: &'g mut [f32],
        first: usize,
        stride: usize,
    },
    Sums(Sums),
}

/// Sums by row and column, by one of them, or by offset.
pub(super) struct Sums {
    sums: Vec<f64>,
    /// The rows, and how far apart the numbers of rows and columns are.
    rows: Range<usize>,
    strides: [usize; 2],
}

impl BiasSums<'_> {
    /// What has been summed beside, if anything.
    pub fn sums(self) -> Option<Sums> {
        if let Self::Sums(sums) = self { Some(sums) } else { None }
    }

    /// Adds a tile `[column][row]` of gradients, whose first row is the head's `first`, with the positions of rows and columns.
    pub fn add(&mut self, bias: &PairBias<'_>, first: usize, [rows, columns]: [&[u32]; 2], tile: &[f32]) {
        match self {
            Self::Sums(sums) => sums.add(bias, first, [rows, columns], tile),
            Self::Pairs { out, first, stride } => {
                // Row by row: they lie far apart.
                for (n, &position) in rows.iter().enumerate() {
                    let row = &mut out[(position as usize - *first) * *stride..][..*stride];
                    for (m, &c) in columns.iter().enumerate() {
                        row[c as usize] += tile[m * STRIDE + n];
                    }
                }
            }
        }
    }
}

impl Sums {
    pub fn new(bias: &PairBias<'_>, rows: Range<usize>) -> Self {
        let (len, strides) = match &bias.numbers {
            Numbers::Stored { values, strides: [0, column] } => (values.len(), [0, *column]),
            Numbers::Stored { strides, .. } => (rows.len() * strides[0], *strides),
            Numbers::Relative { table, .. } => (table.len(), [0, 0]),
        };
        Self { sums: vec![0.0; len], rows, strides }
    }

    fn add(&mut self, bias: &PairBias<'_>, first: usize, [rows, columns]: [&[u32]; 2], tile: &[f32]) {
        let ([row, column], first) = (self.strides, first - self.rows.start);
        for (m, &c) in columns.iter().enumerate() {
            let x = &tile[m * STRIDE..][..rows.len()];
            match &bias.numbers {
                Numbers::Stored { .. } if row == 0 => {
                    self.sums[c as usize * column] += x.iter().map(|&x| f64::from(x)).sum::<f64>();
                }
                Numbers::Stored { .. } => {
                    let sums = self.sums[first * row + c as usize * column..].iter_mut().step_by(row);
                    sums.zip(x).for_each(|(sum, &x)| *sum += f64::from(x));
                }
                Numbers::Relative { queries, keys, .. } => {
                    let at = |r: u32| (queries[r as usize] - keys[c as usize]) as usize;
                    let (first, last) = (at(rows[0]), at(rows[rows.len() - 1]));
                    if is_run(rows) && last == first + rows.len() - 1 {
                        self.sums[first..].iter_mut().zip(x).for_each(|(sum, &x)| *sum += f64::from(x));
                    } else {
                        x.iter().zip(rows).for_each(|(&x, &r)| self.sums[at(r)] += f64::from(x));
                    }
                }
            }
        }
    }

    /// Adds the sums to those of the numbers of the head; `positions` are those of all its rows.
    pub fn add_to(&self, rule: &Bias, shape: &Shape, positions: &[u32], part: &mut [f64]) {
        let [row, _] = self.strides;
        match rule {
            Bias::Tensor(_) if row == 0 => part.iter_mut().zip(&self.sums).for_each(|(sum, x)| *sum += x),
            Bias::Tensor(_) => {
                for (sums, &i) in self.sums.chunks_exact(row).zip(&positions[self.rows.clone()]) {
                    part[i as usize * row..][..row].iter_mut().zip(sums).for_each(|(sum, x)| *sum += x);
                }
            }
            _ => each_offset(rule, shape, |at, (n, factor)| part[n] += factor * self.sums[at]),
        }
    }
}

/// Whether a gradient of every pair can be written where it goes: rows of the head are in the order of the queries.
pub(super) fn is_of_pairs(rule: &Bias, structure: &Structure) -> bool {
    matches!(rule, Bias::Tensor(m) if m.queries && m.keys) && matches!(structure, Structure::Dense(_))
}

/// The gradient of a bias over all slices.
pub(super) struct OfBias<'g> {
    rule: Option<Bias>,
    /// Whether pairs are written where they go.
    of_pairs: bool,
    to: &'g mut [f32],
    /// Else their sums.
    sums: Vec<f64>,
}

impl<'g> OfBias<'g> {
    pub fn new(rule: Option<Bias>, structure: &Structure, to: Option<&'g mut [f32]>) -> Self {
        let (to, of_pairs) = (to.unwrap_or_default(), rule.is_some_and(|rule| is_of_pairs(&rule, structure)));
        let sums = if of_pairs { Vec::new() } else { vec![0.0; to.len()] };
        Self { rule, of_pairs, to, sums }
    }

    /// Where the pairs of `count` slices from `first` on go.
    pub fn pairs(&mut self, shape: &Shape, first: usize, count: usize) -> Vec<Option<&mut [f32]>> {
        match self.rule.filter(|_| self.of_pairs) {
            Some(rule) => {
                let part = rule.part(shape, first);
                let parts = self.to[part.start..].chunks_mut(part.len().max(1));
                parts.take(count).map(Some).collect()
            }
            None => (0..count).map(|_| None).collect(),
        }
    }

    /// Adds sums of a slice, whose rows are at `positions`.
    pub fn add(&mut self, shape: &Shape, slice: usize, positions: &[u32], sums: &[Sums]) {
        if let Some(rule) = self.rule {
            let part = rule.part(shape, slice);
            sums.iter().for_each(|sums| sums.add_to(&rule, shape, positions, &mut self.sums[part.clone()]));
        }
    }

    /// Adds the sums to the gradient.
    pub fn finish(self) {
        self.to.iter_mut().zip(self.sums).for_each(|(to, sum)| *to += sum as f32);
    }
}

/// Numbers of gradients of a bias that wait to be summed over batch and heads, beyond as many as there are in the end.
const WAITING: usize = 1 << 22;

/// How many slices are worked on at once: those that have numbers of their own where pairs are written to, else so many that their
/// sums take no more memory than the bias and a little.
pub(super) fn slices_at_once(rule: &Bias, structure: &Structure, shape: &Shape) -> usize {
    match rule {
        Bias::Tensor(m) if is_of_pairs(rule, structure) => {
            match (m.batch || shape.batch == 1, m.heads || shape.heads == 1) {
                (_, false) => 1,
                (false, true) => shape.heads,
                (true, true) => shape.slices(),
            }
        }
        _ => {
            let all: usize = rule.axes(shape).0.iter().product();
            (all.max(WAITING) / rule.part(shape, 0).len()).clamp(1, shape.slices())
        }
    }
}
