//! Any mechanism on Burn tensors, with gradients.

use burn::tensor::{Device, Distribution, Tensor};
use resolvent::{Inputs, Mask, Mechanism, Strategy, attend};

fn main() -> Result<(), resolvent::Error> {
    let device = Device::flex().autodiff();
    let random = || Tensor::<4>::random([1, 8, 1024, 64], Distribution::Default, &device).require_grad();
    let (q, k, v) = (random(), random(), random());
    let mechanism = Mechanism::from_json(r#"{"mechanism": "infsa", "gamma": 0.9}"#)?;
    let output = attend(&Inputs::new(q.clone(), k, v), &mechanism, &Mask::causal(), Strategy::Auto)?;
    let gradients = output.out.clone().sum().backward();
    println!("out {:?}, dq {:?}", output.out.dims(), q.grad(&gradients).map(|dq| dq.dims()));
    Ok(())
}
