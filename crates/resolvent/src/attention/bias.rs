//! The numbers of a bias that a layer learns: one per head and bucket of distances, or offset on a grid.

use burn::{
    module::{Initializer, Module, Param},
    tensor::{Device, Tensor},
};

use crate::{Extras, Mechanism, Parameter, Shape, mechanism::Bias};

/// The table of a bias by distances, where the mechanism has one. (Slopes of ALiBi are fixed, or learned like any other parameter per
/// head: see [`super::Trained`].)
#[derive(Module, Debug)]
pub struct BiasTable {
    /// `[heads, numbers]`. Starts normal with deviation 0.02, as in "Swin Transformer: Hierarchical Vision Transformer using Shifted
    /// Windows".
    pub table: Option<Param<Tensor<2>>>,
}

/// Deviation of the numbers that a table starts with.
const DEVIATION: f64 = 0.02;

/// The sizes of a table, where the mechanism has one: they do not depend on the tokens.
fn sizes(mechanism: &Mechanism, heads: usize) -> Option<[usize; 2]> {
    let by_distance = matches!(mechanism.bias?, Bias::Buckets(_) | Bias::Grid(_));
    let len = mechanism.parameter_len(Parameter::Bias, &Shape::square(1, heads, 1, 1));
    by_distance.then(|| [heads, len / heads])
}

impl BiasTable {
    pub(super) fn init(mechanism: &Mechanism, heads: usize, device: &Device) -> Self {
        let start = Initializer::Normal { mean: 0.0, std: DEVIATION };
        Self { table: sizes(mechanism, heads).map(|sizes| start.init(sizes, device)) }
    }

    /// `extras` with the table as the mechanism takes it.
    pub(super) fn add_to(&self, extras: Extras) -> Extras {
        match &self.table {
            Some(table) => extras.with(Parameter::Bias, table.val()),
            None => extras,
        }
    }

    /// Elements of the table.
    pub(super) fn count(mechanism: &Mechanism, heads: usize) -> usize {
        sizes(mechanism, heads).map_or(0, |[heads, len]| heads * len)
    }
}
