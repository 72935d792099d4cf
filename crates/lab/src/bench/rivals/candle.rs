//! candle's attention as its models write it: two matrix products and a softmax, differentiated by candle.

use candle_core::{D, Device, Error as CandleError, Tensor, Var};
use candle_nn::ops;

use resolvent_kernels::Shape;

use super::super::{
    buffers::{Buffers, Results},
    contender::{self, Local},
};
use crate::{Error, Result};

/// candle's attention, tensors at hand.
#[derive(Default)]
pub(super) struct Candle {
    leaves: Option<Box<Leaves>>,
}

/// Queries, keys and values, tracked and not, and the gradient that comes in.
struct Leaves {
    tracked: [Var; 3],
    plain: [Tensor; 3],
    dout: Tensor,
}

type Candled<T> = std::result::Result<T, CandleError>;

impl Candle {
    /// The buffers as candle's tensors, made once.
    fn at_hand(&mut self, b: &Buffers) -> Candled<&Leaves> {
        if self.leaves.is_none() {
            let shape = (b.call.shape.batch, b.call.shape.heads, b.call.shape.seq_q, b.call.shape.head_dim);
            let tensor = |x: &[f32]| Tensor::from_slice(x, shape, &Device::Cpu);
            let plain = [tensor(&b.q)?, tensor(&b.k)?, tensor(&b.v)?];
            let [q, k, v] = &plain;
            let tracked = [Var::from_tensor(q)?, Var::from_tensor(k)?, Var::from_tensor(v)?];
            self.leaves = Some(Box::new(Leaves { tracked, plain, dout: tensor(&b.dout)? }));
        }
        Ok(self.leaves.as_deref().expect("just made"))
    }

    fn attended(&mut self, b: &Buffers) -> Candled<Tensor> {
        let [q, k, v] = &self.at_hand(b)?.plain;
        ops::softmax_last_dim(&scores(q, k)?)?.matmul(v)
    }

    /// The output and the gradients of queries, keys and values. The fused softmax has no gradient there.
    fn differentiated(&mut self, b: &Buffers) -> Candled<[Tensor; 4]> {
        let Leaves { tracked: [q, k, v], dout, .. } = self.at_hand(b)?;
        let out = ops::softmax(&scores(q, k)?, D::Minus1)?.matmul(v)?;
        let mut gradients = (&out * dout)?.sum_all()?.backward()?;
        let mut gradient = |x: &Var| gradients.remove(x).ok_or_else(|| CandleError::Msg("no gradient".into()));
        Ok([out, gradient(q)?, gradient(k)?, gradient(v)?])
    }
}

fn scores(q: &Tensor, k: &Tensor) -> Candled<Tensor> {
    let scale = 1.0 / (q.dim(D::Minus1)? as f64).sqrt();
    q.matmul(&k.t()?)? * scale
}

fn failed(error: CandleError) -> Error {
    Error::Rival { name: "candle".into(), problem: error.to_string() }
}

impl Local for Candle {
    fn prepare(&mut self, b: &Buffers) -> Result<()> {
        self.at_hand(b).map(drop).map_err(failed)
    }

    fn forward(&mut self, b: &mut Buffers) -> Result<()> {
        self.attended(b).map(|out| drop(std::hint::black_box(out))).map_err(failed)
    }

    fn needs(&self, shape: Shape) -> u64 {
        contender::scores(shape, 17)
    }

    fn training(&mut self, b: &mut Buffers) -> Result<()> {
        self.differentiated(b).map(|results| drop(std::hint::black_box(results))).map_err(failed)
    }

    fn solve(&mut self, b: &mut Buffers) -> Result<Results> {
        let [out, dq, dk, dv] = self.differentiated(b).map_err(failed)?.map(|x| x.flatten_all()?.to_vec1::<f32>());
        let [dq, dk, dv] = [dq, dk, dv].map(|x| x.map(Some).map_err(failed));
        Ok(Results { out: out.map_err(failed)?, dq: dq?, dk: dk?, dv: dv? })
    }
}
