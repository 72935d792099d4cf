//! One attention problem with its incoming gradient, and ways to solve it over fresh, poisoned buffers.

use std::collections::BTreeMap;

use resolvent_kernels::{
    ClusterPlan, Dropout, Element, ExtraGradients, Extras, Gradients, Inputs, Mask, Mechanism, Operator, Parameter,
    Result, Scratch, Shape, Strategy, Tol, reference, simd::Level,
};

use super::assert_close;

/// Inputs of one call and the gradient of its output, in f64 but exact in f32.
#[derive(Debug, Clone)]
pub struct Problem {
    pub mechanism: Mechanism,
    pub shape: Shape,
    pub q: Vec<f64>,
    pub k: Option<Vec<f64>>,
    pub v: Vec<f64>,
    /// The mechanism's own tensors that the call gives.
    pub parameters: BTreeMap<Parameter, Vec<f32>>,
    /// Fixed centroids of a clustered call.
    pub codebook: Option<Vec<f32>>,
    /// The plan of a clustered call that does not make its own.
    pub clusters: Option<ClusterPlan>,
    /// The tokens that are landmarks.
    pub landmark_indices: Option<Vec<i64>>,
    pub dropout: Option<Dropout>,
    pub key_mask: Option<Vec<bool>>,
    pub query_mask: Option<Vec<bool>>,
    pub dout: Vec<f64>,
}

/// Everything that a solver returns, by the names of the tensors.
pub type Solution = BTreeMap<&'static str, Vec<f64>>;

impl Problem {
    pub fn mask(&self) -> Mask<'_> {
        Mask { causal: false, key: self.key_mask.as_deref(), query: self.query_mask.as_deref() }
    }

    /// Gives the call a decay per head.
    pub fn set_gamma(&mut self, gamma: Vec<f32>) {
        self.parameters.insert(Parameter::Gamma, gamma);
    }

    pub fn extras(&self) -> Extras<'_> {
        let mut extras = Extras::default();
        extras.landmark_indices = self.landmark_indices.as_deref();
        extras.dropout = self.dropout;
        let extras = self.parameters.iter().fold(extras, |extras, (&parameter, x)| extras.with(parameter, x));
        let extras = self.codebook.iter().fold(extras, |extras, codebook| extras.with_codebook(codebook));
        self.clusters.iter().fold(extras, |extras, plan| extras.with_clusters(plan))
    }

    /// The plan that a clustered call makes of this problem.
    pub fn plan(&self) -> ClusterPlan {
        let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
        let (q, k) = (narrow(&self.q), narrow(self.k.as_ref().unwrap_or(&self.q)));
        ClusterPlan::new(&self.mechanism, &self.shape, &q, &k, self.codebook.as_deref(), &self.mask()).unwrap()
    }

    /// Gives a clustered call its own plan: a constant from here on, also where tokens change, or their order.
    pub fn fix_plan(&mut self) {
        if self.mechanism.values().structure.kind() == "clustered" {
            self.clusters = Some(self.plan());
        }
    }

    pub fn inputs(&self) -> Inputs<'_, f64> {
        Inputs { q: &self.q, k: self.k.as_deref(), v: &self.v, extras: self.extras() }
    }

    /// The solution by the f64 reference.
    pub fn reference(&self) -> Solution {
        let (inputs, mask) = (self.inputs(), self.mask());
        let forward = reference::forward(&self.mechanism, &self.shape, &inputs, &mask).unwrap();
        let backward = reference::backward(&self.mechanism, &self.shape, &inputs, &mask, &self.dout).unwrap();
        let mut solution = Solution::from([("out", forward.out), ("dq", backward.dq), ("dv", backward.dv)]);
        let optional = [("lse", forward.lse), ("dk", backward.dk)];
        solution.extend(optional.into_iter().filter_map(|(name, x)| Some((name, x?))));
        solution.extend(backward.parameters.into_iter().map(|(parameter, x)| (parameter.gradient_name(), x)));
        solution
    }

    /// The solution by the kernels, with all tensors stored as `T`.
    pub fn solve<T: Element>(&self, strategy: Strategy, level: Option<Level>) -> Result<Solution> {
        let mut op = Operator::new(&self.mechanism, self.shape, false, strategy)?;
        if let Some(level) = level {
            op = op.with_level(level)?;
        }
        self.solve_by::<T>(&op)
    }

    /// The solution by an operator for it, with all tensors stored as `T`.
    pub fn solve_by<T: Element>(&self, op: &Operator) -> Result<Solution> {
        let (q, k, v) = (stored::<T>(&self.q), self.k.as_deref().map(stored::<T>), stored::<T>(&self.v));
        let inputs = Inputs { q: &q, k: k.as_deref(), v: &v, extras: self.extras() };
        let mask = self.mask();
        let (mut out, mut stats) = (poisoned::<T>(op.out_len()), poisoned::<f32>(op.plan().stats));
        let mut scratch = Scratch::default();
        scratch.take(op.plan().scratch_forward.max(op.plan().scratch_backward)).fill(f32::NAN);
        op.forward(&inputs, &mask, &mut out, &mut stats, &mut scratch)?;
        let mut dq = poisoned::<T>(q.len());
        let (mut dk, mut dv) = (k.as_deref().map(|k| poisoned::<T>(k.len())), poisoned::<T>(v.len()));
        let mut parameters = self.parameter_rooms();
        let extras = parameters.iter_mut().fold(ExtraGradients::default(), |extras, (p, room)| extras.with(*p, room));
        let mut gradients = Gradients { dq: &mut dq, dk: dk.as_deref_mut(), dv: &mut dv, extras };
        let dout = stored::<T>(&self.dout);
        op.backward(&inputs, &mask, &out, &stats, &dout, &mut gradients, &mut scratch)?;
        let mut solution = Solution::from([("out", wide(&out)), ("dq", wide(&dq)), ("dv", wide(&dv))]);
        let optional = [("dk", dk.as_deref().map(wide)), ("lse", op.lse(&stats).map(wide))];
        solution.extend(optional.into_iter().filter_map(|(name, x)| Some((name, x?))));
        solution.extend(parameters.into_iter().map(|(parameter, x)| (parameter.gradient_name(), wide(&x))));
        Ok(solution)
    }

    /// Fresh room for the gradient of every parameter that the mechanism has.
    fn parameter_rooms(&self) -> Vec<(Parameter, Vec<f32>)> {
        let room = |&parameter| {
            let len = self.mechanism.parameter_shape(parameter, &self.shape).iter().product();
            (parameter, poisoned::<f32>(len))
        };
        self.mechanism.parameters().iter().map(room).collect()
    }

    /// The solution by the fused kernels in f32.
    pub fn fused(&self) -> Solution {
        self.solve::<f32>(Strategy::Fused, None).unwrap()
    }

    /// The same problem with every tensor rounded to `T`, or `None` where `T` cannot hold it.
    pub fn rounded<T: Element>(&self) -> Option<Self> {
        let round = |x: &[f64]| {
            let rounded = wide(&stored::<T>(x));
            rounded.iter().all(|x| x.is_finite()).then_some(rounded)
        };
        let k = match &self.k {
            Some(k) => Some(round(k)?),
            None => None,
        };
        Some(Self { q: round(&self.q)?, k, v: round(&self.v)?, dout: round(&self.dout)?, ..self.clone() })
    }
}

/// Panics unless `got` has the tensors of `expected`, each (batch, head) within the tolerance (a parameter's gradient: as a whole).
#[track_caller]
pub fn assert_solution(what: &str, got: &Solution, expected: &Solution, shape: &Shape, tol: Tol) {
    let names = |s: &Solution| s.keys().copied().collect::<Vec<_>>();
    assert_eq!(names(got), names(expected), "{what}");
    for (name, expected) in expected {
        // A parameter's gradient is a sum over all outputs of its head.
        let terms = (shape.out_len() / shape.heads) as f64;
        let (slices, noise) =
            if is_parameter(name) { (1, tol.noise * terms.sqrt()) } else { (shape.slices(), tol.noise) };
        let rtol = if matches!(*name, "out" | "lse") { tol.forward } else { tol.backward };
        let (got, expected) = (finite(&got[name]), finite(expected));
        assert_close(&format!("{what}, {name}"), &got, &expected, slices, rtol, noise);
    }
}

/// Whether `name` is the gradient of a mechanism's own tensor.
pub fn is_parameter(name: &str) -> bool {
    Parameter::ALL.iter().any(|parameter| parameter.gradient_name() == name)
}

/// The entries with `-inf`, the log of an empty sum, as a number that no finite logit comes near.
fn finite(x: &[f64]) -> Vec<f64> {
    x.iter().map(|&x| if x == f64::NEG_INFINITY { -1e30 } else { x }).collect()
}

/// A buffer in which an element that is never written stays NaN.
fn poisoned<T: Element>(len: usize) -> Vec<T> {
    vec![T::narrow(f32::NAN); len]
}

fn stored<T: Element>(x: &[f64]) -> Vec<T> {
    x.iter().map(|&x| T::narrow(x as f32)).collect()
}

fn wide<T: Element>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.widen().into()).collect()
}
