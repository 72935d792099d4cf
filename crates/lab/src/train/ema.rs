//! An exponential moving average of a model's weights.

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::Tensor,
};

/// The decay after `updates` updates: `min(decay, (1 + updates) / (10 + updates))`, so that the first, untrained weights
/// are soon forgotten.
pub fn decay_at(decay: f64, updates: usize) -> f64 {
    decay.min((1.0 + updates as f64) / (10.0 + updates as f64))
}

/// `average <- decay average + (1 - decay) model`, for every float parameter.
///
/// `average` is a copy of `model` (the same parameter ids) without autodiff.
pub fn update<M: Module>(average: M, model: &M, decay: f64) -> M {
    let mut current = Collect(GradientsParams::new());
    model.visit(&mut current);
    average.map(&mut Blend { current: current.0, decay })
}

/// Burn's container of gradients is its one public map from parameter ids to tensors of any rank.
struct Collect(GradientsParams);

impl ModuleVisitor for Collect {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.register(param.id, param.val().inner());
    }
}

struct Blend {
    current: GradientsParams,
    decay: f64,
}

impl ModuleMapper for Blend {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, average, mapper) = param.consume();
        let blended = match self.current.remove::<D>(id) {
            Some(value) => average.mul_scalar(self.decay) + value.mul_scalar(1.0 - self.decay),
            None => average,
        };
        Param::from_mapped_value(id, blended, mapper)
    }
}

#[cfg(test)]
mod tests {
    use burn::{
        nn::{Linear, LinearConfig},
        tensor::Device,
    };

    use super::*;

    fn filled(model: Linear, value: f32) -> Linear {
        struct Fill(f32);
        impl ModuleMapper for Fill {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                let (id, tensor, mapper) = param.consume();
                Param::from_mapped_value(id, tensor.full_like(self.0), mapper)
            }
        }
        model.map(&mut Fill(value))
    }

    #[test]
    fn the_average_follows_its_closed_form() {
        let model = LinearConfig::new(2, 3).init(&Device::flex().autodiff());
        let mut average = filled(model.clone(), 1.0).valid();
        let mut expected = 1.0;
        for step in 0..5 {
            let value = step as f32;
            average = update(average, &filled(model.clone(), value), 0.75);
            expected = 0.75 * expected + 0.25 * value;
        }
        let weights = average.weight.val().try_into_vec_as::<f32>().unwrap();
        let biases = average.bias.as_ref().unwrap().val().try_into_vec_as::<f32>().unwrap();
        assert_eq!((weights.len(), biases.len()), (6, 3));
        assert!(weights.iter().chain(&biases).all(|x| (x - expected).abs() < 1e-6), "{weights:?} {expected}");
    }

    #[test]
    fn the_decay_grows_to_its_limit() {
        assert_eq!(decay_at(0.999, 0), 0.1);
        assert_eq!(decay_at(0.5, 8), 0.5);
        assert_eq!(decay_at(0.999, 1_000_000), 0.999);
    }
}
