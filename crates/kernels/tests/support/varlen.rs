//! Calls over sequences that lie end to end, by one call and one by one.

use std::collections::BTreeMap;

use resolvent_kernels::{
    ClusterPlan, Dropout, Element, ExtraGradients, Extras, Gradients, Heads, Inputs, Mask, Mechanism, Operator,
    Parameter, Result, Scratch, Sequences, Shape, Strategy, Strided, StridedGradients, VarlenInputs, VarlenOperator,
};

pub const HEADS: Heads = Heads { heads: 4, kv_heads: 4, head_dim: 5, value_dim: 3 };
pub const LENGTHS: [usize; 6] = [7, 1, 40, 7, 23, 2];

pub fn bounds(lengths: &[usize]) -> Vec<usize> {
    let ends = lengths.iter().scan(0, |end, len| {
        *end += len;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

pub fn numbers(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|n| ((n * 7 + seed * 13) as f32 * 0.61).sin()).collect()
}

/// A call over sequences, and how its tensors lie in memory.
pub struct Case {
    pub mechanism: Mechanism,
    pub heads: Heads,
    pub sequences: Sequences,
    pub causal: bool,
    pub tokens_first: bool,
    pub parameters: BTreeMap<Parameter, Vec<f32>>,
    pub dropout: Option<Dropout>,
    pub keep: Option<Vec<bool>>,
}

pub type Solution = BTreeMap<String, Vec<f32>>;

impl Case {
    pub fn new(json: &str) -> Self {
        Self {
            mechanism: Mechanism::from_json(json)
                .unwrap_or_else(|_| Mechanism::preset(json).unwrap())
                .with_max_tokens(80),
            heads: HEADS,
            sequences: Sequences::new(&bounds(&LENGTHS)).unwrap(),
            causal: false,
            tokens_first: false,
            parameters: BTreeMap::new(),
            dropout: None,
            keep: None,
        }
    }

    pub fn extras(&self) -> Extras<'_> {
        let extras = self.parameters.iter().fold(Extras::default(), |extras, (&p, values)| extras.with(p, values));
        self.dropout.iter().fold(extras, |extras, dropout| extras.with_dropout(*dropout))
    }

    /// q, k, v and dout as `[heads, tokens, channels]`.
    pub fn tensors<T: Element>(&self) -> [Vec<T>; 4] {
        let Heads { heads, kv_heads, head_dim, value_dim } = self.heads;
        let (tokens, keys) = (self.sequences.tokens(), self.sequences.keys());
        let lens = [heads * tokens * head_dim, kv_heads * keys * head_dim, kv_heads * keys * value_dim];
        let all = [lens[0], lens[1], lens[2], heads * tokens * value_dim];
        std::array::from_fn(|n| numbers(all[n], n + 1).into_iter().map(T::narrow).collect())
    }

    pub fn mask<'a>(&'a self) -> Mask<'a> {
        self.keep.as_deref().map_or(Mask::NONE, Mask::padding)
    }

    pub fn operator(&self, strategy: Strategy) -> Result<VarlenOperator> {
        VarlenOperator::new(&self.mechanism, self.heads, &self.sequences, self.causal, strategy)
    }

    pub fn wanted(&self) -> Vec<(Parameter, Vec<f32>)> {
        let shape = Shape { heads: self.heads.heads, ..Shape::square(1, 1, 7, self.heads.head_dim) };
        let len = |p: Parameter| self.mechanism.parameter_shape(p, &shape).iter().product();
        self.mechanism.parameters().iter().map(|&p| (p, vec![f32::NAN; len(p)])).collect()
    }

    /// Everything by one call.
    pub fn together<T: Element>(&self, strategy: Strategy, plans: Option<&[ClusterPlan]>) -> Result<Solution> {
        let op = self.operator(strategy)?;
        let Heads { heads, kv_heads, head_dim, value_dim } = self.heads;
        let (tokens, keys) = (self.sequences.tokens(), self.sequences.keys());
        let place = |x: &[T], [heads, tokens, channels]: [usize; 3]| {
            if self.tokens_first { transposed(x, [heads, tokens], channels) } else { x.to_vec() }
        };
        let [q, k, v, dout] = self.tensors::<T>();
        let sizes = [[heads, tokens, head_dim], [kv_heads, keys, head_dim], [kv_heads, keys, value_dim]];
        let of_out = [heads, tokens, value_dim];
        let [q, k, v] = [place(&q, sizes[0]), place(&k, sizes[1]), place(&v, sizes[2])];
        let dout = place(&dout, of_out);
        let (clusters, extras) = (plans, self.extras());
        let inputs = VarlenInputs {
            q: self.view(&q[..], sizes[0]),
            k: (!self.mechanism.tied).then(|| self.view(&k[..], sizes[1])),
            v: self.view(&v[..], sizes[2]),
            extras,
            clusters,
        };
        let fresh = |len: usize| vec![T::narrow(f32::NAN); len];
        let (mut out, mut stats) = (fresh(dout.len()), vec![f32::NAN; op.plan().stats]);
        let mut scratch = Scratch::default();
        scratch.take(op.plan().scratch_forward.max(op.plan().scratch_backward)).fill(f32::NAN);
        let held = scratch.len();
        let mask = self.mask();
        op.forward(&inputs, &mask, self.view(&mut out[..], of_out), &mut stats, &mut scratch)?;
        let [mut dq, mut dk, mut dv] = [fresh(q.len()), fresh(k.len()), fresh(v.len())];
        let mut wanted = self.wanted();
        let extras = wanted.iter_mut().fold(ExtraGradients::default(), |extras, (p, x)| extras.with(*p, x));
        let mut gradients = StridedGradients {
            dq: self.view(&mut dq[..], sizes[0]),
            dk: (!self.mechanism.tied).then(|| self.view(&mut dk[..], sizes[1])),
            dv: self.view(&mut dv[..], sizes[2]),
            extras,
        };
        let [o, g] = [&out, &dout].map(|x| self.view(&x[..], of_out));
        op.backward(&inputs, &mask, o, &stats, g, &mut gradients, &mut scratch)?;
        // Half types are widened in more.
        assert!(scratch.len() == held || T::NAME != f32::NAME, "the plan says how much memory it takes");
        let home = |x: &[T], [heads, tokens, channels]: [usize; 3]| -> Vec<f32> {
            let x = if self.tokens_first { transposed(x, [tokens, heads], channels) } else { x.to_vec() };
            x.iter().map(|x| x.widen()).collect()
        };
        let mut all = Solution::from([("out".into(), home(&out, of_out)), ("dq".into(), home(&dq, sizes[0]))]);
        all.insert("dv".into(), home(&dv, sizes[2]));
        if !self.mechanism.tied {
            all.insert("dk".into(), home(&dk, sizes[1]));
        }
        all.extend(op.lse(&stats).map(|lse| ("lse".into(), lse)));
        all.extend(wanted.into_iter().map(|(p, x)| (p.gradient_name().to_owned(), x)));
        Ok(all)
    }

    /// The same by one call per sequence.
    pub fn one_by_one<T: Element>(&self, strategy: Strategy) -> Result<Solution> {
        let Heads { heads, kv_heads, head_dim, value_dim } = self.heads;
        let [q, k, v, dout] = self.tensors::<T>();
        let mut all = Solution::new();
        let mut sums: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for n in 0..self.sequences.len() {
            let (queries, keys) = (self.sequences.range(n), self.sequences.key_range(n));
            let (seq_q, seq_kv) = (queries.len(), keys.len());
            let shape = Shape { batch: 1, heads, seq_q, seq_kv, head_dim, value_dim };
            let op = Operator::new(&self.mechanism, shape, self.causal, strategy)?.with_kv_heads(kv_heads)?;
            let [q, dout] = [(&q, head_dim), (&dout, value_dim)].map(|(x, c)| part(x, heads, c, &queries));
            let [k, v] = [(&k, head_dim), (&v, value_dim)].map(|(x, c)| part(x, kv_heads, c, &keys));
            let mut extras = self.extras();
            extras.dropout = extras.dropout.map(|dropout| dropout.reseeded(n as u64));
            let inputs = Inputs { q: &q, k: (!self.mechanism.tied).then_some(&k[..]), v: &v, extras };
            let mask = self.keep.as_deref().map_or(Mask::NONE, |keep| Mask::padding(&keep[queries.clone()]));
            let (mut out, mut stats) = (vec![T::default(); dout.len()], vec![0.0; op.plan().stats]);
            let mut scratch = Scratch::default();
            op.forward(&inputs, &mask, &mut out, &mut stats, &mut scratch)?;
            let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|x| vec![T::default(); x.len()]);
            let mut wanted = self.wanted();
            let extras = wanted.iter_mut().fold(ExtraGradients::default(), |extras, (p, x)| extras.with(*p, x));
            let into_dk = (!self.mechanism.tied).then_some(&mut dk[..]);
            let mut gradients = Gradients { dq: &mut dq, dk: into_dk, dv: &mut dv, extras };
            op.backward(&inputs, &mask, &out, &stats, &dout, &mut gradients, &mut scratch)?;
            let mut put = |name: &str, x: &[f32], heads: usize, range: &std::ops::Range<usize>, tokens: usize| {
                let c = x.len() / heads / range.len();
                let whole = all.entry(name.into()).or_insert_with(|| vec![f32::NAN; heads * tokens * c]);
                for (head, x) in x.chunks_exact(range.len() * c).enumerate() {
                    whole[(head * tokens + range.start) * c..][..x.len()].copy_from_slice(x);
                }
            };
            let wide = |x: &[T]| x.iter().map(|x| x.widen()).collect::<Vec<_>>();
            let (tokens, of_keys) = (self.sequences.tokens(), self.sequences.keys());
            put("out", &wide(&out), heads, &queries, tokens);
            put("dq", &wide(&dq), heads, &queries, tokens);
            put("dv", &wide(&dv), kv_heads, &keys, of_keys);
            if !self.mechanism.tied {
                put("dk", &wide(&dk), kv_heads, &keys, of_keys);
            }
            if let Some(lse) = op.lse(&stats) {
                put("lse", lse, heads, &queries, tokens);
            }
            for (p, x) in wanted {
                let sum = sums.entry(p.gradient_name()).or_insert_with(|| vec![0.0; x.len()]);
                sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += f64::from(x));
            }
        }
        all.extend(sums.into_iter().map(|(name, x)| (name.to_owned(), x.into_iter().map(|x| x as f32).collect())));
        Ok(all)
    }

    pub fn view<D>(&self, data: D, [heads, tokens, channels]: [usize; 3]) -> Strided<D> {
        match self.tokens_first {
            true => Strided::tokens_first(data, [heads, tokens, channels]),
            false => Strided::heads_first(data, [heads, tokens, channels]),
        }
    }
}

/// `[a, b, channels]` as `[b, a, channels]`.
pub fn transposed<T: Copy>(x: &[T], [a, b]: [usize; 2], channels: usize) -> Vec<T> {
    let rows = (0..b).flat_map(|j| (0..a).map(move |i| i * b + j));
    rows.flat_map(|row| x[row * channels..][..channels].iter().copied()).collect()
}

/// The rows `range` of every head.
pub fn part<T: Copy>(x: &[T], heads: usize, channels: usize, range: &std::ops::Range<usize>) -> Vec<T> {
    let heads = x.chunks_exact(x.len() / heads);
    heads.flat_map(|head| head[range.start * channels..range.end * channels].iter().copied()).collect()
}

#[track_caller]
pub fn assert_same(what: &str, got: &Solution, expected: &Solution) {
    assert_eq!(got.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for (name, expected) in expected {
        assert!(bits(&got[name]) == bits(expected), "{what}, {name}");
    }
}
