//! The hand-derived gradients of the reference against finite differences, for every mechanism and option.

use crate::support;

use resolvent_kernels::{Mechanism, Parameter, Shape, mechanism::Score, reference};
use support::{
    problem::Problem,
    random::{VARIANTS, is_composed, problem, takes_cross},
};

/// Step of the central differences: its square and the rounding `eps / STEP` are both far below the tolerance.
const STEP: f64 = 1e-6;
const RTOL: f64 = 1e-6;

fn inner(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// `<dout, out>` of a problem.
fn loss(p: &Problem) -> f64 {
    inner(&p.dout, &reference::forward(&p.mechanism, &p.shape, &p.inputs(), &p.mask()).unwrap().out)
}

/// The derivative of [`loss`] along what `shift(problem, step)` changes.
fn slope(p: &Problem, shift: impl Fn(&mut Problem, f64)) -> f64 {
    let at = |step: f64| {
        let mut p = p.clone();
        shift(&mut p, step);
        loss(&p)
    };
    (at(STEP) - at(-STEP)) / (2.0 * STEP)
}

/// Checks `gradient` along three directions: one that meets every entry with either sign, and two single entries.
fn check(p: &Problem, what: &str, gradient: &[f64], tensor: impl Fn(&mut Problem) -> &mut Vec<f64>) {
    let n = gradient.len();
    let mixed = (0..n).map(|i| ((i * i + 3 * i) as f64).sin()).collect::<Vec<f64>>();
    let single = |at: usize| (0..n).map(|i| f64::from(u8::from(i == at))).collect::<Vec<f64>>();
    let size = inner(gradient, gradient).sqrt() + 1e-3;
    for direction in [mixed, single(n / 2), single(n - 1)] {
        let measured = slope(p, |p, step| tensor(p).iter_mut().zip(&direction).for_each(|(x, d)| *x += step * d));
        let length = inner(&direction, &direction).sqrt();
        let error = (measured - inner(gradient, &direction)).abs() / (size * length);
        assert!(error < RTOL, "{what}: {error:.1e}; measured {measured}, got {}", inner(gradient, &direction));
    }
}

fn shift_field(mechanism: &mut Mechanism, change: f64) {
    match &mut mechanism.score {
        Score::Gaussian(m) => *m.scale.as_mut().unwrap() += change,
        Score::Laplacian(m) => m.lambda += change,
        _ => *mechanism = mechanism.clone().with_gamma(|gamma| gamma + change),
    }
}

/// The variants whose gradient is that of what they compute, and not of an inverse that they stop short of.
fn variants() -> impl Iterator<Item = (usize, &'static &'static str)> {
    VARIANTS.iter().enumerate().filter(|(_, json)| !json.contains("newton_iterations"))
}

fn check_all(p: &Problem, what: &str) {
    let p = &{
        let mut p = p.clone();
        p.fix_plan();
        p
    };
    let b = reference::backward(&p.mechanism, &p.shape, &p.inputs(), &p.mask(), &p.dout).unwrap();
    check(p, &format!("{what}: dq"), &b.dq, |p| &mut p.q);
    check(p, &format!("{what}: dv"), &b.dv, |p| &mut p.v);
    assert_eq!(b.dk.is_none(), p.mechanism.tied);
    if let Some(dk) = b.dk {
        check(p, &format!("{what}: dk"), &dk, |p| p.k.as_mut().unwrap());
    }
    let mut listed = p.mechanism.parameters();
    listed.sort();
    assert!(b.parameters.keys().copied().eq(listed), "{what}");
    if is_composed(&p.mechanism) {
        return; // `algebra.rs` walks the parameters of all values
    }
    for parameter in [Parameter::Gamma, Parameter::Lambda, Parameter::Scale] {
        let Some(gradient) = b.parameters.get(&parameter) else { continue };
        let mut p = p.clone();
        if let Score::Gaussian(m) = &mut p.mechanism.score {
            m.scale.get_or_insert(0.5 / (p.shape.head_dim as f64).sqrt());
        }
        // One side only where 1 is the end of the range: the loss is smooth in the decay.
        if p.mechanism.gamma() == Some(1.0) {
            continue;
        }
        let measured = slope(&p, |p, step| shift_field(&mut p.mechanism, step));
        let got: f64 = gradient.iter().sum();
        let name = parameter.gradient_name();
        assert!((measured - got).abs() < RTOL * (1.0 + got.abs()), "{what}: {name}: {measured}, got {got}");
    }
    for parameter in [Parameter::Alpha, Parameter::Kappa] {
        let Some(gradient) = b.parameters.get(&parameter) else { continue };
        // Away from the ends of alpha's range, and per head, as a call gives it.
        let values: Vec<f32> = (0..p.shape.heads).map(|h| 1.25 + 0.375 * h as f32).collect();
        let mut p = p.clone();
        p.parameters.insert(parameter, values);
        let b = reference::backward(&p.mechanism, &p.shape, &p.inputs(), &p.mask(), &p.dout).unwrap();
        assert_eq!(gradient.len(), p.shape.heads);
        for (h, got) in b.parameters[&parameter].iter().enumerate() {
            // A step that f32 holds exactly.
            let at = |step: f32| {
                let mut p = p.clone();
                p.parameters.get_mut(&parameter).unwrap()[h] += step;
                loss(&p)
            };
            let step = 1.0 / 1024.0;
            let measured =
                (8.0 * (at(step) - at(-step)) - (at(2.0 * step) - at(-2.0 * step))) / (12.0 * f64::from(step));
            let what = format!("{what}: {}[{h}]", parameter.gradient_name());
            assert!((measured - got).abs() < 1e-6 * (1.0 + got.abs()), "{what}: {measured}, got {got}");
        }
    }
}

#[test]
fn gradients_are_slopes() {
    for (n, json) in variants() {
        let mechanism = Mechanism::from_json(json).unwrap();
        let shape = Shape { batch: 2, heads: 2, seq_q: 7, seq_kv: 10, head_dim: 5, value_dim: 3 };
        check_all(&problem(mechanism.clone(), shape, n as u64), json);
        if takes_cross(&mechanism) {
            let shape = Shape { seq_q: 9, seq_kv: 4, ..shape };
            check_all(&problem(mechanism, shape, 100 + n as u64), json);
        }
    }
}

#[test]
fn gradients_are_slopes_under_masks() {
    for (n, json) in variants() {
        let mechanism = Mechanism::from_json(json).unwrap();
        let mut p = problem(mechanism, Shape::square(2, 1, 8, 4), n as u64);
        p.key_mask = Some((0..16).map(|i| i % 5 != 1).collect());
        check_all(&p, &format!("{json}, keys masked"));
        if p.mechanism.as_soft().is_some() {
            continue; // one mask is for both
        }
        p.query_mask = Some((0..16).map(|i| i % 3 != 0).collect());
        check_all(&p, &format!("{json}, keys and queries masked"));
    }
}

/// The default `eps` leaves gradients that are small next to their parts; in f64 that is no excuse.
#[test]
fn gradients_are_slopes_with_the_default_guard() {
    for id in Mechanism::IDS {
        let shape = Shape { batch: 1, heads: 2, seq_q: 6, seq_kv: 6, head_dim: 3, value_dim: 4 };
        check_all(&problem(Mechanism::preset(id).unwrap(), shape, 7), id);
    }
}
