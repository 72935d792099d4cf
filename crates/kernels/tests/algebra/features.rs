//! The structure `features` on the fused path: against the f64 reference, and what may change no bit.

use crate::support;

use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use resolvent_kernels::{Error, Mechanism, Parameter, Shape, Strategy, Tol, simd::Level};
use support::{
    problem::{Problem, Solution, assert_solution},
    random::problem,
};

/// Both maps, with every option of the values around them.
const VARIANTS: &[&str] = &[
    r#""structure": {"kind": "features"}"#,
    r#""structure": {"kind": "features"}, "score": {"kind": "dot-exp", "scale": 0.75}, "tied": true"#,
    r#""structure": {"kind": "features"}, "series": {"kind": "one-hop", "gamma": 0.5}"#,
    r#""structure": {"kind": "features", "map": "favor"}"#,
    r#""structure": {"kind": "features", "map": "favor", "count": 21, "seed": 5}, "series": {"kind": "one-hop", "gamma": 0.8}"#,
    r#""structure": {"kind": "features", "map": "favor", "count": 150}, "score": {"kind": "dot-exp", "scale": 0.5}, "tied": true"#,
];

fn mechanism(variant: &str, causal: bool) -> Mechanism {
    Mechanism::from_json(&format!(r#"{{"mechanism": "composed", {variant}, "causal": {causal}}}"#)).unwrap()
}

fn keep(len: usize, seed: u64) -> Option<Vec<bool>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    Some((0..len).map(|_| rng.random_bool(0.7)).collect())
}

/// A problem, every other with a mask on each side, and every third with a scale and a decay per head.
fn case(mechanism: &Mechanism, shape: Shape, seed: u64) -> Problem {
    let shape = if mechanism.tied { Shape { seq_q: shape.seq_kv, ..shape } } else { shape };
    let mut p = problem(mechanism.clone(), shape, seed);
    if seed % 2 == 1 {
        p.key_mask = keep(shape.batch * p.shape.seq_kv, seed);
        p.query_mask = keep(shape.batch * p.shape.seq_q, seed + 1000);
    }
    if seed % 3 == 1 {
        p.set_gamma((0..shape.heads).map(|h| 0.3 + 0.2 * h as f32).collect());
        p.parameters.insert(Parameter::Scale, (0..shape.heads).map(|h| 0.4 + 0.1 * h as f32).collect());
    }
    p
}

/// Sizes on both sides of a chunk and of a piece, and of whole vectors.
fn shapes(causal: bool) -> Vec<Shape> {
    let shape = |batch, heads, [seq_q, seq_kv]: [usize; 2], head_dim, value_dim| Shape {
        batch,
        heads,
        seq_q,
        seq_kv,
        head_dim,
        value_dim,
    };
    let mut shapes = vec![
        shape(1, 1, [1, 1], 1, 1),
        shape(2, 3, [5, 5], 4, 3),
        shape(1, 2, [63, 64], 16, 16),
        shape(1, 2, [64, 65], 17, 5),
        shape(2, 1, [70, 150], 8, 33),
        shape(1, 1, [130, 1100], 5, 4),
        shape(1, 1, [1040, 1040], 3, 2),
    ];
    if !causal {
        shapes.extend([shape(1, 2, [65, 3], 6, 7), shape(1, 1, [1100, 90], 4, 4)]);
    }
    shapes
}

/// Every variant on every shape, causal and not.
fn cases() -> impl Iterator<Item = Problem> {
    let all = VARIANTS.iter().flat_map(|variant| [false, true].map(|causal| (mechanism(variant, causal), causal)));
    let all = all.flat_map(|(m, causal)| shapes(causal).into_iter().map(move |shape| (m.clone(), shape)));
    all.enumerate().map(|(n, (m, shape))| case(&m, shape, n as u64))
}

#[test]
fn the_fused_path_is_the_reference() {
    for p in cases() {
        let (what, tol) =
            (format!("{} on {:?}, causal {}", p.mechanism.values(), p.shape, p.mechanism.causal), tol(&p));
        let expected = p.reference();
        for level in Level::available() {
            let got = p.solve::<f32>(Strategy::Fused, Some(level)).unwrap();
            assert_solution(&format!("{what}, {}", level.name()), &got, &expected, &p.shape, tol);
        }
    }
}

/// Features are exponentials of products up to some twenty, of entries of order one.
fn tol(p: &Problem) -> Tol {
    Tol::f32(&p.mechanism).with_scores(20.0).with_noise(1.0)
}

#[test]
fn halves_are_stored_and_computed_as_floats() {
    for p in cases().step_by(5) {
        let (wide, what) = (Tol::HALF.with_noise(1.0), format!("{:?}", p.shape));
        if let Some(p) = p.rounded::<f16>() {
            assert_solution(&what, &p.solve::<f16>(Strategy::Fused, None).unwrap(), &p.reference(), &p.shape, wide);
        }
        if let Some(p) = p.rounded::<bf16>() {
            assert_solution(&what, &p.solve::<bf16>(Strategy::Fused, None).unwrap(), &p.reference(), &p.shape, wide);
        }
    }
}

fn bits(x: &[f64]) -> Vec<u64> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn same(what: &str, a: &Solution, b: &Solution) {
    for (name, a) in a {
        assert!(bits(a) == bits(&b[name]), "{what}: {name}");
    }
}

#[test]
fn what_is_masked_changes_no_bit() {
    for clean in cases().filter(|p| p.key_mask.is_some()) {
        let mut dirty = clean.clone();
        dirty.fill_masked(&[f64::NAN, 1e30, f64::NEG_INFINITY, -1e30]);
        let what = format!("{} on {:?}", clean.mechanism.values(), clean.shape);
        same(&what, &clean.fused(), &dirty.fused());
    }
}

/// The rows before token `first` of a tensor with `seq` tokens a head.
fn past(x: &[f64], slices: usize, seq: usize, first: usize) -> Vec<u64> {
    x.chunks(x.len() / slices).flat_map(|x| bits(&x[..x.len() / seq * first])).collect()
}

/// Later tokens, infinite ones and NaN among them, change no earlier row, nor its gradients.
#[test]
fn the_future_changes_no_bit() {
    for variant in VARIANTS {
        for (seq, firsts) in [(70, vec![1, 20, 63, 64, 69]), (1200, vec![600, 700])] {
            let m = mechanism(variant, true);
            let shape = Shape::square(1, 2, seq, 4);
            for first in firsts {
                let mut p = problem(m.clone(), shape, first as u64);
                let later = |n: usize| n / 4 % seq >= first;
                p.dout.iter_mut().enumerate().filter(|(n, _)| later(*n)).for_each(|(_, x)| *x = 0.0);
                let a = p.fused();
                for junk in [-3.0, 9.0, f64::NAN, f64::INFINITY] {
                    let mut other = p.clone();
                    let tensors = [Some(&mut other.q), other.k.as_mut(), Some(&mut other.v)];
                    for (t, x) in tensors.into_iter().flatten().enumerate() {
                        let change = |n: usize, x: &mut f64| *x = if n % 3 == t { junk } else { 2.5 - 1.5 * *x };
                        x.iter_mut().enumerate().filter(|(n, _)| later(*n)).for_each(|(n, x)| change(n, x));
                    }
                    let b = other.fused();
                    // Gradients of earlier tokens are those through later rows, too: zero times no number is none.
                    let names: &[&str] = if junk.is_finite() { &["out", "dq", "dk", "dv"] } else { &["out", "dq"] };
                    for name in names.iter().filter(|name| a.contains_key(*name) && !(m.tied && **name == "dq")) {
                        let rows = |s: &Solution| past(&s[name], 2, seq, first);
                        assert!(rows(&a) == rows(&b), "{variant}: {name} before {first} of {seq}, {junk}");
                    }
                }
            }
        }
    }
}

#[test]
fn threads_change_no_bit() {
    let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    for variant in VARIANTS {
        for causal in [false, true] {
            let p = problem(mechanism(variant, causal), Shape::square(1, 3, 1500, 6), 1);
            let [a, b] = [1, 3].map(|threads| pool(threads).install(|| p.fused()));
            same(variant, &a, &b);
        }
    }
}

/// Rows far longer than those of ordinary tokens, and keys whose features differ by more than f32 has room for.
#[test]
fn features_of_any_size_keep_their_digits() {
    for (variant, stretch) in [(0, 60.0), (3, 4.0), (4, 3.0)] {
        for causal in [false, true] {
            let mut p = problem(mechanism(VARIANTS[variant], causal), Shape::square(1, 2, 150, 8), 3);
            // Key after key longer, so that each has another exponent, and the first ones the largest.
            let longer =
                |n: usize, x: &mut f64| *x = f64::from((*x * (1.0 + stretch * (n / 8 % 150) as f64 / 150.0)) as f32);
            p.k.iter_mut().flatten().enumerate().for_each(|(n, x)| longer(n, x));
            let tol = Tol::f32(&p.mechanism).with_scores(100.0).with_noise(1.0);
            assert_solution(VARIANTS[variant], &p.fused(), &p.reference(), &p.shape, tol);
        }
    }
}

#[test]
fn what_leaves_f32_is_refused() {
    for (variant, size, fits) in
        [(3, 1e4, false), (4, 1e20, false), (0, 1e20, false), (0, 1e10, true), (2, -1e4, false), (2, -10.0, true)]
    {
        let mut p = problem(mechanism(VARIANTS[variant], false), Shape::square(1, 1, 6, 8), 3);
        let grow = |x: &mut f64| *x = f64::from((x.abs() * size) as f32);
        p.q.iter_mut().for_each(grow);
        p.k.iter_mut().flatten().for_each(grow);
        let done = p.solve::<f32>(Strategy::Fused, None);
        match fits {
            true => assert!(done.is_ok(), "{variant}, {size}: {done:?}"),
            false => assert!(matches!(done, Err(Error::Range { .. })), "{variant}, {size}: {done:?}"),
        }
    }
}

/// Random features estimate softmax, the better the more of them: the error falls as the root of their number.
#[test]
fn favor_tends_to_softmax() {
    let shape = Shape::square(1, 2, 48, 16);
    let mut p = problem(Mechanism::preset("softmax").unwrap(), shape, 7);
    [&mut p.q].into_iter().chain(&mut p.k).flatten().for_each(|x| *x = f64::from(0.4 * *x as f32));
    let expected = p.reference()["out"].clone();
    let error = |count: usize| {
        let errors = (0..8).map(|seed| {
            let json =
                format!(r#""structure": {{"kind": "features", "map": "favor", "count": {count}, "seed": {seed}}}"#);
            let p = Problem { mechanism: mechanism(&json, false), ..p.clone() };
            let got = p.fused()["out"].clone();
            got.iter().zip(&expected).map(|(x, y)| (x - y).powi(2)).sum::<f64>()
        });
        (errors.sum::<f64>() / (8 * expected.len()) as f64).sqrt()
    };
    let errors = [64, 1024, 16384].map(error);
    // Sixteen times as many: a quarter of the error, once there are enough for every row.
    assert!(errors[0] > 1.5 * errors[1] && (2.5..6.5).contains(&(errors[1] / errors[2])), "{errors:?}");
    assert!(errors[2] < 0.02, "{errors:?}");
}
