//! The outermost eigenpairs of a symmetric operator: block Lanczos with thick restarts.

use faer::Mat;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{dense::symmetric_eigen, tall::Tall};
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
        let mut space = Space::new(n, room, self.seed);
        let mut next = space.outside(Vec::new(), block.min(room));
        let mut products = 0;
        loop {
            products += next.len();
            space.grow(next, operator)?;
            let ritz = space.ritz(wanted)?;
            if ritz.residuals.iter().all(|&r| r <= self.tol) || space.basis.columns() == n {
                return Ok(Eigenpairs { products, ..ritz });
            }
            if products >= self.max_products || ritz.residuals.iter().any(|r| !r.is_finite()) {
                return Err(self.failure(&ritz, products));
            }
            next = space.next(block);
            if space.basis.columns() + next.len() > room {
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
    /// Vectors that there is room for.
    room: usize,
    basis: Tall,
    images: Tall,
    /// The operator within the space: the lower triangle of `basis^T images`, row by row.
    projection: Vec<Vec<f64>>,
    /// Where the vectors of the last block begin.
    last: usize,
    rng: ChaCha8Rng,
}

impl Space {
    fn new(n: usize, room: usize, seed: u64) -> Self {
        let none = || Tall::with_capacity(n, room);
        let (basis, images, rng) = (none(), none(), ChaCha8Rng::seed_from_u64(seed));
        Self { n, room, basis, images, projection: Vec::new(), last: 0, rng }
    }

    /// `count` orthonormal vectors outside the space: what `block` adds to it, filled up at random.
    fn outside(&mut self, block: Vec<Vec<f64>>, count: usize) -> Vec<Vec<f64>> {
        let mut block = self.orthonormal(block);
        while block.len() < count {
            let random = |_| (0..self.n).map(|_| self.rng.random_range(-1.0..1.0)).collect();
            let missing: Vec<Vec<f64>> = (block.len()..count).map(random).collect();
            block.extend(missing);
            block = self.orthonormal(block);
        }
        block
    }

    /// An orthonormal basis of what `block` adds to the space, less what is rounding.
    fn orthonormal(&self, mut block: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
        // Twice is enough: the second pass removes what rounding left of the first.
        for _ in 0..2 {
            let sizes: Vec<f64> = block.iter().map(|x| norm(x)).collect();
            let mut rest = Tall::with_capacity(self.n, block.len());
            rest.extend(&block);
            rest.subtract(&self.basis, self.basis.inner(&rest, 0..block.len()).as_ref());
            block = Vec::with_capacity(block.len());
            for (mut x, size) in rest.vectors(0..sizes.len()).into_iter().zip(sizes) {
                block.iter().for_each(|direction: &Vec<f64>| axpy(-dot(direction, &x), direction, &mut x));
                let rest = norm(&x);
                if rest > 1e-12 * size {
                    block.push(scaled(&x, 1.0 / rest));
                }
            }
        }
        block
    }

    fn grow(&mut self, block: Vec<Vec<f64>>, operator: &impl LinearOperator) -> Result<()> {
        self.last = self.basis.columns();
        self.images.extend(&operator.apply_block(&block)?);
        self.basis.extend(&block);
        let all = self.basis.columns();
        // Twice what is meant, as rounding makes of it from either side.
        let both = self.basis.inner(&self.images, self.last..all) + self.images.inner(&self.basis, self.last..all);
        for i in self.last..all {
            self.projection.push((0..=i).map(|j| 0.5 * both[(j, i - self.last)]).collect());
        }
        Ok(())
    }

    /// The next block: what the products of the last one add to the space, filled up at random where they add nothing.
    fn next(&mut self, count: usize) -> Vec<Vec<f64>> {
        let count = count.min(self.n - self.basis.columns());
        let end = self.images.columns().min(self.last + count);
        self.outside(self.images.vectors(self.last..end), count)
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
        let weights = columns(&coordinates, &chosen);
        let vectors = self.basis.times(weights.as_ref(), chosen.len());
        let mut rest = self.images.times(weights.as_ref(), chosen.len());
        let scale = Mat::from_fn(chosen.len(), chosen.len(), |i, j| if i == j { values[chosen[i]] } else { 0.0 });
        rest.subtract(&vectors, scale.as_ref());
        let mut residuals: Vec<_> = rest.norms().into_iter().map(|rest| rest / size).collect();
        if m < wanted[0] + wanted[1] {
            residuals.push(f64::MAX); // the space is still smaller than what is wanted of it
        }
        let values = chosen.iter().map(|&i| values[i]).collect();
        Ok(Eigenpairs { values, vectors: vectors.vectors(0..chosen.len()), residuals, products: 0 })
    }

    /// Keeps the Ritz vectors of the `upper` largest and `lower` smallest values.
    fn compress(&mut self, [upper, lower]: [usize; 2]) -> Result<()> {
        let (values, coordinates) = self.projected()?;
        let m = values.len();
        let kept: Vec<_> = (0..lower).chain(m - upper..m).collect();
        let weights = columns(&coordinates, &kept);
        for vectors in [&mut self.basis, &mut self.images] {
            *vectors = vectors.times(weights.as_ref(), self.room);
        }
        let diagonal =
            |row: usize| (0..=row).map(|column| if column == row { values[kept[row]] } else { 0.0 }).collect();
        self.projection = (0..kept.len()).map(diagonal).collect();
        Ok(())
    }
}

/// The `chosen` ones of some vectors, as the columns of a matrix.
fn columns(vectors: &[Vec<f64>], chosen: &[usize]) -> Mat<f64> {
    Mat::from_fn(vectors.len(), chosen.len(), |i, j| vectors[chosen[j]][i])
}
