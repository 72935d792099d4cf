//! Mechanisms as Python objects, with the operators that their calls have been checked and planned as.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use resolvent_kernels::{
    Arithmetic, Mechanism, Operator, Parameter, Precision, Shape, Strategy,
    mechanism::{FeatureMap, Structure},
};

use crate::{
    error::{Failure, python},
    threads,
};

/// What an operator is made for, beside the mechanism.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Key {
    pub shape: Shape,
    /// Heads of keys and values.
    pub kv_heads: usize,
    pub causal: bool,
    pub strategy: Strategy,
    /// How many landmarks the call gives.
    pub given: Option<usize>,
    pub precision: Precision,
}

/// Operators that are kept for each mechanism: sizes that alternate in a model are checked and planned once.
const KEPT: usize = 32;

/// A mechanism. `resolvent.Mechanism` wraps it.
#[pyclass(frozen, module = "resolvent._resolvent", name = "Core")]
#[derive(Debug)]
pub struct Core {
    mechanism: Mechanism,
    /// The last used first.
    operators: Mutex<Vec<(Key, Arc<Operator>)>>,
}

impl Core {
    pub fn mechanism(&self) -> &Mechanism {
        &self.mechanism
    }

    /// The operator of calls of these sizes.
    pub fn operator(&self, key: Key) -> PyResult<Arc<Operator>> {
        let mut operators = self.operators.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = operators.iter().position(|(known, _)| *known == key) {
            operators[..=at].rotate_right(1);
            return Ok(operators[0].1.clone());
        }
        let operator = Arc::new(python(self.planned(&key))?);
        honoured(&operator.plan().arithmetic)?;
        operators.insert(0, (key, operator.clone()));
        operators.truncate(KEPT);
        Ok(operator)
    }

    fn planned(&self, key: &Key) -> resolvent_kernels::Result<Operator> {
        let mechanism = match key.given {
            Some(number) => self.mechanism.clone().with_given_landmarks(number),
            None => self.mechanism.clone(),
        };
        let operator = Operator::new(&mechanism, key.shape, key.causal, key.strategy)?.with_kv_heads(key.kv_heads)?;
        Ok(operator.with_precision(key.precision))
    }
}

/// The strategy of that name.
pub fn strategy(name: &str) -> PyResult<Strategy> {
    match name {
        "auto" => Ok(Strategy::Auto),
        "fused" => Ok(Strategy::Fused),
        "reference" => Ok(Strategy::Reference),
        _ => Err(Failure::argument("strategy", &format!("is {name:?}"), "expected auto, fused or reference").into()),
    }
}

/// The precision of that name.
pub fn precision(name: &str) -> PyResult<Precision> {
    let names = Precision::ALL.iter().map(|precision| precision.name()).collect::<Vec<_>>().join(" or ");
    let failure = || Failure::argument("precision", &format!("is {name:?}"), &format!("expected {names}")).into();
    Precision::named(name).ok_or_else(failure)
}

/// Refuses a call that would run in another precision than it asks for.
pub fn honoured(arithmetic: &Arithmetic) -> PyResult<()> {
    if arithmetic.asked == arithmetic.runs {
        return Ok(());
    }
    let (asked, remedy) = (arithmetic.asked.name(), "leave the precision out");
    let message = format!("precision {asked} is not supported here: {}; {remedy}", arithmetic.reason);
    let (field, remedy) = (Some("precision".to_owned()), Some(remedy.to_owned()));
    Err(Failure { class: "UnsupportedError", code: "unsupported", field, remedy, message, tensor: None }.into())
}

/// The parameter of that name, which the mechanism has.
pub fn parameter(mechanism: &Mechanism, name: &str) -> PyResult<Parameter> {
    let own = mechanism.parameters();
    own.iter().copied().find(|p| p.name() == name).ok_or_else(|| {
        let names = own.iter().map(|p| p.name()).collect::<Vec<_>>().join(", ");
        let remedy = if names.is_empty() { "leave it out".to_owned() } else { format!("it has {names}") };
        let problem = format!("is no parameter of `{mechanism}`");
        Failure::tensor("TensorError", "tensor", name, &problem, &remedy).into()
    })
}

/// Sizes in the order of `Shape`'s fields.
pub type Sizes = (usize, usize, usize, usize, usize, usize);

fn shape_of((batch, heads, seq_q, seq_kv, head_dim, value_dim): Sizes) -> Shape {
    Shape { batch, heads, seq_q, seq_kv, head_dim, value_dim }
}

#[pymethods]
impl Core {
    /// A preset's id, or JSON.
    #[new]
    fn new(text: &str) -> PyResult<Self> {
        let mechanism = python(text.parse())?;
        Ok(Self { mechanism, operators: Mutex::default() })
    }

    fn __str__(&self) -> String {
        self.mechanism.to_string()
    }

    fn to_json(&self) -> PyResult<String> {
        let problem = |error: serde_json::Error| Failure::argument("mechanism", &error.to_string(), "it has no JSON");
        Ok(serde_json::to_string(&self.mechanism).map_err(problem)?)
    }

    /// The JSON of its structure, of a preset too.
    fn structure(&self) -> PyResult<String> {
        let problem = |error: serde_json::Error| Failure::argument("mechanism", &error.to_string(), "it has no JSON");
        Ok(serde_json::to_string(&self.mechanism.values().structure).map_err(problem)?)
    }

    #[getter]
    fn id(&self) -> &'static str {
        self.mechanism.id()
    }

    #[getter]
    fn tied(&self) -> bool {
        self.mechanism.tied
    }

    #[getter]
    fn causal(&self) -> bool {
        self.mechanism.causal
    }

    #[getter]
    fn clustered(&self) -> bool {
        self.mechanism.clustering().is_some()
    }

    #[getter]
    fn tells_heads_apart(&self) -> bool {
        self.mechanism.tells_heads_apart()
    }

    /// Whether queries and keys share one mask.
    #[getter]
    fn masks_tokens_once(&self) -> bool {
        self.mechanism.masks_tokens_once()
    }

    /// Whether each row of the result depends on its own query alone, so that masked queries need not be told.
    #[getter]
    fn row_local(&self) -> bool {
        self.mechanism.values().is_row_local()
    }

    #[getter]
    fn caution(&self) -> Option<&'static str> {
        self.mechanism.caution()
    }

    /// Names of the parameters, and whether a call must give them.
    #[getter]
    fn parameters(&self) -> Vec<(&'static str, bool)> {
        // Whether a call must give a bias does not depend on the sizes.
        let requires = |p| self.mechanism.requires(p, &Shape::square(1, 1, 1, 1));
        self.mechanism.parameters().into_iter().map(|p| (p.name(), requires(p))).collect()
    }

    fn parameter_shape(&self, name: &str, sizes: Sizes) -> PyResult<Vec<usize>> {
        let shape = shape_of(sizes);
        python(self.mechanism.check(&shape, false))?;
        Ok(self.mechanism.parameter_shape(parameter(&self.mechanism, name)?, &shape))
    }

    fn parameter_default(&self, name: &str, sizes: Sizes) -> PyResult<Vec<f32>> {
        let shape = shape_of(sizes);
        python(self.mechanism.check(&shape, false))?;
        Ok(self.mechanism.parameter_default(parameter(&self.mechanism, name)?, &shape))
    }

    /// The directions of random features of heads of `head_dim` channels, row by row; none of mechanisms without any.
    fn feature_directions(&self, head_dim: usize) -> Option<Vec<f64>> {
        match self.mechanism.values().structure {
            Structure::Features(features) if features.map == FeatureMap::Favor => Some(features.directions(head_dim)),
            _ => None,
        }
    }

    fn with_tied(&self, tied: bool) -> Self {
        Self { mechanism: self.mechanism.clone().with_tied(tied), operators: Mutex::default() }
    }

    fn with_causal(&self, causal: bool) -> Self {
        Self { mechanism: self.mechanism.clone().with_causal(causal), operators: Mutex::default() }
    }

    fn with_seed(&self, seed: u64) -> Self {
        Self { mechanism: self.mechanism.clone().with_seed(seed), operators: Mutex::default() }
    }

    /// Rows of `out` per head, and elements of the state that the backward pass needs.
    #[pyo3(signature = (sizes, causal, strategy, given=None))]
    fn lengths(&self, sizes: Sizes, causal: bool, strategy: &str, given: Option<usize>) -> PyResult<(usize, usize)> {
        let (strategy, precision) = (self::strategy(strategy)?, Precision::Full);
        let key = Key { shape: shape_of(sizes), kv_heads: sizes.1, causal, strategy, given, precision };
        let operator = self.operator(key)?;
        Ok((operator.out_seq(), operator.plan().stats))
    }

    /// What a call will do and need, as JSON, and what is likely a mistake in it.
    /// `how`: whether it is causal, by which strategy, and in which precision.
    #[pyo3(signature = (sizes, how, given, threads))]
    fn plan(
        &self,
        py: Python<'_>,
        sizes: Sizes,
        how: (bool, String, String),
        given: Option<usize>,
        threads: usize,
    ) -> PyResult<(String, Option<&'static str>)> {
        let (causal, strategy, precision) = (how.0, self::strategy(&how.1)?, self::precision(&how.2)?);
        let key = Key { shape: shape_of(sizes), kv_heads: sizes.1, causal, strategy, given, precision };
        // What the threads hold between them is planned for those of the pool.
        let operator = python(threads::run(py, threads, |_| self.planned(&key))?)?;
        honoured(&operator.plan().arithmetic)?;
        let problem = |error: serde_json::Error| Failure::argument("plan", &error.to_string(), "it has no JSON");
        let plan = serde_json::to_string(operator.plan()).map_err(problem)?;
        Ok((plan, operator.mechanism().caution().or(operator.mechanism().caution_at(operator.shape()))))
    }
}
