//! Tensors that lie anywhere in memory give the bits of those in one piece, and nothing is written between their rows.

use crate::{support, threads};

use half::bf16;
use proptest::{prelude::*, sample::select, test_runner::RngSeed};
use resolvent_kernels::{
    Element, Error, ExtraGradients, Extras, Gradients, Inputs, Mask, Mechanism, Operator, Parameter, Scratch, Shape,
    Strategy as Path, Strided, StridedGradients, StridedInputs,
};
use support::{
    problem::Problem,
    random::{any_masked_problem, problem},
};
use threads::on_threads;

/// How a tensor lies.
#[derive(Debug, Clone, Copy)]
enum Layout {
    /// Tokens before heads, as a transposed view of what was projected.
    TokensFirst,
    /// The same with numbers between the rows, as one of several projections.
    Padded,
    /// Some tokens of a longer cache.
    Cache,
}

/// `[batch, heads, tokens, channels]`, laid out.
#[derive(Debug, Clone, Copy)]
struct Laid {
    sizes: [usize; 4],
    strides: [usize; 3],
}

impl Laid {
    fn new(layout: Layout, sizes: [usize; 4]) -> Self {
        let [_, heads, tokens, channels] = sizes;
        let strides = match layout {
            Layout::TokensFirst => [tokens * heads * channels, channels, heads * channels],
            Layout::Padded => [tokens * (heads * (channels + 1) + 7), channels + 1, heads * (channels + 1) + 7],
            Layout::Cache => [heads * (tokens + 3) * channels, (tokens + 3) * channels, channels],
        };
        Self { sizes, strides }
    }

    fn len(&self) -> usize {
        self.sizes[0] * self.strides[0] + 5
    }

    fn rows(self) -> impl Iterator<Item = usize> {
        let ([batch, heads, tokens, _], [b, h, n]) = (self.sizes, self.strides);
        (0..batch * heads * tokens)
            .map(move |row| row / (heads * tokens) * b + row / tokens % heads * h + row % tokens * n)
    }

    /// `x` in its place, NaN around it.
    fn place<T: Element>(self, x: &[T]) -> Vec<T> {
        let mut placed = vec![T::narrow(f32::NAN); self.len()];
        for (at, row) in self.rows().zip(x.chunks_exact(self.sizes[3])) {
            placed[at..at + row.len()].copy_from_slice(row);
        }
        placed
    }

    fn view<D>(self, data: D) -> Strided<D> {
        let [batch_stride, head_stride, token_stride] = self.strides;
        Strided { data, batch_stride, head_stride, token_stride }
    }

    /// What lies in the places of the rows; all others hold `7` as before.
    fn taken<T: Element>(self, mut placed: Vec<T>) -> Vec<f32> {
        let channels = self.sizes[3];
        let mut all = Vec::new();
        for at in self.rows() {
            all.extend(placed[at..at + channels].iter().map(|x| x.widen()));
            placed[at..at + channels].fill(T::narrow(7.0));
        }
        assert!(placed.iter().all(|x| *x == T::narrow(7.0)), "written between the rows");
        all
    }
}

/// A problem on keys and values of some heads.
struct Case<'p> {
    problem: &'p Problem,
    kv_heads: usize,
    path: Path,
}

type Bits = Vec<(&'static str, Vec<u32>)>;

fn bits(all: Vec<(&'static str, Vec<f32>)>) -> Bits {
    all.into_iter().map(|(name, x)| (name, x.into_iter().map(f32::to_bits).collect())).collect()
}

impl Case<'_> {
    fn operator(&self) -> Result<Operator, Error> {
        Operator::new(&self.problem.mechanism, self.problem.shape, false, self.path)?.with_kv_heads(self.kv_heads)
    }

    /// q, k, v and dout with their sizes.
    fn tensors<T: Element>(&self, out_seq: usize) -> [(Vec<T>, [usize; 4]); 4] {
        let (s, p) = (self.problem.shape, self.problem);
        let of = |x: &[f64], heads: usize, seq: usize, channels: usize| {
            let whole = x.chunks(x.len() / s.batch).flat_map(|of_batch| &of_batch[..heads * seq * channels]);
            (whole.map(|x| T::narrow(*x as f32)).collect(), [s.batch, heads, seq, channels])
        };
        let k = p.k.as_ref().unwrap_or(&p.q);
        [
            of(&p.q, s.heads, s.seq_q, s.head_dim),
            of(k, self.kv_heads, s.seq_kv, s.head_dim),
            of(&p.v, self.kv_heads, s.seq_kv, s.value_dim),
            of(&p.dout, s.heads, out_seq, s.value_dim),
        ]
    }

    /// Where gradients of all parameters go.
    fn wanted(&self) -> Vec<(Parameter, Vec<f32>)> {
        let p = self.problem;
        let unwritten = |&of| (of, vec![f32::NAN; p.mechanism.parameter_shape(of, &p.shape).iter().product()]);
        p.mechanism.parameters().iter().map(unwritten).collect()
    }

    fn in_one_piece<T: Element>(&self) -> Result<Bits, Error> {
        let (op, mask) = (self.operator()?, self.problem.mask());
        let [q, k, v, dout] = self.tensors::<T>(op.out_seq()).map(|(x, _)| x);
        let tied = op.mechanism().tied;
        let inputs = Inputs { q: &q, k: (!tied).then_some(&k), v: &v, extras: self.problem.extras() };
        let (mut out, mut stats) = (vec![T::default(); op.out_len()], vec![0.0; op.plan().stats]);
        let mut scratch = Scratch::default();
        op.forward(&inputs, &mask, &mut out, &mut stats, &mut scratch)?;
        let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|x| vec![T::default(); x.len()]);
        let mut wanted = self.wanted();
        let extras = wanted.iter_mut().fold(ExtraGradients::default(), |extras, (p, x)| extras.with(*p, x));
        let mut gradients = Gradients { dq: &mut dq, dk: (!tied).then_some(&mut dk), dv: &mut dv, extras };
        op.backward(&inputs, &mask, &out, &stats, &dout, &mut gradients, &mut scratch)?;
        let wide = |x: &[T]| x.iter().map(|x| x.widen()).collect::<Vec<_>>();
        let mut all = vec![("out", wide(&out)), ("stats", stats), ("dq", wide(&dq)), ("dv", wide(&dv))];
        all.extend((!tied).then(|| ("dk", wide(&dk))));
        all.extend(wanted.into_iter().map(|(p, x)| (p.gradient_name(), x)));
        Ok(bits(all))
    }

    fn laid_out<T: Element>(&self, layout: Layout) -> Result<Bits, Error> {
        let (op, mask) = (self.operator()?, self.problem.mask());
        let tensors = self.tensors::<T>(op.out_seq());
        let [lq, lk, lv, lo] = tensors.each_ref().map(|(_, sizes)| Laid::new(layout, *sizes));
        let [q, k, v, dout] = [lq, lk, lv, lo]
            .iter()
            .zip(&tensors)
            .map(|(laid, (x, _))| laid.place(x))
            .collect::<Vec<_>>()
            .try_into()
            .expect("four");
        let tied = op.mechanism().tied;
        let (q, k, v) = (lq.view(&q[..]), (!tied).then_some(lk.view(&k[..])), lv.view(&v[..]));
        let inputs = StridedInputs { q, k, v, extras: self.problem.extras() };
        let [mut out, mut dq, mut dk, mut dv] = [lo, lq, lk, lv].map(|laid| vec![T::narrow(7.0); laid.len()]);
        let (mut stats, mut scratch) = (vec![0.0; op.plan().stats], Scratch::default());
        op.forward_strided(&inputs, &mask, lo.view(&mut out[..]), &mut stats, &mut scratch)?;
        let mut wanted = self.wanted();
        let extras = wanted.iter_mut().fold(ExtraGradients::default(), |extras, (p, x)| extras.with(*p, x));
        let dk_into = (!tied).then(|| lk.view(&mut dk[..]));
        let mut gradients =
            StridedGradients { dq: lq.view(&mut dq[..]), dk: dk_into, dv: lv.view(&mut dv[..]), extras };
        let (out_view, dout) = (lo.view(&out[..]), lo.view(&dout[..]));
        op.backward_strided(&inputs, &mask, out_view, &stats, dout, &mut gradients, &mut scratch)?;
        let mut all = vec![("out", lo.taken(out)), ("stats", stats), ("dq", lq.taken(dq)), ("dv", lv.taken(dv))];
        all.extend((!tied).then(|| ("dk", lk.taken(dk))));
        all.extend(wanted.into_iter().map(|(p, x)| (p.gradient_name(), x)));
        Ok(bits(all))
    }
}

const LAYOUTS: [Layout; 3] = [Layout::TokensFirst, Layout::Padded, Layout::Cache];

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, rng_seed: RngSeed::Fixed(7), failure_persistence: None, ..ProptestConfig::default() })]

    /// Every mechanism with every option, masked.
    #[test]
    fn strides_change_no_bit(problem in any_masked_problem(), layout in select(&LAYOUTS[..])) {
        let case = Case { problem: &problem, kv_heads: problem.shape.heads, path: Path::Auto };
        prop_assert_eq!(case.laid_out::<f32>(layout), case.in_one_piece::<f32>());
    }
}

/// Tiles and blocks of several tokens, whole vectors and parts of them, other lengths of queries and keys.
const SHAPES: [Shape; 3] = [
    Shape { batch: 2, heads: 4, seq_q: 150, seq_kv: 150, head_dim: 32, value_dim: 16 },
    Shape { batch: 1, heads: 4, seq_q: 300, seq_kv: 700, head_dim: 16, value_dim: 20 },
    Shape { batch: 3, heads: 4, seq_q: 9, seq_kv: 9, head_dim: 5, value_dim: 4 },
];

const MECHANISMS: [&str; 10] = [
    r#"{"mechanism": "softmax"}"#,
    r#"{"mechanism": "softmax", "causal": true}"#,
    r#"{"mechanism": "softmax", "tied": true}"#,
    r#"{"mechanism": "infsa"}"#,
    r#"{"mechanism": "fna", "norm_exponent": 0.5}"#,
    r#"{"mechanism": "fna", "norm_exponent": 0}"#,
    r#"{"mechanism": "ssa"}"#,
    r#"{"mechanism": "sigmoid"}"#,
    r#"{"mechanism": "linear"}"#,
    r#"{"mechanism": "laplacian", "landmarks": {"kind": "pool", "count": 4}}"#,
];

#[test]
fn shared_heads_and_long_sequences_lie_anywhere() {
    for (n, json) in MECHANISMS.into_iter().enumerate() {
        let mechanism = Mechanism::from_json(json).unwrap();
        for shape in SHAPES {
            let problem = problem(mechanism.clone(), shape, 1);
            for kv_heads in [1, 2, 4] {
                let case = Case { problem: &problem, kv_heads, path: Path::Auto };
                let (layout, expected) = (LAYOUTS[(n + kv_heads) % 3], case.in_one_piece::<f32>());
                assert_eq!(case.laid_out::<f32>(layout), expected, "{json}, {shape:?}, {kv_heads}, {layout:?}");
            }
        }
    }
}

#[test]
fn halves_the_reference_and_threads_are_no_different() {
    for json in [MECHANISMS[0], MECHANISMS[3], MECHANISMS[8]] {
        let problem = problem(Mechanism::from_json(json).unwrap(), SHAPES[0], 1);
        for kv_heads in [2, 4] {
            let case = Case { problem: &problem, kv_heads, path: Path::Auto };
            let layout = LAYOUTS[kv_heads / 2];
            assert_eq!(case.laid_out::<bf16>(layout), case.in_one_piece::<bf16>(), "{json}, {kv_heads}");
            let [one, three] = [1, 3].map(|threads| on_threads(threads, || case.laid_out::<f32>(layout)));
            assert_eq!(one, three, "{json}, {kv_heads}");
            let case = Case { path: Path::Reference, ..case };
            assert_eq!(case.laid_out::<f32>(layout), case.in_one_piece::<f32>(), "{json}, {kv_heads}");
        }
    }
}

#[test]
fn what_is_planned_is_enough_for_heads_that_are_shared() {
    for json in [MECHANISMS[0], MECHANISMS[8]] {
        let op = Operator::new(&Mechanism::from_json(json).unwrap(), SHAPES[0], false, Path::Auto).unwrap();
        let op = op.with_kv_heads(2).unwrap();
        let x = vec![0.5_f32; op.shape().q_len()];
        let (k, v) = (&x[..op.shape().k_len() / 2], &x[..op.shape().v_len() / 2]);
        let inputs = Inputs { q: &x, k: Some(k), v, extras: Extras::default() };
        let (mut out, mut stats) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats]);
        let mut scratch = Scratch::default();
        op.forward(&inputs, &Mask::NONE, &mut out, &mut stats, &mut scratch).unwrap();
        assert!(scratch.len() < op.plan().scratch_forward + 16, "{json}");
        let [mut dq, mut dk, mut dv] = [x.len(), k.len(), v.len()].map(|len| vec![0.0; len]);
        let extras = ExtraGradients::default();
        let mut gradients = Gradients { dq: &mut dq, dk: Some(&mut dk), dv: &mut dv, extras };
        let mut scratch = Scratch::default();
        op.backward(&inputs, &Mask::NONE, &out, &stats, &out, &mut gradients, &mut scratch).unwrap();
        assert!(scratch.len() < op.plan().scratch_backward + 16, "{json}");
    }
}

const UNIFORM: &str = r#"{"mechanism": "uniform"}"#;

/// Projections side by side, `[batch, tokens, (q, k, v), heads, channels]`, and their gradients.
#[test]
fn projections_side_by_side_are_those_apart() {
    let shape = Shape { value_dim: 8, head_dim: 8, ..SHAPES[0] };
    let [n, sizes] = [150, shape.heads * 8];
    for (json, kv_heads) in
        [(MECHANISMS[0], 4), (MECHANISMS[0], 2), (MECHANISMS[2], 4), (MECHANISMS[8], 2), (UNIFORM, 4), (UNIFORM, 2)]
    {
        let mechanism = Mechanism::from_json(json).unwrap();
        let op = Operator::new(&mechanism, shape, false, Path::Auto).unwrap().with_kv_heads(kv_heads).unwrap();
        let widths = match (mechanism.id(), mechanism.tied) {
            ("uniform", _) => vec![kv_heads * 8],
            (_, true) => vec![sizes, kv_heads * 8],
            _ => vec![sizes, kv_heads * 8, kv_heads * 8],
        };
        let width = widths.iter().sum::<usize>();
        let packed: Vec<f32> = (0..2 * n * width).map(|i| (i as f32 * 0.37).sin()).collect();
        let dout: Vec<f32> = (0..2 * n * sizes).map(|i| (i as f32 * 0.53).cos()).collect();
        let apart = |first: usize, width_of: usize| -> Vec<f32> {
            packed.chunks(width).flat_map(|row| row[first..first + width_of].to_vec()).collect()
        };
        let firsts = widths.iter().scan(0, |next, w| Some(std::mem::replace(next, *next + w)));
        let parts: Vec<Vec<f32>> = firsts.zip(&widths).map(|(first, &w)| apart(first, w)).collect();
        // `uniform` has no queries and keys of its own, and reads none.
        let unread = vec![f32::NAN; 2 * n * sizes];
        let (q, k, v) = match &parts[..] {
            [v] => (&unread, &unread, v),
            [q, v] => (q, q, v),
            parts => (&parts[0], &parts[1], &parts[2]),
        };
        let of = |heads| [heads, n, 8];
        let each = StridedInputs {
            q: Strided::tokens_first(&q[..], of(4)),
            k: (!mechanism.tied).then(|| Strided::tokens_first(&k[..], of(kv_heads))),
            v: Strided::tokens_first(&v[..], of(kv_heads)),
            extras: Extras::default(),
        };
        let together = op.packed_inputs(&packed, Extras::default()).unwrap();
        let run = |inputs: &StridedInputs<'_, f32>| {
            let (mut out, mut stats) = (vec![f32::NAN; dout.len()], vec![0.0; op.plan().stats]);
            let into = Strided::tokens_first(&mut out[..], of(4));
            op.forward_strided(inputs, &Mask::NONE, into, &mut stats, &mut Scratch::default()).unwrap();
            (out, stats)
        };
        let (out, stats) = run(&together);
        assert_eq!((&out, &stats), (&run(&each).0, &run(&each).1), "{json}");
        let [o, g] = [&out, &dout].map(|x| Strided::tokens_first(&x[..], of(4)));
        let mut dpacked = vec![f32::NAN; packed.len()];
        let mut extras = ExtraGradients::default();
        let into = (&mut dpacked[..], &mut extras);
        op.backward_packed(&together, &Mask::NONE, o, &stats, g, into, &mut Scratch::default()).unwrap();
        let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| vec![f32::NAN; x.len()]);
        let mut gradients = StridedGradients {
            dq: Strided::tokens_first(&mut dq[..], of(4)),
            dk: (!mechanism.tied).then(|| Strided::tokens_first(&mut dk[..], of(kv_heads))),
            dv: Strided::tokens_first(&mut dv[..], of(kv_heads)),
            extras: ExtraGradients::default(),
        };
        op.backward_strided(&each, &Mask::NONE, o, &stats, g, &mut gradients, &mut Scratch::default()).unwrap();
        let expected = match widths.len() {
            1 => vec![dv],
            2 => vec![dq, dv],
            _ => vec![dq, dk, dv],
        };
        let rows = (0..2 * n)
            .flat_map(|row| expected.iter().zip(&widths).flat_map(move |(x, w)| x[row * w..(row + 1) * w].to_vec()));
        assert_eq!(dpacked, rows.collect::<Vec<_>>(), "{json}, {kv_heads}");
        let short = op.packed_inputs(&packed[1..], Extras::default()).unwrap_err();
        assert!(matches!(short, Error::Length { tensor: "packed", .. }), "{short}");
    }
}

#[test]
fn strides_that_do_not_fit_are_refused() {
    let shape = Shape { batch: 2, heads: 2, seq_q: 3, seq_kv: 3, head_dim: 4, value_dim: 4 };
    let op = Operator::new(&Mechanism::preset("softmax").unwrap(), shape, false, Path::Auto).unwrap();
    let tokens = [0.5_f32; 48];
    let x = Strided::tokens_first(&tokens[..], [2, 3, 4]);
    let run = |q: Strided<&[f32]>, [batch_stride, head_stride, token_stride]: [usize; 3]| {
        let inputs = StridedInputs { q, k: Some(x), v: x, extras: Extras::default() };
        let (mut out, mut stats) = (vec![0.0; 48], vec![0.0; op.plan().stats]);
        let into = Strided { data: &mut out[..], batch_stride, head_stride, token_stride };
        op.forward_strided(&inputs, &Mask::NONE, into, &mut stats, &mut Scratch::default())
    };
    for strides in [[24, 4, 8], [24, 12, 4], [4, 24, 8], [4, 8, 16]] {
        assert_eq!(run(x, strides), Ok(()), "{strides:?}");
    }
    assert_eq!(run(Strided { batch_stride: 0, head_stride: 0, ..x }, [24, 4, 8]), Ok(()), "read for several");
    for strides in [[0, 4, 8], [24, 0, 4], [24, 4, 4], [23, 4, 8], [12, 12, 4], [4, 8, 12]] {
        let error = run(x, strides).unwrap_err();
        assert!(matches!(error, Error::Tensor { tensor: "out", .. }), "{strides:?}: {error}");
    }
    assert!(matches!(run(x, [25, 4, 8]), Err(Error::Length { tensor: "out", got: 48, expected: 49, .. })));
    for q in [Strided { data: &tokens[..47], ..x }, Strided { token_stride: usize::MAX / 2, ..x }] {
        assert!(matches!(run(q, [24, 4, 8]), Err(Error::Length { tensor: "q", .. })));
    }
}
