//! The token graph of one attention head, applied by the mechanism's own kernels.

use std::cell::RefCell;

use resolvent_kernels::{
    ClusterPlan, ExtraGradients, Extras, Gradients, Inputs, Mask, Mechanism, Operator, Parameter, PlanTensors, Scratch,
    Shape, Strategy,
    mechanism::{DotExp, Row, Score, Series, Structure},
    reference,
};

use crate::{Dense, Error, LinearOperator, Result, error::check_len, vector::dot};

/// What a head has of its call beside queries and keys: numbers of its own, and which of the draws are its.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct HeadExtras {
    /// Parameters of a call with this head alone.
    pub parameters: Vec<(Parameter, Vec<f32>)>,
    /// See [`Extras::first_sequence`].
    pub first_sequence: usize,
}

impl HeadExtras {
    /// Those of head `head` of a call of sizes `shape` that gives `given`: of biases and maps, which heads have one by one whether a call
    /// gives them or not.
    ///
    /// # Panics
    /// Where `given` has fewer numbers than the call takes, or `head` is none of it.
    pub fn of(
        mechanism: &Mechanism,
        shape: &Shape,
        head: usize,
        given: &[(Parameter, Vec<f32>)],
        first_sequence: usize,
    ) -> Self {
        let own = |parameter: Parameter| {
            let given = given.iter().find(|(known, _)| *known == parameter).map(|(_, values)| values.clone());
            let values = given.unwrap_or_else(|| mechanism.parameter_default(parameter, shape));
            (parameter, values[mechanism.parameter_part(parameter, shape, head)].to_vec())
        };
        let by_head = |parameter: &Parameter| *parameter == Parameter::Bias || parameter.is_map();
        let parameters = mechanism.parameters().into_iter().filter(by_head).map(own).collect();
        Self { parameters, first_sequence }
    }

    fn extras(&self) -> Extras<'_> {
        let none = Extras::default().with_first_sequence(self.first_sequence);
        self.parameters.iter().fold(none, |extras, (parameter, values)| extras.with(*parameter, values))
    }
}

/// The matrix `M(q, k)` that one head of a mechanism multiplies its values with, decay included, known by `M x` and
/// `M^T x` in O(N) memory.
///
/// `M x` is the forward pass with `x` for the values; `M^T x` is the gradient of the values when `x` comes back. So
/// every mechanism with a forward and a backward pass has its token graph here, in the f32 arithmetic of its kernels:
/// about six digits. A masked token is an isolated one.
#[derive(Debug)]
pub struct AttentionOperator {
    op: Operator,
    q: Vec<f32>,
    k: Option<Vec<f32>>,
    keep: Option<Vec<bool>>,
    extras: HeadExtras,
    /// Of a clustered mechanism: made once, so that every product has the same graph.
    clusters: Option<ClusterPlan>,
    ones: Vec<f32>,
    row_sums: Vec<f32>,
    stats: Vec<f32>,
    scratch: RefCell<Scratch>,
}

impl AttentionOperator {
    /// The graph of `mechanism` over `seq` tokens with queries `q [seq, head_dim]` and keys `k` (`None` iff the mechanism
    /// is tied). `keep [seq]` masks tokens, as queries and as keys.
    ///
    /// # Errors
    /// What the mechanism refuses; [`crate::Error::Length`] where `q` does not have whole rows.
    pub fn new(
        mechanism: &Mechanism,
        seq: usize,
        q: &[f32],
        k: Option<&[f32]>,
        keep: Option<&[bool]>,
        strategy: Strategy,
    ) -> Result<Self> {
        Self::of_call(mechanism, seq, q, k, keep, HeadExtras::default(), strategy)
    }

    /// [`AttentionOperator::new`] of a head that its call gives something of its own.
    ///
    /// # Errors
    /// As [`AttentionOperator::new`].
    pub fn of_call(
        mechanism: &Mechanism,
        seq: usize,
        q: &[f32],
        k: Option<&[f32]>,
        keep: Option<&[bool]>,
        extras: HeadExtras,
        strategy: Strategy,
    ) -> Result<Self> {
        let head_dim = q.len() / seq.max(1);
        check_len("q", q.len(), seq * head_dim)?;
        // The graph has a row per token, also where the mechanism would return a common row once.
        let mechanism = mechanism.clone().with_every_row();
        let shape = Shape { value_dim: 1, ..Shape::square(1, 1, seq, head_dim) };
        let op = Operator::new(&mechanism, shape, false, strategy)?;
        let (k, keep) = (k.map(<[f32]>::to_vec), keep.map(<[bool]>::to_vec));
        let stats = vec![0.0; op.plan().stats];
        let (ones, row_sums, scratch) = (vec![1.0; seq], vec![0.0; seq], RefCell::default());
        let mut graph = Self { op, q: q.to_vec(), k, keep, extras, clusters: None, ones, row_sums, stats, scratch };
        if graph.op.mechanism().clustering().is_some() {
            let (inputs, mask) = graph.inputs(&graph.ones);
            graph.clusters = Some(graph.op.clusters(&inputs, &mask)?.into_owned());
        }
        graph.saved()
    }

    /// The graph of the same tokens under the plan that slice `slice` (batch entry times heads plus head) of a larger call
    /// has: what a clustered mechanism draws depends on where in a call a head is.
    ///
    /// # Errors
    /// [`Error::Range`] where the plan has no such slice; what the mechanism refuses.
    pub fn with_clusters(mut self, plan: &ClusterPlan, slice: usize) -> Result<Self> {
        if slice >= plan.slices() {
            return Err(Error::Range { what: "slice", value: slice as f64, expected: "one that the plan has" });
        }
        let (all, seq) = (plan.to_tensors(), self.len());
        let own = |triple: &[i64; 3]| triple[0] == slice as i64;
        let first = |triple: [i64; 3]| [0, triple[1], triple[2]];
        let edges = || all.edges.iter().zip(&all.edge_log_weight).filter(|(edge, _)| own(edge));
        let labels = |all: &[i64]| all.get(slice * seq..(slice + 1) * seq).unwrap_or_default().to_vec();
        let tensors = PlanTensors {
            label_q: labels(&all.label_q),
            label_k: labels(&all.label_k),
            exact_blocks: all.exact_blocks.iter().copied().filter(own).map(first).collect(),
            edges: edges().map(|(&edge, _)| first(edge)).collect(),
            edge_log_weight: edges().map(|(_, &weight)| weight).collect(),
        };
        self.clusters = Some(ClusterPlan::from_tensors(&tensors, self.op.shape())?);
        self.saved()
    }

    /// With what forward saves for the backward pass of one channel of ones.
    fn saved(mut self) -> Result<Self> {
        let (mut row_sums, mut stats) = (vec![0.0; self.len()], vec![0.0; self.stats.len()]);
        self.forward(&self.op, &self.ones, &mut row_sums, &mut stats)?;
        (self.row_sums, self.stats) = (row_sums, stats);
        Ok(self)
    }

    /// The tokens' queries `[seq, head_dim]`, and keys where the mechanism is not tied.
    pub(crate) fn tokens(&self) -> (&[f32], Option<&[f32]>) {
        (&self.q, self.k.as_deref())
    }

    /// The scores `scale q_i.k_j` of softmax, of every pair or in a window, `[seq, seq]` in f64, `-inf` where a token is not seen: the
    /// logarithms of its kernel before rows are normalised, which no weight is too small for. `None` for other mechanisms.
    pub fn logits(&self) -> Option<Vec<f64>> {
        let m = self.op.mechanism().values();
        let Structure::Dense(pairs) = &m.structure else { return None };
        let rows = m.normalisation == Row::default().into() && m.series == Series::default();
        if !rows || m.bias.is_some() || !matches!(m.score, Score::DotExp(DotExp { softcap: None, .. })) {
            return None;
        }
        let (n, dim) = (self.len(), self.op.shape().head_dim);
        let scale = m.score.value(Parameter::Scale, dim, 1);
        let (q, k) = (wide(&self.q), wide(self.k.as_deref().unwrap_or(&self.q)));
        let there = |token: usize| self.keep.as_ref().is_none_or(|keep| keep[token]);
        let near = |i: usize, j: usize| j < pairs.sinks || pairs.window.is_none_or(|window| i.abs_diff(j) < window);
        let logit = |at: usize| match (at / n, at % n) {
            (i, j) if (m.causal && j > i) || !there(i) || !there(j) || !near(i, j) => f64::NEG_INFINITY,
            (i, j) => scale * dot(&q[i * dim..][..dim], &k[j * dim..][..dim]),
        };
        Some((0..n * n).map(logit).collect())
    }

    /// The weights `M` of `fna`, or of a composition of the same values, in f64, and the logarithms of what its rows were divided by: by the
    /// reference, in O(N^2) memory. `None` for other mechanisms.
    ///
    /// # Errors
    /// What the mechanism refuses.
    pub fn exact(&self) -> Result<Option<(Dense, Option<Vec<f64>>)>> {
        let mechanism = self.op.mechanism();
        if mechanism.as_fna().is_none() {
            return Ok(None);
        }
        let (q, k, v) = (wide(&self.q), self.k.as_deref().map(wide), vec![0.0; self.len()]);
        let inputs = Inputs { q: &q, k: k.as_deref(), v: &v, extras: self.extras.extras() };
        let mask = self.keep.as_deref().map_or(Mask::NONE, Mask::padding);
        let found = reference::forward(mechanism, self.op.shape(), &inputs, &mask)?;
        Ok(Some((Dense::new(self.len(), found.weights().to_vec())?, found.lse)))
    }

    /// Which tokens are there.
    pub fn keep(&self) -> Option<&[bool]> {
        self.keep.as_deref()
    }

    /// The mechanism.
    pub fn mechanism(&self) -> &Mechanism {
        self.op.mechanism()
    }

    /// The plan of a clustered mechanism.
    pub fn clusters(&self) -> Option<&ClusterPlan> {
        self.clusters.as_ref()
    }

    /// The logarithm of what each row was divided by, where the mechanism keeps it (one hop over pairs whose rows are normalised, as of
    /// `softmax`, `fna` and `ssa`): row `i` of the unnormalised kernel is `exp(lse_i) M_i`. `-inf` for a row without keys.
    pub fn lse(&self) -> Option<Vec<f64>> {
        Some(wide(self.op.lse(&self.stats)?))
    }

    fn inputs<'a>(&'a self, v: &'a [f32]) -> (Inputs<'a, f32>, Mask<'a>) {
        let own = self.extras.extras();
        let extras = self.clusters.as_ref().map_or(own, |plan| own.with_clusters(plan));
        let inputs = Inputs { q: &self.q, k: self.k.as_deref(), v, extras };
        (inputs, self.keep.as_deref().map_or(Mask::NONE, Mask::padding))
    }

    fn forward(&self, op: &Operator, v: &[f32], out: &mut [f32], stats: &mut [f32]) -> Result<()> {
        let (inputs, mask) = self.inputs(v);
        Ok(op.forward(&inputs, &mask, out, stats, &mut self.scratch.borrow_mut())?)
    }
}

impl LinearOperator for AttentionOperator {
    fn len(&self) -> usize {
        self.ones.len()
    }

    fn apply(&self, x: &[f64]) -> Result<Vec<f64>> {
        check_len("x", x.len(), self.len())?;
        let mut out = vec![0.0; x.len()];
        self.forward(&self.op, &narrow(x), &mut out, &mut vec![0.0; self.stats.len()])?;
        Ok(wide(&out))
    }

    fn apply_transpose(&self, x: &[f64]) -> Result<Vec<f64>> {
        check_len("x", x.len(), self.len())?;
        self.adjoint(&self.op, &self.ones, (&self.row_sums, &self.stats), &narrow(x))
    }

    fn apply_block(&self, block: &[Vec<f64>]) -> Result<Vec<Vec<f64>>> {
        if block.is_empty() {
            return Ok(Vec::new());
        }
        let op = self.wider(block)?;
        let v = interleaved(block);
        let mut out = vec![0.0; v.len()];
        self.forward(&op, &v, &mut out, &mut vec![0.0; op.plan().stats])?;
        Ok(apart(&wide(&out), block.len()))
    }

    fn apply_transpose_block(&self, block: &[Vec<f64>]) -> Result<Vec<Vec<f64>>> {
        if block.is_empty() {
            return Ok(Vec::new());
        }
        let op = self.wider(block)?;
        let dout = interleaved(block);
        // What forward saved for one channel is not what it saves for several.
        let ones = vec![1.0; dout.len()];
        let (mut out, mut stats) = (vec![0.0; dout.len()], vec![0.0; op.plan().stats]);
        self.forward(&op, &ones, &mut out, &mut stats)?;
        Ok(apart(&self.adjoint(&op, &ones, (&out, &stats), &dout)?, block.len()))
    }
}

impl AttentionOperator {
    /// The operator on as many channels as there are vectors in `block`.
    fn wider(&self, block: &[Vec<f64>]) -> Result<Operator> {
        block.iter().try_for_each(|x| check_len("x", x.len(), self.len()))?;
        let shape = Shape { value_dim: block.len(), ..*self.op.shape() };
        Ok(Operator::new(self.op.mechanism(), shape, false, self.op.plan().strategy)?)
    }

    /// The gradient of the values `v`, of which forward `saved` output and statistics, when `dout` comes back.
    fn adjoint(&self, op: &Operator, v: &[f32], saved: (&[f32], &[f32]), dout: &[f32]) -> Result<Vec<f64>> {
        let (inputs, mask) = self.inputs(v);
        let (mut dq, mut dk) = (vec![0.0; self.q.len()], self.k.as_ref().map(|k| vec![0.0; k.len()]));
        let mut dv = vec![0.0; v.len()];
        let mut gradients =
            Gradients { dq: &mut dq, dk: dk.as_deref_mut(), dv: &mut dv, extras: ExtraGradients::default() };
        op.backward(&inputs, &mask, saved.0, saved.1, dout, &mut gradients, &mut self.scratch.borrow_mut())?;
        Ok(wide(&dv))
    }
}

/// Several vectors as the channels of one tensor, `[tokens, vectors]`.
fn interleaved(block: &[Vec<f64>]) -> Vec<f32> {
    (0..block[0].len()).flat_map(|i| block.iter().map(move |x| x[i] as f32)).collect()
}

/// The channels of a tensor as vectors.
fn apart(x: &[f64], channels: usize) -> Vec<Vec<f64>> {
    (0..channels).map(|c| x[c..].iter().step_by(channels).copied().collect()).collect()
}

fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| x.into()).collect()
}
