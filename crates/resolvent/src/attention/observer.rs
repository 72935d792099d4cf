//! What self-attention is made of, shown to whoever watches.

use std::{fmt, sync::Arc};

use resolvent_kernels::ClusterPlan;

use crate::{Inputs, Mask, Mechanism};

/// One call of self-attention as its operator is given it: projected, turned by positions, with the mechanism's own tensors as
/// the layer has learned them.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Observed {
    /// Queries, keys (`None` where tied) and values, `[batch, heads, seq, head_dim]`, and the mechanism's own tensors. `uniform`
    /// has values alone, which stand for all three.
    pub inputs: Inputs,
    /// The mechanism, on the call's grid.
    pub mechanism: Mechanism,
    /// Which tokens take part.
    pub mask: Mask,
    /// Height and width of the tokens' grid, where they are one.
    pub grid: Option<[usize; 2]>,
    /// How many tokens the call is filled up to with zeros behind the last, where clusters are those of a whole context; not where heads are in groups.
    pub span: Option<usize>,
    /// The plan of a mechanism with clusters, of [`span`](Self::span) tokens or else of those that there are: the layer's own, or the one that
    /// layers share. None where heads are in groups, whose mechanisms have plans of their own.
    pub clusters: Option<Arc<ClusterPlan>>,
}

/// Is shown every call of self-attention of the module it is set in, before the operator is applied; the module's result is the
/// same as without it. See [`super::MultiHeadAttention::observer`].
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use burn::tensor::{Device, Tensor};
/// use resolvent::{Mechanism, attention::{MhaInput, MultiHeadAttentionConfig, Observer}};
/// let device = Device::flex();
/// let mut attention = MultiHeadAttentionConfig::new(32, 4, Mechanism::preset("fna")?).init(&device);
/// let seen = Arc::new(Mutex::new(Vec::new()));
/// let calls = seen.clone();
/// attention.observer = Some(Observer::new(move |call| calls.lock().unwrap().push(call.inputs.q.dims())));
/// attention.forward(MhaInput::self_attn(Tensor::zeros([2, 10, 32], &device)));
/// assert_eq!(*seen.lock().unwrap(), [[2, 4, 10, 8]]);
/// # Ok::<(), resolvent::Error>(())
/// ```
#[derive(Clone)]
pub struct Observer(Arc<dyn Fn(Observed) + Send + Sync>);

impl Observer {
    /// Calls `show` with every call.
    pub fn new(show: impl Fn(Observed) + Send + Sync + 'static) -> Self {
        Self(Arc::new(show))
    }

    pub(super) fn show(&self, call: Observed) {
        (self.0)(call);
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observer")
    }
}
