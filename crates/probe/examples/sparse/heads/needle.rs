//! A needle among random tokens: the last token asks for one value that lies far back. "Spectral Sparse Attention",
//! section 4.2 and table 3.

use rand::RngExt;
use resolvent_kernels::Result;
use resolvent_lab::{
    data::rng::{Purpose, stream},
    named,
};

use super::{Head, normal, refused};

/// Channels of every token.
const DIM: usize = 64;

/// Settings of the generated head. The same settings give the same head.
///
/// Queries, keys and values are independent and standard normal, but that all keys are orthogonal to a random direction
/// `u`, and the key of the needle and the query of the last token lie in it. Their product, `sqrt(64) (ln tokens + 8)`
/// before scaling, leaves all other keys together a weight of about `exp(-8)`. The needle lies between a tenth and a
/// third of the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needle {
    /// Seed of everything random.
    pub seed: u64,
    /// Tokens, at least 16.
    pub tokens: usize,
    /// How asker and needle are alike.
    pub kind: NeedleKind,
}

named! {
    /// How the query that asks is like the needle.
    pub enum NeedleKind {
        /// Key of the needle and query of the asker are the same vector, and so is the needle's own query: it clusters with the
        /// asker.
        Tied = "tied",
        /// As `Tied`, but the needle's query is as random as any: nothing but its long key tells of it.
        Key = "key",
        /// The needle's query is random, and its key so short that it does not stand out either; the asker's query is long.
        Query = "query",
    }
}

/// A head with a needle.
#[derive(Debug, Clone, PartialEq)]
pub struct NeedleHead {
    /// Its tensors.
    pub head: Head,
    /// Where the needle is.
    pub needle: usize,
}

impl NeedleHead {
    /// The cosine between a row of outputs, of the last token, and the needle's value: 1 where it was found.
    pub fn cosine(&self, out: &[f32]) -> f64 {
        cosine(out, &self.head.v[self.needle * DIM..][..DIM])
    }
}

/// The cosine of the angle between two vectors; 0 where one of them is 0.
fn cosine(x: &[f32], y: &[f32]) -> f64 {
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum::<f64>();
    let norms = (dot(x, x) * dot(y, y)).sqrt();
    if norms > 0.0 { dot(x, y) / norms } else { 0.0 }
}

impl Needle {
    /// Draws the head.
    ///
    /// # Errors
    /// Too few tokens.
    pub fn generate(&self) -> Result<NeedleHead> {
        let n = self.tokens;
        if n < 16 {
            return Err(refused(format!("has {n} tokens; a needle is among 16 at least")));
        }
        let mut rng = stream(Purpose::Needle, self.seed, n as u64, 0);
        let [mut q, mut k, v] = [(); 3].map(|()| normal(&mut rng, n * DIM));
        let mut u = normal(&mut rng, DIM);
        let norm = u.iter().map(|x| x * x).sum::<f32>().sqrt();
        u.iter_mut().for_each(|x| *x /= norm);
        for key in k.chunks_exact_mut(DIM) {
            let share: f32 = key.iter().zip(&u).map(|(k, u)| k * u).sum();
            key.iter_mut().zip(&u).for_each(|(k, u)| *k -= share * u);
        }
        let needle = rng.random_range(n / 10..=n / 3);
        let product = (DIM as f32).sqrt() * ((n as f32).ln() + 8.0);
        let long = product.sqrt();
        let asks = match self.kind {
            NeedleKind::Tied | NeedleKind::Key => long,
            NeedleKind::Query => 8.0 * long,
        };
        let along = |length: f32| u.iter().map(move |u| length * u);
        let write = |row: &mut [f32], length: f32| row.iter_mut().zip(along(length)).for_each(|(x, u)| *x = u);
        write(&mut q[(n - 1) * DIM..], asks);
        write(&mut k[needle * DIM..][..DIM], product / asks);
        if self.kind == NeedleKind::Tied {
            write(&mut q[needle * DIM..][..DIM], long);
        }
        Ok(NeedleHead { head: Head { tokens: n, dim: DIM, q, k, v }, needle })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(x: &[f32], n: usize) -> &[f32] {
        &x[n * DIM..][..DIM]
    }

    fn product(x: &[f32], y: &[f32]) -> f32 {
        x.iter().zip(y).map(|(x, y)| x * y).sum()
    }

    #[test]
    fn the_needle_has_nearly_all_weight_and_only_it() {
        for &kind in NeedleKind::ALL {
            for (seed, tokens) in [(0, 16), (1, 300), (2, 2000)] {
                let NeedleHead { head, needle } = Needle { seed, tokens, kind }.generate().unwrap();
                assert!((tokens / 10..=tokens / 3).contains(&needle));
                let asker = row(&head.q, tokens - 1);
                let logit = |j: usize| product(asker, row(&head.k, j)) / (DIM as f32).sqrt();
                assert!((logit(needle) - (tokens as f32).ln() - 8.0).abs() < 1e-2);
                assert!((0..tokens).filter(|&j| j != needle).all(|j| logit(j).abs() < 1e-3), "{kind} {seed}");
                let alike = product(row(&head.q, needle), asker) / product(asker, asker);
                assert_eq!((alike - 1.0).abs() < 1e-4, kind == NeedleKind::Tied, "{kind}: {alike}");
            }
        }
    }

    #[test]
    fn the_settings_alone_decide() {
        let settings = Needle { seed: 3, tokens: 64, kind: NeedleKind::Query };
        assert_eq!(settings.generate().unwrap(), settings.generate().unwrap());
        assert_ne!(settings.generate().unwrap(), Needle { seed: 4, ..settings }.generate().unwrap());
        let value = settings.generate().unwrap();
        assert!((value.cosine(row(&value.head.v, value.needle)) - 1.0).abs() < 1e-9);
        assert_eq!(value.cosine(&[0.0; DIM]), 0.0);
        assert!(Needle { tokens: 3, ..settings }.generate().unwrap_err().to_string().contains("3 tokens"));
    }
}
