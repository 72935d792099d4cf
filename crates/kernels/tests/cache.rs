//! The key/value cache against the causal reference, token by token and in steps of several lengths.

mod support;

use resolvent_kernels::{Cache, Error, Inputs, Mechanism, Parameter, Shape, Tol, reference};
use support::{
    assert_close,
    problem::Problem,
    random::{mechanisms, problem},
};

fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}

/// Rows `from..to` of every slice of `x [slices, seq, dim]`.
fn tokens(x: &[f64], seq: usize, dim: usize, from: usize, to: usize) -> Vec<f32> {
    x.chunks(seq * dim).flat_map(|slice| narrow(&slice[from * dim..to * dim])).collect()
}

/// `out` of a problem, fed in steps of the given lengths (the last one repeated).
fn stepwise(p: &Problem, cache: &mut Cache, steps: &[usize]) -> Vec<f64> {
    let Shape { seq_q: seq, head_dim, value_dim, .. } = p.shape;
    let mut out = vec![f64::NAN; p.shape.out_len()];
    let (mut at, mut steps) = (0, steps.iter().copied().chain(std::iter::repeat(*steps.last().unwrap())));
    while at < seq {
        let to = (at + steps.next().unwrap()).min(seq);
        let q = tokens(&p.q, seq, head_dim, at, to);
        let k = p.k.as_ref().map(|k| tokens(k, seq, head_dim, at, to));
        let v = tokens(&p.v, seq, value_dim, at, to);
        let mut rows = vec![f32::NAN; v.len()];
        cache.step(&Inputs { q: &q, k: k.as_deref(), v: &v, extras: p.extras() }, &mut rows).unwrap();
        for (slice, rows) in out.chunks_mut(seq * value_dim).zip(rows.chunks((to - at) * value_dim)) {
            slice[at * value_dim..to * value_dim].iter_mut().zip(rows).for_each(|(out, x)| *out = (*x).into());
        }
        at = to;
    }
    assert_eq!(cache.len(), seq);
    out
}

fn cache_of(p: &Problem, capacity: usize) -> Cache {
    let Shape { batch, heads, head_dim, value_dim, .. } = p.shape;
    Cache::new(&p.mechanism, batch, heads, head_dim, value_dim, capacity).unwrap()
}

fn check(p: &Problem) {
    let expected = reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap().out;
    for (steps, capacity) in [(&[1][..], 1), (&[5, 1, 7], 4), (&[1000], 0), (&[40, 3], 100)] {
        let mut cache = cache_of(p, capacity);
        let first = stepwise(p, &mut cache, steps);
        let rtol = Tol::f32(&p.mechanism).forward;
        assert_close(&format!("{:?}, {steps:?}", p.mechanism), &first, &expected, p.shape.slices(), rtol, 0.0);
        cache.clear();
        assert!(cache.is_empty() && stepwise(p, &mut cache, steps) == first, "{:?}: cleared", p.mechanism);
    }
}

fn causal() -> impl Iterator<Item = Mechanism> {
    let json = |m: &Mechanism| serde_json::to_value(m).unwrap();
    let makes_sense = |m: &Mechanism| match m {
        Mechanism::Fna(m) => m.norm_exponent == 0.0,
        m => matches!(m, Mechanism::Softmax(_) | Mechanism::Infsa(_) | Mechanism::Uniform(_)),
    };
    mechanisms().into_iter().filter(makes_sense).map(move |m| {
        let mut config = json(&m);
        config["causal"] = true.into();
        Mechanism::from_value(config).unwrap()
    })
}

#[test]
fn steps_of_any_length_equal_the_whole() {
    for mechanism in causal() {
        let mut p = problem(mechanism, Shape { value_dim: 5, ..Shape::square(2, 3, 61, 12) }, 3);
        check(&p);
        if p.mechanism.gamma().is_some() {
            p.set_gamma(vec![0.2, 0.9, 0.5]);
            check(&p);
        }
        for &parameter in p.mechanism.parameters().iter().filter(|&&parameter| parameter != Parameter::Gamma) {
            p.parameters.insert(parameter, vec![1.1, 1.9, 1.5]);
            check(&p);
        }
    }
}

#[test]
fn the_running_norm_survives_products_out_of_range() {
    for mechanism in causal().filter(|m| matches!(m, Mechanism::Infsa(_))) {
        for size in [1e25, 1e-12] {
            let mut p = problem(mechanism.clone(), Shape::square(1, 2, 20, 8), 9);
            p.q.iter_mut().chain(p.k.iter_mut().flatten()).for_each(|x| *x = f64::from((*x * size) as f32));
            check(&p);
        }
    }
}

#[test]
fn what_cannot_be_decoded_is_refused() {
    for id in ["infsa-resolvent", "linear-infsa"] {
        let refused = Cache::new(&Mechanism::preset(id).unwrap(), 1, 1, 4, 4, 8).unwrap_err();
        assert!(matches!(refused, Error::Unsupported { mechanism, what: "causal", .. } if mechanism == id));
    }
    let density = Mechanism::from_json(r#"{"mechanism": "fna", "norm_exponent": 1}"#).unwrap();
    let refused = Cache::new(&density, 1, 1, 4, 4, 8).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { what: "decoding with norm_exponent != 0", .. }), "{refused}");
    let mut cache = Cache::new(&Mechanism::preset("infsa").unwrap(), 1, 2, 4, 4, 8).unwrap();
    let (x, mut out) = ([0.5; 16], [0.0; 16]);
    for (q, k, v) in [(0, 8, 8), (9, 8, 8), (8, 16, 8), (8, 8, 4)] {
        let inputs = Inputs { q: &x[..q], k: Some(&x[..k]), v: &x[..v], extras: Default::default() };
        assert!(matches!(cache.step(&inputs, &mut out[..8]), Err(Error::Length { op: "step", .. })));
    }
    let inputs = Inputs { q: &x[..8], k: None, v: &x[..8], extras: Default::default() };
    assert!(matches!(cache.step(&inputs, &mut out[..8]), Err(Error::Tensor { tensor: "k", .. })));
    assert!(cache.is_empty());
}
