//! The decay.

use burn::{module::Param, tensor::Tensor};
use resolvent_kernels as kernels;

use super::MultiHeadAttention;
use crate::{Parameter, Result, mechanism::Series};

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
        let several = !matches!(self.mechanism.series, Series::OneHop(_) | Series::Limit(_));
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
        self.mechanism = self.mechanism.with_gamma(|_| 1.0);
        Ok(self)
    }
}
