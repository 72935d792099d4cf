//! The outermost eigenpairs of a symmetric operator: block Lanczos with thick restarts.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::dense::symmetric_eigen;
use crate::{
    Dense, Error, LinearOperator, Result,
    vector::{axpy, dot, norm, scaled},
};

/// How the outermost eigenpairs are sought.
///
/// A Krylov space of blocks, all of its vectors kept orthogonal, with Rayleigh-Ritz on the whole of it: when it is full,
/// the best Ritz vectors stay and it grows again. The products with the basis are kept beside it, so that the residual of
/// every pair returned is the measured `|A x - theta x|`, not an estimate. Vectors and sums are f64; with an operator in
/// f32 residuals reach about 1e-7 of its norm.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Lanczos {
    /// Eigenpairs at the upper end. Default 10.
    pub largest: usize,
    /// Eigenpairs at the lower end, found in the same space. Default 0.
    pub smallest: usize,
    /// Vectors of a block, multiplied in one pass; also how many copies of a multiple eigenvalue are sure to be told
    /// apart. Default 8.
    pub block: usize,
    /// Vectors kept at most; at least the wanted pairs and three blocks are. Default 128.
    pub basis: usize,
    /// Residual, relative to the largest eigenvalue by size, at which a pair is done. Default 1e-8; 1e-6 suits operators
    /// in f32.
    pub tol: f64,
    /// Products with single vectors allowed. Default 2000.
    pub max_products: usize,
    /// Seed of the start. Default 0.
    pub seed: u64,
}

impl Default for Lanczos {
    fn default() -> Self {
        Self { largest: 10, smallest: 0, block: 8, basis: 128, tol: 1e-8, max_products: 2000, seed: 0 }
    }
}

/// Eigenpairs with their measured residuals.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Eigenpairs {
    /// The eigenvalues, descending: the largest first, then the smallest wanted.
    pub values: Vec<f64>,
    /// Their unit vectors.
    #[serde(skip)]
    pub vectors: Vec<Vec<f64>>,
    /// `|A x - theta x|` of each, relative to the largest eigenvalue by size.
    pub residuals: Vec<f64>,
    /// Products with single vectors spent.
    pub products: usize,
}

impl Lanczos {
    /// The eigenpairs of the symmetric `operator`. Where it has fewer tokens than pairs are wanted, all of them.
    ///
    /// # Errors
    /// [`Error::Eigen`] when the products run out; those of the operator.
    pub fn eigenpairs(&self, operator: &impl LinearOperator) -> Result<Eigenpairs> {
        let n = operator.len();
        let wanted = [self.largest.min(n), self.smallest.min(n.saturating_sub(self.largest))];
        let keep = wanted[0] + wanted[1];
        let block = self.block.clamp(1, n.max(1));
        let room = self.basis.max(keep + 3 * block).min(n);
        let mut space = Space::new(n, self.seed);
        let mut next = space.fresh(block.min(room));
        let mut products = 0;
        loop {
            products += next.len();
            space.grow(next, operator)?;
            let ritz = space.ritz(wanted)?;
            if ritz.residuals.iter().all(|&r| r <= self.tol) || space.basis.len() == n {
                return Ok(Eigenpairs { products, ..ritz });
            }
            if products >= self.max_products || ritz.residuals.iter().any(|r| !r.is_finite()) {
                return Err(self.failure(&ritz, products));
            }
            next = space.next(block);
            if space.basis.len() + next.len() > room {
                // More than the wanted ones, so that little of what the space knows is lost.
                let spare = (room - keep - block) / 2;
                space.compress(match wanted {
                    [upper, 0] => [upper + spare, 0],
                    [upper, lower] => [upper + spare / 2, lower + spare / 2],
                })?;
            }
        }
    }

    fn failure(&self, ritz: &Eigenpairs, products: usize) -> Error {
        let converged = ritz.residuals.iter().filter(|&&r| r <= self.tol).count();
        let residual =
            ritz.residuals.iter().copied().fold(0.0, |worst: f64, r| if r.is_nan() { r } else { worst.max(r) });
        Error::Eigen { converged, wanted: ritz.residuals.len(), products, residual, tol: self.tol }
    }
}

/// An orthonormal basis with its products.
struct Space {
    n: usize,
    basis: Vec<Vec<f64>>,
    images: Vec<Vec<f64>>,
    /// The operator within the space: the lower triangle of `basis^T images`, row by row.
    projection: Vec<Vec<f64>>,
    /// Where the vectors of the last block begin.
    last: usize,
    rng: ChaCha8Rng,
}

impl Space {
    fn new(n: usize, seed: u64) -> Self {
        Self {
            n,
            basis: Vec::new(),
            images: Vec::new(),
            projection: Vec::new(),
            last: 0,
            rng: ChaCha8Rng::seed_from_u64(seed),
        }
    }

    /// `count` random orthonormal vectors outside the space.
    fn fresh(&mut self, count: usize) -> Vec<Vec<f64>> {
        let mut block = Vec::new();
        while block.len() < count {
            let x = (0..self.n).map(|_| self.rng.random_range(-1.0..1.0)).collect();
            block.extend(self.outside(x, &block));
        }
        block
    }

    /// The unit vector of what `x` adds to the space and `block`; `None` where that is rounding.
    fn outside(&self, mut x: Vec<f64>, block: &[Vec<f64>]) -> Option<Vec<f64>> {
        let size = norm(&x);
        // Twice is enough: the second pass removes what rounding left of the first.
        for _ in 0..2 {
            for direction in self.basis.iter().chain(block) {
                axpy(-dot(direction, &x), direction, &mut x);
            }
        }
        let rest = norm(&x);
        (rest > 1e-12 * size).then(|| scaled(&x, 1.0 / rest))
    }

    fn grow(&mut self, block: Vec<Vec<f64>>, operator: &impl LinearOperator) -> Result<()> {
        self.last = self.basis.len();
        self.images.extend(operator.apply_block(&block)?);
        self.basis.extend(block);
        let (v, w) = (&self.basis, &self.images);
        for i in self.last..v.len() {
            self.projection.push((0..=i).map(|j| 0.5 * (dot(&v[i], &w[j]) + dot(&v[j], &w[i]))).collect());
        }
        Ok(())
    }

    /// The next block: what the products of the last one add to the space, filled up at random where they add nothing.
    fn next(&mut self, count: usize) -> Vec<Vec<f64>> {
        let count = count.min(self.n - self.basis.len());
        let mut block: Vec<Vec<f64>> = Vec::new();
        for image in self.images[self.last..].iter().take(count) {
            let outside = self.outside(image.clone(), &block);
            block.extend(outside);
        }
        while block.len() < count {
            let x = (0..self.n).map(|_| self.rng.random_range(-1.0..1.0)).collect();
            let outside = self.outside(x, &block);
            block.extend(outside);
        }
        block
    }

    /// Eigenvalues of the operator within the space, ascending, and their coordinates.
    fn projected(&self) -> Result<(Vec<f64>, Vec<Vec<f64>>)> {
        let rows = &self.projection;
        let found = symmetric_eigen(&Dense::from_fn(rows.len(), |i, j| rows[i].get(j).copied().unwrap_or(0.0)))?;
        Ok((found.values, found.vectors))
    }

    /// The wanted pairs as they stand.
    fn ritz(&self, wanted: [usize; 2]) -> Result<Eigenpairs> {
        let (values, coordinates) = self.projected()?;
        let size = values.iter().fold(f64::MIN_POSITIVE, |size, x| size.max(x.abs()));
        let m = values.len();
        let lower = wanted[1].min(m);
        let upper = (m - wanted[0].min(m)).max(lower);
        let chosen: Vec<_> = (upper..m).rev().chain((0..lower).rev()).collect();
        let vectors: Vec<_> = chosen.iter().map(|&i| combined(&self.basis, &coordinates[i])).collect();
        let residual = |(&i, x): (&usize, &Vec<f64>)| {
            let mut rest = combined(&self.images, &coordinates[i]);
            axpy(-values[i], x, &mut rest);
            norm(&rest) / size
        };
        let mut residuals: Vec<_> = chosen.iter().zip(&vectors).map(residual).collect();
        if m < wanted[0] + wanted[1] {
            residuals.push(f64::MAX); // the space is still smaller than what is wanted of it
        }
        Ok(Eigenpairs { values: chosen.iter().map(|&i| values[i]).collect(), vectors, residuals, products: 0 })
    }

    /// Keeps the Ritz vectors of the `upper` largest and `lower` smallest values.
    fn compress(&mut self, [upper, lower]: [usize; 2]) -> Result<()> {
        let (values, coordinates) = self.projected()?;
        let m = values.len();
        let kept: Vec<_> = (0..lower).chain(m - upper..m).collect();
        let basis = kept.iter().map(|&i| combined(&self.basis, &coordinates[i])).collect();
        self.images = kept.iter().map(|&i| combined(&self.images, &coordinates[i])).collect();
        let diagonal =
            |row: usize| (0..=row).map(|column| if column == row { values[kept[row]] } else { 0.0 }).collect();
        self.projection = (0..kept.len()).map(diagonal).collect();
        self.basis = basis;
        Ok(())
    }
}

/// `sum_i weights_i vectors_i`.
pub(super) fn combined(vectors: &[Vec<f64>], weights: &[f64]) -> Vec<f64> {
    let mut sum = vec![0.0; vectors.first().map_or(0, Vec::len)];
    vectors.iter().zip(weights).for_each(|(x, &weight)| axpy(weight, x, &mut sum));
    sum
}
