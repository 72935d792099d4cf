//! The tensors of a call, read and checked, and what is computed of them.

use std::sync::Arc;

use half::{bf16, f16};
use pyo3::prelude::*;
use resolvent_kernels::{
    ClusterPlan, Dropout, Element, ExtraGradients, Extras, Mask, Mechanism, Operator, Parameter, Plan, Shape,
    StridedGradients, StridedInputs, VarlenInputs, VarlenOperator,
};

use crate::{
    dlpack::{Dtype, Stored, Tensor},
    error::{Failure, python},
    threads,
};

/// What computes a call.
pub enum Applied {
    /// Tokens of one sequence per batch entry.
    Together(Arc<Operator>),
    /// Sequences end to end.
    EndToEnd(Box<VarlenOperator>),
}

impl Applied {
    pub fn mechanism(&self) -> &Mechanism {
        match self {
            Self::Together(operator) => operator.mechanism(),
            Self::EndToEnd(operator) => operator.mechanism(),
        }
    }

    pub fn plan(&self) -> &Plan {
        match self {
            Self::Together(operator) => operator.plan(),
            Self::EndToEnd(operator) => operator.plan(),
        }
    }
}

/// What a call reads.
pub struct Operands {
    pub applied: Applied,
    pub shape: Shape,
    pub q: Tensor,
    pub k: Option<Tensor>,
    pub v: Tensor,
    pub key_mask: Option<Vec<bool>>,
    pub query_mask: Option<Vec<bool>>,
    pub parameters: Vec<(Parameter, Tensor)>,
    pub codebook: Option<Tensor>,
    pub landmark_indices: Option<Tensor>,
    pub clusters: Option<Arc<Vec<ClusterPlan>>>,
    pub dropout: Option<Dropout>,
    pub causal: bool,
    pub threads: usize,
}

/// What a backward pass reads and writes, beside the operands.
pub struct Backward {
    pub out: Tensor,
    pub state: Tensor,
    pub dout: Tensor,
    pub dq: Tensor,
    pub dk: Option<Tensor>,
    pub dv: Tensor,
    pub parameters: Vec<(Parameter, Tensor)>,
}

/// Calls `$call` with the storage type of `$tensor`.
macro_rules! of_dtype {
    ($tensor:expr, $self:ident.$method:ident($($argument:expr),*)) => {
        match $tensor.dtype {
            Dtype::F32 => $self.$method::<f32>($($argument),*),
            Dtype::F16 => $self.$method::<f16>($($argument),*),
            Dtype::Bf16 => $self.$method::<bf16>($($argument),*),
            other => {
                let problem = format!("is {}", other.name());
                let remedy = "expected float32, float16 or bfloat16";
                Err(Failure::tensor("DTypeError", "dtype", $tensor.name, &problem, remedy).into())
            }
        }
    };
}

impl Operands {
    /// Rows of the result per head.
    pub fn out_seq(&self) -> usize {
        self.applied.mechanism().out_seq(&self.shape)
    }

    pub fn forward(&self, py: Python<'_>, out: Tensor, state: Option<Tensor>) -> PyResult<()> {
        let mut written = vec![&out];
        written.extend(&state);
        disjoint(&written, &self.inputs_read())?;
        of_dtype!(self.q, self.forward_of(py, out, state))
    }

    pub fn backward(&self, py: Python<'_>, backward: Backward) -> PyResult<()> {
        let mut read = self.inputs_read();
        read.extend([&backward.out, &backward.state, &backward.dout]);
        let mut written = vec![&backward.dq, &backward.dv];
        written.extend(&backward.dk);
        written.extend(backward.parameters.iter().map(|(_, tensor)| tensor));
        disjoint(&written, &read)?;
        of_dtype!(self.q, self.backward_of(py, backward))
    }

    /// The plan of a clustered call.
    pub fn plan_clusters(&self, py: Python<'_>) -> PyResult<Arc<Vec<ClusterPlan>>> {
        of_dtype!(self.q, self.clusters_of(py))
    }

    fn inputs_read(&self) -> Vec<&Tensor> {
        let mut all = vec![&self.q, &self.v];
        all.extend([&self.k, &self.codebook, &self.landmark_indices].into_iter().flatten());
        all.extend(self.parameters.iter().map(|(_, tensor)| tensor));
        all
    }

    fn inputs<T: Stored>(&self) -> PyResult<StridedInputs<'_, T>> {
        let mut extras = Extras::default();
        for (parameter, values) in &self.parameters {
            extras = extras.with(*parameter, values.values()?);
        }
        extras.codebook = self.codebook.as_ref().map(Tensor::values).transpose()?;
        extras.landmark_indices = self.landmark_indices.as_ref().map(Tensor::values).transpose()?;
        if let (Applied::Together(_), Some(plans)) = (&self.applied, &self.clusters) {
            let [plan] = &plans[..] else {
                let problem = format!("are of {} sequences", plans.len());
                return Err(
                    Failure::tensor("TensorError", "tensor", "clusters", &problem, "pass those of this call").into()
                );
            };
            extras.clusters = Some(plan);
        }
        extras.dropout = self.dropout;
        let k = self.k.as_ref().map(Tensor::rows).transpose()?;
        Ok(StridedInputs { q: self.q.rows()?, k, v: self.v.rows()?, extras })
    }

    /// What computes the call, and the plans of its sequences.
    fn operator(&self) -> (&Applied, Option<&[ClusterPlan]>) {
        (&self.applied, self.clusters.as_deref().map(Vec::as_slice))
    }

    fn mask(&self) -> Mask<'_> {
        Mask { causal: self.causal, key: self.key_mask.as_deref(), query: self.query_mask.as_deref() }
    }

    fn forward_of<T: Stored + Element>(
        &self,
        py: Python<'_>,
        mut out: Tensor,
        mut state: Option<Tensor>,
    ) -> PyResult<()> {
        let (inputs, mask, (applied, plans)) = (self.inputs::<T>()?, self.mask(), self.operator());
        python(applied.plan().check_memory(false))?;
        let mut unsaved = vec![0.0; if state.is_some() { 0 } else { applied.plan().stats }];
        let state = state.as_mut().map(Tensor::values_mut).transpose()?.unwrap_or(&mut unsaved);
        let out = out.rows_mut::<T>()?;
        let work = |scratch: &mut _| match applied {
            Applied::Together(operator) => operator.forward_strided(&inputs, &mask, out, state, scratch),
            Applied::EndToEnd(operator) => operator.forward(&of_sequences(inputs, plans), &mask, out, state, scratch),
        };
        python(threads::run(py, self.threads, work)?)
    }

    fn backward_of<T: Stored + Element>(&self, py: Python<'_>, backward: Backward) -> PyResult<()> {
        let (inputs, mask, (applied, plans)) = (self.inputs::<T>()?, self.mask(), self.operator());
        let Backward { out, state, dout, mut dq, mut dk, mut dv, mut parameters } = backward;
        let mut extras = ExtraGradients::default();
        for (parameter, tensor) in &mut parameters {
            extras = extras.with(*parameter, tensor.values_mut()?);
        }
        let dk = dk.as_mut().map(Tensor::rows_mut).transpose()?;
        let mut gradients = StridedGradients { dq: dq.rows_mut()?, dk, dv: dv.rows_mut()?, extras };
        let (out, state, dout) = (out.rows::<T>()?, state.values::<f32>()?, dout.rows::<T>()?);
        let work = |scratch: &mut _| match applied {
            Applied::Together(operator) => {
                operator.backward_strided(&inputs, &mask, out, state, dout, &mut gradients, scratch)
            }
            Applied::EndToEnd(operator) => {
                let inputs = of_sequences(inputs, plans);
                operator.backward(&inputs, &mask, out, state, dout, &mut gradients, scratch)
            }
        };
        python(threads::run(py, self.threads, work)?)
    }

    fn clusters_of<T: Stored + Element>(&self, py: Python<'_>) -> PyResult<Arc<Vec<ClusterPlan>>> {
        let (inputs, mask, (applied, plans)) = (self.inputs::<T>()?, self.mask(), self.operator());
        let work = |scratch: &mut _| match applied {
            Applied::Together(operator) => {
                operator.clusters_strided(&inputs, &mask).map(|plan| vec![plan.into_owned()])
            }
            Applied::EndToEnd(operator) => operator.clusters(&of_sequences(inputs, plans), &mask, scratch),
        };
        Ok(Arc::new(python(threads::run(py, self.threads, work)?)?))
    }
}

/// The inputs of sequences end to end.
fn of_sequences<'a, T>(inputs: StridedInputs<'a, T>, clusters: Option<&'a [ClusterPlan]>) -> VarlenInputs<'a, T> {
    let StridedInputs { q, k, v, extras } = inputs;
    VarlenInputs { q, k, v, extras, clusters }
}

/// Refuses outputs that share memory with an input or with each other.
fn disjoint(written: &[&Tensor], read: &[&Tensor]) -> PyResult<()> {
    for (n, output) in written.iter().enumerate() {
        if let Some(other) = read.iter().chain(&written[n + 1..]).find(|other| output.overlaps(other)) {
            let problem = format!("shares memory with `{}`", other.name);
            return Err(
                Failure::tensor("TensorError", "overlap", output.name, &problem, "pass memory of its own").into()
            );
        }
    }
    Ok(())
}
