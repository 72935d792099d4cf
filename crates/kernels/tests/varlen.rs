//! Sequences of any lengths in one call: each as if it were alone.

mod support;
#[path = "support/threads.rs"]
mod threads;

use std::collections::BTreeMap;

use half::bf16;
use resolvent_kernels::{
    ClusterPlan, Dropout, Element, Error, ExtraGradients, Extras, Gradients, Heads, Inputs, Mask, Mechanism, Operator,
    Parameter, Result, Scratch, Sequences, Shape, Strategy, Strided, StridedGradients, Tol, VarlenInputs,
    VarlenOperator, reference,
};
use support::assert_close;
use threads::on_threads;

const HEADS: Heads = Heads { heads: 4, kv_heads: 4, head_dim: 5, value_dim: 3 };
const LENGTHS: [usize; 6] = [7, 1, 40, 7, 23, 2];

fn bounds(lengths: &[usize]) -> Vec<usize> {
    let ends = lengths.iter().scan(0, |end, len| {
        *end += len;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

fn numbers(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|n| ((n * 7 + seed * 13) as f32 * 0.61).sin()).collect()
}

/// A call over sequences, and how its tensors lie in memory.
struct Case {
    mechanism: Mechanism,
    heads: Heads,
    sequences: Sequences,
    causal: bool,
    tokens_first: bool,
    parameters: BTreeMap<Parameter, Vec<f32>>,
    dropout: Option<Dropout>,
    keep: Option<Vec<bool>>,
}

type Solution = BTreeMap<String, Vec<f32>>;

impl Case {
    fn new(json: &str) -> Self {
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

    fn extras(&self) -> Extras<'_> {
        let extras = self.parameters.iter().fold(Extras::default(), |extras, (&p, values)| extras.with(p, values));
        self.dropout.iter().fold(extras, |extras, dropout| extras.with_dropout(*dropout))
    }

    /// q, k, v and dout as `[heads, tokens, channels]`.
    fn tensors<T: Element>(&self) -> [Vec<T>; 4] {
        let Heads { heads, kv_heads, head_dim, value_dim } = self.heads;
        let (tokens, keys) = (self.sequences.tokens(), self.sequences.keys());
        let lens = [heads * tokens * head_dim, kv_heads * keys * head_dim, kv_heads * keys * value_dim];
        let all = [lens[0], lens[1], lens[2], heads * tokens * value_dim];
        std::array::from_fn(|n| numbers(all[n], n + 1).into_iter().map(T::narrow).collect())
    }

    fn mask<'a>(&'a self) -> Mask<'a> {
        self.keep.as_deref().map_or(Mask::NONE, Mask::padding)
    }

    fn operator(&self, strategy: Strategy) -> Result<VarlenOperator> {
        VarlenOperator::new(&self.mechanism, self.heads, &self.sequences, self.causal, strategy)
    }

    fn wanted(&self) -> Vec<(Parameter, Vec<f32>)> {
        let shape = Shape { heads: self.heads.heads, ..Shape::square(1, 1, 7, self.heads.head_dim) };
        let len = |p: Parameter| self.mechanism.parameter_shape(p, &shape).iter().product();
        self.mechanism.parameters().iter().map(|&p| (p, vec![f32::NAN; len(p)])).collect()
    }

    /// Everything by one call.
    fn together<T: Element>(&self, strategy: Strategy, plans: Option<&[ClusterPlan]>) -> Result<Solution> {
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
            k: (!self.mechanism.tied()).then(|| self.view(&k[..], sizes[1])),
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
            dk: (!self.mechanism.tied()).then(|| self.view(&mut dk[..], sizes[1])),
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
        if !self.mechanism.tied() {
            all.insert("dk".into(), home(&dk, sizes[1]));
        }
        all.extend(op.lse(&stats).map(|lse| ("lse".into(), lse)));
        all.extend(wanted.into_iter().map(|(p, x)| (p.gradient_name().to_owned(), x)));
        Ok(all)
    }

    /// The same by one call per sequence.
    fn one_by_one<T: Element>(&self, strategy: Strategy) -> Result<Solution> {
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
            let inputs = Inputs { q: &q, k: (!self.mechanism.tied()).then_some(&k[..]), v: &v, extras };
            let mask = self.keep.as_deref().map_or(Mask::NONE, |keep| Mask::padding(&keep[queries.clone()]));
            let (mut out, mut stats) = (vec![T::default(); dout.len()], vec![0.0; op.plan().stats]);
            let mut scratch = Scratch::default();
            op.forward(&inputs, &mask, &mut out, &mut stats, &mut scratch)?;
            let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|x| vec![T::default(); x.len()]);
            let mut wanted = self.wanted();
            let extras = wanted.iter_mut().fold(ExtraGradients::default(), |extras, (p, x)| extras.with(*p, x));
            let into_dk = (!self.mechanism.tied()).then_some(&mut dk[..]);
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
            if !self.mechanism.tied() {
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

    fn view<D>(&self, data: D, [heads, tokens, channels]: [usize; 3]) -> Strided<D> {
        match self.tokens_first {
            true => Strided::tokens_first(data, [heads, tokens, channels]),
            false => Strided::heads_first(data, [heads, tokens, channels]),
        }
    }
}

/// `[a, b, channels]` as `[b, a, channels]`.
fn transposed<T: Copy>(x: &[T], [a, b]: [usize; 2], channels: usize) -> Vec<T> {
    let rows = (0..b).flat_map(|j| (0..a).map(move |i| i * b + j));
    rows.flat_map(|row| x[row * channels..][..channels].iter().copied()).collect()
}

/// The rows `range` of every head.
fn part<T: Copy>(x: &[T], heads: usize, channels: usize, range: &std::ops::Range<usize>) -> Vec<T> {
    let heads = x.chunks_exact(x.len() / heads);
    heads.flat_map(|head| head[range.start * channels..range.end * channels].iter().copied()).collect()
}

#[track_caller]
fn assert_same(what: &str, got: &Solution, expected: &Solution) {
    assert_eq!(got.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for (name, expected) in expected {
        assert!(bits(&got[name]) == bits(expected), "{what}, {name}");
    }
}

/// Every preset that takes sequences this short, by its defaults.
fn presets() -> Vec<&'static str> {
    let all = Mechanism::IDS.iter().copied();
    all.filter(|id| Case::new(id).operator(Strategy::Auto).is_ok()).collect()
}

#[test]
fn every_sequence_is_a_call_of_its_own_bit_for_bit() {
    let presets = presets();
    for id in ["softmax", "infsa", "fna", "ssa", "routed", "performer", "laplacian-exact", "uniform", "infsa-resolvent"]
    {
        assert!(presets.contains(&id), "{id} of {presets:?}");
    }
    for (n, id) in presets.iter().enumerate() {
        let mut case = Case::new(id);
        case.tokens_first = n % 2 == 0;
        // Those of a single head lie in one piece: nothing is gathered.
        let alone = Heads { heads: 1, kv_heads: 1, ..HEADS };
        for (strategy, heads) in [(Strategy::Auto, HEADS), (Strategy::Auto, alone), (Strategy::Reference, HEADS)] {
            case.heads = heads;
            let expected = case.one_by_one::<f32>(strategy);
            let got = case.together::<f32>(strategy, None);
            match (got, expected) {
                (Ok(got), Ok(expected)) => assert_same(&format!("{id}, {strategy:?}"), &got, &expected),
                (Err(got), Err(expected)) => assert_eq!(*got.cause(), expected, "{id}"),
                (got, expected) => panic!("{id}: {got:?} beside {expected:?}"),
            }
        }
    }
}

#[test]
fn masks_causality_shared_heads_and_halves_are_those_of_each_sequence() {
    for id in ["softmax", "fna", "infsa", "routed", "linear", r#"{"mechanism": "softmax", "bias": {"kind": "alibi"}}"#]
    {
        for (kv_heads, causal) in [(4, true), (2, false), (1, true)] {
            let mut case = Case { causal, tokens_first: causal, ..Case::new(id) };
            case.heads.kv_heads = kv_heads;
            // The tokens of one sequence are all masked.
            case.keep = Some((0..80).map(|n| n % 5 != 2 && !(7..8).contains(&n)).collect());
            let what = format!("{id}, {kv_heads} heads of keys");
            let expected = case.one_by_one::<f32>(Strategy::Auto).unwrap();
            assert_same(&what, &case.together::<f32>(Strategy::Auto, None).unwrap(), &expected);
            if kv_heads == 4 {
                let expected = case.one_by_one::<bf16>(Strategy::Auto).unwrap();
                assert_same(&what, &case.together::<bf16>(Strategy::Auto, None).unwrap(), &expected);
            }
        }
    }
}

#[test]
fn queries_have_keys_of_other_lengths() {
    let keys = bounds(&[9, 3, 5, 8, 23, 40]);
    for id in ["softmax", "fna", "uniform", "ssa", "laplacian-exact"] {
        let mut case = Case::new(id);
        case.sequences = Sequences::cross(&bounds(&LENGTHS), &keys).unwrap();
        if case.operator(Strategy::Auto).is_err() {
            continue;
        }
        let expected = case.one_by_one::<f32>(Strategy::Auto).unwrap();
        assert_same(id, &case.together::<f32>(Strategy::Auto, None).unwrap(), &expected);
    }
}

#[test]
fn parameters_and_dropout_reach_every_sequence() {
    let mut case = Case::new("infsa");
    case.parameters.insert(Parameter::Gamma, vec![0.3, 0.5, 0.7, 0.9]);
    assert_same(
        "gamma",
        &case.together::<f32>(Strategy::Auto, None).unwrap(),
        &case.one_by_one::<f32>(Strategy::Auto).unwrap(),
    );
    let mut case = Case::new("softmax");
    case.sequences = Sequences::new(&[0, 30, 60]).unwrap();
    case.dropout = Some(Dropout::weights(0.5, 3).unwrap());
    let got = case.together::<f32>(Strategy::Auto, None).unwrap();
    assert_same("dropout", &got, &case.one_by_one::<f32>(Strategy::Auto).unwrap());
}

#[test]
fn sequences_are_those_of_the_reference() {
    // Of a single token's weight, which is one, gradients are what two equal numbers leave.
    let sequences = Sequences::new(&bounds(&[7, 40, 23])).unwrap();
    let case = Case { causal: true, sequences, ..Case::new("softmax") };
    let got = case.together::<f32>(Strategy::Auto, None).unwrap();
    let [q, k, v, dout] = case.tensors::<f32>();
    for n in 0..case.sequences.len() {
        let range = case.sequences.range(n);
        let of = |x: &[f32], c| part(x, 4, c, &range).into_iter().map(f64::from).collect::<Vec<_>>();
        let [q, k, v, dout] = [of(&q, 5), of(&k, 5), of(&v, 3), of(&dout, 3)];
        let shape = Shape { value_dim: 3, ..Shape::square(1, 4, range.len(), 5) };
        let inputs = Inputs { q: &q, k: Some(&k), v: &v, extras: Extras::default() };
        let mask = Mask::NONE.with_causal();
        let forward = reference::forward(&case.mechanism, &shape, &inputs, &mask).unwrap();
        let backward = reference::backward(&case.mechanism, &shape, &inputs, &mask, &dout).unwrap();
        let tol = Tol::f32(&case.mechanism);
        for (name, channels, expected) in
            [("out", 3, forward.out), ("dq", 5, backward.dq), ("dk", 5, backward.dk.unwrap()), ("dv", 3, backward.dv)]
        {
            assert_close(name, &of(&got[name], channels), &expected, 4, tol.backward, tol.noise);
        }
    }
}

#[test]
fn threads_and_how_sequences_are_shared_out_change_no_bit() {
    // Long enough to be computed alone, beside short ones.
    let mut case = Case::new("softmax");
    case.heads = Heads::new(2, 32);
    case.sequences = Sequences::new(&bounds(&[3, 1100, 70, 300, 9])).unwrap();
    let of_threads = |threads: usize| on_threads(threads, || case.together::<f32>(Strategy::Auto, None).unwrap());
    let one = of_threads(1);
    assert_same("three threads", &of_threads(3), &one);
    assert_same("one by one", &case.one_by_one::<f32>(Strategy::Auto).unwrap(), &one);
}

#[test]
fn plans_are_made_once() {
    let case = Case::new("ssa");
    let op = case.operator(Strategy::Auto).unwrap();
    let [q, k, v, _] = case.tensors::<f32>();
    let inputs = |clusters| VarlenInputs {
        q: Strided::heads_first(&q[..], [4, 80, 5]),
        k: Some(Strided::heads_first(&k[..], [4, 80, 5])),
        v: Strided::heads_first(&v[..], [4, 80, 3]),
        extras: Extras::default(),
        clusters,
    };
    let plans = op.clusters(&inputs(None), &Mask::NONE, &mut Scratch::default()).unwrap();
    assert_eq!(plans.len(), 6);
    let got = case.together::<f32>(Strategy::Auto, Some(&plans)).unwrap();
    assert_same("plans", &got, &case.together::<f32>(Strategy::Auto, None).unwrap());
    let others: Vec<_> = plans.iter().rev().cloned().collect();
    let error = case.together::<f32>(Strategy::Auto, Some(&others)).unwrap_err();
    assert!(matches!(error, Error::Sequence { sequence: 0, .. }), "{error}");
    let error = case.together::<f32>(Strategy::Auto, Some(&plans[1..])).unwrap_err();
    assert!(matches!(error, Error::Length { tensor: "clusters", got: 5, expected: 6, .. }), "{error}");
    let softmax = Case::new("softmax").operator(Strategy::Auto).unwrap();
    assert!(matches!(
        softmax.clusters(&inputs(None), &Mask::NONE, &mut Scratch::default()),
        Err(Error::Unsupported { .. })
    ));
}

/// Queries, keys and values as views of what one layer writes.
#[test]
fn a_packed_projection_is_read_in_place() {
    let heads = Heads::new(2, 4);
    let sequences = Sequences::new(&bounds(&[5, 9])).unwrap();
    let op = VarlenOperator::new(&Mechanism::preset("softmax").unwrap(), heads, &sequences, false, Strategy::Auto);
    let op = op.unwrap();
    let packed = numbers(14 * 3 * 8, 4);
    let run = |[q, k, v]: [Strided<&[f32]>; 3]| {
        let inputs = VarlenInputs { q, k: Some(k), v, extras: Extras::default(), clusters: None };
        let (mut out, mut stats) = (vec![f32::NAN; 14 * 8], vec![0.0; op.plan().stats]);
        let into = Strided::tokens_first(&mut out[..], [2, 14, 4]);
        op.forward(&inputs, &Mask::NONE, into, &mut stats, &mut Scratch::default()).unwrap();
        out
    };
    let views = [0, 8, 16].map(|at| Strided { data: &packed[at..], batch_stride: 0, head_stride: 4, token_stride: 24 });
    let copies: [Vec<f32>; 3] =
        [0, 8, 16].map(|at| packed.chunks(24).flat_map(|row| row[at..at + 8].to_vec()).collect());
    assert_eq!(run(views), run([0, 1, 2].map(|n| Strided::tokens_first(&copies[n][..], [2, 14, 4]))));
}

#[test]
fn mistakes_are_named() {
    for bounds in [&[][..], &[0], &[1, 3], &[0, 3, 3], &[0, 5, 4]] {
        assert!(matches!(Sequences::new(bounds), Err(Error::OutOfRange { field: "cu_seqlens", .. })), "{bounds:?}");
    }
    assert!(matches!(Sequences::cross(&[0, 3], &[0, 1, 2]), Err(Error::OutOfRange { field: "keys", .. })));
    let refused = |case: &Case| case.together::<f32>(Strategy::Auto, None).unwrap_err();

    let error = refused(&Case::new(r#"{"mechanism": "linear-infsa", "broadcast": false}"#));
    assert!(error.to_string().contains("broadcast"), "{error}");
    let error = refused(&Case::new(r#"{"mechanism": "softmax", "bias": {"kind": "grid", "height": 1, "width": 7}}"#));
    assert!(matches!(error, Error::Sequence { sequence: 1, .. }), "{error}");
    let mut case = Case::new(r#"{"mechanism": "softmax", "bias": {"kind": "tensor"}}"#);
    case.parameters.insert(Parameter::Bias, vec![0.0; 4 * 49]);
    assert!(matches!(refused(&case), Error::Unsupported { .. }));
    let mut case = Case::new("softmax");
    case.parameters.insert(Parameter::Gamma, vec![0.5; 4]);
    assert!(matches!(refused(&case), Error::Tensor { tensor: "gamma", .. }));
    case = Case::new("softmax");
    case.heads.kv_heads = 3;
    assert!(matches!(refused(&case), Error::OutOfRange { field: "kv_heads", .. }));
    case = Case::new("softmax");
    case.keep = Some(vec![true; 79]);
    assert!(matches!(refused(&case), Error::Length { tensor: "key_mask", got: 79, expected: 80, .. }));
}

#[test]
fn strides_that_do_not_fit_are_refused() {
    let sequences = Sequences::new(&[0, 3, 8]).unwrap();
    let op = VarlenOperator::new(
        &Mechanism::preset("softmax").unwrap(),
        Heads::new(2, 4),
        &sequences,
        false,
        Strategy::Auto,
    )
    .unwrap();
    let tokens = numbers(64, 1);
    let run = |x: Strided<&[f32]>, [head_stride, token_stride]: [usize; 2]| {
        let inputs = VarlenInputs { q: x, k: Some(x), v: x, extras: Extras::default(), clusters: None };
        let (mut out, mut stats) = (vec![0.0; 64], vec![0.0; op.plan().stats]);
        let into = Strided { data: &mut out[..], batch_stride: 0, head_stride, token_stride };
        op.forward(&inputs, &Mask::NONE, into, &mut stats, &mut Scratch::default())
    };
    let x = Strided::tokens_first(&tokens[..], [2, 8, 4]);
    assert_eq!(run(x, [4, 8]), Ok(()));
    assert_eq!(run(x, [32, 4]), Ok(()));
    // Reading a row for several heads, or several tokens, is no fault.
    assert_eq!(run(Strided { data: &tokens[..], batch_stride: 0, head_stride: 0, token_stride: 4 }, [4, 8]), Ok(()));
    for data in [&tokens[..63], &[]] {
        let error = run(Strided { data, ..x }, [4, 8]).unwrap_err();
        assert!(matches!(error, Error::Length { tensor: "q", expected: 64, .. }), "{error}");
    }
    let far = run(Strided { token_stride: usize::MAX / 2, ..x }, [4, 8]).unwrap_err();
    assert!(matches!(far, Error::Length { tensor: "q", .. }), "{far}");
    for strides in [[0, 4], [4, 4], [2, 8], [8, 3], [28, 4]] {
        let error = run(x, strides).unwrap_err();
        assert!(matches!(error, Error::Tensor { tensor: "out", .. }), "{strides:?}: {error}");
    }
    assert!(matches!(run(x, [4, 9]), Err(Error::Length { tensor: "out", .. })));
}

#[test]
fn the_first_sequence_at_fault_is_named() {
    let mut case = Case::new("softmax");
    case.heads = Heads::new(1, 2);
    case.sequences = Sequences::new(&[0, 2, 4, 6, 8]).unwrap();
    let op = case.operator(Strategy::Auto).unwrap();
    let mut x = [1.0_f32; 16];
    (x[9], x[13]) = (f32::NAN, f32::NAN);
    let view = Strided::heads_first(&x[..], [1, 8, 2]);
    let inputs = VarlenInputs { q: view, k: Some(view), v: view, extras: Extras::default(), clusters: None };
    let (mut out, mut stats) = (vec![0.0; 16], vec![0.0; op.plan().stats]);
    let into = Strided::heads_first(&mut out[..], [1, 8, 2]);
    let error = op.forward(&inputs, &Mask::NONE, into, &mut stats, &mut Scratch::default());
    // Tokens that are no numbers make rows that are none; nothing of another sequence sees them.
    match error {
        Err(error) => assert!(matches!(error, Error::Sequence { sequence: 2, .. }), "{error}"),
        Ok(()) => assert!(out[..8].iter().all(|x| *x == 1.0)),
    }
}
