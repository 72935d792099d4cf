//! What generation keeps of the tokens so far: a cache of the kernels as a Python object.

use pyo3::prelude::*;
use resolvent_kernels::{Cache, Extras, Inputs, Mask};

use crate::{
    call::{keep, same_shape},
    dlpack::Tensor,
    error::python,
    mechanism::{Core, parameter},
    threads,
};

/// The past of causal calls of one mechanism, which further tokens attend to without doing it again. In float32.
#[pyclass(module = "resolvent._resolvent", name = "Past")]
pub struct Past {
    core: Py<Core>,
    cache: Cache,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    /// Channels of queries and keys, and of values.
    dims: [usize; 2],
}

#[pymethods]
impl Past {
    /// No token yet, and memory for `capacity` of them.
    #[new]
    #[pyo3(signature = (core, *, batch, heads, kv_heads, head_dim, value_dim, capacity=0))]
    #[allow(clippy::too_many_arguments)] // sizes, by name
    fn new(
        py: Python<'_>,
        core: Py<Core>,
        batch: usize,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        value_dim: usize,
        capacity: usize,
    ) -> PyResult<Self> {
        let mechanism = core.bind(py).get().mechanism();
        let cache = Cache::new(mechanism, batch, heads, head_dim, value_dim, capacity)
            .and_then(|cache| cache.with_kv_heads(kv_heads));
        Ok(Self { core, cache: python(cache)?, batch, heads, kv_heads, dims: [head_dim, value_dim] })
    }

    fn __len__(&self) -> usize {
        self.cache.len()
    }

    /// Bytes of what is kept.
    #[getter]
    fn bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Takes `n` tokens in, `q [batch, heads, n, head_dim]`, `k` and `v` of `kv_heads`, dense, and writes their rows to
    /// `out [batch, heads, n, value_dim]`; of tokens whose rows are known, `q` and `out` are none. `key_mask [batch, n]`, true = keep.
    #[pyo3(signature = (q, k, v, out, *, threads, key_mask=None, parameters=Vec::new()))]
    #[allow(clippy::too_many_arguments)] // the tensors of a call
    fn take(
        &mut self,
        py: Python<'_>,
        q: Option<&Bound<'_, PyAny>>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        threads: usize,
        key_mask: Option<&Bound<'_, PyAny>>,
        parameters: Vec<(String, Bound<'_, PyAny>)>,
    ) -> PyResult<()> {
        let Self { batch, heads, kv_heads, dims: [head_dim, value_dim], .. } = *self;
        let read = |object: &Bound<'_, PyAny>, name| Tensor::read(object, name, false);
        let (k, v) = (read(k, "k")?, read(v, "v")?);
        let new = v.shape().iter().rev().nth(1).copied().unwrap_or(0);
        same_shape(&k, &[batch, kv_heads, new, head_dim])?;
        same_shape(&v, &[batch, kv_heads, new, value_dim])?;
        let q = q.map(|q| read(q, "q")).transpose()?;
        let mut out = out.map(|out| read(out, "out")).transpose()?;
        let (rows, width) = ([batch, heads, new], |dim: usize| [batch, heads, new, dim]);
        q.iter().try_for_each(|q| same_shape(q, &width(head_dim)))?;
        out.iter().try_for_each(|out| same_shape(out, &width(value_dim)))?;
        let key_mask = key_mask.map(|mask| keep(&read(mask, "key_mask")?, batch, new, 4)).transpose()?;
        let mechanism = self.core.bind(py).get().mechanism();
        let mut given = Vec::with_capacity(parameters.len());
        for (name, values) in &parameters {
            let parameter = parameter(mechanism, name)?;
            given.push((parameter, read(values, parameter.name())?));
        }
        let mut extras = Extras::default();
        for (parameter, values) in &given {
            extras = extras.with(*parameter, values.values()?);
        }
        // Queries whose rows nobody asks for are not read, but for their number.
        let unread = vec![0.0; if q.is_some() { 0 } else { rows.iter().product::<usize>() * head_dim }];
        let q = q.as_ref().map_or(Ok(&unread[..]), Tensor::values)?;
        let inputs = Inputs { q, k: Some(k.values()?), v: v.values()?, extras };
        let mask = Mask { causal: true, key: key_mask.as_deref(), query: None };
        let (cache, out) = (&mut self.cache, out.as_mut().map(Tensor::values_mut).transpose()?);
        let work = |_: &mut _| match out {
            Some(out) => cache.step_masked(&inputs, &mask, out),
            None => cache.append_masked(&inputs, &mask),
        };
        python(threads::run(py, threads, work)?)
    }
}
