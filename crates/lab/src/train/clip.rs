//! Clipping by the norm of all gradients together (Burn clips each parameter by its own): with the norm as a number, which the CPU
//! has at once, or without one, so that a GPU need not be waited for.

use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::Tensor,
};

/// Scales `grads` in place so that their common norm is at most `max_norm` (0: no limit). Returns the norm before.
pub fn clip_by_global_norm<M: Module>(model: &M, grads: &mut GradientsParams, max_norm: f64) -> f64 {
    let norm = squares(model, grads).map(|sum| f64::from(sum.into_scalar::<f32>())).sum::<f64>().sqrt();
    if max_norm > 0.0 && norm > max_norm {
        let factor = max_norm / norm;
        model.visit(&mut Scale { grads, by: Factor::Number(factor) });
    }
    norm
}

/// [`clip_by_global_norm`] with the norm `[1]` in f32 on the device of the gradients, of which nothing is read.
pub fn clip_on_device<M: Module>(model: &M, grads: &mut GradientsParams, max_norm: f64) -> Tensor<1> {
    let norm = Tensor::cat(squares(model, grads).collect(), 0).sum().sqrt();
    if max_norm > 0.0 {
        let factor = (norm.clone().recip() * max_norm).clamp_max(1.0);
        model.visit(&mut Scale { grads, by: Factor::OnDevice(factor.into()) });
    }
    norm
}

/// The sum of squares of each gradient, `[1]`.
fn squares<M: Module>(model: &M, grads: &GradientsParams) -> impl Iterator<Item = Tensor<1>> {
    let mut squares = Squares { grads, sums: Vec::new() };
    model.visit(&mut squares);
    squares.sums.into_iter()
}

struct Squares<'a> {
    grads: &'a GradientsParams,
    sums: Vec<Tensor<1>>,
}

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id) {
            self.sums.push(grad.square().sum());
        }
    }
}

struct Scale<'a> {
    grads: &'a mut GradientsParams,
    by: Factor,
}

enum Factor {
    Number(f64),
    /// `[1]`.
    OnDevice(Box<Tensor<1>>),
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            let scaled = match &self.by {
                Factor::Number(factor) => grad.mul_scalar(*factor),
                Factor::OnDevice(factor) => grad * factor.clone().reshape([1; D]),
            };
            self.grads.register(param.id, scaled);
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::{
        nn::{Linear, LinearConfig},
        tensor::Device,
    };

    use super::*;

    #[test]
    fn the_common_norm_is_limited_and_the_direction_kept() {
        let model = LinearConfig::new(2, 2).init(&Device::flex());
        let weight = Tensor::<2>::from_floats([[3.0, 0.0], [0.0, 0.0]], &Device::flex());
        let bias = Tensor::<1>::from_floats([0.0, 4.0], &Device::flex());
        let clipped_by = |clip: fn(&Linear, &mut GradientsParams, f64) -> f64, max_norm| {
            let mut grads = GradientsParams::new();
            grads.register(model.weight.id, weight.clone());
            grads.register(model.bias.as_ref().unwrap().id, bias.clone());
            let norm = clip(&model, &mut grads, max_norm);
            let weight = grads.get::<2>(model.weight.id).unwrap().try_into_vec_as::<f32>().unwrap();
            let bias = grads.get::<1>(model.bias.as_ref().unwrap().id).unwrap().try_into_vec_as::<f32>().unwrap();
            (norm, weight[0], bias[1])
        };
        let read = |model: &Linear, grads: &mut GradientsParams, max_norm| {
            f64::from(clip_on_device(model, grads, max_norm).into_scalar::<f32>())
        };
        for clip in [clip_by_global_norm, read] {
            let clipped = |max_norm| clipped_by(clip, max_norm);
            assert_eq!(clipped(0.0), (5.0, 3.0, 4.0), "no limit");
            assert_eq!(clipped(6.0), (5.0, 3.0, 4.0), "below the limit");
            let (norm, w, b) = clipped(1.0);
            assert_eq!(norm, 5.0);
            assert!((w - 0.6).abs() < 1e-6 && (b - 0.8).abs() < 1e-6, "{w} {b}");
        }
    }
}
