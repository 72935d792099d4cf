//! Random tensors that are the same in every run.

use std::cell::RefCell;

use burn::tensor::{Device, Tensor, TensorData};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

thread_local! {
    // Every test has a thread of its own, so that tests that run side by side do not change each other's numbers.
    static RNG: RefCell<ChaCha8Rng> = RefCell::new(ChaCha8Rng::seed_from_u64(7));
}

/// Standard normal numbers.
pub fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let len = shape.iter().product();
    let values: Vec<f32> = RNG.with_borrow_mut(|rng| StandardNormal.sample_iter(rng).take(len).collect());
    Tensor::from_data(TensorData::new(values, shape), device)
}
