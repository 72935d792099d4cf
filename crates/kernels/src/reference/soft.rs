//! SOFT and SOFT++. "Softmax-free Linear Transformers", with the further options of [`Soft`].

use super::{
    HeadForward, HeadGradients,
    head::Head,
    inverse::{Inverted, Method},
    landmarks::{Activated, Filter, Producer},
    matrix::{Matrix, inner},
};
use crate::{
    Parameter, Result,
    mechanism::{Degree, Landmarks, Soft},
    random,
};

/// Everything on the way from tokens to weights.
struct Trace {
    scale: f64,
    producer: Producer,
    activated: Option<Activated>,
    u: Matrix,
    alive: Vec<bool>,
    /// Kernel among landmarks; the identity at dead ones.
    a: Matrix,
    /// Kernel from landmarks to tokens; zero at dead landmarks and masked tokens.
    p: Matrix,
    inverted: Inverted,
    /// Inverse square roots of the degrees; ones without degrees.
    c: Vec<f64>,
    /// `diag(c) Y diag(c)`.
    m: Matrix,
}

/// `exp(-scale |x_i - y_j|^2)`.
fn gaussian(x: &Matrix, y: &Matrix, scale: f64) -> Matrix {
    Matrix::from_fn(x.rows, y.rows, |i, j| (-scale * square(x.row(i), y.row(j))).exp())
}

fn square(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| (x - y).powi(2)).sum()
}

impl Soft {
    fn scale_of(&self, head: &Head) -> f64 {
        head.parameter(Parameter::Scale).map_or(self.scale_for(head.q.cols), |scale| scale[0])
    }
}

/// The producer of the landmarks, and those that are given.
fn producer(head: &Head, m: &Soft) -> Producer {
    let indices = match m.landmarks {
        Landmarks::Random { count, seed } => {
            head.landmark_indices().unwrap_or_else(|| random::sample(seed, head.batch, head.q.rows, count).collect())
        }
        _ => Vec::new(),
    };
    let filter = head.parameter(Parameter::LandmarkWeight).map(Filter::Full);
    Producer::new(m.landmarks, m.grid, &head.keep_key, false, filter, &indices)
}

impl Trace {
    fn of(head: &Head, m: &Soft, mechanism: &'static str) -> Result<Self> {
        let scale = m.scale_of(head);
        let producer = producer(head, m);
        let raw = match head.parameter(Parameter::GivenLandmarks) {
            Some(data) => Matrix { rows: data.len() / head.q.cols, cols: head.q.cols, data },
            None => producer.apply(&head.q),
        };
        let given = producer.members.is_empty();
        let alive: Vec<bool> = (0..raw.rows).map(|w| given || !producer.members[w].is_empty()).collect();
        let activated = m.landmark_act.then(|| {
            let of = |parameter| head.parameter(parameter).unwrap_or_default();
            Activated::new(&raw, of(Parameter::LandmarkNormGamma), &of(Parameter::LandmarkNormBeta))
        });
        let u = activated.as_ref().map_or(raw.clone(), |activated| activated.u.clone());
        let both = |i: usize, j: usize, x: f64| if alive[i] && alive[j] { x } else { f64::from(u8::from(i == j)) };
        let a = gaussian(&u, &u, scale).map(both);
        let seen = |i: usize, n: usize, x: f64| if alive[i] && head.keep_key[n] { x } else { 0.0 };
        let p = gaussian(&u, &head.q, scale).map(seen);
        let method = Method {
            mechanism,
            inverse: m.inverse,
            steps: m.newton_iterations,
            init: Some(m.newton_init),
            ridge: m.ridge,
            gradient: m.gradient,
            cutoff: m.eigen_cutoff,
        };
        let inverted = Inverted::new(&a, method)?;
        let row_sum = |x: &Matrix, i: usize| x.row(i).iter().sum::<f64>();
        let c: Vec<f64> = (0..a.rows)
            .map(|i| match m.degree {
                None => 1.0,
                Some(Degree::Landmark) => row_sum(&a, i).powf(-0.5),
                Some(Degree::Token) => row_sum(&p, i).max(1e-30).powf(-0.5),
            })
            .collect();
        let m = inverted.result().map(|i, j, y| c[i] * y * c[j]);
        Ok(Self { scale, producer, activated, u, alive, a, p, inverted, c, m })
    }
}

/// The matrix that the filter over the values adds.
pub(super) fn value_filter(head: &Head, m: &Soft) -> Matrix {
    let weight = head.parameter(Parameter::ValueWeight).unwrap_or_default();
    let mut matrix = Matrix::zeros(head.q.rows, head.q.rows);
    taps(head, m, |n, from, tap| matrix.row_mut(n)[from] += weight[tap]);
    matrix
}

/// The gradient of the filter from that of the matrix.
pub(super) fn value_filter_backward(head: &Head, m: &Soft, dmatrix: &Matrix) -> Vec<f64> {
    let axes = if m.grid.is_some() { 2 } else { 1 };
    let mut dweight = vec![0.0; m.value_conv.pow(axes)];
    taps(head, m, |n, from, tap| dweight[tap] += dmatrix.at(n, from));
    dweight
}

/// Calls `visit(token, token it reads, place in the filter)` for every kept pair.
fn taps(head: &Head, m: &Soft, mut visit: impl FnMut(usize, usize, usize)) {
    let k = m.value_conv;
    let [height, width] = m.grid.unwrap_or([1, head.q.rows]);
    let rows = if m.grid.is_some() { k } else { 1 };
    for n in (0..height * width).filter(|&n| head.keep_key[n] && head.keep_query[n]) {
        for tap in 0..rows * k {
            let (y, x) = (n / width + tap / k, n % width + tap % k);
            let (Some(y), Some(x)) = (y.checked_sub(rows / 2), x.checked_sub(k / 2)) else { continue };
            if y < height && x < width && head.keep_key[y * width + x] {
                visit(n, y * width + x, tap);
            }
        }
    }
}

/// `S`, or `D^-1/2 S D^-1/2` with `D = diag(S 1)`, and the inverse square roots of the degrees.
fn whole(head: &Head, m: &Soft) -> (Matrix, Vec<f64>) {
    let both = |i: usize, j: usize, x: f64| if head.keep_key[i] && head.keep_key[j] { x } else { 0.0 };
    let s = gaussian(&head.q, &head.q, m.scale_of(head)).map(both);
    let degree = |i: usize| s.row(i).iter().sum::<f64>().max(f64::MIN_POSITIVE).powf(-0.5);
    let kept = |i: usize| if m.degree.is_some() && head.keep_key[i] { degree(i) } else { 1.0 };
    let c = (0..s.rows).map(kept).collect();
    (s, c)
}

/// The weights `P^T M P`, or the kernel itself, and the filter over the values.
pub(super) fn forward(head: &Head, m: &Soft, mechanism: &'static str) -> Result<HeadForward> {
    let mut weights = if m.landmarks == Landmarks::All {
        let (s, c) = whole(head, m);
        s.map(|i, j, x| c[i] * x * c[j])
    } else {
        let trace = Trace::of(head, m, mechanism)?;
        trace.p.transpose().times(&trace.m).times(&trace.p)
    };
    if m.value_conv > 0 {
        weights = weights.plus(&value_filter(head, m));
    }
    Ok(HeadForward { weights, ..HeadForward::default() })
}

pub(super) fn backward(head: &Head, m: &Soft, mechanism: &'static str, dout: &Matrix) -> Result<HeadGradients> {
    let dweights = dout.times_transposed(&head.v);
    let mut gradients = if m.landmarks == Landmarks::All {
        whole_backward(head, m, &dweights)
    } else {
        landmarks_backward(head, m, &Trace::of(head, m, mechanism)?, &dweights)
    };
    if m.value_conv > 0 {
        gradients.parameters.push((Parameter::ValueWeight, value_filter_backward(head, m, &dweights)));
    }
    Ok(gradients)
}

/// Gradients of `<e, log k(x, y)>` in `x`, in `y` and in the scale.
fn gaussian_backward(e: &Matrix, x: &Matrix, y: &Matrix, scale: f64) -> (Matrix, Matrix, f64) {
    let (mut dx, mut dy, mut dscale) = (Matrix::zeros(x.rows, x.cols), Matrix::zeros(y.rows, y.cols), 0.0);
    for i in 0..x.rows {
        for j in 0..y.rows {
            dscale -= e.at(i, j) * square(x.row(i), y.row(j));
            for c in 0..x.cols {
                let slope = -2.0 * scale * e.at(i, j) * (x.at(i, c) - y.at(j, c));
                dx.row_mut(i)[c] += slope;
                dy.row_mut(j)[c] -= slope;
            }
        }
    }
    (dx, dy, dscale)
}

fn times_entries(x: &Matrix, y: &Matrix) -> Matrix {
    x.map(|i, j, x| x * y.at(i, j))
}

/// The chain of `P^T diag(c) Y diag(c) P`.
fn landmarks_backward(head: &Head, m: &Soft, t: &Trace, dweights: &Matrix) -> HeadGradients {
    let dm = t.p.times(dweights).times_transposed(&t.p);
    let mut dp = t.m.times(&t.p).times_transposed(dweights);
    dp = dp.plus(&t.m.transpose().times(&t.p).times(dweights));
    let y = t.inverted.result();
    let mut da = t.inverted.backward(&dm.map(|i, j, x| t.c[i] * x * t.c[j]));
    if let Some(degree) = m.degree {
        let dc =
            |i: usize| (0..y.rows).map(|j| t.c[j] * (dm.at(i, j) * y.at(i, j) + dm.at(j, i) * y.at(j, i))).sum::<f64>();
        let ddegree: Vec<f64> = (0..y.rows).map(|i| -0.5 * t.c[i].powi(3) * dc(i)).collect();
        match degree {
            Degree::Landmark => da = da.map(|i, _, x| x + ddegree[i]),
            Degree::Token => dp = dp.map(|i, _, x| x + ddegree[i]),
        }
    }
    // What is constant at dead landmarks is zero in `p`, and the identity in `a`.
    let off = |i: usize, j: usize, x: f64| if t.alive[i] && t.alive[j] { x } else { 0.0 };
    let (du_left, du_right, dscale_a) = gaussian_backward(&times_entries(&da, &t.a).map(off), &t.u, &t.u, t.scale);
    let (du_tokens, dq, dscale_p) = gaussian_backward(&times_entries(&dp, &t.p), &t.u, &head.q, t.scale);
    let mut du = du_left.plus(&du_right).plus(&du_tokens);
    let mut parameters = vec![(Parameter::Scale, vec![dscale_a + dscale_p])];
    if let Some(activated) = &t.activated {
        let alive = du.map(|i, _, x| if t.alive[i] { x } else { 0.0 });
        let (before, dgamma, dbeta) = activated.backward(&alive);
        du = before;
        parameters.extend([(Parameter::LandmarkNormGamma, dgamma), (Parameter::LandmarkNormBeta, dbeta)]);
    }
    let (dq_landmarks, dfilter) = t.producer.backward(&head.q, &du);
    match m.landmarks {
        Landmarks::Given { .. } => parameters.push((Parameter::GivenLandmarks, du.data)),
        Landmarks::Conv { .. } => parameters.push((Parameter::LandmarkWeight, dfilter)),
        _ => {}
    }
    HeadGradients { dq: dq.plus(&dq_landmarks), dk: Matrix::zeros(head.k.rows, head.k.cols), parameters }
}

/// The chain of `diag(c) S diag(c)`.
fn whole_backward(head: &Head, m: &Soft, dweights: &Matrix) -> HeadGradients {
    let (s, c) = whole(head, m);
    let mut ds = dweights.map(|i, j, x| c[i] * x * c[j]);
    if m.degree.is_some() {
        let column = |x: &Matrix, i: usize| Vec::from_iter((0..x.rows).map(|j| x.at(j, i)));
        let weighted = s.map(|_, j, x| x * c[j]);
        let dc = |i: usize| inner(dweights.row(i), weighted.row(i)) + inner(&column(dweights, i), weighted.row(i));
        let ddegree: Vec<f64> = (0..s.rows).map(|i| -0.5 * c[i].powi(3) * dc(i)).collect();
        ds = ds.map(|i, _, x| x + ddegree[i]);
    }
    let (dq, dk, dscale) = gaussian_backward(&times_entries(&ds, &s), &head.q, &head.q, m.scale_of(head));
    HeadGradients { dq, dk, parameters: vec![(Parameter::Scale, vec![dscale])] }
}
