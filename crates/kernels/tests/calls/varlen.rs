//! Sequences of any lengths in one call: each as if it were alone.

use crate::{support, threads};

use half::bf16;
use resolvent_kernels::{
    Dropout, Error, Extras, Heads, Inputs, Mask, Mechanism, Parameter, Scratch, Sequences, Shape, Strategy, Strided,
    Tol, VarlenInputs, VarlenOperator, reference,
};
use support::{
    assert_close,
    varlen::{Case, HEADS, LENGTHS, assert_same, bounds, numbers, part},
};
use threads::on_threads;

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
