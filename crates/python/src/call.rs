//! One call as a Python object: everything but q, k and v, which forward and backward pass share.

use std::sync::Arc;

use pyo3::prelude::*;
use resolvent_kernels::{
    ClusterPlan, Dropout, Error, Heads, Parameter, PlanTensors, Precision, Sequences, Shape, Strategy, VarlenOperator,
};

use crate::{
    dlpack::Tensor,
    error::{Failure, python},
    mechanism::{Core, Key, Sizes, honoured, parameter, precision, strategy},
    run::{Applied, Backward, Operands},
    threads,
};

/// Which tokens a clustered call puts together: one plan, or one per sequence. `resolvent.Clusters`.
#[pyclass(frozen, module = "resolvent._resolvent", name = "Clusters")]
#[derive(Debug)]
pub struct Clusters(Arc<Vec<ClusterPlan>>);

/// Labels of queries and of keys, exact blocks, edges and their weights: the fields of [`resolvent_kernels::PlanTensors`].
type PlanLists = (Vec<i64>, Vec<i64>, Vec<[i64; 3]>, Vec<[i64; 3]>, Vec<f64>);

/// A plan as it is pickled: its slices, and its lists.
type Pickled = (usize, PlanLists);

#[pymethods]
impl Clusters {
    /// The plan of every sequence (of calls of one length, a single one) as flat lists: cluster of every query and of every key, -1 for
    /// none; `[slice, query cluster, key cluster]` of what is seen exactly; `[slice, query, key]` of sampled edges, and what is added to
    /// their logits. A slice is `batch entry * heads + head`.
    fn tensors(&self) -> Vec<PlanLists> {
        let lists = |plan: &ClusterPlan| {
            let PlanTensors { label_q, label_k, exact_blocks, edges, edge_log_weight } = plan.to_tensors();
            (label_q, label_k, exact_blocks, edges, edge_log_weight)
        };
        self.0.iter().map(lists).collect()
    }

    /// From what `__reduce__` gives.
    #[staticmethod]
    fn restored(plans: Vec<Pickled>) -> PyResult<Self> {
        let plan = |(slices, (label_q, label_k, exact_blocks, edges, edge_log_weight)): Pickled| {
            let [seq_q, seq_kv] = [&label_q, &label_k].map(|labels| labels.len() / slices.max(1));
            let shape = Shape { batch: slices, heads: 1, seq_q, seq_kv, head_dim: 1, value_dim: 1 };
            ClusterPlan::from_tensors(&PlanTensors { label_q, label_k, exact_blocks, edges, edge_log_weight }, &shape)
        };
        Ok(Self(Arc::new(python(plans.into_iter().map(plan).collect())?)))
    }

    /// For pickles and copies.
    fn __reduce__(slf: &Bound<'_, Self>) -> PyResult<(Object, (Vec<Pickled>,))> {
        let this = slf.get();
        let plans = this.0.iter().map(ClusterPlan::slices).zip(this.tensors()).collect();
        Ok((slf.get_type().getattr("restored")?.unbind(), (plans,)))
    }

    /// Clusters of queries and of keys of every batch entry or sequence and head.
    #[getter]
    fn counts(&self) -> Vec<[usize; 2]> {
        self.0.iter().flat_map(|plan| (0..plan.slices()).map(|slice| plan.clusters(slice))).collect()
    }

    /// Sampled edges, all heads together.
    #[getter]
    fn edges(&self) -> usize {
        self.0.iter().map(ClusterPlan::edges).sum()
    }
}

type Object = Py<PyAny>;

/// A tensor that is written, by the parameter's name.
type Wanted<'py> = Vec<(String, Bound<'py, PyAny>)>;

/// Everything of a call but q, k and v.
#[pyclass(frozen, module = "resolvent._resolvent", name = "Call")]
pub struct Call {
    core: Py<Core>,
    causal: bool,
    strategy: Strategy,
    threads: usize,
    key_mask: Option<Object>,
    query_mask: Option<Object>,
    parameters: Vec<(Parameter, Object)>,
    codebook: Option<Object>,
    landmark_indices: Option<Object>,
    clusters: Option<Py<Clusters>>,
    dropout: Option<Dropout>,
    bf16_as_u16: bool,
    precision: Precision,
    sequences: Option<Sequences>,
}

#[pymethods]
impl Call {
    /// `dropout` is kind, probability and seed; `sequences` are the cumulative lengths of those that lie end to end, of queries and, of
    /// cross-attention, of keys.
    #[new]
    #[pyo3(signature = (
        core, *, threads, causal=false, strategy="auto", key_mask=None, query_mask=None, parameters=Vec::new(),
        codebook=None, landmark_indices=None, clusters=None, dropout=None, bf16_as_u16=false, precision="full", sequences=None
    ))]
    #[allow(clippy::too_many_arguments)] // a call's options, by name
    fn new(
        py: Python<'_>,
        core: Py<Core>,
        threads: usize,
        causal: bool,
        strategy: &str,
        key_mask: Option<Object>,
        query_mask: Option<Object>,
        parameters: Vec<(String, Object)>,
        codebook: Option<Object>,
        landmark_indices: Option<Object>,
        clusters: Option<Py<Clusters>>,
        dropout: Option<(String, f64, u64)>,
        bf16_as_u16: bool,
        precision: &str,
        sequences: Option<(Vec<usize>, Option<Vec<usize>>)>,
    ) -> PyResult<Self> {
        let mechanism = core.bind(py).get().mechanism();
        let parameters = parameters.into_iter().map(|(name, values)| Ok((parameter(mechanism, &name)?, values)));
        let parameters = parameters.collect::<PyResult<_>>()?;
        let (strategy, dropout) = (self::strategy(strategy)?, dropout.map(dropped).transpose()?);
        Ok(Self {
            core,
            causal,
            strategy,
            threads,
            key_mask,
            query_mask,
            parameters,
            codebook,
            landmark_indices,
            clusters,
            dropout,
            bf16_as_u16,
            precision: self::precision(precision)?,
            sequences: sequences.map(|(queries, keys)| end_to_end(&queries, keys.as_deref())).transpose()?,
        })
    }

    /// Sizes of the call, rows of `out` per head and elements of the state that the backward pass needs.
    #[pyo3(signature = (q, k, v))]
    fn lengths(
        &self,
        q: &Bound<'_, PyAny>,
        k: Option<&Bound<'_, PyAny>>,
        v: &Bound<'_, PyAny>,
    ) -> PyResult<(Sizes, usize, usize)> {
        let operands = self.operands(q, k, v)?;
        let Shape { batch, heads, seq_q, seq_kv, head_dim, value_dim } = operands.shape;
        let sizes = (batch, heads, seq_q, seq_kv, head_dim, value_dim);
        Ok((sizes, operands.out_seq(), operands.applied.plan().stats))
    }

    /// Writes `out` and, where a backward pass will follow, `state`.
    #[pyo3(signature = (q, k, v, out, state))]
    fn forward(
        &self,
        q: &Bound<'_, PyAny>,
        k: Option<&Bound<'_, PyAny>>,
        v: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        state: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let operands = self.operands(q, k, v)?;
        let out = self.tensor(out, "out")?;
        let state = state.map(|state| Tensor::read(state, "state", false)).transpose()?;
        let leading = &operands.q.shape()[..operands.q.shape().len() - 2];
        let expected = [leading, &[operands.out_seq(), operands.shape.value_dim]].concat();
        same_shape(&out, &expected)?;
        operands.forward(q.py(), out, state)
    }

    /// Writes the gradients.
    #[pyo3(signature = (q, k, v, out, state, dout, dq, dk, dv, wanted))]
    #[allow(clippy::too_many_arguments)] // what forward read and wrote, and where gradients go
    fn backward(
        &self,
        q: &Bound<'_, PyAny>,
        k: Option<&Bound<'_, PyAny>>,
        v: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        state: &Bound<'_, PyAny>,
        dout: &Bound<'_, PyAny>,
        dq: &Bound<'_, PyAny>,
        dk: Option<&Bound<'_, PyAny>>,
        dv: &Bound<'_, PyAny>,
        wanted: Wanted<'_>,
    ) -> PyResult<()> {
        let operands = self.operands(q, k, v)?;
        let mechanism = operands.applied.mechanism();
        let parameters = wanted.iter().map(|(name, gradient)| {
            let parameter = parameter(mechanism, name)?;
            Ok((parameter, Tensor::read(gradient, parameter.gradient_name(), false)?))
        });
        let backward = Backward {
            out: self.tensor(out, "out")?,
            state: Tensor::read(state, "state", false)?,
            dout: self.tensor(dout, "dout")?,
            dq: self.tensor(dq, "dq")?,
            dk: dk.map(|dk| self.tensor(dk, "dk")).transpose()?,
            dv: self.tensor(dv, "dv")?,
            parameters: parameters.collect::<PyResult<_>>()?,
        };
        same_shape(&backward.dout, backward.out.shape())?;
        operands.backward(q.py(), backward)
    }

    /// The plan that a clustered call makes.
    #[pyo3(signature = (q, k, v))]
    fn plan_clusters(
        &self,
        q: &Bound<'_, PyAny>,
        k: Option<&Bound<'_, PyAny>>,
        v: &Bound<'_, PyAny>,
    ) -> PyResult<Clusters> {
        Ok(Clusters(self.operands(q, k, v)?.plan_clusters(q.py())?))
    }
}

impl Call {
    /// The operator of sequences that are as long together as the tensors.
    fn end_to_end(&self, py: Python<'_>, sequences: &Sequences, key: &Key) -> PyResult<Box<VarlenOperator>> {
        let Shape { heads, seq_q, seq_kv, head_dim, value_dim, .. } = key.shape;
        let ends = [("cu_seqlens_q", sequences.tokens(), seq_q), ("cu_seqlens_k", sequences.keys(), seq_kv)];
        if let Some((field, end, tokens)) = ends.into_iter().find(|(_, end, tokens)| end != tokens) {
            let problem = format!("ends with {end} beside {tokens} tokens");
            return Err(Failure::argument(field, &problem, "it must end with their number").into());
        }
        let heads = Heads { heads, kv_heads: key.kv_heads, head_dim, value_dim };
        let core = self.core.bind(py).get();
        // How the sequences share the threads is planned for those of the pool.
        let plan = |_: &mut _| VarlenOperator::new(core.mechanism(), heads, sequences, key.causal, key.strategy);
        let operator = python(threads::run(py, self.threads, plan)?)?.with_precision(key.precision);
        honoured(&operator.plan().arithmetic)?;
        Ok(Box::new(operator))
    }

    fn tensor(&self, object: &Bound<'_, PyAny>, name: &'static str) -> PyResult<Tensor> {
        Tensor::read_rows(object, name, self.bf16_as_u16)
    }

    fn operands(&self, q: &Bound<'_, PyAny>, k: Option<&Bound<'_, PyAny>>, v: &Bound<'_, PyAny>) -> PyResult<Operands> {
        let py = q.py();
        let (q, v) = (self.tensor(q, "q")?, self.tensor(v, "v")?);
        let k = k.map(|k| self.tensor(k, "k")).transpose()?;
        let (shape, kv_heads) = shape_of(&q, k.as_ref(), &v)?;
        let mut parameters = Vec::with_capacity(self.parameters.len());
        for (parameter, values) in &self.parameters {
            parameters.push((*parameter, Tensor::read(values.bind(py), parameter.name(), false)?));
        }
        let given = parameters.iter().find(|(parameter, _)| *parameter == Parameter::GivenLandmarks);
        let given = given.and_then(|(_, landmarks)| landmarks.shape().iter().rev().nth(1).copied());
        let (causal, strategy, precision) = (self.causal, self.strategy, self.precision);
        let key = Key { shape, kv_heads, causal, strategy, given, precision };
        let applied = match &self.sequences {
            None => Applied::Together(self.core.bind(py).get().operator(key)?),
            Some(sequences) => Applied::EndToEnd(self.end_to_end(py, sequences, &key)?),
        };
        for (parameter, values) in &parameters {
            same_shape(values, &applied.mechanism().parameter_shape(*parameter, &shape))?;
        }
        let read = |object: &Option<Object>, name| {
            object.as_ref().map(|object| Tensor::read(object.bind(py), name, false)).transpose()
        };
        let mask = |object: &Option<Object>, name, seq| {
            read(object, name)?.map(|mask| keep(&mask, shape.batch, seq, q.shape().len())).transpose()
        };
        Ok(Operands {
            key_mask: mask(&self.key_mask, "key_mask", shape.seq_kv)?,
            query_mask: mask(&self.query_mask, "query_mask", shape.seq_q)?,
            codebook: read(&self.codebook, "codebook")?,
            landmark_indices: read(&self.landmark_indices, "landmark_indices")?,
            clusters: self.clusters.as_ref().map(|clusters| clusters.bind(py).get().0.clone()),
            dropout: self.dropout,
            causal: self.causal,
            threads: self.threads,
            applied,
            shape,
            q,
            k,
            v,
            parameters,
        })
    }
}

/// Sequences by their cumulative lengths.
fn end_to_end(queries: &[usize], keys: Option<&[usize]>) -> PyResult<Sequences> {
    let sequences = keys.map_or_else(|| Sequences::new(queries), |keys| Sequences::cross(queries, keys));
    python(sequences.map_err(|error| match error {
        Error::OutOfRange { field, got, expected } => {
            let field = if field == "keys" { "cu_seqlens_k" } else { "cu_seqlens_q" };
            Error::OutOfRange { field, got, expected }
        }
        other => other,
    }))
}

fn dropped((kind, probability, seed): (String, f64, u64)) -> PyResult<Dropout> {
    match &*kind {
        "weights" => python(Dropout::weights(probability, seed)),
        "pairs" => python(Dropout::pairs(probability, seed)),
        _ => Err(Failure::argument("dropout_kind", &format!("is {kind:?}"), "expected weights or pairs").into()),
    }
}

/// The elements of a mask, `[batch, seq]`, or `[seq]` beside tensors without a batch.
pub fn keep(mask: &Tensor, batch: usize, seq: usize, rank: usize) -> PyResult<Vec<bool>> {
    let alone = rank < 4 && mask.shape() == [seq];
    if !alone {
        same_shape(mask, &[batch, seq])?;
    }
    Ok(mask.values::<u8>()?.iter().map(|&keep| keep != 0).collect())
}

pub fn same_shape(tensor: &Tensor, expected: &[usize]) -> PyResult<()> {
    if tensor.shape() == expected {
        return Ok(());
    }
    let problem = format!("has shape {:?}", tensor.shape());
    Err(Failure::tensor("TensorError", "shape", tensor.name, &problem, &format!("expected {expected:?}")).into())
}

/// The sizes that `q`, `k` and `v` give, `[batch, heads, seq, channels]`, `[heads, seq, channels]` or `[seq, channels]`, and the heads of
/// `k` and `v`, which may be fewer.
fn shape_of(q: &Tensor, k: Option<&Tensor>, v: &Tensor) -> PyResult<(Shape, usize)> {
    let rank = q.shape().len();
    if rank < 2 {
        let problem = format!("has shape {:?}", q.shape());
        let remedy = "expected [batch, heads, tokens, channels], [heads, tokens, channels] or [tokens, channels]";
        return Err(Failure::tensor("TensorError", "shape", "q", &problem, remedy).into());
    }
    let (leading, [seq_q, head_dim]) = (&q.shape()[..rank - 2], [q.shape()[rank - 2], q.shape()[rank - 1]]);
    let last = |tensor: &Tensor| tensor.shape().iter().rev().take(2).copied().collect::<Vec<_>>();
    let seq_kv = last(v).get(1).copied().unwrap_or(0);
    let value_dim = last(v).first().copied().unwrap_or(0);
    let heads = leading.last().copied().unwrap_or(1);
    let mut kv_heads = heads;
    if let Some(k) = k {
        let mut leading = leading.to_vec();
        if let Some(of_keys) = leading.last_mut().filter(|_| k.shape().len() == rank) {
            let given = k.shape()[rank - 3];
            if given > 0 && heads.is_multiple_of(given) {
                (kv_heads, *of_keys) = (given, given);
            }
        }
        let expected = [&leading[..], &[last(k).get(1).copied().unwrap_or(0), head_dim]].concat();
        shared_axes(k, &expected, "the same batch and channels as `q`, and heads that divide its")?;
        let expected = [&leading[..], &[expected[rank - 2], value_dim]].concat();
        shared_axes(v, &expected, "the same batch, heads and tokens as `k`")?;
    } else {
        shared_axes(v, &[leading, &[seq_kv, value_dim]].concat(), "the same batch and heads as `q`")?;
    }
    if let Some(tensor) = [k, Some(v)].into_iter().flatten().find(|tensor| tensor.dtype != q.dtype) {
        let problem = format!("is {} beside a `q` of {}", tensor.dtype.name(), q.dtype.name());
        return Err(Failure::tensor("DTypeError", "dtype", tensor.name, &problem, "pass one type for all").into());
    }
    let batch = if rank == 4 { leading[0] } else { 1 };
    Ok((Shape { batch, heads, seq_q, seq_kv, head_dim, value_dim }, kv_heads))
}

fn shared_axes(tensor: &Tensor, expected: &[usize], what: &str) -> PyResult<()> {
    if tensor.shape() == expected {
        return Ok(());
    }
    let problem = format!("has shape {:?}", tensor.shape());
    let remedy = format!("expected {expected:?}: {what}");
    Err(Failure::tensor("TensorError", "shape", tensor.name, &problem, &remedy).into())
}
