//! Calls at the ends of f32 and beyond: each is right, or refused.

use resolvent_kernels::{
    Error, Strategy,
    mechanism::{DistanceKernel, Manifold, Score},
};

use super::support::{
    problem::{Problem, Solution},
    random::is_composed,
};

/// Every entry so many times as large, and one of f32.
pub fn resize(x: &mut [f64], size: f64) {
    x.iter_mut().for_each(|x| *x = f64::from((*x * size) as f32));
}

/// The problem with some of its tensors, or one token, that many times as large.
pub fn resized(p: &Problem, what: &str, size: f64) -> Problem {
    let mut p = p.clone();
    let (dim, value_dim) = (p.shape.head_dim, p.shape.value_dim);
    let all = what == "all";
    let token = |dim: usize| 11 * dim..12 * dim;
    for (name, x) in [("q", Some(&mut p.q)), ("k", p.k.as_mut()), ("v", Some(&mut p.v)), ("dout", Some(&mut p.dout))] {
        let Some(x) = x else { continue };
        if all || what.split(' ').any(|what| what == name) {
            resize(x, size);
        }
        match (what, name) {
            ("token", "q" | "k") => resize(&mut x[token(dim)], size),
            ("value", "v") => resize(&mut x[token(value_dim)], size),
            _ => {}
        }
    }
    p
}

/// The largest magnitude of what is finite.
pub fn largest(x: &[f64]) -> f64 {
    x.iter().filter(|x| x.is_finite()).fold(0.0, |most, x| most.max(x.abs()))
}

/// The size of the terms that cancel in a result, of which f32 leaves a rounding.
fn terms(p: &Problem, name: &str) -> f64 {
    let s = &p.shape;
    let (q, k, v, g) = (largest(&p.q), p.k.as_deref().map_or(0.0, largest), largest(&p.v), largest(&p.dout));
    let (d, weight) = (s.head_dim as f64, g * v * (s.value_dim * s.seq_q) as f64);
    let (scale, token) = (|scale: Option<f64>| scale.unwrap_or(d.powf(-0.5)), q.max(k));
    // What a score changes by with an entry of a token, and with a parameter.
    let m = &p.mechanism;
    let (slope, of_parameter) = match (&m.score, m.as_fna()) {
        _ if is_composed(m) => {
            let own = if name == "dq" { q } else { k.max(q * f64::from(u8::from(m.tied))) };
            let slope = match &m.score {
                // `d_M + alpha` over the distance, or the length scale, which is 2 or more for all of them.
                Score::Levy(_) | Score::Student(_) => (d + 2.0) / token.max(2.0),
                Score::CosineExp(_) => 10.0 / own.max(1e-12),
                Score::Laplacian(_) => 0.25,
                // The slopes of features do not vanish with the tokens.
                _ if m.feature_map().is_some() => scale(None) * token + scale(None).sqrt(),
                _ => scale(None) * token,
            };
            (slope, slope * token)
        }
        (Score::DotExp(m), _) => (scale(m.scale) * token, 0.0),
        (_, Some(m)) => {
            let (resolved, power) = (m.resolve(s.head_dim, s.heads), m.alpha + 64.0);
            let on_sphere = m.manifold == Manifold::Sphere;
            let z = if on_sphere { std::f64::consts::PI } else { token * d.sqrt() } / resolved.kappa;
            let sphere = if on_sphere { 1.0 / token } else { 0.0 };
            let slope = match m.kernel {
                _ if m.is_gaussian() => z / resolved.kappa,
                DistanceKernel::Student => z.min(1.0) / resolved.kappa,
                _ => 1.0 / resolved.kappa,
            };
            (power * slope.max(sphere / resolved.kappa), power * (1.0 + z).ln().min(z) * (1.0 + 1.0 / resolved.kappa))
        }
        (Score::Gaussian(m), _) => (m.scale.unwrap_or(0.5 / d.sqrt()) * token, token.powi(2).min(1e9)),
        (Score::Laplacian(m), _) => (1.0 / m.lambda, 1.0 / m.lambda),
        _ => (0.0, weight),
    };
    match name {
        "out" => v,
        "lse" => 1.0,
        "dv" => g * s.seq_q as f64,
        "dq" | "dk" => weight * slope,
        _ => weight * of_parameter,
    }
}

/// What is wrong with a solution, if anything.
fn fault(p: &Problem, got: &Solution, expected: &Solution) -> Option<String> {
    expected.iter().find_map(|(name, expected)| {
        // What is as near to nothing as the products on the way may be is nothing to f32.
        let allowed = (1e-3 * largest(expected)).max(1e-5 * terms(p, name)).max(1e-35);
        // An infinity is itself; NaN is near to nothing.
        let near = |got: f64, expected: f64| got == expected || (got - expected).abs() <= allowed;
        let (got, expected) = got[name].iter().zip(expected).find(|(got, expected)| !near(**got, **expected))?;
        Some(format!("{name} is {got:e}, not {expected:e} (within {allowed:.1e})"))
    })
}

/// Counts of what came out of calls.
#[derive(Debug, Default)]
pub struct Tally {
    pub right: usize,
    pub refused: usize,
    pub wrong: Vec<String>,
}

impl Tally {
    /// Makes the call; panics where an error is of another kind than what a size or a field is refused with.
    pub fn take(&mut self, what: &str, p: &Problem) {
        match p.solve::<f32>(Strategy::Fused, None) {
            Ok(got) => match fault(p, &got, &p.reference()) {
                None => self.right += 1,
                Some(fault) => self.wrong.push(format!("{what}: {fault}")),
            },
            Err(error) => {
                let message = error.to_string();
                let typed = matches!(
                    error,
                    Error::Range { .. } | Error::Overflow { .. } | Error::OutOfRange { .. } | Error::Unsupported { .. }
                );
                let typed =
                    typed || matches!(error, Error::Close { .. } | Error::Singular { .. } | Error::Diverged { .. });
                assert!(typed && !message.contains('\n'), "{what}: {message}");
                self.refused += 1;
            }
        }
    }

    /// How many were right, and refused. Panics where one was wrong.
    pub fn report(self) -> (usize, usize) {
        println!("{} right, {} refused, {} wrong", self.right, self.refused, self.wrong.len());
        assert!(self.wrong.is_empty(), "{} of them:\n{}", self.wrong.len(), self.wrong.join("\n"));
        (self.right, self.refused)
    }
}
