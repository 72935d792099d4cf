//! The gradient of the fused operation, by the kernels' own backward pass.

use std::sync::Arc;

use burn::backend::{
    Autodiff,
    autodiff::{
        NodeId,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::FloatTensor,
};

use super::fused::{Call, FusedAttention, FusedKernel, Leaves, Outcome};

/// Saves the inputs (as checkpoints), `out` and O(N) statistics; recomputes the score tiles.
#[derive(Debug)]
struct FusedBackward;

/// What [`FusedBackward`] saves.
#[derive(Debug, Clone)]
struct Saved<F> {
    inputs: Leaves<NodeId>,
    out: F,
    stats: Arc<[f32]>,
    call: Call,
}

impl<B: FusedKernel> Backward<B, 4> for FusedBackward {
    type State = Saved<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 4>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dout = grads.consume::<B>(&ops.node);
        let Saved { inputs: Leaves { q, k, v, gamma }, out, stats, call } = ops.state;
        let [q, k, v, gamma] = [q, k, v, gamma].map(|id| checkpointer.retrieve_node_output(id));
        let leaves = Leaves { q, k, v, gamma };
        // Burn's backward pass returns no errors: like its own operations, this one can only panic.
        let Leaves { q, k, v, gamma } =
            B::backward(leaves, out, &stats, dout, &call).unwrap_or_else(|e| panic!("backward of attend: {e}"));
        for (node, gradient) in ops.parents.into_iter().zip([q, k, v, gamma]) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

impl<B: FusedAttention + FusedKernel, C: CheckpointStrategy> FusedAttention for Autodiff<B, C> {
    fn fused_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        call: Call,
    ) -> Outcome<Self> {
        let prepared = FusedBackward.prepare::<C>([q.node(), k.node(), v.node(), gamma.node()]).compute_bound();
        let leaves = Leaves {
            q: q.primitive().clone(),
            k: k.primitive().clone(),
            v: v.primitive().clone(),
            gamma: gamma.primitive().clone(),
        };
        let (out, lse, stats) = match B::forward(leaves, &call) {
            Outcome::Done { out, lse, stats } => (out, lse, stats),
            Outcome::Failed(error) => return Outcome::Failed(error),
        };
        let tracked = match prepared.stateful() {
            OpsKind::Tracked(mut prepared) => {
                let [q, k, v, gamma] = [&q, &k, &v, &gamma].map(|x| prepared.checkpoint(x));
                let inputs = Leaves { q, k, v, gamma };
                let saved = Saved { inputs, out: out.clone(), stats: stats.clone(), call };
                prepared.finish(saved, out)
            }
            OpsKind::UnTracked(prepared) => prepared.finish(out),
        };
        Outcome::Done { out: tracked, lse: <Self as burn::backend::AutodiffBackend>::from_inner(lse), stats }
    }
}
