//! From sums of rows to weights, and from products of gradients to what a normalisation takes out of them.

use super::{
    head::Head,
    norms::{self, add_logs, norms},
    sums::{LogSum, RowSum},
    sweep::{Summed, Taken, Weights},
    whiten::Statistics,
};
use crate::{
    Shape,
    mechanism::{Factor, Normalisation, Score},
};

/// The least sum of affinities that f32 has digits of.
pub(crate) const LEAST_SUM: f64 = 1e-34;

/// The largest logarithm of what columns are divided by: f32 rounds it, and the logits that it stands beside, by a thousandth.
const MOST_COLUMN_LOG: f64 = (1_u64 << 14) as f64;

/// How far the logarithms of what rows and columns are divided by may be apart, for products of both to keep to f32.
const MOST_APART: f32 = 40.0;

/// What the distance of a query from its nearest key may take off the logarithms of a row that sums to one. Keys differ by no more
/// than they are apart, however far the query is: f32 rounds what they differ by, with `laplacian` a two hundredth of it at that
/// distance.
pub(crate) fn farthest(score: &Score) -> f64 {
    match score {
        Score::Laplacian(_) => (1_u64 << 16) as f64,
        score if score.is_gaussian() => (1_u64 << 34) as f64,
        _ => f64::INFINITY,
    }
}

/// Whether a row that sees a pair has an affinity that is not nothing, whatever f32 has left of it: a sigmoid is positive, a GELU not zero
/// where some product is not. Others may be nothing by themselves.
pub(crate) fn has_affinity(score: &Score, has_product: impl FnOnce() -> bool) -> bool {
    match score {
        Score::DotSigmoid(_) => true,
        Score::DotGelu(_) => has_product(),
        _ => false,
    }
}

/// Weights that sums of rows lead to.
#[derive(Debug, Clone, Default)]
pub(super) struct Weighed {
    pub weights: Weights,
    /// The logarithms of the sums, where they are all that has to be known.
    logs: Vec<LogSum>,
    /// Of a Frobenius norm, per row: the divisor over the norm that it comes from.
    norm_ratios: Vec<f64>,
    /// The logarithms of the rows' sums before densities are divided out, where they are.
    plain: Vec<f64>,
    /// The logarithms of the sums of the columns, where they are divided by.
    of_columns: Vec<f64>,
}

/// How many numbers per query and per key a call saves, so that its backward pass sums nothing again: [`Weighed::saved`].
pub(super) fn saved_numbers(m: &Normalisation) -> [usize; 2] {
    match m {
        Normalisation::Symmetric(_) => [2, 1],
        Normalisation::Whitened(_) => [1, 2],
        _ => [3, 0],
    }
}

/// Numbers that a call saves of all rows and columns: [`saved_numbers`].
pub(super) fn saved_len(m: &Normalisation, s: &Shape) -> usize {
    let [rows, columns] = saved_numbers(m);
    s.slices() * (rows * s.seq_q + columns * s.seq_kv)
}

/// Whether weights follow from sums over single rows, so that these can be summed while the values are.
pub(super) fn is_streamed(m: &Normalisation) -> bool {
    match m {
        Normalisation::Row(m) => m.density_exponent == 0.0,
        m => !matches!(m, Normalisation::Symmetric(_) | Normalisation::Whitened(_)),
    }
}

/// What a sweep sums of rows.
pub(super) fn summed(m: &Normalisation) -> Summed {
    match m {
        Normalisation::Frobenius(_) => Summed::Squares,
        Normalisation::Row(_) | Normalisation::Factors(_) => Summed::Divided,
        _ => Summed::Magnitudes,
    }
}

/// The factor on an affinity, or what is taken out of its logarithm, from the logarithm of a divisor; what is divided by nothing is
/// nothing.
fn factor(log: bool, ln: f64) -> f32 {
    match ln == f64::NEG_INFINITY {
        true => neutral(log),
        false if log => ln as f32,
        false => (-ln).exp() as f32,
    }
}

/// The factor on the affinities of a row that is divided: none on one of nothing, whose affinities may have slopes all the same.
fn factor_of_sum(log: bool, ln: f64) -> f32 {
    if !log && ln == f64::NEG_INFINITY { 0.0 } else { factor(log, ln) }
}

/// What leaves an affinity, or its logarithm, as it is.
fn neutral(log: bool) -> f32 {
    if log { 0.0 } else { 1.0 }
}

/// Weights of rows that are divided by something, from its logarithms.
fn rows_of(log: bool, head: &Head<'_>, logs: &[LogSum]) -> Weights {
    let row = |ln: &LogSum| if log && ln.sum.is_finite() { ln.sum } else { factor_of_sum(log, ln.whole()) };
    let rows = logs.iter().map(row).collect();
    let fine = if log { logs.iter().map(|ln| near_exp(-ln.rest)).collect() } else { Vec::new() };
    Weights { rows, fine, columns: vec![neutral(log); head.keys.len()], ..Weights::default() }
}

/// `exp(x)`, most of all of what rounding leaves.
fn near_exp(x: f64) -> f32 {
    if x.abs() < 1e-4 { (1.0 + x * (1.0 + 0.5 * x)) as f32 } else { x.exp() as f32 }
}

impl Weighed {
    /// From the sums of rows.
    pub fn of_rows(m: &Normalisation, head: &Head<'_>, log: bool, sums: &[RowSum]) -> Self {
        let logs = sums.iter().map(RowSum::log_parts).collect();
        Self::streamed(m, head, log, logs, sums.iter().map(|sum| sum.term).collect())
    }

    /// The factor on what was summed with row `n`, in units of its peak.
    pub fn factor(&self, how: Summed, log: bool, n: usize, sum: &RowSum) -> f32 {
        match how {
            _ if sum.total == 0.0 => 0.0,
            _ if !log => self.weights.rows[n],
            _ => {
                let peak = if how == Summed::Squares { sum.peak / 2.0 } else { sum.peak };
                (f64::from(self.weights.fine[n]) * (peak - f64::from(self.weights.rows[n])).exp()) as f32
            }
        }
    }

    /// The factors on rows, with the logarithms of their sums, 0 where these are not known.
    pub fn factors(&self) -> impl Iterator<Item = (f32, f64)> {
        self.weights.rows.iter().copied().zip(self.logs.iter().map(LogSum::whole).chain(std::iter::repeat(0.0)))
    }

    /// From the logarithms of the sums of rows (of squares, for a Frobenius norm) and the terms of the rows' largest values.
    pub fn streamed(m: &Normalisation, head: &Head<'_>, log: bool, logs: Vec<LogSum>, terms: Vec<f32>) -> Self {
        let whole = || logs.iter().map(LogSum::whole).collect::<Vec<_>>();
        match m {
            Normalisation::Frobenius(m) => {
                let norms = norms(head, &whole());
                let divisor = |norm: &f64| add_logs(norm / 2.0, m.eps.ln());
                let ratio =
                    |norm: &f64| if *norm == f64::NEG_INFINITY { 0.0 } else { (divisor(norm) - norm / 2.0).exp() };
                let divisors: Vec<_> = norms.iter().map(|norm| divisor(norm).into()).collect();
                let norm_ratios = norms.iter().map(ratio).collect();
                Self { weights: rows_of(log, head, &divisors), norm_ratios, logs, ..Self::default() }
            }
            Normalisation::None(m) => {
                let seen = if m.factor == Factor::InvN { head.seen() } else { vec![1.0; head.queries.len()] };
                let divisors: Vec<_> = seen.iter().map(|seen| seen.max(1.0).ln().into()).collect();
                Self { weights: rows_of(log, head, &divisors), logs, ..Self::default() }
            }
            // Rows that sum to one; those of factors, each by its own.
            _ => {
                let typical = if log { terms } else { Vec::new() };
                Self { weights: Weights { typical, ..rows_of(log, head, &logs) }, logs, ..Self::default() }
            }
        }
    }

    /// What densities `n_j^a` divide the columns by, as logarithms: `n_j` is the sum of the row at the column's position, 1 where there
    /// is none. Affinities are divided up to a factor, which rows that sum to one do not feel, lest they vanish or leave f32: the least is 1,
    /// or, where rows do not know what comes later, the first.
    pub fn densities(head: &Head<'_>, log: bool, exponent: f64, plain: &[f64]) -> Vec<f64> {
        let of_columns = at_positions(&head.queries, plain, &head.keys);
        let logs = of_columns.map(|log| log.filter(|log| log.is_finite()).map_or(0.0, |log| exponent * log));
        let mut logs: Vec<f64> = logs.collect();
        if !log {
            let first = (0..logs.len()).min_by_key(|&n| head.keys[n]).map(|n| logs[n]);
            let least = logs.iter().copied().fold(f64::INFINITY, f64::min);
            let shared = if head.sight.causal { first.unwrap_or(0.0) } else { least };
            logs.iter_mut().for_each(|log| *log -= shared);
        }
        logs
    }

    /// From the logarithms of densities and of the sums of rows before and after these are divided out, and any pair's term.
    pub fn of_densities(
        head: &Head<'_>,
        log: bool,
        densities: &[f64],
        [plain, logs]: [Vec<f64>; 2],
        term: f32,
    ) -> Self {
        let columns = densities.iter().map(|&ln| factor(log, ln)).collect();
        let logs: Vec<LogSum> = logs.into_iter().map(LogSum::from).collect();
        // Where every column has its row, and that a sum, the gradients of all rows together add up to nothing: all have the same
        // typical term.
        let paired = log && head.queries == head.keys && plain.iter().all(|log| log.is_finite());
        let typical = if paired { vec![term; logs.len()] } else { Vec::new() };
        Self { weights: Weights { columns, typical, ..rows_of(log, head, &logs) }, logs, plain, ..Self::default() }
    }

    /// A row whose affinities f32 has no digits of although they are divided by their sum: one that had a sum before densities were divided
    /// out, or one that [`has_affinity`]. The same of columns that are divided by theirs.
    pub fn vanished(&self, m: &Normalisation, score: &Score, head: &Head<'_>) -> Option<usize> {
        let small = |log: &f64| *log < LEAST_SUM.ln();
        let lost = |logs: &[f64], head: &Head<'_>| {
            let seen = head.seen();
            let has = |n: usize| seen[n] > 0.0 && has_affinity(score, || head.has_product(n));
            (0..logs.len()).find(|&n| small(&logs[n]) && has(n))
        };
        let whole = self.whole_logs();
        let mut densities = self.plain.iter().zip(&whole);
        let divided = densities.position(|(plain, log)| plain.is_finite() && small(log));
        let rows = || {
            let norms = matches!(m, Normalisation::Frobenius(_)).then(|| norms(head, &whole));
            let logs = norms.as_ref().unwrap_or(&whole);
            logs.iter().any(small).then(|| lost(logs, head))?
        };
        let columns = || self.of_columns.iter().any(small).then(|| lost(&self.of_columns, &head.transposed()))?;
        divided.or_else(rows).or_else(columns)
    }

    fn whole_logs(&self) -> Vec<f64> {
        self.logs.iter().map(LogSum::whole).collect()
    }

    /// A row or a column whose sum, by which columns are divided, left f32.
    pub fn infinite(&self) -> Option<usize> {
        let beyond = |logs: &[f64]| logs.iter().position(|&log| log == f64::INFINITY);
        beyond(&self.plain).or_else(|| beyond(&self.of_columns))
    }

    /// A row or a column by the logarithm of whose sum columns are divided, of log scores, and which leaves weights no digits.
    pub fn beyond_digits(&self, m: &Normalisation) -> Option<usize> {
        let exponent = if let Normalisation::Row(m) = m { m.density_exponent.abs().max(1.0) } else { 1.0 };
        let rows = if self.of_columns.is_empty() { &self.plain } else { &self.whole_logs() };
        let far = |logs: &[f64]| logs.iter().position(|log| log.is_finite() && log.abs() * exponent > MOST_COLUMN_LOG);
        far(rows).or_else(|| far(&self.of_columns))
    }

    /// A row that is farther than [`farthest`] from all that it sees.
    pub fn far(&self, score: &Score) -> Option<usize> {
        let most = farthest(score);
        self.logs.iter().position(|log| log.sum.is_finite() && log.whole() < -most)
    }

    /// By how much affinities with a key differ, and would have to, where f32 does not tell them apart.
    pub fn too_close(&self) -> Option<[f64; 2]> {
        self.weights.whitened.as_ref()?.too_close()
    }

    /// From the statistics by which `columns` are whitened.
    pub fn whitened(statistics: Statistics, columns: usize) -> Self {
        let weights = Weights { columns: vec![0.0; columns], whitened: Some(statistics), ..Weights::default() };
        Self { weights, ..Self::default() }
    }

    /// From the logarithms of the sums of rows and columns, by the roots of both, and any pair's term: a factor on all affinities changes
    /// nothing, so that the gradients of all rows together add up to nothing.
    pub fn symmetric(log: bool, rows: Vec<f64>, columns: Vec<f64>, term: f32) -> Self {
        let half = |logs: &[f64]| logs.iter().map(|&ln| factor(log, ln / 2.0)).collect();
        let typical = if log { vec![term; rows.len()] } else { Vec::new() };
        let weights = Weights { rows: half(&rows), columns: half(&columns), typical, ..Weights::default() };
        Self { weights, logs: rows.into_iter().map(LogSum::from).collect(), of_columns: columns, ..Self::default() }
    }

    /// What is saved of rows and of columns: see [`saved_numbers`].
    pub fn saved(&self, m: &Normalisation) -> [Vec<Vec<f32>>; 2] {
        let Weights { rows, columns, typical, whitened, .. } = &self.weights;
        match (m, whitened) {
            (_, Some(statistics)) => return statistics.saved(),
            (Normalisation::Symmetric(_), _) => return [vec![rows.clone(), typical.clone()], vec![columns.clone()]],
            _ => {}
        }
        let sums = self.logs.iter().map(|ln| ln.sum).collect();
        [vec![sums, self.logs.iter().map(|ln| ln.rest as f32).collect(), typical.clone()], Vec::new()]
    }

    /// From what was [`Weighed::saved`]; none where that does not say it all.
    pub fn restored(m: &Normalisation, head: &Head<'_>, log: bool, saved: [Vec<Vec<f32>>; 2]) -> Option<Self> {
        match (m, saved.each_ref().map(Vec::as_slice)) {
            (Normalisation::Symmetric(_), [[rows, terms], [columns]]) => {
                let typical = if log { terms.clone() } else { Vec::new() };
                let weights = Weights { rows: rows.clone(), columns: columns.clone(), typical, ..Weights::default() };
                Some(Self { weights, ..Self::default() })
            }
            (Normalisation::Whitened(m), [[row_means], [means, factors]]) => {
                let saved = [row_means, means, factors].map(Clone::clone);
                Some(Self::whitened(Statistics::new(head, m, saved), head.keys.len()))
            }
            (m, [[sums, rests, terms], []]) if is_streamed(m) => {
                let logs = sums.iter().zip(rests).map(|(&sum, &rest)| LogSum { sum, rest: rest.into() }).collect();
                Some(Self::streamed(m, head, log, logs, terms.clone()))
            }
            _ => None,
        }
    }

    /// What flows back through densities, from what comes back to the logarithms of the columns' affinities.
    fn take_densities(&self, exponent: f64, head: &Head<'_>, log: bool, columns: &[f64], taken: &mut Taken) {
        let share = |(ln, x): (&f64, Option<f64>)| {
            // The share of an affinity in the sum, or what the rounding of the logarithm leaves of it.
            let factor = if log { f64::from(*ln as f32) - ln } else { -ln };
            if ln.is_finite() { (exponent * x.unwrap_or(0.0) * factor.exp()) as f32 } else { 0.0 }
        };
        taken.shares = self.plain.iter().zip(at_positions(&head.keys, columns, &head.queries)).map(share).collect();
        taken.share_logs = self.plain.iter().map(|&ln| if ln.is_finite() { ln as f32 } else { 0.0 }).collect();
    }

    /// What the normalisation takes out of the gradients, from `delta_i = <dout_i, out_i>` and, where columns are divided,
    /// `epsilon_j = <v_j, dv_j>` (with densities, without the part of `delta`).
    pub fn taken(&self, m: &Normalisation, head: &Head<'_>, log: bool, delta: &[f64], epsilon: &[f64]) -> Taken {
        let weights = &self.weights;
        let (rows, columns) = (head.queries.len(), head.keys.len());
        let zeros = |n: usize| vec![0.0; n];
        let mut taken = Taken {
            a: zeros(rows),
            c: zeros(rows),
            tau: zeros(rows),
            p: zeros(columns),
            d: zeros(columns),
            shares: Vec::new(),
            share_logs: Vec::new(),
            halves: None,
            whitened: None,
        };
        match m {
            Normalisation::Row(m) => {
                taken.a = delta.iter().map(|&x| x as f32).collect();
                taken.p.fill(1.0);
                if m.density_exponent != 0.0 {
                    self.take_densities(m.density_exponent, head, log, epsilon, &mut taken);
                }
            }
            Normalisation::Frobenius(_) => taken.tau = norms::gradients(head, &self.norm_ratios, weights, delta, log),
            Normalisation::Symmetric(_) => {
                // The root of a sum: its logarithm is half of the sum's. They are taken relative to the largest of the rows.
                let most = weights.rows.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let root = |x: f32| if log { f64::from(x - most).exp() } else { 1.0 / f64::from(x) };
                let far = |x: &f32| (x - most).abs() > MOST_APART;
                if log && weights.rows.iter().chain(&weights.columns).any(far) {
                    taken.halves = Some([delta, epsilon].map(|x| x.iter().map(|x| (0.5 * x) as f32).collect()));
                    return taken;
                }
                let ratio = |x: f64, root: f64| if root > 0.0 { (0.5 * x / root) as f32 } else { 0.0 };
                for (n, &x) in weights.rows.iter().enumerate() {
                    (taken.a[n], taken.c[n]) = (ratio(delta[n], root(x)), root(x) as f32);
                }
                for (n, &x) in weights.columns.iter().enumerate() {
                    (taken.p[n], taken.d[n]) = (root(x) as f32, ratio(epsilon[n], root(x)));
                }
            }
            _ => {}
        }
        taken
    }
}

/// The numbers `x` of tokens at ascending positions, for tokens at others.
fn at_positions<'x>(of: &'x [u32], x: &'x [f64], others: &'x [u32]) -> impl Iterator<Item = Option<f64>> + 'x {
    others.iter().map(|other| of.binary_search(other).ok().map(|n| x[n]))
}
