//! The diagnostics on token graphs that are never stored.

#[path = "../../kernels/tests/support/mod.rs"]
mod support;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use resolvent_graph::{AttentionOperator, Dense, LinearOperator, PerronReport, Solver, katz, markov, spectral_norm};
use resolvent_kernels::{
    Mechanism, Shape, Strategy,
    mechanism::{Infsa, LinearInfsa, NormBias, PowerOperator},
    reference,
};
use support::{
    assert_close,
    random::{mechanisms, problem},
};

fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}

/// The operator of every mechanism does what its stored matrix does, in both directions, with tokens masked.
#[test]
fn products_are_those_of_the_stored_matrix() {
    // A graph is made of queries and keys: mechanisms that learn their landmarks need more.
    let learned = |m: &Mechanism| m.parameters().iter().any(|p| p.required());
    for mechanism in mechanisms().into_iter().filter(|m| !learned(m)) {
        let (n, d) = (23, 6);
        let mut p = problem(mechanism, Shape::square(1, 1, n, d), 5);
        let keep: Vec<bool> = (0..n).map(|i| i % 4 != 1).collect();
        (p.key_mask, p.query_mask) = (Some(keep.clone()), Some(keep.clone()));
        let (q, k) = (narrow(&p.q), p.k.as_deref().map(narrow));
        let graph = AttentionOperator::new(&p.mechanism, n, &q, k.as_deref(), Some(&keep), Strategy::Auto).unwrap();
        if let Mechanism::LinearInfsa(m) = &mut p.mechanism {
            m.broadcast = true;
        }
        let forward = reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap();
        let stored = Dense::new(n, forward.weights().to_vec()).unwrap();
        let x: Vec<f64> = (0..n).map(|i| (1.0 + i as f64).sin()).collect();
        let what = format!("{:?}", p.mechanism);
        let rtol = resolvent_kernels::Tol::f32(&p.mechanism).forward;
        assert_close(&what, &graph.apply(&x).unwrap(), &stored.apply(&x).unwrap(), 1, rtol, 1e-7);
        let transposed = (graph.apply_transpose(&x).unwrap(), stored.apply_transpose(&x).unwrap());
        assert_close(&what, &transposed.0, &transposed.1, 1, rtol, 1e-7);
        let block = [x.clone(), x.iter().map(|x| 1.0 - x * x).collect()];
        let (there, back) = (graph.apply_block(&block).unwrap(), graph.apply_transpose_block(&block).unwrap());
        for (c, x) in block.iter().enumerate() {
            assert_close(&what, &there[c], &stored.apply(x).unwrap(), 1, rtol, 1e-7);
            assert_close(&what, &back[c], &stored.apply_transpose(x).unwrap(), 1, rtol, 1e-7);
        }
    }
}

fn gaussian(rng: &mut ChaCha8Rng, len: usize) -> Vec<f32> {
    let mut uniform = || f64::from(rng.random_range(f32::EPSILON..1.0));
    (0..len).map(|_| ((-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()) as f32).collect()
}

/// Gaussian tokens: no row sum exceeds one, one long query breaks that; the norm stays below the decay.
#[test]
fn long_queries_break_absorption() {
    let (n, d) = (197, 64);
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let (mut q, k) = (gaussian(&mut rng, n * d), gaussian(&mut rng, n * d));
    let mechanism = Mechanism::Infsa(Infsa::default());
    let graph = |q: &[f32]| AttentionOperator::new(&mechanism, n, q, Some(&k), None, Strategy::Auto).unwrap();
    let chain = markov(&graph(&q)).unwrap();
    assert!(chain.substochastic && chain.min_absorption > 0.3, "{}", chain.min_absorption);
    q[..d].iter_mut().for_each(|x| *x *= 10.0);
    let long = graph(&q);
    let chain = markov(&long).unwrap();
    assert!(!chain.substochastic && chain.negative == 1, "{} of {n}", chain.negative);
    assert!(chain.absorption[0] < -1.0, "{}", chain.absorption[0]);
    assert!(spectral_norm(&long, &Default::default()).unwrap() < 0.7);
    let scores = katz(&long, &Solver::default()).unwrap();
    assert!(scores.c_out[0] > 2.0 && scores.c_in.iter().all(|c| *c >= 1.0));
}

/// Means of the alignment over random heads of 197 tokens and 12 channels around a shared mean of `shift * sqrt(12)`.
fn mean_alignment(linear: &LinearInfsa, shift: f64) -> [f64; 4] {
    const HEADS: usize = 32;
    let (n, d) = (197, 12);
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let mut mean = [0.0; 4];
    for _ in 0..HEADS {
        let direction = gaussian(&mut rng, d);
        let length = direction.iter().map(|x| x * x).sum::<f32>().sqrt();
        let factor = shift as f32 * (d as f32).sqrt() / length;
        let mut q = gaussian(&mut rng, n * d);
        q.iter_mut().enumerate().for_each(|(i, q)| *q += factor * direction[i % d]);
        let r = PerronReport::new(linear, n, &q, None).unwrap();
        let values = [r.weights.cosine, r.weights.spearman, r.uniform.cosine, r.energies.cosine];
        mean.iter_mut().zip(values).for_each(|(mean, x)| *mean += x / HEADS as f64);
    }
    mean
}

/// The paper's cosine of 0.985 says that its queries share a mean; without one the uniform vector does better.
#[test]
fn alignment_depends_on_a_shared_mean() {
    let near = |got: [f64; 4], expected: &[f64]| {
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() < 0.03, "{got} is not near {expected}");
        }
    };
    let paper = LinearInfsa::default();
    near(mean_alignment(&paper, 0.0), &[0.738, 0.61, 0.963, 0.987]);
    near(mean_alignment(&paper, 0.4), &[0.986, 0.983]);
    let biased = LinearInfsa { iterations: 3, norm_bias: NormBias::Auto, ..LinearInfsa::default() };
    near(mean_alignment(&biased, 0.0), &[0.998, 0.970]);
    let exact = LinearInfsa { operator: PowerOperator::Exact, iterations: 2, ..LinearInfsa::default() };
    near(mean_alignment(&exact, 0.0), &[0.9996]);
}
