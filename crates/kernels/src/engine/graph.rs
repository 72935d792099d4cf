//! The weighted graph of a call: one hop over it, its transpose, and the gradients.

use std::sync::{Arc, OnceLock};

use super::{
    bias::{OfBias, PairBias, slices_at_once},
    columns::Block,
    gradient::Wanted,
    head::{Head, Logits, Slice},
    normalise::{Weighed, is_streamed, summed},
    pool::Pool,
    rounded::Rounding,
    routes::merged,
    series::{Hop, Tokens},
    sight::Sight,
    sums::{RowSum, any_term},
    sweep::Sweep,
    whiten::{Moments, Statistics},
};
use crate::{
    Error, Mechanism, Parameter, Result, Shape,
    call::{Call, TokenRows, cluster_plan::HeadPlan},
    mechanism::{Estimator, Normalisation, Structure, Whitened, Whitening},
    parallel,
    score::{builtin, map::Map, tiles::TileScore},
    structure::{clustered, dense::padded},
};

/// Tasks that a call's backward pass is split into where batch and heads are fewer. A constant, lest results depend on the machine.
pub(super) const TASKS: usize = 16;

/// Pairs of a dense or clustered structure, and what weighs them.
pub(super) struct Graph<'a> {
    pub call: &'a Call<'a>,
    pub m: &'a Mechanism,
    pub map: Map,
    pub heads: Vec<Head<'a>>,
    /// Of every head of the call, not of every slice.
    scores: Vec<Arc<dyn TileScore>>,
    /// Of every slice, from the first hop or from what that saved.
    pub(super) weighed: Vec<OnceLock<Weighed>>,
    pub pool: Pool,
}

/// Whether the engine has the composition.
pub(super) fn is_fused(m: &Mechanism, causal: bool) -> bool {
    let density = density(m).is_some();
    match &m.structure {
        Structure::Dense(dense) => {
            // Rows of a window differ in the columns that they see.
            let whole = |m: &Whitened| m.whitening == Whitening::Full || dense.window.is_some();
            let whitened = matches!(&m.normalisation, Normalisation::Whitened(m) if whole(m));
            // A density's gradient is summed over columns of weights, which have to be those of magnitudes.
            let signed = density && !m.score.is_non_negative();
            !signed && !whitened
        }
        Structure::Clustered(s) => {
            let ssa = s.ssa(None, causal);
            // Means of what a query sees of a cluster that goes on differ from query to query.
            let prefixes = causal && ssa.estimator == Estimator::Centroid && !ssa.routes_queries();
            let columns = matches!(m.normalisation, Normalisation::Symmetric(_) | Normalisation::Whitened(_));
            !(density || columns || prefixes)
        }
        _ => false,
    }
}

/// The exponent of the densities that are divided out, where they are.
pub(super) fn density(m: &Mechanism) -> Option<f64> {
    match &m.normalisation {
        Normalisation::Row(row) => Some(row.density_exponent).filter(|&exponent| exponent != 0.0),
        _ => None,
    }
}

/// A parameter of one head: the call's, or the configured one.
pub(super) fn parameter(call: &Call<'_>, m: &Mechanism, parameter: Parameter, head: usize) -> f64 {
    let shape = &call.shape;
    let configured = || match parameter {
        Parameter::Gamma => m.series.gamma(),
        _ => m.score.value(parameter, shape.head_dim, shape.heads),
    };
    call.extras.get(parameter).map_or_else(configured, |values| values[head].into())
}

impl<'a> Graph<'a> {
    pub fn new(call: &'a Call<'a>, m: &'a Mechanism) -> Result<Self> {
        let shape = call.shape;
        let map = Map::of(&m.score);
        let score = |head| builtin::of_head(&m.score, shape.head_dim, shape.heads, |p| parameter(call, m, p, head));
        let scores: Vec<_> = (0..shape.heads).map(score).collect();
        let logits = |slice: usize| Logits {
            map,
            scale: parameter(call, m, Parameter::Scale, slice % shape.heads) as f32,
            bias: PairBias::of(call, m.bias, slice),
        };
        let causal = call.mask.causal;
        let heads = match &m.structure {
            Structure::Clustered(structure) => {
                let ssa = structure.ssa(m.planned_scale(), causal);
                let made = if call.extras.clusters.is_none() { Some(clustered::make(call, &ssa)?) } else { None };
                let plan = call.extras.clusters.or(made.as_ref());
                let none = HeadPlan::default();
                let head = |slice: usize| {
                    let plan = plan.map_or(&none, |plan| plan.head(slice));
                    let tokens = Slice::of(call, slice);
                    match ssa.routes_queries() {
                        true => Head::routed(tokens, plan, &ssa, causal, logits(slice)),
                        false => Head::clustered(tokens, plan, &ssa, causal, logits(slice)),
                    }
                };
                parallel::map(0..shape.slices(), head)
            }
            structure => {
                let dense = if let Structure::Dense(dense) = structure { dense.clone() } else { Default::default() };
                let sight = Sight::dense(&dense, &shape, causal);
                let head = |slice: usize| Head::dense(Slice::of(call, slice), sight, logits(slice));
                parallel::map(0..shape.slices(), head)
            }
        };
        let weighed = (0..shape.slices()).map(|_| OnceLock::new()).collect();
        Ok(Self { call, m, map, heads, scores, weighed, pool: Pool::default() })
    }

    pub fn sweep(&self, slice: usize) -> Sweep<'_> {
        let (head, score) = (&self.heads[slice], &*self.scores[slice % self.call.shape.heads]);
        let rounding =
            self.call.bf16.map(|products| Rounding { products, dim: self.call.shape.head_dim, map: self.map });
        Sweep {
            head,
            q: &head.q,
            k: &head.k,
            constants: None,
            score,
            level: self.call.level,
            pool: &self.pool,
            rounding,
            shared: None,
        }
    }

    /// Whether the affinity of a query and a key is that of the key and the query.
    fn is_symmetric(&self, head: &Head<'_>) -> bool {
        let Head { queries, keys, sight, bias, .. } = head;
        self.m.tied && sight.is_complete() && bias.is_none() && queries == keys
    }

    /// Whether rows are summed while values are.
    pub fn is_streamed(&self) -> bool {
        is_streamed(&self.m.normalisation)
    }

    /// What `make` makes of a head's blocks, on other threads too where there are not heads for all of them.
    fn map_blocks<B: Send, R: Send>(
        &self,
        blocks: impl Iterator<Item = B> + Send,
        make: impl Fn(B) -> R + Sync,
    ) -> Vec<R> {
        if self.call.shape.slices() >= TASKS { blocks.map(make).collect() } else { parallel::map(blocks, make) }
    }

    /// The logarithms of the sums of the rows of `sweep`'s head.
    fn row_logs(&self, sweep: Sweep<'_>) -> Vec<f64> {
        self.rows(sweep, &[], &mut []).iter().map(RowSum::log).collect()
    }

    /// The means and variances of the rows of `sweep`'s head.
    fn row_moments(&self, sweep: Sweep<'_>) -> Vec<Moments> {
        self.map_blocks(sweep.head.blocks.iter(), |block| sweep.row_moments(block)).concat()
    }

    /// The sums of the rows of `sweep`'s head, and `sums` in units of these: [`Sweep::rows`] of all blocks.
    pub(super) fn rows(&self, sweep: Sweep<'_>, v: &[f32], sums: &mut [f32]) -> Vec<RowSum> {
        let how = summed(&self.m.normalisation);
        let stride = v.len() / sweep.head.keys.len().max(1);
        let parts = split(&sweep.head.blocks, sums, stride);
        // Blocks are in the order of the rows.
        self.map_blocks(sweep.head.blocks.iter().zip(parts), |(block, part)| sweep.rows(block, how, v, part)).concat()
    }

    /// What makes weights of a slice's values.
    pub fn weighed(&self, slice: usize) -> &Weighed {
        self.weighed[slice].get_or_init(|| self.weigh(slice))
    }

    fn weigh(&self, slice: usize) -> Weighed {
        let (sweep, head) = (self.sweep(slice), &self.heads[slice]);
        let log = sweep.score.is_log();
        match &self.m.normalisation {
            Normalisation::None(_) => {
                let logs = vec![0.0.into(); head.queries.len()];
                Weighed::streamed(&self.m.normalisation, head, log, logs, Vec::new())
            }
            Normalisation::Row(m) if m.density_exponent != 0.0 => {
                let sums = self.rows(sweep, &[], &mut []);
                let plain: Vec<f64> = sums.iter().map(RowSum::log).collect();
                let densities = Weighed::densities(head, log, m.density_exponent, &plain);
                let constants: Vec<f32> = densities.iter().map(|&ln| -ln as f32).collect();
                let logs = self.row_logs(Sweep { constants: Some(&constants), ..sweep });
                let term = any_term(&sums);
                Weighed::of_densities(head, log, &densities, [plain, logs], term)
            }
            Normalisation::Symmetric(_) => {
                let sums = self.rows(sweep, &[], &mut []);
                let rows: Vec<f64> = sums.iter().map(RowSum::log).collect();
                let term = any_term(&sums);
                if self.is_symmetric(head) {
                    return Weighed::symmetric(log, rows.clone(), rows, term);
                }
                let transposed = head.transposed();
                let columns = self.row_logs(Sweep { head: &transposed, q: &transposed.q, k: &transposed.k, ..sweep });
                Weighed::symmetric(log, rows, columns, term)
            }
            Normalisation::Whitened(m) => {
                let statistics = Statistics::of(sweep, |sweep| self.row_moments(sweep), m);
                Weighed::whitened(statistics, head.keys.len())
            }
            streamed => {
                let sums = self.rows(sweep, &[], &mut []);
                Weighed::of_rows(streamed, head, log, &merged(head.routes.as_ref(), &sums))
            }
        }
    }

    /// Whether sums left f32, by which would be divided in silence.
    pub fn check(&self) -> Result<()> {
        let log = self.scores[0].is_log();
        // The factor on a row of nothing is zero too.
        let unbounded =
            |(x, sum): (f32, f64)| !x.is_finite() || sum == f64::INFINITY || x == 0.0 && !log && sum.is_finite();
        let known = || self.weighed.iter().zip(&self.heads).filter_map(|(w, head)| Some((w.get()?, head)));
        let mut rows = known().flat_map(|(w, _)| w.factors());
        let m = &self.m.normalisation;
        let divided = !log && !matches!(m, Normalisation::None(_));
        let vanished = || known().filter(|_| divided).find_map(|(w, head)| w.vanished(m, &self.m.score, head));
        let imprecise = || known().filter(|_| log).find_map(|(w, _)| w.beyond_digits(m));
        let relative = matches!(m, Normalisation::Row(_));
        let far = || known().filter(|_| relative).find_map(|(w, _)| w.far(&self.m.score));
        let infinite = || known().find_map(|(w, _)| w.infinite());
        if let Some([apart, limit]) = known().find_map(|(w, _)| w.too_close()) {
            let remedy = "affinities with a key differ by too little of their rounding: take the mean off the tokens";
            return Err(Error::Close { tensor: "q", apart, limit, remedy });
        }
        match rows.position(unbounded).or_else(infinite).or_else(vanished).or_else(imprecise).or_else(far) {
            Some(index) => Err(Error::Overflow { tensor: "row sums", index }),
            None => Ok(()),
        }
    }

    /// One hop of a slice: from `values` by column to `rows`, both of whole vectors and in the order of the head.
    fn hop(&self, slice: usize, values: &[f32], rows: &mut [f32]) {
        let (sweep, head) = (self.sweep(slice), &self.heads[slice]);
        let stride = values.len() / head.keys.len().max(1);
        let shared = sweep.share((values, stride), false);
        let sweep = Sweep { shared: shared.as_ref(), ..sweep };
        let mut streamed = Vec::new();
        if self.weighed[slice].get().is_none() && self.is_streamed() {
            streamed = self.stream((slice, sweep), values, rows);
            if !streamed.contains(&false) {
                return;
            }
        }
        // What was streamed stays: the two ways round differently, and which one a causal row takes may not depend on later rows.
        let kept = streamed.contains(&true).then(|| rows.to_vec());
        let weights = &self.weighed(slice).weights;
        rows.fill(0.0);
        let parts = split(&head.blocks, rows, stride);
        self.map_blocks(head.blocks.iter().zip(parts), |(block, part)| sweep.apply(block, weights, values, part));
        if let Some(routes) = &head.routes {
            routes.gather(rows, stride);
        }
        if let Some(kept) = kept {
            let parts = rows.chunks_exact_mut(stride).zip(kept.chunks_exact(stride)).zip(&streamed);
            parts.filter(|(_, streamed)| **streamed).for_each(|((row, kept), _)| row.copy_from_slice(kept));
        }
    }
}

/// Parts of `x`, `stride` numbers for every row of each block.
pub(super) fn split<'x>(blocks: &'x [Block], x: &'x mut [f32], stride: usize) -> impl Iterator<Item = &'x mut [f32]> {
    parallel::split(x, blocks.iter().map(move |block| block.rows.len() * stride))
}

impl Hop for Graph<'_> {
    fn shape(&self) -> Shape {
        self.call.shape
    }

    fn apply(&self, x: &[f32], out: &mut [f32]) {
        let s = self.call.shape;
        let dim = s.value_dim;
        let slices = out.chunks_mut(s.seq_q * dim).zip(x.chunks(s.seq_kv * dim)).enumerate();
        parallel::each(slices, |(slice, (out, x))| {
            let head = &self.heads[slice];
            let values = head.of_columns(TokenRows::in_one_piece(x, dim));
            let values = self.pool.aligned(&values);
            if head.lies_like(s.seq_q, dim) {
                return self.hop(slice, &values, out);
            }
            // Where no key is kept nothing is written.
            let mut rows = self.pool.zeros(head.queries.len() * padded(dim));
            self.hop(slice, &values, &mut rows);
            if head.own_rows() < s.seq_q {
                out.fill(0.0);
            }
            for (row, &i) in rows.chunks_exact(padded(dim)).zip(&head.queries[..head.own_rows()]) {
                out[i as usize * dim..][..dim].copy_from_slice(&row[..dim]);
            }
        });
    }

    fn transpose(&self, y: &[f32], out: &mut [f32]) {
        let s = self.call.shape;
        let dim = s.value_dim;
        out.fill(0.0);
        let slices = out.chunks_mut(s.seq_kv * dim).zip(y.chunks(s.seq_q * dim)).enumerate();
        parallel::each(slices, |(slice, (out, y))| {
            let head = &self.heads[slice];
            let mut dv = self.pool.zeros(head.keys.len() * padded(dim));
            self.transpose_slice(slice, &head.of_rows(TokenRows::in_one_piece(y, dim)), dim, &mut dv);
            head.add_columns(&dv, padded(dim), out, dim, None);
        });
    }

    fn backward(&self, x: &[f32], y: &[f32], dout: &[f32], dx: &mut [f32], tokens: &mut Tokens<'_>) {
        let s = self.call.shape;
        let [dx_len, dq_len, dk_len] = [s.seq_kv * s.value_dim, s.seq_q * s.head_dim, s.seq_kv * s.head_dim];
        dx.fill(0.0);
        let rule = self.m.bias.filter(|_| tokens.bias.is_some());
        let at_once = rule.map_or(s.slices(), |rule| slices_at_once(&rule, &self.m.structure, &s));
        let wanted = Wanted { parameters: tokens.wanted, bias: rule.is_some(), at_once };
        let mut of_bias = OfBias::new(rule, &self.m.structure, tokens.bias.as_deref_mut());
        let waves = dx.chunks_mut(at_once * dx_len).zip(tokens.dq.chunks_mut(at_once * dq_len));
        let waves = waves.zip(tokens.dk.chunks_mut(at_once * dk_len)).zip(tokens.parameters.chunks_mut(at_once));
        for (wave, (((dx, dq), dk), parameters)) in waves.enumerate() {
            let first = wave * at_once;
            let pairs = of_bias.pairs(&s, first, parameters.len());
            let slices = dx.chunks_mut(dx_len).zip(dq.chunks_mut(dq_len)).zip(dk.chunks_mut(dk_len));
            let slices = slices.zip(parameters.iter_mut()).zip(pairs).enumerate();
            let sums = parallel::map(slices, |(n, ((((dx, dq), dk), parameters), pairs))| {
                let slice = first + n;
                let of_slice = [(x, s.seq_kv), (y, s.seq_q), (dout, s.seq_q)];
                let of_slice = of_slice.map(|(x, seq)| &x[slice * seq * s.value_dim..][..seq * s.value_dim]);
                let of_score = self.backward_slice(slice, wanted, of_slice, [dq, dk, dx], pairs);
                parameters.iter_mut().zip(of_score.parameters).for_each(|(sum, x)| *sum += x);
                of_score.bias
            });
            for (slice, sums) in (first..).zip(sums) {
                of_bias.add(&s, slice, &self.heads[slice].queries, &sums);
            }
        }
        of_bias.finish();
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.m.score.parameters().to_vec()
    }

    fn check(&self) -> Result<()> {
        Graph::check(self)
    }
}
