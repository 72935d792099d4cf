//! Affinities through landmarks: `G = Cq X Ck^T`, and its normalisations.

use super::{
    super::{
        head::Head,
        inverse::{Inverted, Method},
        landmarks::{Activated, Filter, LandmarkSource},
        matrix::{Matrix, inner, ratio},
    },
    HopGradients,
    score::{Affinity, PairContext},
    whitened,
};
use crate::{
    Mechanism, Parameter, Result,
    mechanism::{Degree, Factor, Landmarks, Normalisation, Nystrom},
    random,
};

/// A row sum is at least this part of the product of the norms that it is of.
const LEAST_SUM: f64 = 1e-6;

/// Everything on the way from tokens to weights.
pub(super) struct Landmarked<'a> {
    head: &'a Head,
    affinity: Affinity<'a>,
    structure: &'a Nystrom,
    producer: LandmarkSource,
    activated: Option<Activated>,
    alive: Vec<bool>,
    landmarks: Matrix,
    /// Affinities of queries and of keys to landmarks, and among these: the identity at those that are none.
    cq: Matrix,
    ck: Matrix,
    a: Matrix,
    inverted: Inverted,
    degree: Option<Degree>,
    /// Inverse roots of the landmarks' degrees, ones without.
    c: Vec<f64>,
    /// The inverse, between the degrees.
    x: Matrix,
    g: Matrix,
    normalised: Normalised,
}

enum Normalised {
    /// By a factor per row.
    Factors(Vec<f64>),
    /// By signed sums of rows, of which some are at their floor.
    Sums {
        t: Vec<f64>,
        divisors: Vec<f64>,
        floored: Vec<bool>,
    },
    Whitened(Box<whitened::Weights>),
}

impl<'a> Landmarked<'a> {
    /// `mechanism` names errors.
    pub fn of(
        head: &'a Head,
        mechanism: &Mechanism,
        affinity: Affinity<'a>,
        m: &'a Nystrom,
        normalisation: &Normalisation,
    ) -> Result<Self> {
        // LaplacianFormer filters channel by channel, and windows that are not whole.
        let producer = producer(head, m, mechanism.filters_by_channel());
        let raw = match head.parameter(Parameter::GivenLandmarks) {
            Some(data) => Matrix { rows: data.len() / head.q.cols, cols: head.q.cols, data },
            None => producer.apply(&head.k),
        };
        let given = producer.members.is_empty();
        let alive: Vec<bool> = (0..raw.rows).map(|w| given || !producer.members[w].is_empty()).collect();
        let activated = m.landmark_act.then(|| {
            let of = |parameter| head.parameter(parameter).unwrap_or_default();
            Activated::new(&raw, of(Parameter::LandmarkNormGamma), &of(Parameter::LandmarkNormBeta))
        });
        let landmarks = activated.as_ref().map_or(raw, |activated| activated.u.clone());
        let block = |x: &Matrix, seen: &dyn Fn(usize, usize) -> bool| {
            let entry =
                |i: usize, l: usize| if seen(i, l) { affinity.affinity(x.row(i), landmarks.row(l)) } else { 0.0 };
            Matrix::from_fn(x.rows, landmarks.rows, entry)
        };
        let mut cq = block(&head.q, &|i, l| head.keep_query[i] && alive[l]);
        if matches!(normalisation, Normalisation::Row(_)) && affinity.is_log() {
            let log = |i, l| affinity.value(head.q.row(i), landmarks.row(l), PairContext::NONE);
            lift(&mut cq, &|i, l| if head.keep_query[i] && alive[l] { log(i, l) } else { f64::NEG_INFINITY });
        }
        let ck = block(&head.k, &|j, l| head.keep_key[j] && alive[l]);
        let a = block(&landmarks, &|i, l| alive[i] && alive[l]);
        let a = a.map(|i, l, x| if alive[i] && alive[l] { x } else { f64::from(u8::from(i == l)) });
        let inverted = Inverted::new(&a, method(m, mechanism.id()))?;
        let degree = match normalisation {
            Normalisation::Symmetric(m) => Some(m.degree.unwrap_or_default()),
            _ => None,
        };
        let c = roots(degree, &a, &ck);
        let x = inverted.result().map(|i, l, x| c[i] * x * c[l]);
        let g = cq.times(&x).times_transposed(&ck);
        let normalised = Normalised::of(head, normalisation, &g, (&cq, &x, &ck));
        Ok(Self {
            head,
            affinity,
            structure: m,
            producer,
            activated,
            alive,
            landmarks,
            cq,
            ck,
            a,
            inverted,
            degree,
            c,
            x,
            g,
            normalised,
        })
    }

    pub fn weights(&self) -> Matrix {
        match &self.normalised {
            Normalised::Factors(factors) => self.g.map(|i, _, x| factors[i] * x),
            Normalised::Sums { divisors, .. } => self.g.map(|i, _, x| ratio(x, divisors[i])),
            Normalised::Whitened(weights) => weights.weights(),
        }
    }

    /// Gradients of `G`, and of `Cq` where row sums are at their floor.
    fn dg(&self, dweights: &Matrix) -> (Matrix, Matrix) {
        let mut dcq = Matrix::zeros(self.cq.rows, self.cq.cols);
        let dg = match &self.normalised {
            Normalised::Factors(factors) => dweights.map(|i, _, x| factors[i] * x),
            Normalised::Whitened(weights) => weights.backward(dweights),
            Normalised::Sums { t, divisors, floored } => {
                let slope = |i: usize| -ratio(inner(dweights.row(i), self.g.row(i)), divisors[i].powi(2));
                let slopes: Vec<f64> = (0..divisors.len()).map(slope).collect();
                let size = inner(t, t).sqrt();
                for i in (0..divisors.len()).filter(|&i| floored[i]) {
                    let norm = inner(self.cq.row(i), self.cq.row(i)).sqrt();
                    let rate = slopes[i] * LEAST_SUM * divisors[i].signum() * size;
                    dcq.row_mut(i).iter_mut().zip(self.cq.row(i)).for_each(|(d, c)| *d += rate * ratio(*c, norm));
                }
                dweights.map(|i, j, x| {
                    let seen = if self.head.keep_key[j] && !floored[i] { slopes[i] } else { 0.0 };
                    ratio(x, divisors[i]) + seen
                })
            }
        };
        (dg, dcq)
    }

    pub fn backward(&self, dweights: &Matrix) -> HopGradients {
        let (head, affinity) = (self.head, &self.affinity);
        let (dg, extra) = self.dg(dweights);
        let dcq = dg.times(&self.ck).times_transposed(&self.x).plus(&extra);
        let mut dck = dg.transpose().times(&self.cq).times(&self.x);
        let mut dx = self.cq.transpose().times(&dg).times(&self.ck);
        self.add_floor(dweights, &mut dck, &mut dx);
        let y = self.inverted.result();
        let mut da = self.inverted.backward(&dx.map(|i, l, x| self.c[i] * x * self.c[l]));
        if let Some(degree) = self.degree {
            let dc = |i: usize| {
                let term = |l: usize| self.c[l] * (dx.at(i, l) * y.at(i, l) + dx.at(l, i) * y.at(l, i));
                (0..y.rows).map(term).sum::<f64>()
            };
            let ddegree: Vec<f64> = (0..y.rows).map(|i| -0.5 * self.c[i].powi(3) * dc(i)).collect();
            match degree {
                Degree::Landmark => da = da.map(|i, _, x| x + ddegree[i]),
                Degree::Token => dck = dck.map(|_, l, x| x + ddegree[l]),
            }
        }
        let mut gradients = HopGradients {
            dq: Matrix::zeros(head.q.rows, head.q.cols),
            dk: Matrix::zeros(head.k.rows, head.k.cols),
            parameters: Vec::new(),
        };
        let mut parameters = vec![0.0; affinity.parameters.len()];
        let mut dl = Matrix::zeros(self.landmarks.rows, self.landmarks.cols);
        let sides = [(&head.q, &self.cq, &dcq, &mut gradients.dq), (&head.k, &self.ck, &dck, &mut gradients.dk)];
        for (x, c, dc, dx) in sides {
            self.pull_back(c, dc, x, dx, &mut dl, &mut parameters);
        }
        let off = self.a.map(|i, l, x| if self.alive[i] && self.alive[l] { x } else { 0.0 });
        let mut left = Matrix::zeros(dl.rows, dl.cols);
        self.pull_back(&off, &da, &self.landmarks, &mut left, &mut dl, &mut parameters);
        gradients.parameters = affinity.parameters.iter().zip(parameters).map(|(&p, x)| (p, vec![x])).collect();
        self.of_landmarks(dl.plus(&left), &mut gradients);
        gradients
    }

    /// Adds the gradients of affinities `c` of rows `x` to the landmarks; those that are 0 are not seen.
    fn pull_back(&self, c: &Matrix, dc: &Matrix, x: &Matrix, dx: &mut Matrix, dl: &mut Matrix, parameters: &mut [f64]) {
        for i in 0..c.rows {
            for l in (0..c.cols).filter(|&l| c.at(i, l) != 0.0) {
                // Of a log score, in its logarithm.
                let e = dc.at(i, l) * c.at(i, l);
                let rows = [x.row(i), self.landmarks.row(l)];
                self.affinity.backward(e, rows, PairContext::NONE, [dx.row_mut(i), dl.row_mut(l)], parameters);
            }
        }
    }

    /// What flows back through `t` from row sums at their floor.
    fn add_floor(&self, dweights: &Matrix, dck: &mut Matrix, dx: &mut Matrix) {
        let Normalised::Sums { t, divisors, floored } = &self.normalised else { return };
        let size = inner(t, t).sqrt();
        let mut dt = vec![0.0; t.len()];
        for i in (0..divisors.len()).filter(|&i| floored[i]) {
            let slope = -ratio(inner(dweights.row(i), self.g.row(i)), divisors[i].powi(2));
            let norm = inner(self.cq.row(i), self.cq.row(i)).sqrt();
            dt.iter_mut()
                .zip(t)
                .for_each(|(dt, t)| *dt += slope * LEAST_SUM * divisors[i].signum() * norm * ratio(*t, size));
        }
        let sums: Vec<f64> = (0..self.ck.cols).map(|l| (0..self.ck.rows).map(|j| self.ck.at(j, l)).sum()).collect();
        for l in 0..t.len() {
            let back: f64 = (0..t.len()).map(|n| self.x.at(n, l) * dt[n]).sum();
            dx.row_mut(l).iter_mut().zip(&sums).for_each(|(dx, sum)| *dx += dt[l] * sum);
            (0..dck.rows).for_each(|j| dck.row_mut(j)[l] += back);
        }
    }

    /// On to what landmarks are made of.
    fn of_landmarks(&self, dl: Matrix, gradients: &mut HopGradients) {
        let mut du = dl;
        if let Some(activated) = &self.activated {
            let alive = du.map(|i, _, x| if self.alive[i] { x } else { 0.0 });
            let (before, dgamma, dbeta) = activated.backward(&alive);
            du = before;
            gradients.parameters.extend([(Parameter::LandmarkNormGamma, dgamma), (Parameter::LandmarkNormBeta, dbeta)]);
        }
        let (dk, dfilter) = self.producer.backward(&self.head.k, &du);
        gradients.dk = gradients.dk.plus(&dk);
        match self.structure.landmarks {
            Landmarks::Given { .. } => gradients.parameters.push((Parameter::GivenLandmarks, du.data)),
            Landmarks::Conv { .. } => gradients.parameters.push((Parameter::LandmarkWeight, dfilter)),
            _ => {}
        }
    }
}

impl Normalised {
    fn of(head: &Head, normalisation: &Normalisation, g: &Matrix, (cq, x, ck): (&Matrix, &Matrix, &Matrix)) -> Self {
        match normalisation {
            Normalisation::Whitened(m) => {
                let seen = g.map(|i, j, _| f64::from(u8::from(head.keep_query[i] && head.keep_key[j])));
                Self::Whitened(Box::new(whitened::Weights::of(m, seen, g)))
            }
            Normalisation::Row(_) => {
                let sums = Matrix::from_fn(1, ck.cols, |_, l| (0..ck.rows).map(|j| ck.at(j, l)).sum());
                let t = sums.times_transposed(x).data;
                let floor = |i: usize| LEAST_SUM * (inner(cq.row(i), cq.row(i)) * inner(&t, &t)).sqrt();
                let sum = |i: usize| inner(cq.row(i), &t);
                let floored: Vec<bool> = (0..cq.rows).map(|i| sum(i).abs() < floor(i)).collect();
                let divisor = |i: usize| if floored[i] { floor(i).copysign(sum(i)) } else { sum(i) };
                Self::Sums { divisors: (0..cq.rows).map(divisor).collect(), t, floored }
            }
            Normalisation::None(m) if m.factor == Factor::InvN => {
                let seen = head.keep_key.iter().filter(|&&keep| keep).count() as f64;
                Self::Factors(vec![ratio(1.0, seen); g.rows])
            }
            _ => Self::Factors(vec![1.0; g.rows]),
        }
    }
}

/// The producer of landmarks from the keys; `depthwise`: by filters channel by channel, also of partial windows.
fn producer(head: &Head, m: &Nystrom, depthwise: bool) -> LandmarkSource {
    let indices = match m.landmarks {
        Landmarks::Random { count, seed } => {
            head.landmark_indices().unwrap_or_else(|| random::sample(seed, head.batch, head.k.rows, count).collect())
        }
        _ => Vec::new(),
    };
    let kind = if depthwise { Filter::Depthwise } else { Filter::Full };
    let filter = head.parameter(Parameter::LandmarkWeight).map(kind);
    LandmarkSource::new(m.landmarks, m.grid, &head.keep_key, depthwise, filter, &indices)
}

/// Makes the largest affinity of rows that are divided by their sums one where none is near it: f64 may have no room for them.
fn lift(cq: &mut Matrix, log: &dyn Fn(usize, usize) -> f64) {
    for i in 0..cq.rows {
        let logs: Vec<f64> = (0..cq.cols).map(|l| log(i, l)).collect();
        let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if most < -100.0 && most.is_finite() {
            cq.row_mut(i).iter_mut().zip(logs).for_each(|(c, log)| *c = (log - most).exp());
        }
    }
}

fn method(m: &Nystrom, mechanism: &'static str) -> Method {
    Method {
        mechanism,
        inverse: m.inverse,
        steps: m.newton_iterations,
        init: m.newton_init,
        ridge: m.ridge,
        gradient: m.gradient,
        cutoff: m.eigen_cutoff,
    }
}

/// The inverse roots of the degrees: of landmarks `A 1`, without the ridge, of tokens `Ck^T 1`. "Softmax-free Linear Transformers",
/// eq. 17.
fn roots(degree: Option<Degree>, a: &Matrix, ck: &Matrix) -> Vec<f64> {
    let of = |l: usize| match degree {
        None => 1.0,
        Some(Degree::Landmark) => a.row(l).iter().sum::<f64>().powf(-0.5),
        Some(Degree::Token) => (0..ck.rows).map(|j| ck.at(j, l)).sum::<f64>().max(1e-30).powf(-0.5),
    };
    (0..a.rows).map(of).collect()
}
