//! From affinities to weights, pair by pair.

use super::super::matrix::{inner, ratio};
use crate::mechanism::{Factor, Normalisation};

/// The pairs of every query: their keys, and their values, logarithms of affinities or affinities. A key may occur twice.
pub(super) struct Pairs {
    pub log: bool,
    pub keys: Vec<Vec<usize>>,
    pub values: Vec<Vec<f64>>,
    /// Number of keys.
    pub columns: usize,
    pub causal: bool,
}

/// Weights of pairs, and what made them.
pub(super) struct Normalised {
    pairs: Pairs,
    /// Of rows that are divided by their sums alone: what was taken off their logarithms.
    peaks: Vec<f64>,
    kind: Kind,
    pub weights: Vec<Vec<f64>>,
}

/// Logarithms of what affinities are divided by.
enum Kind {
    /// Sums of magnitudes per row, before and after powers of the keys' sums are divided out.
    Row {
        exponent: f64,
        plain: Vec<f64>,
        sums: Vec<f64>,
    },
    /// Norm and divisor of every row: of all rows, or, causal, of those so far.
    Frobenius {
        norms: Vec<f64>,
        divisors: Vec<f64>,
    },
    /// Sums of magnitudes per row and column.
    Symmetric {
        rows: Vec<f64>,
        columns: Vec<f64>,
    },
    None {
        factors: Vec<f64>,
    },
}

impl Pairs {
    /// The logarithm of a pair's magnitude, and its sign.
    fn magnitude(&self, i: usize, p: usize) -> (f64, f64) {
        let x = self.values[i][p];
        if self.log { (x, 1.0) } else { (x.abs().ln(), if x == 0.0 { 0.0 } else { x.signum() }) }
    }

    /// Takes the largest logarithm of every row off the others.
    fn take_peaks(&mut self) -> Vec<f64> {
        let take = |row: &mut Vec<f64>| {
            let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let peak = if most.is_finite() { most } else { 0.0 };
            row.iter_mut().for_each(|x| *x -= peak);
            peak
        };
        self.values.iter_mut().map(take).collect()
    }

    /// `ln sum_p exp(term(i, p))` of every row.
    fn row_logs(&self, term: impl Fn(usize, usize) -> f64) -> Vec<f64> {
        (0..self.values.len()).map(|i| log_sum((0..self.values[i].len()).map(|p| term(i, p)))).collect()
    }

    fn each(&self, mut visit: impl FnMut(usize, usize, usize)) {
        for (i, keys) in self.keys.iter().enumerate() {
            keys.iter().enumerate().for_each(|(p, &j)| visit(i, p, j));
        }
    }
}

fn log_sum(terms: impl Iterator<Item = f64> + Clone) -> f64 {
    let most = terms.clone().fold(f64::NEG_INFINITY, f64::max);
    if most.is_finite() { most + terms.map(|x| (x - most).exp()).sum::<f64>().ln() } else { f64::NEG_INFINITY }
}

/// An empty sum divides by one.
fn or_one(log: f64) -> f64 {
    if log == f64::NEG_INFINITY { 0.0 } else { log }
}

impl Normalised {
    pub fn of(mut pairs: Pairs, normalisation: &Normalisation) -> Self {
        // A large bias would leave the sum beside it no digits.
        let alone = matches!(normalisation, Normalisation::Row(m) if m.density_exponent == 0.0);
        let peaks = if pairs.log && alone { pairs.take_peaks() } else { Vec::new() };
        let kind = Kind::of(&pairs, normalisation);
        let weight = |i: usize, p: usize, j: usize| {
            let (log, sign) = pairs.magnitude(i, p);
            if sign == 0.0 { 0.0 } else { kind.factor(i) * sign * (log - kind.divisor(i, j)).exp() }
        };
        let mut weights: Vec<Vec<f64>> = pairs.keys.iter().map(|keys| vec![0.0; keys.len()]).collect();
        pairs.each(|i, p, j| weights[i][p] = weight(i, p, j));
        Self { pairs, peaks, kind, weights }
    }

    /// The logarithm of every row's sum, where rows are normalised, and before densities were divided out.
    pub fn row_sums(&self) -> Option<[Vec<f64>; 2]> {
        let Kind::Row { plain, sums, .. } = &self.kind else { return None };
        let peak = |i: usize| self.peaks.get(i).copied().unwrap_or(0.0);
        Some([sums, plain].map(|logs| logs.iter().enumerate().map(|(i, log)| log + peak(i)).collect()))
    }

    /// The Frobenius norm that divides each row.
    pub fn norms(&self) -> Option<Vec<f64>> {
        if let Kind::Frobenius { norms, .. } = &self.kind {
            Some(norms.iter().map(|x| x.exp()).collect())
        } else {
            None
        }
    }

    /// The gradients of the values from those of the weights.
    pub fn backward(&self, dweights: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let Self { pairs, weights, .. } = self;
        // Gradients of the logarithms of magnitudes; an affinity that is 0 has none, and is seen to below.
        let mut dlogs: Vec<Vec<f64>> = pairs.keys.iter().map(|keys| vec![0.0; keys.len()]).collect();
        pairs.each(|i, p, _| dlogs[i][p] = weights[i][p] * dweights[i][p]);
        self.take_out(&mut dlogs, dweights);
        let mut dvalues = dlogs;
        if !pairs.log {
            pairs.each(|i, p, j| {
                let value = pairs.values[i][p];
                let alone = || self.kind.factor(i) * dweights[i][p] * (-self.kind.divisor(i, j)).exp();
                let none = self.kind.divisor(i, j) == f64::NEG_INFINITY;
                dvalues[i][p] = match value == 0.0 {
                    false => dvalues[i][p] / value,
                    true if none => 0.0,
                    true => alone(),
                };
            });
        }
        dvalues
    }

    /// Subtracts what flows back through the divisors.
    fn take_out(&self, dlogs: &mut [Vec<f64>], dweights: &[Vec<f64>]) {
        let Self { pairs, kind, weights, .. } = self;
        let delta: Vec<f64> = weights.iter().zip(dweights).map(|(w, dw)| inner(w, dw)).collect();
        // The share of a pair in a sum of magnitudes, by its logarithm.
        let share = |i: usize, p: usize, sum: f64| match pairs.magnitude(i, p).0 {
            f64::NEG_INFINITY => 0.0,
            log => (log - sum).exp(),
        };
        match kind {
            Kind::Row { exponent, plain, sums } => {
                let density = |j: usize| if *exponent == 0.0 { 0.0 } else { exponent * or_one(plain[j]) };
                pairs.each(|i, p, j| dlogs[i][p] -= share(i, p, sums[i] + density(j)) * delta[i]);
                if *exponent != 0.0 {
                    let mut dplain = vec![0.0; plain.len()];
                    pairs.each(|i, p, j| dplain[j] -= exponent * dlogs[i][p]);
                    pairs.each(|i, p, _| dlogs[i][p] += share(i, p, plain[i]) * dplain[i]);
                }
            }
            Kind::Frobenius { norms, divisors } => {
                // Row r divides by f_r, whose norm F_r has the squares of the rows up to r: sum_r delta_r g^2 / (f_r F_r), in units
                // of the first of them, which is the largest.
                let from = |i: usize| if pairs.causal { i } else { 0 };
                let log = |r: usize| norms[r] + divisors[r];
                let part = |i: usize, r: usize| if delta[r] == 0.0 { 0.0 } else { delta[r] * (log(i) - log(r)).exp() };
                let rows = 0..norms.len();
                let sums: Vec<f64> = rows.clone().map(|i| (from(i)..rows.end).map(|r| part(i, r)).sum()).collect();
                pairs.each(|i, p, _| {
                    let square = 2.0 * pairs.magnitude(i, p).0;
                    let taken = if norms[i] == f64::NEG_INFINITY { 0.0 } else { (square - log(i)).exp() * sums[i] };
                    dlogs[i][p] -= taken;
                });
            }
            Kind::Symmetric { rows, columns } => {
                let mut epsilon = vec![0.0; columns.len()];
                pairs.each(|i, p, j| epsilon[j] += weights[i][p] * dweights[i][p]);
                pairs.each(|i, p, j| {
                    let taken = share(i, p, or_one(rows[i])) * delta[i] + share(i, p, or_one(columns[j])) * epsilon[j];
                    dlogs[i][p] -= 0.5 * taken;
                });
            }
            Kind::None { .. } => {}
        }
    }
}

impl Kind {
    fn of(pairs: &Pairs, normalisation: &Normalisation) -> Self {
        let magnitudes = || pairs.row_logs(|i, p| pairs.magnitude(i, p).0);
        match normalisation {
            Normalisation::Row(m) => {
                let (exponent, plain) = (m.density_exponent, magnitudes());
                let density = |i: usize, p: usize| exponent * or_one(plain[pairs.keys[i][p]]);
                let sums = match exponent == 0.0 {
                    true => plain.clone(),
                    false => pairs.row_logs(|i, p| pairs.magnitude(i, p).0 - density(i, p)),
                };
                Self::Row { exponent, plain, sums }
            }
            Normalisation::Frobenius(m) => {
                let squares = pairs.row_logs(|i, p| 2.0 * pairs.magnitude(i, p).0);
                let end = |i: usize| if pairs.causal { i + 1 } else { squares.len() };
                let norms: Vec<f64> =
                    (0..squares.len()).map(|i| 0.5 * log_sum(squares[..end(i)].iter().copied())).collect();
                let divisors = norms.iter().map(|&norm| log_sum([norm, m.eps.ln()].into_iter())).collect();
                Self::Frobenius { norms, divisors }
            }
            Normalisation::Symmetric(_) => {
                let mut columns = vec![Vec::new(); pairs.columns];
                pairs.each(|i, p, j| columns[j].push(pairs.magnitude(i, p).0));
                let columns = columns.iter().map(|column| log_sum(column.iter().copied())).collect();
                Self::Symmetric { rows: magnitudes(), columns }
            }
            Normalisation::None(m) if m.factor == Factor::InvN => {
                Self::None { factors: pairs.keys.iter().map(|keys| ratio(1.0, keys.len() as f64)).collect() }
            }
            _ => Self::None { factors: vec![1.0; pairs.keys.len()] },
        }
    }

    /// The logarithm of what affinities of row `i` and column `j` are divided by.
    fn divisor(&self, i: usize, j: usize) -> f64 {
        match self {
            Self::Row { exponent, plain, sums } if *exponent != 0.0 => sums[i] + exponent * or_one(plain[j]),
            Self::Row { sums, .. } => sums[i],
            Self::Frobenius { divisors, .. } => divisors[i],
            Self::Symmetric { rows, columns } => 0.5 * (or_one(rows[i]) + or_one(columns[j])),
            Self::None { .. } => 0.0,
        }
    }

    /// The factor on the weights of row `i`.
    fn factor(&self, i: usize) -> f64 {
        if let Self::None { factors } = self { factors[i] } else { 1.0 }
    }
}
