//! Burn's own softmax attention on the same backend; with autodiff, its own fallback.

use burn::tensor::{Device, Tensor, TensorData, module::attention, ops::AttentionModuleOptions};

use resolvent_kernels::Shape;

use super::super::{
    buffers::{Buffers, Results},
    contender::{Local, scores},
};
use crate::Result;

/// Burn's attention, tensors at hand.
#[derive(Default)]
pub(super) struct Burn {
    tensors: Option<Box<[Tensor<4>; 4]>>,
}

impl Burn {
    /// The buffers as Burn's tensors, made once.
    fn at_hand(&mut self, b: &Buffers) -> [Tensor<4>; 4] {
        let (device, shape) = (Device::flex(), b.call.shape);
        let dims = [shape.batch, shape.heads, shape.seq_q, shape.head_dim];
        let tensor = |x: &Vec<f32>| Tensor::from_data(TensorData::new(x.clone(), dims), &device);
        *self.tensors.get_or_insert_with(|| Box::new([&b.q, &b.k, &b.v, &b.dout].map(tensor))).clone()
    }

    /// The output and the gradients of queries, keys and values.
    fn differentiated(&mut self, b: &Buffers) -> [Tensor<4>; 4] {
        let [q, k, v, dout] = self.at_hand(b);
        let [q, k, v] = [q, k, v].map(|x| x.autodiff().require_grad());
        let out = attention(q.clone(), k.clone(), v.clone(), None, None, AttentionModuleOptions::default());
        let gradients = (out.clone() * dout.autodiff()).sum().backward();
        let [dq, dk, dv] = [q, k, v].map(|x| x.grad(&gradients).expect("the leaves are tracked"));
        [out, dq, dk, dv]
    }
}

impl Local for Burn {
    fn prepare(&mut self, b: &Buffers) -> Result<()> {
        drop(self.at_hand(b));
        Ok(())
    }

    fn forward(&mut self, b: &mut Buffers) -> Result<()> {
        let [q, k, v, _] = self.at_hand(b);
        drop(std::hint::black_box(attention(q, k, v, None, None, AttentionModuleOptions::default())));
        Ok(())
    }

    fn needs(&self, shape: Shape) -> u64 {
        scores(shape, 6)
    }

    fn training(&mut self, b: &mut Buffers) -> Result<()> {
        drop(std::hint::black_box(self.differentiated(b)));
        Ok(())
    }

    fn solve(&mut self, b: &mut Buffers) -> Result<Results> {
        let [out, dq, dk, dv] = self.differentiated(b).map(|x| x.into_data().iter::<f32>().collect::<Vec<_>>());
        Ok(Results { out, dq: Some(dq), dk: Some(dk), dv: Some(dv) })
    }
}
