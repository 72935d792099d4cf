//! The decay.

use burn::{module::Param, tensor::Tensor};
use resolvent_kernels as kernels;

use super::MultiHeadAttention;
use crate::{Mechanism, Parameter, Result, mechanism::Series};

/// The mechanism with `change` applied to its decay.
pub(super) fn with_gamma(mut mechanism: Mechanism, change: impl Fn(f64) -> f64) -> Mechanism {
    match &mut mechanism {
        Mechanism::Infsa(m) => m.gamma = change(m.gamma),
        Mechanism::InfsaResolvent(m) => m.gamma = change(m.gamma),
        Mechanism::LinearInfsa(m) => m.gamma = change(m.gamma),
        Mechanism::Composed(m) => match &mut m.series {
            Series::OneHop(series) => series.gamma = change(series.gamma),
            Series::Hops(series) => series.gamma = change(series.gamma),
            Series::Resolvent(series) => series.gamma = change(series.gamma),
            _ => {}
        },
        _ => {}
    }
    mechanism
}

impl MultiHeadAttention {
    /// The same function without a decay: `gamma` becomes a factor on the rows of the output projection, and 1 in the
    /// mechanism. For export; the decay is no longer learned.
    ///
    /// # Errors
    /// `Unsupported` for series of several hops, whose decay is not a factor, and for mechanisms without one.
    pub fn fold_gamma(mut self) -> Result<Self> {
        let unsupported = |why| {
            Err(kernels::Error::Unsupported { mechanism: self.mechanism.id(), what: "folding gamma", why }.into())
        };
        let several = match &self.mechanism {
            Mechanism::InfsaResolvent(_) => true,
            Mechanism::Composed(m) => !matches!(m.series, Series::OneHop(_)),
            _ => false,
        };
        let fixed = match (several, self.mechanism.gamma()) {
            (true, _) => return unsupported("the decay weighs every hop differently"),
            (_, None) => return unsupported("it has no decay"),
            (_, Some(gamma)) => gamma,
        };
        let weight = self.output.weight.val();
        let learned = self.learned.value(Parameter::Gamma);
        let gamma = learned.unwrap_or_else(|| Tensor::full([self.n_heads], fixed, &weight.device()));
        let [d_model, width] = weight.dims();
        let rows = weight.reshape([self.n_heads, d_model / self.n_heads, width]);
        let folded = (rows * gamma.reshape([self.n_heads, 1, 1])).reshape([d_model, width]);
        self.output.weight = Param::from_tensor(folded.detach());
        self.learned = self.learned.without(Parameter::Gamma);
        self.mechanism = with_gamma(self.mechanism, |_| 1.0);
        Ok(self)
    }
}
