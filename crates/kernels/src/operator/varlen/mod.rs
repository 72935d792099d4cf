//! Sequences of any lengths in one call: each attends to itself alone.

mod passes;

use crate::{
    ClusterPlan, Error, Extras, Mechanism, Operator, Plan, Precision, Result, Sequences, Shape, Strategy, Strided,
    parallel, scratch::scratch_len, simd::Level,
};

use super::Pass;

/// How many heads there are, and how wide they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values: each serves `heads / kv_heads` heads of queries in a row.
    pub kv_heads: usize,
    /// Channels of a query or key.
    pub head_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
}

impl Heads {
    /// Heads with keys of their own, and as many value as key channels.
    pub const fn new(heads: usize, dim: usize) -> Self {
        Self { heads, kv_heads: heads, head_dim: dim, value_dim: dim }
    }
}

/// The tensors of a call over sequences. Heads and tokens may lie in any order.
#[derive(Debug, Clone, Copy)]
pub struct VarlenInputs<'a, T> {
    /// Queries, `[heads, tokens, head_dim]`.
    pub q: Strided<&'a [T]>,
    /// Keys, `[kv_heads, keys, head_dim]`; `None` iff the mechanism is tied (the keys are `q`).
    pub k: Option<Strided<&'a [T]>>,
    /// Values, `[kv_heads, keys, value_dim]`.
    pub v: Strided<&'a [T]>,
    /// The mechanism's own tensors, which all sequences share. What is of single tokens or of a batch is refused.
    pub extras: Extras<'a>,
    /// Plans that replace planning, one per sequence: what [`VarlenOperator::clusters`] returns.
    pub clusters: Option<&'a [ClusterPlan]>,
}

/// A mechanism bound to sequences that lie end to end: checked and planned once, one call for all of them.
///
/// Every sequence's results are, bit for bit, those of an [`Operator`] on that sequence alone, with one difference: sequence `n` draws
/// [`crate::Dropout::reseeded`] by `n`. Nothing is spent on padding; short sequences are shared out over the threads, long ones share the threads.
///
/// ```
/// use resolvent_kernels::*;
/// let sequences = Sequences::new(&[0, 3, 8])?; // of 3 and 5 tokens
/// let op = VarlenOperator::new(&Mechanism::preset("softmax")?, Heads::new(2, 4), &sequences, true, Strategy::Auto)?;
/// let tokens = vec![0.5; 8 * 2 * 4]; // [tokens, heads, channels]
/// let x = Strided::tokens_first(&tokens[..], [2, 8, 4]);
/// let inputs = VarlenInputs { q: x, k: Some(x), v: x, extras: Extras::default(), clusters: None };
/// let (mut out, mut stats) = (vec![0.0; tokens.len()], vec![0.0; op.plan().stats]);
/// let into = Strided::tokens_first(&mut out[..], [2, 8, 4]);
/// op.forward(&inputs, &Mask::NONE, into, &mut stats, &mut Scratch::default())?;
/// assert!((out[0] - 0.5).abs() < 1e-6);
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct VarlenOperator {
    sequences: Sequences,
    heads: Heads,
    /// One for each pair of lengths.
    operators: Vec<Operator>,
    /// Of every sequence.
    parts: Vec<Part>,
    /// Sequences that keep all threads busy, one after another.
    alone: Vec<usize>,
    /// The others, the most work first.
    shared_out: Vec<usize>,
    plan: Plan,
}

/// What belongs to a sequence.
#[derive(Debug, Clone, Copy)]
struct Part {
    /// Of its lengths.
    operator: usize,
    /// Where its statistics begin.
    stats: usize,
}

/// Operations from which a sequence is worth more than one thread.
const ALONE: u64 = 1 << 26;
/// Tokens of a head that are a task for a thread.
const TASK: usize = 256;

impl VarlenOperator {
    /// Checks `mechanism` against the lengths of `sequences` and plans the call. `causal` is OR-ed with the configuration's.
    ///
    /// # Errors
    /// As [`Operator::new`], within [`Error::Sequence`] where it depends on a sequence's lengths; [`Error::OutOfRange`] where `kv_heads`
    /// does not divide the heads; [`Error::Unsupported`] for a mechanism that makes one row of a sequence.
    pub fn new(
        mechanism: &Mechanism,
        heads: Heads,
        sequences: &Sequences,
        causal: bool,
        strategy: Strategy,
    ) -> Result<Self> {
        if mechanism.out_seq(&Shape::square(1, 1, 2, 1)) == 1 {
            let why = "it returns one row per sequence; set broadcast to true";
            return Err(Error::Unsupported { mechanism: mechanism.id(), what: "sequences end to end", why });
        }
        let (mut operators, mut parts, mut stats) = (Vec::<Operator>::new(), Vec::new(), 0);
        let mut known = std::collections::HashMap::new();
        for n in 0..sequences.len() {
            let lengths = [sequences.range(n).len(), sequences.key_range(n).len()];
            let operator = match known.get(&lengths) {
                Some(&operator) => operator,
                None => {
                    let Heads { heads, head_dim, value_dim, .. } = heads;
                    let shape = Shape { batch: 1, heads, seq_q: lengths[0], seq_kv: lengths[1], head_dim, value_dim };
                    let operator = Operator::new(mechanism, shape, causal, strategy);
                    operators.push(operator.map_err(|error| error.of_sequence(n))?);
                    known.insert(lengths, operators.len() - 1);
                    operators.len() - 1
                }
            };
            parts.push(Part { operator, stats });
            stats += operators[operator].plan().stats;
        }
        operators[0].clone().with_kv_heads(heads.kv_heads)?;
        let is_alone = |&n: &usize| {
            let operator: &Operator = &operators[parts[n].operator];
            let s = operator.shape();
            operator.plan().flops_forward >= ALONE
                && s.heads * s.seq_q.div_ceil(TASK) >= 2 * rayon::current_num_threads()
        };
        let (alone, mut shared_out): (Vec<_>, Vec<_>) = (0..sequences.len()).partition(is_alone);
        shared_out.sort_by_key(|&n| std::cmp::Reverse(operators[parts[n].operator].plan().flops_forward));
        let plan = Plan { stats, ..*operators[0].plan() };
        let all = Self { sequences: sequences.clone(), heads, operators, parts, alone, shared_out, plan };
        Ok(Self { plan: all.planned(), ..all })
    }

    /// The same operator on another instruction set.
    ///
    /// # Errors
    /// As [`Operator::with_level`].
    pub fn with_level(mut self, level: Level) -> Result<Self> {
        self.operators =
            self.operators.into_iter().map(|operator| operator.with_level(level)).collect::<Result<_>>()?;
        self.plan = self.planned();
        Ok(self)
    }

    /// The same operator with products of another precision: see [`Operator::with_precision`].
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.operators = self.operators.into_iter().map(|operator| operator.with_precision(precision)).collect();
        self.plan = self.planned();
        self
    }

    /// What will be done and what it needs: of all sequences together, the tile and the reason those of the longest. Half types are widened
    /// in further scratch.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The mechanism.
    pub fn mechanism(&self) -> &Mechanism {
        self.operators[0].mechanism()
    }

    /// The sequences.
    pub fn sequences(&self) -> &Sequences {
        &self.sequences
    }

    /// The heads.
    pub fn heads(&self) -> Heads {
        self.heads
    }

    /// The log-sum-exp of every row, `[heads, tokens]`, where [`Operator::lse`] has one.
    pub fn lse(&self, stats: &[f32]) -> Option<Vec<f32>> {
        let tokens = self.sequences.tokens();
        let mut all = vec![0.0; self.heads.heads * tokens];
        for n in 0..self.parts.len() {
            let (operator, range) = (self.operator(n), self.sequences.range(n));
            let lse = operator.lse(&stats[self.parts[n].stats..][..operator.plan().stats])?;
            for (head, lse) in lse.chunks_exact(range.len()).enumerate() {
                all[head * tokens..][range.clone()].copy_from_slice(lse);
            }
        }
        Some(all)
    }

    fn operator(&self, n: usize) -> &Operator {
        &self.operators[self.parts[n].operator]
    }

    /// The plan of all sequences from those of each.
    fn planned(&self) -> Plan {
        let plans = || (0..self.parts.len()).map(|n| self.operator(n).plan());
        let sum = |of: fn(&Plan) -> u64| plans().map(of).fold(0, u64::saturating_add);
        let at_once = parallel::workers(self.shared_out.len());
        let allocated = |of: fn(&Plan) -> usize| {
            let most = |all: &[usize]| all.iter().map(|&n| of(self.operator(n).plan())).max().unwrap_or(0);
            most(&self.alone).max(at_once * most(&self.shared_out))
        };
        let longest = self.alone.iter().chain(&self.shared_out).map(|&n| self.operator(n).plan());
        let longest = longest.max_by_key(|plan| plan.flops_forward).unwrap_or(&self.plan);
        Plan {
            flops_forward: sum(|plan| plan.flops_forward),
            flops_backward: sum(|plan| plan.flops_backward),
            exps_forward: sum(|plan| plan.exps_forward),
            exps_backward: sum(|plan| plan.exps_backward),
            bytes_forward: sum(|plan| plan.bytes_forward),
            bytes_backward: sum(|plan| plan.bytes_backward),
            scratch_forward: self.scratch(self.needed(|n| self.gathered(n, Pass::Forward))),
            scratch_backward: self.scratch(self.needed(|n| self.gathered(n, Pass::Backward))),
            stats: self.plan.stats,
            allocated_forward: allocated(|plan| plan.allocated_forward),
            allocated_backward: allocated(|plan| plan.allocated_backward),
            ..*longest
        }
    }

    /// f32 of working memory of the sequences that keep all threads busy, and of one of the others, from that of each.
    fn needed(&self, of: impl Fn(usize) -> usize) -> [usize; 2] {
        let most = |all: &[usize]| all.iter().map(|&n| of(n)).max().unwrap_or(0).next_multiple_of(16);
        [most(&self.alone), most(&self.shared_out)]
    }

    /// f32 of working memory of all.
    fn scratch(&self, [alone, per_worker]: [usize; 2]) -> usize {
        alone.max(parallel::workers(self.shared_out.len()) * per_worker)
    }

    /// f32 of working memory of a sequence whose f32 rows lie among those of others.
    fn gathered(&self, n: usize, pass: Pass) -> usize {
        let operator = self.operator(n);
        let (s, plan) = (operator.shape(), operator.plan());
        let [q, v, o] = [s.q_len(), s.v_len(), operator.out_len()];
        let k = if operator.mechanism().tied { 0 } else { s.k_len() };
        let own = if pass == Pass::Forward { plan.scratch_forward } else { plan.scratch_backward };
        let copied = match pass {
            _ if operator.reads_in_place() => 0,
            Pass::Forward => scratch_len([q, k, v, o]),
            Pass::Backward => scratch_len([q, k, v, o, o, q, k, v]),
        };
        let grouped = pass == Pass::Backward && self.heads.kv_heads != self.heads.heads && operator.reads_in_place();
        own + copied + if grouped { scratch_len([k, v]) } else { 0 }
    }
}
