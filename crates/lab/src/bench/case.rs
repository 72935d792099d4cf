//! One mechanism at one size.

use burn::tensor::{Device, Tensor, TensorData, module::attention, ops::AttentionModuleOptions};
use resolvent_kernels::{
    self as kernels, ExtraGradients, Extras, Gradients, Inputs, Mask, Mechanism, Operator, Scratch, Shape, Strategy,
    Tol, reference, relative_distance,
};

use super::{BenchOptions, BenchReport, Ceilings, Check, PlanSummary, Point, Timing, ceilings::seconds};
use crate::{
    Result,
    compare::{MemoryProbe, peak_above},
};

/// Tokens of the comparison with the reference, and heads of it.
const CHECKED: (usize, usize) = (192, 2);

/// The tensors of one size, shared by all cases.
pub(super) struct Buffers {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
    out: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

impl Buffers {
    pub fn new(shape: Shape) -> Self {
        let [q, k, v, dout] = [1, 2, 3, 4].map(|seed| numbers(shape.q_len(), seed));
        let zeros = || vec![0.0; shape.q_len()];
        Self { q, k, v, dout, out: zeros(), dq: zeros(), dk: zeros(), dv: zeros() }
    }
}

/// Deterministic numbers of about unit variance.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    // The sum of three uniform numbers has variance 1/4.
    (0..len).map(|_| 2.0 * (uniform() + uniform() + uniform())).collect()
}

/// Compares forward and backward of a mechanism with the f64 reference.
pub(super) fn check(mechanism: &Mechanism, options: &BenchOptions) -> Result<Check> {
    let tokens = CHECKED.0.min(options.tokens.iter().copied().max().unwrap_or(1));
    let shape = Shape::square(1, CHECKED.1.min(options.heads), tokens, options.head_dim);
    let mut case = match Case::ours(mechanism, shape) {
        Ok(case) => case,
        Err(refused) => return Ok(Check::refused(mechanism, refused.skipped.unwrap_or_default())),
    };
    let mut b = Buffers::new(shape);
    case.warm(&mut b, None)?;
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let (q, k, v, dout) = (wide(&b.q), wide(&b.k), wide(&b.v), wide(&b.dout));
    let k = (!mechanism.tied()).then_some(&k[..]);
    let inputs = Inputs { q: &q, k, v: &v, extras: Extras::default() };
    let out_len = case.out_len(&b);
    let forward = reference::forward(mechanism, &shape, &inputs, &Mask::NONE)?;
    let backward = reference::backward(mechanism, &shape, &inputs, &Mask::NONE, &dout[..out_len])?;
    let far = |got: &[f32], expected: &[f64]| relative_distance(&wide(got), expected);
    let mut worst = far(&b.dq, &backward.dq).max(far(&b.dv, &backward.dv));
    if let Some(dk) = &backward.dk {
        worst = worst.max(far(&b.dk, dk));
    }
    Ok(Check::new(mechanism, tokens, far(&b.out[..out_len], &forward.out), worst, Tol::f32(mechanism)))
}

/// How a case is computed.
enum How {
    Ours {
        operator: Box<Operator>,
        stats: Vec<f32>,
        scratch: Scratch,
    },
    /// Burn's own attention, tensors at hand.
    Burn {
        tensors: Option<Box<[Tensor<4>; 4]>>,
    },
}

/// A case, or the point that says why there is none.
type Planned = std::result::Result<Case, Box<Point>>;

/// One mechanism, or a rival, at one size.
pub(super) struct Case {
    how: How,
    point: Point,
    flops: [u64; 2],
    bytes: [u64; 2],
    forward: Vec<f64>,
    training: Vec<f64>,
    peaks: [Option<u64>; 2],
}

impl Case {
    /// One of our operators; refused sizes are points that say why.
    pub fn ours(mechanism: &Mechanism, shape: Shape) -> Planned {
        let mut point = Point::new(mechanism.id(), Some(mechanism.clone()), shape);
        match Operator::new(mechanism, shape, false, Strategy::Auto) {
            Ok(operator) => {
                let plan = *operator.plan();
                point.plan = Some(PlanSummary::of(&plan));
                let stats = Vec::new();
                let how = How::Ours { operator: Box::new(operator), stats, scratch: Scratch::default() };
                let flops = [plan.flops_forward, plan.flops_backward];
                Ok(Self::new(how, point, flops, [plan.bytes_forward, plan.bytes_backward]))
            }
            Err(why) => Err(Box::new(Point { skipped: Some(why.to_string()), ..point })),
        }
    }

    /// Burn's softmax attention on the same backend; with autodiff, its own fallback.
    pub fn burn(shape: Shape) -> Planned {
        let softmax = Mechanism::Softmax(Default::default());
        let point = Point::new("burn softmax", None, shape);
        match kernels::plan(&softmax, &shape, false, Strategy::Auto) {
            // The least operations; its bytes are its own affair.
            Ok(plan) => {
                let flops = [plan.flops_forward, plan.flops_backward];
                Ok(Self::new(How::Burn { tensors: None }, point, flops, [0, 0]))
            }
            Err(why) => Err(Box::new(Point { skipped: Some(why.to_string()), ..point })),
        }
    }

    fn new(how: How, point: Point, flops: [u64; 2], bytes: [u64; 2]) -> Self {
        Self { how, point, flops, bytes, forward: Vec::new(), training: Vec::new(), peaks: [None; 2] }
    }

    pub fn skipped(self, why: String) -> Point {
        Point { skipped: Some(why), ..self.point }
    }

    /// Seconds of a forward and a forward and backward pass: scaled from a smaller size, or from the machine's rate.
    pub fn predicted_seconds(&self, report: &BenchReport) -> f64 {
        let work = |flops: [u64; 2]| (2 * flops[0] + flops[1]) as f64;
        let smaller = report.points.iter().rev().find(|p| p.label == self.point.label && p.forward.is_some());
        match smaller {
            Some(Point { forward: Some(forward), training: Some(training), flops, .. }) => {
                (forward.median + training.median) * work(self.flops) / work(*flops).max(1.0)
            }
            _ => work(self.flops) / (0.2e9 * report.ceilings.gemm_gflops),
        }
    }

    fn out_len(&self, buffers: &Buffers) -> usize {
        match &self.how {
            How::Ours { operator, .. } => operator.out_len(),
            How::Burn { .. } => buffers.out.len(),
        }
    }

    /// A first forward and a first backward pass, which touch all memory; what they hold is counted.
    pub fn warm(&mut self, buffers: &mut Buffers, probe: Option<&dyn MemoryProbe>) -> Result<()> {
        if let How::Burn { tensors } = &mut self.how {
            at_hand(tensors, buffers, self.point.shape());
        }
        self.peaks[0] = counted(probe, || self.forward(buffers))?;
        if let How::Ours { stats, scratch, .. } = &mut self.how {
            (*stats, *scratch) = (Vec::new(), Scratch::default());
        }
        self.peaks[1] = counted(probe, || self.training(buffers))?;
        Ok(())
    }

    /// One timed forward pass, and one forward and backward pass.
    pub fn round(&mut self, buffers: &mut Buffers) -> Result<()> {
        let mut outcome = Ok(());
        let forward = seconds(|| outcome = self.forward(buffers));
        outcome?;
        let mut outcome = Ok(());
        let training = seconds(|| outcome = self.training(buffers));
        self.forward.push(forward);
        self.training.push(training);
        outcome
    }

    fn forward(&mut self, b: &mut Buffers) -> Result<()> {
        let out_len = self.out_len(b);
        match &mut self.how {
            How::Ours { operator, stats, scratch } => {
                stats.resize(operator.plan().stats, 0.0);
                let k = (!operator.mechanism().tied()).then_some(&b.k[..]);
                let inputs = Inputs { q: &b.q, k, v: &b.v, extras: Extras::default() };
                operator.forward(&inputs, &Mask::NONE, &mut b.out[..out_len], stats, scratch)?;
            }
            How::Burn { tensors } => {
                let [q, k, v, _] = at_hand(tensors, b, self.point.shape()).clone();
                drop(std::hint::black_box(attention(q, k, v, None, None, AttentionModuleOptions::default())));
            }
        }
        Ok(())
    }

    fn training(&mut self, b: &mut Buffers) -> Result<()> {
        self.forward_for_training(b)?;
        let out_len = self.out_len(b);
        let How::Ours { operator, stats, scratch } = &mut self.how else { return Ok(()) };
        let tied = operator.mechanism().tied();
        let inputs = Inputs { q: &b.q, k: (!tied).then_some(&b.k[..]), v: &b.v, extras: Extras::default() };
        let dk = (!tied).then_some(&mut b.dk[..]);
        let mut gradients = Gradients { dq: &mut b.dq, dk, dv: &mut b.dv, extras: ExtraGradients::default() };
        let (out, dout) = (&b.out[..out_len], &b.dout[..out_len]);
        Ok(operator.backward(&inputs, &Mask::NONE, out, stats, dout, &mut gradients, scratch)?)
    }

    /// The forward pass, and for a rival the backward pass with it.
    fn forward_for_training(&mut self, b: &mut Buffers) -> Result<()> {
        let How::Burn { tensors } = &mut self.how else { return self.forward(b) };
        let [q, k, v, dout] = at_hand(tensors, b, self.point.shape()).clone();
        let [q, k, v] = [q, k, v].map(|x| x.autodiff().require_grad());
        let out = attention(q.clone(), k.clone(), v.clone(), None, None, AttentionModuleOptions::default());
        let gradients = (out * dout.autodiff()).sum().backward();
        for x in [q, k, v] {
            drop(std::hint::black_box(x.grad(&gradients)));
        }
        Ok(())
    }

    /// What was measured.
    pub fn finish(mut self, ceilings: &Ceilings) -> Point {
        let tokens = self.point.batch * self.point.tokens;
        let [forward, backward] = self.flops;
        let bytes = [self.bytes[0], self.bytes[0] + self.bytes[1]];
        let timing = |times: &mut Vec<f64>, flops: u64, bytes: u64, peak| {
            Timing::of(times, tokens, flops, bytes, peak, ceilings)
        };
        self.point.forward = Some(timing(&mut self.forward, forward, bytes[0], self.peaks[0]));
        self.point.training = Some(timing(&mut self.training, forward + backward, bytes[1], self.peaks[1]));
        self.point.flops = self.flops;
        self.point
    }
}

/// Peak bytes of `work`, where there is a counter.
fn counted(probe: Option<&dyn MemoryProbe>, work: impl FnOnce() -> Result<()>) -> Result<Option<u64>> {
    match probe {
        Some(probe) => peak_above(probe, probe.held(), work).map(Some),
        None => work().map(|()| None),
    }
}

/// The buffers as Burn's tensors, made once.
fn at_hand<'t>(tensors: &'t mut Option<Box<[Tensor<4>; 4]>>, b: &Buffers, shape: Shape) -> &'t [Tensor<4>; 4] {
    let device = Device::flex();
    let dims = [shape.batch, shape.heads, shape.seq_q, shape.head_dim];
    tensors.get_or_insert_with(|| {
        Box::new([&b.q, &b.k, &b.v, &b.dout].map(|x| Tensor::from_data(TensorData::new(x.clone(), dims), &device)))
    })
}
