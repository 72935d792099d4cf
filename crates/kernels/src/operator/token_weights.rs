//! The token weights of `linear-infsa` without values: what pooling before projecting needs.

use super::naive;
use crate::{
    ExtraGradients, Extras, Inputs, Mask, Operator, Plan, Result, Scratch, Shape, Strategy,
    call::{Call, GradientTargets, Saved, Target, View},
    check,
    mechanism::{Form, LinearInfsa},
    scratch::{cut, scratch_len},
    structure::pooled,
};

/// One weight per token and head, `a [batch, heads, seq_kv]`, from queries and keys alone, and its gradients. The
/// operator's output is `gamma sum_j a_j v_j`; where all heads' values are projections of the same tokens, they can be
/// pooled first and projected once: `gamma ((sum_j a_j x_j) W_V + (sum_j a_j) b_V)`. "Infinite Self-Attention", eq. 19.
///
/// ```
/// use resolvent_kernels::*;
/// let mechanism = mechanism::LinearInfsa::default().with_tied(true);
/// let weights = TokenWeights::new(&mechanism, Shape::square(1, 1, 2, 1), Strategy::Auto)?;
/// let (mut a, mut stats) = ([0.0; 2], vec![0.0; weights.plan().stats]);
/// weights.forward(&[1.0, 3.0], None, &Mask::NONE, &mut a, &mut stats, &mut Scratch::default())?;
/// assert!((a[1] - 0.75).abs() < 1e-5); // one query direction: weights in proportion to the lengths
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct TokenWeights {
    /// The mechanism on one value channel. Its pooled value is `sum_j a_j v_j`, and so the gradient of `<da, a>` is that of
    /// the pooled value of `v = da`.
    operator: Operator,
}

impl TokenWeights {
    /// Checks `mechanism` against `shape`, whose `value_dim` is not read, and plans the calls.
    ///
    /// # Errors
    /// As [`Operator::new`].
    pub fn new(mechanism: &LinearInfsa, shape: Shape, strategy: Strategy) -> Result<Self> {
        let one = LinearInfsa { broadcast: false, gamma: 1.0, ..mechanism.clone() };
        let shape = Shape { value_dim: 1, ..shape };
        Ok(Self { operator: Operator::new(&one.into(), shape, false, strategy)? })
    }

    /// What will be done and what it needs, one value channel included.
    pub fn plan(&self) -> &Plan {
        self.operator.plan()
    }

    /// The sizes, with one value channel.
    pub fn shape(&self) -> &Shape {
        self.operator.shape()
    }

    /// Whether the keys are the queries.
    pub fn tied(&self) -> bool {
        self.operator.mechanism().tied
    }

    /// Elements of `a`.
    pub fn len(&self) -> usize {
        self.shape().v_len()
    }

    /// Whether there are no tokens: never, as shapes without tokens are refused.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes `a [batch, heads, seq_kv]`, 0 at masked tokens, and `stats` (`plan().stats` elements: what
    /// [`TokenWeights::backward`] needs). `k` is `None` iff tied.
    ///
    /// # Errors
    /// [`crate::Error::Length`], [`crate::Error::Tensor`] for tensors that do not fit.
    pub fn forward(
        &self,
        q: &[f32],
        k: Option<&[f32]>,
        mask: &Mask<'_>,
        a: &mut [f32],
        stats: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<()> {
        const OP: &str = "token weights";
        check::length(OP, "a", a.len(), self.len(), "expected batch * heads * seq_kv")?;
        check::length(OP, "stats", stats.len(), self.plan().stats, "size it with `plan().stats`")?;
        let sizes = [self.len(), self.operator.out_len()];
        let ([ones, sums], work) = cut(scratch.take(scratch_len(sizes) + self.plan().scratch_forward), sizes);
        ones.fill(1.0);
        let call = self.call(OP, q, k, ones, mask)?;
        let sums = Target::in_one_piece(sums, self.shape().slices(), [self.operator.out_seq(), 1]);
        self.operator.apply(&call, sums, stats, work)?;
        match self.plan().strategy {
            Strategy::Reference => naive::token_weights(self.operator.mechanism(), &call, a),
            _ => {
                pooled::token_weights(&call, self.mechanism(), stats, a);
                Ok(())
            }
        }
    }

    /// The gradients of `<da, a>`. `a` and `stats` are what [`TokenWeights::forward`] wrote for the same inputs; `dk` is
    /// `None` iff tied, `dq` then holds both paths.
    ///
    /// # Errors
    /// As [`TokenWeights::forward`].
    #[allow(clippy::too_many_arguments)] // the call's tensors, what forward saved, and where to write
    pub fn backward(
        &self,
        (q, k): (&[f32], Option<&[f32]>),
        mask: &Mask<'_>,
        a: &[f32],
        stats: &[f32],
        da: &[f32],
        (dq, dk): (&mut [f32], Option<&mut [f32]>),
        scratch: &mut Scratch,
    ) -> Result<()> {
        const OP: &str = "token weights, backward";
        let shape = self.shape();
        check::length(OP, "a", a.len(), self.len(), "pass what forward wrote")?;
        check::length(OP, "stats", stats.len(), self.plan().stats, "pass what forward wrote")?;
        check::length(OP, "da", da.len(), self.len(), "expected the shape of a")?;
        check::length(OP, "dq", dq.len(), shape.q_len(), "expected the shape of q")?;
        let expected = k.map_or(0, <[f32]>::len);
        check::length(OP, "dk", dk.as_deref().map_or(0, <[f32]>::len), expected, "expected the shape of k")?;
        let sizes = [self.len(), stats.len(), shape.slices(), shape.slices()];
        let all = scratch.take(scratch_len(sizes) + self.plan().scratch_backward);
        let ([dv, saved, pooled, one], work) = cut(all, sizes);
        for ((pooled, a), da) in pooled.iter_mut().zip(a.chunks_exact(shape.seq_kv)).zip(da.chunks_exact(shape.seq_kv))
        {
            // What does not count has weight 0, whatever its gradient.
            let terms = a.iter().zip(da).filter(|(a, _)| **a != 0.0);
            *pooled = terms.map(|(a, da)| f64::from(*a) * f64::from(*da)).sum::<f64>() as f32;
        }
        saved.copy_from_slice(stats);
        if self.plan().strategy != Strategy::Reference {
            let each = saved.len() / shape.slices();
            saved.chunks_exact_mut(each).zip(&*pooled).for_each(|(saved, p)| pooled::set_pooled(saved, &[*p]));
        }
        one.fill(1.0);
        let call = self.call(OP, q, k, da, mask)?;
        let (slices, out_sizes) = (shape.slices(), [self.operator.out_seq(), 1]);
        let of_keys = |x, channels| Target::in_one_piece(x, slices, [shape.seq_kv, channels]);
        let gradients = GradientTargets {
            dq: Target::in_one_piece(dq, slices, [shape.seq_q, shape.head_dim]),
            dk: dk.map(|dk| of_keys(dk, shape.head_dim)),
            dv: of_keys(dv, 1),
            extras: ExtraGradients::default(),
        };
        let [out, dout] = [pooled, one].map(|x| View::in_one_piece(x, slices, out_sizes));
        let saved = Saved { out, stats: saved, dout };
        self.operator.apply_backward(&call, &saved, gradients, work)
    }

    fn mechanism(&self) -> &LinearInfsa {
        match &*self.operator.form {
            Form::LinearInfsa(m) => m,
            _ => unreachable!("made from a `LinearInfsa`"),
        }
    }

    fn call<'a>(
        &self,
        op: &'static str,
        q: &'a [f32],
        k: Option<&'a [f32]>,
        v: &'a [f32],
        mask: &Mask<'a>,
    ) -> Result<Call<'a>> {
        let inputs = Inputs { q, k, v, extras: Extras::default() };
        Ok(self.operator.call(&self.operator.of_slices(op, &inputs, mask)?, mask))
    }
}
