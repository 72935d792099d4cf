//! Heads of keys and values that several heads of queries share.

use half::bf16;
use resolvent_kernels::{
    Cache, ClusterPlan, Element, Error, ExtraGradients, Extras, Gradients, Inputs, Mask, Mechanism, Operator,
    Parameter, Result, Scratch, Shape, Strategy,
};

const SHAPE: Shape = Shape { batch: 2, heads: 6, seq_q: 9, seq_kv: 9, head_dim: 5, value_dim: 4 };

fn numbers<T: Element>(len: usize, seed: usize) -> Vec<T> {
    (0..len).map(|n| T::narrow(((n * 7 + seed * 13) as f32 * 0.61).sin())).collect()
}

/// `out`, `dq`, `dk`, `dv` and the gradients of the parameters.
fn solve<T: Element>(op: &Operator, [q, k, v]: [&[T]; 3], dout: &[T], mask: &Mask<'_>) -> Result<Vec<Vec<f32>>> {
    let inputs = Inputs { q, k: Some(k), v, extras: Extras::default() };
    let (mut out, mut stats) = (vec![T::narrow(f32::NAN); op.out_len()], vec![0.0; op.plan().stats]);
    let mut scratch = Scratch::default();
    op.forward(&inputs, mask, &mut out, &mut stats, &mut scratch)?;
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| vec![T::narrow(f32::NAN); x.len()]);
    let mut gamma = vec![f32::NAN; SHAPE.heads];
    let has_gamma = op.mechanism().parameters().contains(&Parameter::Gamma);
    let extras = ExtraGradients::default();
    let extras = if has_gamma { extras.with(Parameter::Gamma, &mut gamma) } else { extras };
    let mut gradients = Gradients { dq: &mut dq, dk: Some(&mut dk), dv: &mut dv, extras };
    op.backward(&inputs, mask, &out, &stats, dout, &mut gradients, &mut scratch)?;
    let wide = |x: &[T]| x.iter().map(|x| x.widen()).collect::<Vec<f32>>();
    let mut all = vec![wide(&out), wide(&dq), wide(&dk), wide(&dv)];
    all.extend(has_gamma.then_some(gamma));
    Ok(all)
}

/// Every head of `x`, `times` in a row.
fn repeated<T: Copy>(x: &[T], len: usize, times: usize) -> Vec<T> {
    x.chunks(len).flat_map(|head| head.repeat(times)).collect()
}

#[test]
fn shared_heads_are_repeated_ones() {
    let mechanisms = ["softmax", "infsa", "fna", "ssa", "linear-infsa", "uniform", "laplacian-exact", "linear"];
    for (seed, id) in mechanisms.into_iter().enumerate() {
        for (kv_heads, strategy) in
            [(1, Strategy::Auto), (2, Strategy::Fused), (3, Strategy::Reference), (6, Strategy::Auto)]
        {
            let op = Operator::new(&Mechanism::preset(id).unwrap(), SHAPE, false, strategy).unwrap();
            let grouped = op.clone().with_kv_heads(kv_heads).unwrap();
            let (times, [k_len, v_len]) = (6 / kv_heads, [9 * 5, 9 * 4]);
            let (q, dout) = (numbers::<f32>(SHAPE.q_len(), seed), numbers::<f32>(op.out_len(), seed + 1));
            let (k, v) =
                (numbers::<f32>(2 * kv_heads * k_len, seed + 2), numbers::<f32>(2 * kv_heads * v_len, seed + 3));
            let keep: Vec<bool> = (0..18).map(|n| n % 5 != 2).collect();
            let mask = Mask::padding(&keep);
            let got = solve(&grouped, [&q, &k, &v], &dout, &mask).unwrap();
            let each = [&repeated(&k, k_len, times)[..], &repeated(&v, v_len, times)];
            let mut expected = solve(&op, [&q, each[0], each[1]], &dout, &mask).unwrap();
            for (n, len) in [(2, k_len), (3, v_len)] {
                let sum = |heads: &[f32]| {
                    (0..len).map(|c| heads.iter().skip(c).step_by(len).copied().reduce(|a, b| a + b).unwrap()).collect()
                };
                expected[n] = expected[n].chunks(len * times).flat_map(|heads| -> Vec<f32> { sum(heads) }).collect();
            }
            assert_eq!(got, expected, "{id}, {kv_heads}");
        }
    }
}

/// Clusters are made of keys alone where queries choose among them, so that heads that share keys share these: made once, and no other
/// than those of every head by itself.
#[test]
fn heads_that_share_keys_share_their_clusters() {
    let shape = Shape { heads: 6, seq_q: 40, seq_kv: 40, ..SHAPE };
    let (k_len, v_len) = (40 * 5, 40 * 4);
    for (n, (clusters, fields)) in [
        (5, r#""routes": 2"#),
        (4, r#""routes": 1, "outlier_globals": 3, "cluster_metric": "cosine", "seed": 3"#),
        (3, r#""causal": true, "causal_clusters": {"kind": "segment", "size": 12}"#),
        (3, r#""causal": true, "causal_clusters": {"kind": "segment", "size": 7}, "global_tokens": 2"#),
    ]
    .into_iter()
    .enumerate()
    {
        let json = format!(r#"{{"mechanism": "routed", "clusters": {clusters}, {fields}}}"#);
        let mechanism = Mechanism::from_json(&json).unwrap();
        let book = numbers::<f32>(6 * clusters * 5, n + 4);
        // A codebook is of heads of queries: with one, heads that share keys have clusters of their own.
        for (kv_heads, strategy) in [(1, Strategy::Auto), (2, Strategy::Auto), (3, Strategy::Reference)] {
            for book in [None, Some(&book[..])] {
                let op = Operator::new(&mechanism, shape, false, strategy).unwrap();
                let (q, keep) = (numbers::<f32>(shape.q_len(), n), (0..80).map(|n| n % 7 != 3).collect::<Vec<_>>());
                let (k, v) = (numbers::<f32>(2 * kv_heads * k_len, n + 1), numbers::<f32>(2 * kv_heads * v_len, n + 2));
                let (each_k, each_v) = (repeated(&k, k_len, 6 / kv_heads), repeated(&v, v_len, 6 / kv_heads));
                let mask = Mask::padding(&keep);
                let extras = book.map_or(Extras::default(), |book| Extras::default().with_codebook(book));
                let inputs = |k, v| Inputs { q: &q, k: Some(k), v, extras };
                let grouped = op.clone().with_kv_heads(kv_heads).unwrap();
                let plan = grouped.clusters(&inputs(&k, &v), &mask).unwrap().into_owned();
                let own = op.clusters(&inputs(&each_k, &each_v), &mask).unwrap();
                assert_eq!(&plan, own.as_ref(), "{json}, {kv_heads}");
                let run = |op: &Operator, k, v| {
                    let (mut out, mut stats) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats]);
                    op.forward(&inputs(k, v), &mask, &mut out, &mut stats, &mut Scratch::default()).unwrap();
                    out
                };
                assert_eq!(run(&grouped, &k, &v), run(&op, &each_k, &each_v), "{json}, {kv_heads}");
                if strategy == Strategy::Auto {
                    let alone = ClusterPlan::with_kv_heads(&mechanism, &shape, kv_heads, &q, &k, book, &mask);
                    assert_eq!(plan, alone.unwrap());
                    let error = ClusterPlan::new(&mechanism, &shape, &q, &k, book, &mask).unwrap_err();
                    assert!(matches!(error, Error::Length { tensor: "k", .. }), "{error}");
                }
            }
        }
    }
}

/// What a cache keeps of a head of keys serves all of its heads of queries, until one of these has a codebook of its own.
#[test]
fn caches_keep_the_clusters_of_shared_heads_once() {
    let json =
        r#"{"mechanism": "routed", "clusters": 3, "causal": true, "causal_clusters": {"kind": "segment", "size": 8}}"#;
    let mechanism = Mechanism::from_json(json).unwrap();
    let (cache, book) = (|| Cache::new(&mechanism, 2, 6, 5, 4, 40).unwrap(), numbers::<f32>(6 * 3 * 5, 77));
    for books in [[false; 6], [false, false, true, true, false, true], [true; 6]] {
        let (mut own, mut grouped) = (cache(), cache().with_kv_heads(2).unwrap());
        for (step, (new, has_book)) in [3, 9, 1, 1, 7, 1].into_iter().zip(books).enumerate() {
            let numbers = |heads: usize, channels, seed| numbers::<f32>(2 * heads * new * channels, 5 * step + seed);
            let (q, k, v) = (numbers(6, 5, 0), numbers(2, 5, 1), numbers(2, 4, 2));
            let (each_k, each_v) = (repeated(&k, new * 5, 3), repeated(&v, new * 4, 3));
            let keep: Vec<bool> = (0..2 * new).map(|n| (n + step) % 5 != 1).collect();
            let extras = if has_book { Extras::default().with_codebook(&book) } else { Extras::default() };
            let rows = |cache: &mut Cache, k, v| {
                let mut out = vec![f32::NAN; 2 * 6 * new * 4];
                cache.step_masked(&Inputs { q: &q, k: Some(k), v, extras }, &Mask::padding(&keep), &mut out).unwrap();
                out
            };
            let got = rows(&mut grouped, &k, &v);
            assert_eq!(got, rows(&mut own, &each_k, &each_v), "step {step}, {books:?}");
            (own, grouped) = (own.select(&[1, 0]), grouped.select(&[1, 0]));
        }
        let shared = 2 * grouped.bytes() < own.bytes();
        assert_eq!(shared, books == [false; 6], "{} and {} bytes", grouped.bytes(), own.bytes());
    }
    let tied = Mechanism::from_json(r#"{"mechanism": "softmax", "tied": true, "causal": true}"#).unwrap();
    let error = Cache::new(&tied, 1, 4, 2, 2, 8).unwrap().with_kv_heads(2).unwrap_err();
    assert!(matches!(error, Error::Unsupported { what: "kv_heads below heads", .. }), "{error}");
}

#[test]
fn half_types_are_summed_before_they_are_rounded() {
    let op = Operator::new(&Mechanism::preset("softmax").unwrap(), SHAPE, true, Strategy::Auto).unwrap();
    let op = op.with_kv_heads(1).unwrap();
    let narrow = [SHAPE.q_len(), 2 * 45, 2 * 36, SHAPE.out_len()];
    let narrow: Vec<Vec<bf16>> = narrow.into_iter().enumerate().map(|(seed, len)| numbers(len, seed)).collect();
    let wide: Vec<Vec<f32>> = narrow.iter().map(|x| x.iter().map(|x| x.to_f32()).collect()).collect();
    let got = solve(&op, [&narrow[0], &narrow[1], &narrow[2]], &narrow[3], &Mask::NONE).unwrap();
    let expected = solve(&op, [&wide[0], &wide[1], &wide[2]], &wide[3], &Mask::NONE).unwrap();
    // The backward pass is given the rounded output.
    for (got, expected) in got.iter().zip(&expected).take(4) {
        let most = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        assert!(got.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 0.01 * most));
    }
}

#[test]
fn heads_that_do_not_divide_are_refused() {
    let op = |json: &str| Operator::new(&Mechanism::from_json(json).unwrap(), SHAPE, false, Strategy::Auto).unwrap();
    let softmax = op(r#"{"mechanism": "softmax"}"#);
    for kv_heads in [0, 4, 12] {
        let error = softmax.clone().with_kv_heads(kv_heads).unwrap_err();
        assert!(matches!(error, Error::OutOfRange { field: "kv_heads", .. }), "{error}");
    }
    let tied = op(r#"{"mechanism": "softmax", "tied": true}"#).with_kv_heads(2).unwrap_err();
    assert!(matches!(tied, Error::Unsupported { .. }), "{tied}");
    let grouped = softmax.with_kv_heads(2).unwrap();
    let (q, k) = (numbers::<f32>(SHAPE.q_len(), 1), numbers::<f32>(SHAPE.k_len(), 2));
    let error = solve(&grouped, [&q, &k, &k], &q, &Mask::NONE).unwrap_err();
    assert!(matches!(error, Error::Length { tensor: "k", expected: 180, .. }), "{error}");
}
