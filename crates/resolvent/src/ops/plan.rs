//! Which path a call takes, decided before it is made, and all checks of its tensors.

use burn::{
    backend::DispatchDevice,
    tensor::{DType, Device, Tensor},
};
use resolvent_kernels::{self as kernels, Parameter, Precision};

use super::{Calibration, Inputs, Mask, composed};
use crate::{Error, Mechanism, Result, Shape};

/// How the operator is applied. `Auto` lets the library choose; any other value is honoured or refused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Strategy {
    /// `Fused` where the device and the mechanism have it, else `Composed`; on Flex `Reference` where the fused path has no form and
    /// tensor operations neither, as for full whitening. For few
    /// tokens in f32, `Composed` too where an installed [`Calibration`] has measured that it is faster.
    #[default]
    Auto,
    /// The kernels of `resolvent-kernels` with their own backward pass: streamed, O(N) extra memory. Flex only.
    Fused,
    /// Tensor operations on full matrices, O(N^2) memory, differentiated by Burn: on every device.
    Composed,
    /// The naive f64 form that the others are checked against, O(N^2) memory. Flex only.
    Reference,
}

impl std::fmt::Display for Strategy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Fused => "fused",
            Self::Composed => "composed",
            Self::Reference => "reference",
        })
    }
}

/// What a call will do and need.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Plan {
    /// What `Auto` became.
    pub strategy: Strategy,
    /// Why.
    pub reason: &'static str,
    /// The sizes.
    pub shape: Shape,
    /// Operations, bytes and scratch of the kernels, where they run.
    pub kernel: Option<kernels::Plan>,
}

/// The operation that errors name.
const OP: &str = "attend";

/// What [`crate::attend`] with the same arguments would do.
///
/// # Errors
/// As [`crate::attend`], but for those that depend on the tensors' content.
pub fn plan(inputs: &Inputs, mechanism: &Mechanism, mask: &Mask, strategy: Strategy) -> Result<Plan> {
    let Decision { strategy, reason, shape, operator } = decide(inputs, mechanism, mask, strategy)?;
    Ok(Plan { strategy, reason, shape, kernel: operator.map(|operator| *operator.plan()) })
}

/// A [`Plan`] that can be carried out.
pub(super) struct Decision {
    pub strategy: Strategy,
    pub reason: &'static str,
    pub shape: Shape,
    /// The kernels', where they run.
    pub operator: Option<kernels::Operator>,
}

/// Checks and plans a call, once.
pub(super) fn decide(inputs: &Inputs, mechanism: &Mechanism, mask: &Mask, strategy: Strategy) -> Result<Decision> {
    let shape = check(inputs, mechanism, mask)?;
    mechanism.check(&shape, mask.causal)?;
    let (device, dtype) = (inputs.q.device(), inputs.q.dtype());
    let (precision, dropout) = (inputs.extras.precision, inputs.extras.dropout);
    check_precision(OP, precision, strategy, (&device, dtype))?;
    // What the calibration has not timed: drawing pairs for the full matrix, and products of bf16.
    let timed = dtype == DType::F32 && dropout.is_none() && precision == Precision::Full;
    let calibration = Calibration::installed().filter(|_| timed);
    let few = calibration.is_some_and(|c| shape.seq_q.max(shape.seq_kv) <= c.composed_up_to(mechanism));
    let operator = |strategy| {
        let operator = kernels::Operator::new(mechanism, shape, mask.causal, strategy)?;
        Ok::<_, Error>(operator.with_precision(precision).with_kv_heads(inputs.kv_heads())?)
    };
    let has_kernels = strategy == Strategy::Auto && is_flex(&device) && is_fused(dtype);
    let best = has_kernels.then(|| operator(kernels::Strategy::Auto)).transpose()?;
    let naive = best.as_ref().is_some_and(|best| best.plan().strategy == kernels::Strategy::Reference);
    let (strategy, reason) = match (naive, naive && composed::needs_eigenvalues(mechanism)) {
        (true, true) => (Strategy::Reference, "eigenvalues are taken by the naive path alone"),
        (true, false) => (Strategy::Composed, "no fused path holds these values"),
        _ => choose(strategy, &device, dtype, few)?,
    };
    let operator = match strategy {
        Strategy::Auto | Strategy::Composed => None,
        // What is best is fused, or there is no other form.
        Strategy::Fused | Strategy::Reference => best.map_or_else(|| operator(of_kernels(strategy)), Ok).map(Some)?,
    };
    Ok(Decision { strategy, reason, shape, operator })
}

/// The strategy as the kernels name it.
pub(super) fn of_kernels(strategy: Strategy) -> kernels::Strategy {
    match strategy {
        Strategy::Reference => kernels::Strategy::Reference,
        _ => kernels::Strategy::Fused,
    }
}

fn choose(strategy: Strategy, device: &Device, dtype: DType, few: bool) -> Result<(Strategy, &'static str)> {
    let fused_dtype = is_fused(dtype);
    match strategy {
        Strategy::Auto if is_flex(device) && few => {
            Ok((Strategy::Composed, "measured here: tensor operations are faster for so few tokens"))
        }
        Strategy::Auto if is_flex(device) && fused_dtype => Ok((Strategy::Fused, "the device runs the fused kernels")),
        Strategy::Auto if is_flex(device) => Ok((Strategy::Composed, "the fused kernels store f32, f16 or bf16")),
        Strategy::Auto => Ok((Strategy::Composed, "the device has no fused kernels")),
        Strategy::Composed => Ok((strategy, "asked for")),
        Strategy::Fused | Strategy::Reference if !is_flex(device) => {
            let remedy = "move the tensors to Device::flex(), or use Strategy::Composed";
            Err(Error::Strategy { op: OP, strategy, what: format!("{device:?}"), remedy })
        }
        Strategy::Fused | Strategy::Reference if !fused_dtype => {
            let remedy = "cast the tensors to f32, or use Strategy::Composed";
            Err(Error::Strategy { op: OP, strategy, what: format!("{dtype:?}"), remedy })
        }
        Strategy::Fused | Strategy::Reference => Ok((strategy, "asked for")),
    }
}

/// Refuses products of less than f32 where there are none: beside the kernels.
pub(crate) fn check_precision(
    op: &'static str,
    precision: Precision,
    strategy: Strategy,
    (device, dtype): (&Device, DType),
) -> Result<()> {
    let (what, remedy) = match strategy {
        _ if precision == Precision::Full => return Ok(()),
        _ if !is_flex(device) => {
            (format!("{device:?}"), "move the tensors to Device::flex(), or use Precision::Full there")
        }
        _ if !is_fused(dtype) => (format!("{dtype:?}"), "cast the tensors to f32, or use Precision::Full"),
        Strategy::Composed | Strategy::Reference => {
            (format!("strategy `{strategy}`"), "use Strategy::Auto or Strategy::Fused, or Precision::Full")
        }
        Strategy::Auto | Strategy::Fused => return Ok(()),
    };
    Err(Error::Precision { op, precision, what, remedy })
}

/// Whether the kernels store such tensors.
pub(super) fn is_fused(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

pub(crate) fn is_flex(device: &Device) -> bool {
    matches!(device.clone().without_autodiff().as_dispatch(), DispatchDevice::Flex(_))
}

/// Checks shapes, storage types and devices; returns the sizes.
pub(super) fn check(inputs: &Inputs, mechanism: &Mechanism, mask: &Mask) -> Result<Shape> {
    let Inputs { q, k, v, extras } = inputs;
    let [batch, heads, seq_q, head_dim] = q.dims();
    let keys = match (k, mechanism.tied) {
        (Some(_), true) => {
            let problem = "is given although the mechanism is tied (the keys are `q`); leave it out";
            return Err(kernels::Error::Tensor { op: OP, tensor: "k", problem }.into());
        }
        (None, false) => {
            let problem = "is missing; only a tied mechanism has none";
            return Err(kernels::Error::Tensor { op: OP, tensor: "k", problem }.into());
        }
        (k, _) => k.as_ref().unwrap_or(q),
    };
    let [k_batch, k_heads, seq_kv, k_dim] = keys.dims();
    let [v_batch, v_heads, v_seq, value_dim] = v.dims();
    let fits = |ok: bool, left, left_dims: &[usize], right, right_dims: &[usize], remedy| {
        let (left_shape, right_shape) = (left_dims.to_vec(), right_dims.to_vec());
        if ok { Ok(()) } else { Err(kernels::Error::Shape { op: OP, left, left_shape, right, right_shape, remedy }) }
    };
    let same = "they must agree in batch and channels, and the heads of k divide those of q";
    let shared = k_heads > 0 && heads.is_multiple_of(k_heads);
    fits(shared && [k_batch, k_dim] == [batch, head_dim], "q", &q.dims(), "k", &keys.dims(), same)?;
    let same = "they must agree in batch, heads and sequence length";
    fits([v_batch, v_heads, v_seq] == [batch, k_heads, seq_kv], "k", &keys.dims(), "v", &v.dims(), same)?;
    for (name, tensor, seq) in [("key_mask", &mask.key, seq_kv), ("query_mask", &mask.query, seq_q)] {
        let Some(tensor) = tensor else { continue };
        let against = if name == "key_mask" { ("k", keys.dims()) } else { ("q", q.dims()) };
        let remedy = "a mask is [batch, sequence length]";
        fits(tensor.dims() == [batch, seq], name, &tensor.dims(), against.0, &against.1, remedy)?;
        check_device(q, name, &tensor.device())?;
    }
    for (name, tensor) in [("k", keys), ("v", v)] {
        check_device(q, name, &tensor.device())?;
        check_dtype(q, name, tensor.dtype())?;
    }
    let shape = Shape { batch, heads, seq_q, seq_kv, head_dim, value_dim };
    for (&parameter, extra) in &extras.parameters {
        let tensor = parameter.name();
        if !mechanism.parameters().contains(&parameter) {
            let problem = "belongs to another mechanism; leave it out";
            return Err(kernels::Error::Tensor { op: OP, tensor, problem }.into());
        }
        let expected = mechanism.parameter_shape(parameter, &shape);
        fits(extra.shape == expected, tensor, &extra.shape, "q", &q.dims(), "see `Mechanism::parameter_shape`")?;
        check_device(q, tensor, &extra.flat.device())?;
    }
    let missing =
        |&parameter: &Parameter| mechanism.requires(parameter, &shape) && !extras.parameters.contains_key(&parameter);
    match Parameter::ALL.iter().find(|parameter| missing(parameter)) {
        Some(parameter) => {
            let problem = "is missing; the configuration asks for it";
            Err(kernels::Error::Tensor { op: OP, tensor: parameter.name(), problem }.into())
        }
        None => Ok(shape),
    }
}

fn check_device(q: &Tensor<4>, tensor: &'static str, device: &Device) -> Result<()> {
    if *device == q.device() {
        return Ok(());
    }
    let (got, expected) = (format!("{device:?}"), format!("{:?}", q.device()));
    Err(Error::Mixed { op: OP, tensor, property: "device", got, expected, remedy: "move them with `to_device`" })
}

fn check_dtype(q: &Tensor<4>, tensor: &'static str, dtype: DType) -> Result<()> {
    if dtype == q.dtype() {
        return Ok(());
    }
    let (got, expected) = (format!("{dtype:?}"), format!("{:?}", q.dtype()));
    Err(Error::Mixed { op: OP, tensor, property: "storage type", got, expected, remedy: "cast one of them" })
}
