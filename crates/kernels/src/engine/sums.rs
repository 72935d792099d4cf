//! Sums over the pairs of a row, as sweeps leave them.

use super::sweep::Summed;

/// What is known of a row after a sweep: `sum |g|^p`, in units of `exp(p peak)`.
#[derive(Clone, Copy)]
pub(super) struct RowSum {
    /// The largest logarithm of an affinity, times `p`; 0 for affinities.
    pub peak: f64,
    pub total: f64,
    /// The term of the largest.
    pub term: f32,
}

/// The term of the largest value of the first row that has any: one that all rows may be compared with.
pub(super) fn any_term(rows: &[RowSum]) -> f32 {
    rows.iter().find(|row| row.total > 0.0).map_or(0.0, |row| row.term)
}

/// Between what bounds sums of affinities times values keep the digits of f32.
const PRODUCTS: [f64; 2] = [1e-28, 1e36];

impl RowSum {
    /// Whether f32 has room for the affinities of the row, which are not divided by anything, times values up to `largest`, and
    /// digits for their sum over `columns`.
    pub fn fits(&self, how: Summed, largest: f64, columns: usize) -> bool {
        let sum = if how == Summed::Squares { self.total.sqrt() } else { self.total };
        let product = sum * largest;
        product == 0.0 || product / columns as f64 >= PRODUCTS[0] && product * columns as f64 <= PRODUCTS[1]
    }

    /// The part that it is of the sum of its query.
    pub fn share_of(&self, all: &Self) -> f32 {
        if self.total > 0.0 { (self.total / all.total * (self.peak - all.peak).exp()) as f32 } else { 0.0 }
    }

    /// With another sum of the same query.
    pub fn plus(&self, other: &Self) -> Self {
        match (self.total > 0.0, other.total > 0.0) {
            (_, false) => *self,
            (false, true) => *other,
            _ => {
                let (high, low) = if self.peak < other.peak { (other, self) } else { (self, other) };
                Self { total: high.total + low.total * (low.peak - high.peak).exp(), ..*high }
            }
        }
    }

    /// The logarithm of the sum; `-inf` for a row that sees nothing.
    pub fn log(&self) -> f64 {
        if self.total > 0.0 { self.peak + self.total.ln() } else { f64::NEG_INFINITY }
    }

    /// The same in the parts of [`LogSum`]: beside a bias of -1e25 an f64 has no digits for the logarithm of the total.
    pub fn log_parts(&self) -> LogSum {
        let LogSum { sum, rest } = LogSum::from(self.log());
        LogSum { sum, rest: if sum.is_finite() { self.peak - f64::from(sum) + self.total.ln() } else { rest } }
    }
}

/// The logarithm of a sum, and what f32 leaves of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct LogSum {
    pub sum: f32,
    pub rest: f64,
}

impl From<f64> for LogSum {
    fn from(ln: f64) -> Self {
        // Sums of squares beside the least bias are beyond f32: the rest has room for them.
        let sum = if ln.is_finite() { ln.clamp(f32::MIN.into(), f32::MAX.into()) as f32 } else { ln as f32 };
        Self { sum, rest: if ln.is_finite() { ln - f64::from(sum) } else { 0.0 } }
    }
}

impl LogSum {
    pub fn whole(&self) -> f64 {
        f64::from(self.sum) + self.rest
    }
}
