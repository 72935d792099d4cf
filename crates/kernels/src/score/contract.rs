//! The contract of a score: what an engine needs to know of how two tokens relate. Anyone may implement it.
//!
//! An engine sums a [`Term`] over the channels of two rows, and hands these sums to the score while they are in
//! registers. The functions of a score see one vector at a time and are compiled for every instruction set, where the score is defined.

pub use crate::simd::product::Term;
pub use pulp::Simd;

/// Most parameters of a score that have gradients.
pub const MOST_PARAMETERS: usize = 2;

/// How two tokens relate, as a function of one number.
pub trait PairScore: Send + Sync {
    /// What is summed over the channels of a query and a key.
    const TERM: Term;
    /// Whether [`PairScore::value`] is the natural logarithm of the affinity (which is then positive), or the affinity itself.
    const LOG: bool;
    /// Parameters with gradients, at most [`MOST_PARAMETERS`]. A score from outside has none that calls may give.
    const PARAMETERS: usize = 0;
    /// Whether the affinities among any tokens are a positive definite matrix and at most 1, so that landmarks may stand for tokens
    /// and columns be whitened.
    const POSITIVE_DEFINITE: bool = false;
    /// Whether no affinity is negative. Always so where [`PairScore::LOG`].
    const NON_NEGATIVE: bool = Self::LOG;

    /// The affinity of pairs whose terms are `term`, or its logarithm.
    fn value<S: Simd>(&self, simd: S, term: S::f32s) -> S::f32s;

    /// The derivatives of [`PairScore::value`].
    fn slopes<S: Simd>(&self, simd: S, term: S::f32s) -> Slopes<S::f32s>;

    /// What the derivatives in the parameters of other pairs are taken from, of a pair whose term is `term`.
    #[inline(always)]
    fn centre<S: Simd>(&self, simd: S, term: S::f32s) -> [S::f32s; MOST_PARAMETERS] {
        self.slopes(simd, term).parameters
    }

    /// The derivatives in the parameters, of pairs whose terms are `term`, less those of the pair of `centre` ([`PairScore::centre`]; zeros
    /// take nothing off). Where both are nearly the same, a score that knows their difference has its digits.
    #[inline(always)]
    fn less_centre<S: Simd>(
        &self,
        simd: S,
        _term: S::f32s,
        slopes: &Slopes<S::f32s>,
        centre: [S::f32s; MOST_PARAMETERS],
    ) -> [S::f32s; MOST_PARAMETERS] {
        let mut parameters = slopes.parameters;
        for (slope, centre) in parameters.iter_mut().zip(centre) {
            *slope = simd.sub_f32s(*slope, centre);
        }
        parameters
    }

    /// [`PairScore::value`] with `bias` added to the logit: to the logarithm of the affinity, or, of what is no logarithm, to the number
    /// that is activated, which is the term unless a score says otherwise.
    #[inline(always)]
    fn biased_value<S: Simd>(&self, simd: S, term: S::f32s, bias: S::f32s) -> S::f32s {
        if Self::LOG {
            simd.add_f32s(self.value(simd, term), bias)
        } else {
            self.value(simd, simd.add_f32s(term, bias))
        }
    }

    /// The derivatives of [`PairScore::biased_value`], and that in the bias.
    #[inline(always)]
    fn biased_slopes<S: Simd>(&self, simd: S, term: S::f32s, bias: S::f32s) -> (Slopes<S::f32s>, S::f32s) {
        if Self::LOG {
            return (self.slopes(simd, term), simd.splat_f32s(1.0));
        }
        let slopes = self.slopes(simd, simd.add_f32s(term, bias));
        (slopes, slopes.term)
    }
}

/// The derivatives of a score's value, of a vector of pairs.
#[derive(Debug, Clone, Copy)]
pub struct Slopes<V> {
    /// In the term.
    pub term: V,
    /// In each parameter; what lies beyond [`PairScore::PARAMETERS`] is not read.
    pub parameters: [V; MOST_PARAMETERS],
}
