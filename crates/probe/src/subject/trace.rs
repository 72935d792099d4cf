//! What a model's attention is made of while it answers.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Tensor;
use resolvent::attention::{MultiHeadAttention, Observed, Observer};
use resolvent_kernels::{ClusterPlan, Mechanism, Parameter, Shape};
use resolvent_lab::{Error, Result};

/// Where in a model a layer of attention is, and how its tokens lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its path in the model, such as `blocks.3`.
    pub name: String,
    /// Whether the first token is one that the answer is read from, and no part of the input.
    pub class_token: bool,
    /// Height and width of the grid of the other tokens; `None` for a text.
    pub grid: Option<[usize; 2]>,
}

/// One layer's self-attention on one example: what its operator was given.
#[derive(Debug, Clone)]
pub struct LayerCall {
    /// Which layer.
    pub place: Place,
    /// The mechanism, on the layer's grid.
    pub mechanism: Mechanism,
    /// Its sizes; `batch` is 1.
    pub shape: Shape,
    /// Whether tokens see themselves and earlier ones only.
    pub causal: bool,
    /// Queries `[heads, tokens, head_dim]`, as the operator sees them.
    pub q: Vec<f32>,
    /// Keys; `None` where they are the queries.
    pub k: Option<Vec<f32>>,
    /// Values.
    pub v: Vec<f32>,
    /// The mechanism's own tensors, as the layer has learned them.
    pub parameters: Vec<(Parameter, Vec<f32>)>,
    /// Tokens that the operator is given: those that there are, and zeros behind them where clusters are those of a whole context.
    pub span: usize,
    /// The plan of its clusters, of so many tokens.
    pub clusters: Option<ClusterPlan>,
}

type Calls = Arc<Mutex<Vec<(usize, Observed)>>>;

/// A model beside a copy of it that shows what its attention is made of. Weights are shared.
#[derive(Debug)]
pub(super) struct Watched<M> {
    /// The model itself.
    pub plain: M,
    watched: M,
    places: Vec<Place>,
    calls: Calls,
}

impl<M: Clone> Watched<M> {
    /// `model`, whose layers of attention `attentions` lists in the order of `places`.
    pub fn new(model: M, places: Vec<Place>, attentions: fn(&mut M) -> Vec<&mut MultiHeadAttention>) -> Self {
        let (mut watched, calls) = (model.clone(), Calls::default());
        for (index, attention) in attentions(&mut watched).into_iter().enumerate() {
            let calls = calls.clone();
            let show = move |call| calls.lock().unwrap_or_else(PoisonError::into_inner).push((index, call));
            attention.observer = Some(Observer::new(show));
        }
        Self { plain: model, watched, places, calls }
    }

    /// The layers' calls while `forward` shows one example to the model.
    pub fn trace<T>(&self, forward: impl FnOnce(&M) -> Result<T>) -> Result<Vec<LayerCall>> {
        forward(&self.watched)?;
        let calls = std::mem::take(&mut *self.calls.lock().unwrap_or_else(PoisonError::into_inner));
        calls.into_iter().map(|(index, call)| layer_call(&self.places[index], call)).collect()
    }
}

fn layer_call(place: &Place, call: Observed) -> Result<LayerCall> {
    let [batch, heads, seq, head_dim] = call.inputs.q.dims();
    let elements = |x: &Tensor<4>| x.clone().into_data().iter::<f32>().collect::<Vec<_>>();
    let own = |parameter| {
        let values = call.inputs.extras.get(parameter)?.clone().into_data();
        Some((parameter, values.iter::<f32>().collect()))
    };
    let (q, k, v) = (elements(&call.inputs.q), call.inputs.k.as_ref().map(elements), elements(&call.inputs.v));
    let finite = |x: &[f32]| x.iter().all(|x| x.is_finite());
    if !finite(&q) || !k.as_deref().is_none_or(finite) || !finite(&v) {
        let problem = "has queries, keys or values that are not finite; the model has diverged, use another checkpoint";
        return Err(Error::Unfit { name: place.name.clone(), problem: problem.into() });
    }
    Ok(LayerCall {
        place: place.clone(),
        mechanism: call.mechanism,
        shape: Shape::square(batch, heads, seq, head_dim),
        causal: call.mask.causal,
        q,
        k,
        v,
        parameters: Parameter::ALL.into_iter().filter_map(own).collect(),
        span: call.span.unwrap_or(seq),
        clusters: call.clusters.as_deref().cloned(),
    })
}
