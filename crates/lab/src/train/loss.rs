//! Cross-entropy against soft targets, as label smoothing, mixup and cutmix make them.

use burn::tensor::{Tensor, activation::log_softmax};

/// Mean over the batch of `-sum_c targets_c log softmax(logits)_c`.
///
/// # Shapes
/// - `logits`, `targets`: `[batch, classes]`; each row of `targets` sums to 1
/// - output: `[1]`
pub fn soft_cross_entropy(logits: Tensor<2>, targets: Tensor<2>) -> Tensor<1> {
    let [batch, _] = logits.dims();
    (log_softmax(logits, 1) * targets).sum() * (-1.0 / batch as f64)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Int};

    use super::*;

    fn logits(device: &Device) -> Tensor<2> {
        Tensor::from_floats([[1.0, 2.0, -1.0], [0.0, -30.0, 50.0]], device)
    }

    fn scalar(tensor: Tensor<1>) -> f64 {
        f64::from(tensor.into_scalar::<f32>())
    }

    #[test]
    fn one_hot_targets_give_the_ordinary_cross_entropy() {
        let device = Device::flex();
        let one_hot = Tensor::from_floats([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], &device);
        let ours = scalar(soft_cross_entropy(logits(&device), one_hot));
        let labels = Tensor::<1, Int>::from_ints([1, 0], &device);
        let burn = burn::nn::loss::CrossEntropyLossConfig::new().init(&device).forward(logits(&device), labels);
        assert!((ours - scalar(burn)).abs() < 1e-5);
        let closed = 0.5 * (((1f64).exp() + (2f64).exp() + (-1f64).exp()).ln() - 2.0 + 50.0);
        assert!((ours - closed).abs() < 1e-5, "{ours} {closed}");
    }

    #[test]
    fn the_gradient_is_softmax_minus_targets() {
        let device = Device::flex().autodiff();
        let x = logits(&device).require_grad();
        let targets = Tensor::<2>::from_floats([[0.2, 0.5, 0.3], [0.1, 0.0, 0.9]], &device);
        let grads = soft_cross_entropy(x.clone(), targets.clone()).backward();
        let got = x.grad(&grads).unwrap().into_data();
        let expected = ((burn::tensor::activation::softmax(x, 1) - targets) / 2.0).into_data();
        got.assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::absolute(1e-6));
    }
}
