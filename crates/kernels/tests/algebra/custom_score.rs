//! A score from outside, on every structure that takes it, against finite differences; and one that a built-in score has too.

use crate::support;

use resolvent_kernels::{
    Error, Mechanism, Shape, Strategy, Tol,
    mechanism::{
        Frobenius, Hops, Landmarks, Normalisation, Nystrom, PoolWindows, Resolvent, Score, Series, Ssa, Structure,
    },
    score::{PairScore, Simd, Slopes, Term},
};
use support::{
    problem::{Problem, assert_solution},
    random::problem,
};

/// `exp(-square / width)`, which is the built-in Gaussian.
struct Bell {
    width: f32,
}

impl PairScore for Bell {
    const TERM: Term = Term::SquaredDifference;
    const LOG: bool = true;
    const POSITIVE_DEFINITE: bool = true;

    #[inline(always)]
    fn value<S: Simd>(&self, simd: S, square: S::f32s) -> S::f32s {
        simd.mul_f32s(square, simd.splat_f32s(-1.0 / self.width))
    }

    #[inline(always)]
    fn slopes<S: Simd>(&self, simd: S, _: S::f32s) -> Slopes<S::f32s> {
        Slopes { term: simd.splat_f32s(-1.0 / self.width), parameters: [simd.splat_f32s(0.0); 2] }
    }
}

/// `1 + (scale q.k)^2`, which is none of the built-in ones.
struct Squared {
    scale: f32,
}

impl PairScore for Squared {
    const TERM: Term = Term::Product;
    const LOG: bool = false;
    const NON_NEGATIVE: bool = true;

    #[inline(always)]
    fn value<S: Simd>(&self, simd: S, product: S::f32s) -> S::f32s {
        let x = simd.mul_f32s(product, simd.splat_f32s(self.scale));
        simd.mul_add_f32s(x, x, simd.splat_f32s(1.0))
    }

    #[inline(always)]
    fn slopes<S: Simd>(&self, simd: S, product: S::f32s) -> Slopes<S::f32s> {
        let slope = simd.mul_f32s(product, simd.splat_f32s(2.0 * self.scale * self.scale));
        Slopes { term: slope, parameters: [simd.splat_f32s(0.0); 2] }
    }
}

fn structures() -> Vec<Structure> {
    let clusters = Ssa::default().with_clusters(Some(4)).with_samples(Some(2));
    vec![Structure::default(), clusters.into()]
}

fn problem_of(composed: Mechanism, seed: u64) -> Problem {
    let shape = Shape { value_dim: 5, ..Shape::square(2, 2, 37, 6) };
    let mut p = problem(composed, shape, seed);
    p.key_mask = Some((0..74).map(|n| n % 5 != 3).collect());
    p.query_mask = Some((0..74).map(|n| n % 7 != 1).collect());
    p.fix_plan();
    p
}

#[test]
fn a_score_from_outside_is_the_built_in_one_that_it_equals() {
    let landmarks = Nystrom::default().with_landmarks(Landmarks::Pool(PoolWindows::Count(5)));
    let series: [Series; 2] = [Hops::default().into(), Series::default()];
    for structure in structures().into_iter().chain([landmarks.into()]) {
        // Landmarks take one hop.
        let nystrom = matches!(structure, Structure::Nystrom(_));
        for series in series.iter().filter(|series| !nystrom || **series == Series::default()) {
            let of = |score: Score| Mechanism::new(score).structure(structure.clone()).series(series.clone());
            let built_in = Score::Gaussian(resolvent_kernels::mechanism::Gaussian::default().with_scale(Some(0.25)));
            let expected = problem_of(of(built_in), 3);
            let mine = Problem { mechanism: of(Score::custom("bell", Bell { width: 4.0 })), ..expected.clone() };
            let mut want = expected.reference();
            let got = mine.fused();
            want.retain(|name, _| got.contains_key(name));
            assert_solution(
                &format!("{}", of(Score::custom("bell", Bell { width: 4.0 }))),
                &got,
                &want,
                &mine.shape,
                Tol::f32(&mine.mechanism).with_noise(1.0),
            );
        }
    }
}

/// `<dout, out>` of the fused path, in f64 from f32 results.
fn loss(p: &Problem) -> f64 {
    p.fused()["out"].iter().zip(&p.dout).map(|(x, y)| x * y).sum()
}

#[test]
fn gradients_of_a_score_from_outside_are_slopes() {
    let normalisations: [Normalisation; 2] = [Normalisation::default(), Frobenius::default().into()];
    for structure in structures() {
        for normalisation in &normalisations {
            let score = Score::custom("squared", Squared { scale: 0.3 });
            let composed = Mechanism::new(score).structure(structure.clone()).normalisation(normalisation.clone());
            let p = problem_of(composed.series(Resolvent::default().with_gamma(0.5)), 7);
            let got = p.fused();
            for (name, of) in [("dq", 0), ("dk", 1), ("dv", 2)] {
                let gradient = &got[name];
                let direction = |i: usize| ((i * i + 3 * i + 1) as f64).sin();
                let at = |step: f64| {
                    let mut p = p.clone();
                    let tensor = match of {
                        0 => &mut p.q,
                        1 => p.k.as_mut().unwrap(),
                        _ => &mut p.v,
                    };
                    tensor.iter_mut().enumerate().for_each(|(i, x)| *x += step * direction(i));
                    loss(&p)
                };
                let step = 1.0 / 256.0;
                let measured = (8.0 * (at(step) - at(-step)) - (at(2.0 * step) - at(-2.0 * step))) / (12.0 * step);
                let along: f64 = gradient.iter().enumerate().map(|(i, g)| g * direction(i)).sum();
                let size = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
                assert!((measured - along).abs() < 2e-3 * (1.0 + size), "{name}: {measured}, got {along}");
            }
        }
    }
}

#[test]
fn what_a_score_from_outside_cannot_do_is_refused_with_the_reason() {
    let score = || Score::custom("squared", Squared { scale: 0.3 });
    let p = problem_of(Mechanism::new(score()), 1);
    let error = p.solve::<f32>(Strategy::Reference, None).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let nystrom = Mechanism::new(score()).structure(Nystrom::default());
    assert!(matches!(nystrom.check(&p.shape, false), Err(Error::Unsupported { .. })));
}
