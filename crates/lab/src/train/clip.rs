//! Clipping by the norm of all gradients together (Burn clips each parameter by its own).

use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::Tensor,
};

/// Scales `grads` in place so that their common norm is at most `max_norm` (0: no limit). Returns the norm before.
pub fn clip_by_global_norm<M: Module>(model: &M, grads: &mut GradientsParams, max_norm: f64) -> f64 {
    let mut squares = Squares { grads, sum: 0.0 };
    model.visit(&mut squares);
    let norm = squares.sum.sqrt();
    if max_norm > 0.0 && norm > max_norm {
        model.visit(&mut Scale { grads, factor: max_norm / norm });
    }
    norm
}

struct Squares<'a> {
    grads: &'a GradientsParams,
    sum: f64,
}

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id) {
            self.sum += f64::from(grad.square().sum().into_scalar::<f32>());
        }
    }
}

struct Scale<'a> {
    grads: &'a mut GradientsParams,
    factor: f64,
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.grads.register(param.id, grad.mul_scalar(self.factor));
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::{nn::LinearConfig, tensor::Device};

    use super::*;

    #[test]
    fn the_common_norm_is_limited_and_the_direction_kept() {
        let model = LinearConfig::new(2, 2).init(&Device::flex());
        let weight = Tensor::<2>::from_floats([[3.0, 0.0], [0.0, 0.0]], &Device::flex());
        let bias = Tensor::<1>::from_floats([0.0, 4.0], &Device::flex());
        let clipped = |max_norm| {
            let mut grads = GradientsParams::new();
            grads.register(model.weight.id, weight.clone());
            grads.register(model.bias.as_ref().unwrap().id, bias.clone());
            let norm = clip_by_global_norm(&model, &mut grads, max_norm);
            let weight = grads.get::<2>(model.weight.id).unwrap().try_into_vec_as::<f32>().unwrap();
            let bias = grads.get::<1>(model.bias.as_ref().unwrap().id).unwrap().try_into_vec_as::<f32>().unwrap();
            (norm, weight[0], bias[1])
        };
        assert_eq!(clipped(0.0), (5.0, 3.0, 4.0), "no limit");
        assert_eq!(clipped(6.0), (5.0, 3.0, 4.0), "below the limit");
        let (norm, w, b) = clipped(1.0);
        assert_eq!(norm, 5.0);
        assert!((w - 0.6).abs() < 1e-6 && (b - 0.8).abs() < 1e-6, "{w} {b}");
    }
}
