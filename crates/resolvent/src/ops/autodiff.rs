//! The gradients of the fused operations, by the kernels' own backward passes.

use std::sync::Arc;

use burn::backend::{
    Autodiff, AutodiffBackend, Backend,
    autodiff::{
        NodeId,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::FloatTensor,
};
use resolvent_kernels as kernels;

use super::{
    fused::{Call, FusedAttention, FusedKernel, Leaves, Outcome, Saved},
    token_weights::{self, TokenWeightsKernel},
};

/// Saves the inputs (as checkpoints), `out` and O(N) statistics; recomputes the score tiles.
#[derive(Debug)]
struct FusedBackward;

/// [`FusedBackward`] from projections that lie side by side.
#[derive(Debug)]
struct PackedBackward;

/// What the forward pass saves; `inputs` are those of the operation in their order.
#[derive(Debug, Clone)]
pub(super) struct State<F, const N: usize, C = Call> {
    inputs: [NodeId; N],
    out: F,
    stats: Arc<[f32]>,
    call: C,
}

impl<B: FusedKernel> Backward<B, 4> for FusedBackward {
    type State = State<FloatTensor<B>, 4>;

    fn backward(self, ops: Ops<Self::State, 4>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dout = grads.consume::<B>(&ops.node);
        let State { inputs, out, stats, call } = ops.state;
        let [q, k, v, parameters] = inputs.map(|id| checkpointer.retrieve_node_output(id));
        let saved = Saved { out, stats: &stats, dout };
        let Leaves { q, k, v, parameters } = expect(B::backward(Leaves { q, k, v, parameters }, saved, &call));
        register::<B, 4>(grads, ops.parents.map(|node| node.map(|node| node.id)), [q, k, v, parameters]);
    }
}

/// That of [`super::token_weights`].
#[derive(Debug)]
pub(super) struct WeightsBackward;

impl<B: TokenWeightsKernel> Backward<B, 2> for WeightsBackward {
    type State = State<FloatTensor<B>, 2, token_weights::Call>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let da = grads.consume::<B>(&ops.node);
        let State { inputs, out, stats, call } = ops.state;
        let inputs = inputs.map(|id| checkpointer.retrieve_node_output(id));
        register::<B, 2>(
            grads,
            ops.parents.map(|node| node.map(|node| node.id)),
            expect(B::weigh_backward(inputs, out, &stats, da, &call)),
        );
    }
}

impl<B: FusedKernel> Backward<B, 2> for PackedBackward {
    type State = State<FloatTensor<B>, 2>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dout = grads.consume::<B>(&ops.node);
        let State { inputs, out, stats, call } = ops.state;
        let [qkv, parameters] = inputs.map(|id| checkpointer.retrieve_node_output(id));
        let saved = Saved { out, stats: &stats, dout };
        register::<B, 2>(
            grads,
            ops.parents.map(|node| node.map(|node| node.id)),
            expect(B::backward_packed(qkv, parameters, saved, &call)),
        );
    }
}

/// Burn's backward pass returns no errors: like its own operations, ours can only panic.
fn expect<T>(result: kernels::Result<T>) -> T {
    result.unwrap_or_else(|e| panic!("backward of attend: {e}"))
}

/// Adds what there is to the gradients of the tracked among an operation's inputs.
pub(super) fn register<B: Backend, const N: usize>(
    grads: &mut Gradients,
    parents: [Option<NodeId>; N],
    gradients: [Option<FloatTensor<B>>; N],
) {
    for (node, gradient) in parents.into_iter().zip(gradients) {
        if let (Some(node), Some(gradient)) = (node, gradient) {
            grads.register::<B>(node, gradient);
        }
    }
}

/// Attaches its backward pass to the result `out` of an operation. The pass starts from what `state` makes of the tensors
/// that it `reads`, which are checkpointed.
pub(super) fn attach<B: Backend, C: CheckpointStrategy, P: Backward<B, N>, const N: usize, const M: usize>(
    pass: P,
    inputs: [&FloatTensor<Autodiff<B, C>>; N],
    reads: [&FloatTensor<Autodiff<B, C>>; M],
    out: FloatTensor<B>,
    state: impl FnOnce([NodeId; M]) -> P::State,
) -> FloatTensor<Autodiff<B, C>> {
    match pass.prepare::<C>(inputs.map(|x| x.node())).compute_bound().stateful() {
        OpsKind::Tracked(mut prepared) => {
            let reads = reads.map(|x| prepared.checkpoint(x));
            prepared.finish(state(reads), out)
        }
        OpsKind::UnTracked(prepared) => prepared.finish(out),
    }
}

/// Attaches a backward pass to what its forward pass returned.
macro_rules! track {
    ($backward:ident, $strategy:ty, [$($input:ident),+], $outcome:expr, $call:ident) => {{
        let prepared = $backward.prepare::<$strategy>([$($input.node()),+]).compute_bound();
        match $outcome {
            Outcome::Failed(error) => Outcome::Failed(error),
            Outcome::Done { out, lse, stats } => {
                let tracked = match prepared.stateful() {
                    OpsKind::Tracked(mut prepared) => {
                        let inputs = [$(prepared.checkpoint(&$input)),+];
                        let state = State { inputs, out: out.clone(), stats: stats.clone(), call: $call };
                        prepared.finish(state, out)
                    }
                    OpsKind::UnTracked(prepared) => prepared.finish(out),
                };
                Outcome::Done { out: tracked, lse: Self::from_inner(lse), stats }
            }
        }
    }};
}

/// Attaches its backward pass to token weights.
pub(super) fn track_weights<B: TokenWeightsKernel, C: CheckpointStrategy>(
    backward: WeightsBackward,
    [q, k]: [FloatTensor<Autodiff<B, C>>; 2],
    a: FloatTensor<B>,
    stats: Arc<[f32]>,
    call: token_weights::Call,
) -> FloatTensor<Autodiff<B, C>> {
    let out = a.clone();
    attach::<B, C, _, 2, 2>(backward, [&q, &k], [&q, &k], a, |inputs| State { inputs, out, stats, call })
}

impl<B: FusedAttention + FusedKernel, C: CheckpointStrategy> FusedAttention for Autodiff<B, C> {
    fn fused_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        parameters: FloatTensor<Self>,
        call: Call,
    ) -> Outcome<Self> {
        let leaves = Leaves {
            q: q.primitive().clone(),
            k: k.primitive().clone(),
            v: v.primitive().clone(),
            parameters: parameters.primitive().clone(),
        };
        track!(FusedBackward, C, [q, k, v, parameters], B::forward(leaves, &call), call)
    }

    fn fused_packed(qkv: FloatTensor<Self>, parameters: FloatTensor<Self>, call: Call) -> Outcome<Self> {
        let outcome = B::forward_packed(qkv.primitive().clone(), parameters.primitive().clone(), &call);
        track!(PackedBackward, C, [qkv, parameters], outcome, call)
    }
}
