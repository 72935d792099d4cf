//! Parts of problems and of their solutions: some of the tokens, or one of the heads.

use std::collections::BTreeSet;

use resolvent_kernels::{ClusterPlan, Parameter, PlanTensors, Shape};

use super::problem::{Problem, Solution};

impl Problem {
    /// The problem over the query tokens `queries` and the key tokens `keys`, in that order.
    pub fn select(&self, queries: &[usize], keys: &[usize]) -> Self {
        let Shape { batch, seq_q, seq_kv, .. } = self.shape;
        let slices = self.shape.slices();
        Self {
            mechanism: self.mechanism.clone(),
            shape: Shape { seq_q: queries.len(), seq_kv: keys.len(), ..self.shape },
            q: rows(&self.q, slices, seq_q, queries),
            k: self.k.as_ref().map(|k| rows(k, slices, seq_kv, keys)),
            v: rows(&self.v, slices, seq_kv, keys),
            parameters: self.parameters.clone(),
            codebook: self.codebook.clone(),
            clusters: self.clusters.as_ref().map(|plan| select_plan(plan, &self.shape, queries, keys)),
            landmark_indices: self.landmark_indices.clone(),
            dropout: self.dropout,
            key_mask: self.key_mask.as_ref().map(|mask| rows(mask, batch, seq_kv, keys)),
            query_mask: self.query_mask.as_ref().map(|mask| rows(mask, batch, seq_q, queries)),
            dout: self.output_rows(&self.dout, queries),
        }
    }

    /// The part of this problem's `solution` that is about these tokens.
    pub fn select_solution(&self, solution: &Solution, queries: &[usize], keys: &[usize]) -> Solution {
        let Shape { seq_q, seq_kv, .. } = self.shape;
        let slices = self.shape.slices();
        let part = |name: &str, x: &Vec<f64>| match name {
            "out" => self.output_rows(x, queries),
            "dq" | "lse" => rows(x, slices, seq_q, queries),
            "dk" | "dv" => rows(x, slices, seq_kv, keys),
            _ => x.clone(),
        };
        solution.iter().map(|(&name, x)| (name, part(name, x))).collect()
    }

    fn output_rows(&self, x: &[f64], queries: &[usize]) -> Vec<f64> {
        if self.is_pooled() { x.to_vec() } else { rows(x, self.shape.slices(), self.shape.seq_q, queries) }
    }

    /// Whether the output is the pooled value, once, and not a row per query.
    pub fn is_pooled(&self) -> bool {
        self.mechanism.pooling().is_some_and(|m| !m.broadcast)
    }

    /// The problem of batch entry `b` and head `h` alone.
    pub fn head(&self, b: usize, h: usize) -> Self {
        let Shape { batch, heads, .. } = self.shape;
        let slice = [b * heads + h];
        let (of_head, of_entry) = (|x: &[f64]| rows(x, 1, batch * heads, &slice), |x: &[bool]| rows(x, 1, batch, &[b]));
        Self {
            mechanism: self.mechanism.clone(),
            shape: Shape { batch: 1, heads: 1, ..self.shape },
            q: of_head(&self.q),
            k: self.k.as_deref().map(of_head),
            v: of_head(&self.v),
            codebook: self
                .codebook
                .as_ref()
                .map(|book| book[h * book.len() / heads..(h + 1) * book.len() / heads].to_vec()),
            clusters: self.clusters.as_ref().map(|plan| head_plan(plan, &self.shape, slice[0])),
            parameters: self.parameters.iter().map(|(&p, x)| (p, self.of_head(p, x, b, h))).collect(),
            landmark_indices: self.landmark_indices.clone(),
            dropout: self.dropout,
            key_mask: self.key_mask.as_deref().map(of_entry),
            query_mask: self.query_mask.as_deref().map(of_entry),
            dout: of_head(&self.dout),
        }
    }

    /// What batch entry `b` and head `h` have of a parameter: their part where there is one for each, else all.
    fn of_head(&self, parameter: Parameter, values: &[f32], b: usize, h: usize) -> Vec<f32> {
        let Shape { batch, heads, .. } = self.shape;
        let part = |parts: usize, part: usize| values.chunks(values.len() / parts).nth(part).unwrap().to_vec();
        match parameter {
            Parameter::LandmarkWeight | Parameter::LandmarkNormGamma | Parameter::LandmarkNormBeta => values.to_vec(),
            Parameter::GivenLandmarks => part(batch * heads, b * heads + h),
            _ => part(heads, h),
        }
    }

    /// Writes `junk` over every masked row of `q`, `k`, `v` and of `dout`.
    pub fn fill_masked(&mut self, junk: &[f64]) {
        let Shape { batch, heads, .. } = self.shape;
        let (query, key) = (self.query_mask.clone(), self.key_mask.clone());
        // A tied token holds both roles: it is gone only where both are masked.
        let both = |a: &Option<Vec<bool>>, b: &Option<Vec<bool>>| {
            Some(a.as_ref()?.iter().zip(b.as_ref()?).map(|(a, b)| *a || *b).collect::<Vec<_>>())
        };
        let of_q = if self.k.is_none() { both(&query, &key) } else { query.clone() };
        let dout = (!self.is_pooled()).then_some(&mut self.dout);
        let tensors = [(Some(&mut self.q), of_q), (self.k.as_mut(), key.clone()), (Some(&mut self.v), key)];
        for (x, keep) in tensors.into_iter().chain([(dout, query)]) {
            let (Some(x), Some(keep)) = (x, keep) else { continue };
            let (seq, cols) = (keep.len() / batch, x.len() / (keep.len() * heads));
            for (n, row) in x.chunks_mut(cols).enumerate() {
                let (slice, token) = (n / seq, n % seq);
                if !keep[slice / heads * seq + token] {
                    row.iter_mut().zip(junk.iter().cycle().skip(n)).for_each(|(x, junk)| *x = *junk);
                }
            }
        }
    }
}

/// The plan of a problem that has the tokens `queries` and `keys` only, in that order.
fn select_plan(plan: &ClusterPlan, shape: &Shape, queries: &[usize], keys: &[usize]) -> ClusterPlan {
    let all = plan.to_tensors();
    let place = |picks: &[usize], token: i64| picks.iter().position(|&pick| pick as i64 == token).map(|n| n as i64);
    let mut tensors = PlanTensors {
        label_q: rows(&all.label_q, shape.slices(), shape.seq_q, queries),
        label_k: rows(&all.label_k, shape.slices(), shape.seq_kv, keys),
        ..PlanTensors::default()
    };
    for (&[slice, query, key], &weight) in all.edges.iter().zip(&all.edge_log_weight) {
        if let (Some(query), Some(key)) = (place(queries, query), place(keys, key)) {
            tensors.edges.push([slice, query, key]);
            tensors.edge_log_weight.push(weight);
        }
    }
    // Clusters whose tokens are gone have neither numbers nor blocks.
    let left = |labels: &[i64]| labels.iter().copied().filter(|&label| label >= 0).collect::<BTreeSet<_>>();
    let of_slices = |labels: &[i64], seq: usize| labels.chunks(seq).map(left).collect::<Vec<_>>();
    let rank = |left: &BTreeSet<i64>, label: i64| left.range(..label).count() as i64;
    let (left_q, left_k) = (of_slices(&tensors.label_q, queries.len()), of_slices(&tensors.label_k, keys.len()));
    for (labels, left, seq) in
        [(&mut tensors.label_q, &left_q, queries.len()), (&mut tensors.label_k, &left_k, keys.len())]
    {
        let labels =
            labels.chunks_mut(seq).zip(left).flat_map(|(labels, left)| labels.iter_mut().map(move |l| (l, left)));
        labels.filter(|(label, _)| **label >= 0).for_each(|(label, left)| *label = rank(left, *label));
    }
    for &[slice, a, c] in &all.exact_blocks {
        let (left_q, left_k) = (&left_q[slice as usize], &left_k[slice as usize]);
        if left_q.contains(&a) && left_k.contains(&c) {
            tensors.exact_blocks.push([slice, rank(left_q, a), rank(left_k, c)]);
        }
    }
    let shape = Shape { seq_q: queries.len(), seq_kv: keys.len(), ..*shape };
    ClusterPlan::from_tensors(&tensors, &shape).unwrap()
}

/// The plan of one (batch, head) alone.
fn head_plan(plan: &ClusterPlan, shape: &Shape, slice: usize) -> ClusterPlan {
    let all = plan.to_tensors();
    let blocks = |blocks: &[[i64; 3]]| {
        blocks.iter().filter(|block| block[0] == slice as i64).map(|&[_, a, c]| [0, a, c]).collect::<Vec<_>>()
    };
    let weights = all.edges.iter().zip(&all.edge_log_weight).filter(|(edge, _)| edge[0] == slice as i64);
    let tensors = PlanTensors {
        label_q: all.label_q[slice * shape.seq_q..][..shape.seq_q].to_vec(),
        label_k: all.label_k[slice * shape.seq_kv..][..shape.seq_kv].to_vec(),
        exact_blocks: blocks(&all.exact_blocks),
        edges: blocks(&all.edges),
        edge_log_weight: weights.map(|(_, &weight)| weight).collect(),
    };
    ClusterPlan::from_tensors(&tensors, &Shape { batch: 1, heads: 1, ..*shape }).unwrap()
}

/// The rows `picks` of each of the `slices` blocks of `seq` rows of `x`.
fn rows<T: Copy>(x: &[T], slices: usize, seq: usize, picks: &[usize]) -> Vec<T> {
    let cols = x.len() / (slices * seq);
    let row = |slice: usize, pick: usize| x[(slice * seq + pick) * cols..][..cols].iter().copied();
    (0..slices).flat_map(|slice| picks.iter().flat_map(move |&pick| row(slice, pick))).collect()
}
