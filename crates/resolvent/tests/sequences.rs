//! Sequences end to end: each as if it were alone.

mod support;

use burn::{
    module::Module,
    tensor::{Bool, Device, Tensor},
};
use resolvent::{
    Dropout, Extras, Inputs, Mask, Mechanism, Sequences, Strategy, attend, attend_sequences,
    attention::{HeadGroup, MhaInput, MultiHeadAttentionConfig},
};
use resolvent_kernels::{Error, relative_distance};
use support::random;

/// Of 3, 5, 3, 1 and 5 tokens.
const BOUNDS: [usize; 6] = [0, 3, 8, 11, 12, 17];
const STRATEGIES: [Strategy; 2] = [Strategy::Fused, Strategy::Composed];

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

#[track_caller]
fn assert_close<const D: usize>(what: &str, got: Tensor<D>, expected: Tensor<D>) {
    assert_eq!(got.dims(), expected.dims(), "{what}");
    let distance = relative_distance(&values(got), &values(expected));
    assert!(distance <= 1e-5, "{what}: {distance:.1e}");
}

fn part(x: &Tensor<4>, bounds: &[usize], n: usize) -> Tensor<4> {
    x.clone().narrow(2, bounds[n], bounds[n + 1] - bounds[n])
}

#[test]
fn each_sequence_is_a_call_of_its_own() {
    let device = Device::flex();
    for id in ["softmax", "fna", "infsa", "linear-infsa", "uniform", "laplacian-exact", "ssa", "routed"] {
        let mechanism = Mechanism::preset(id).unwrap();
        for strategy in STRATEGIES {
            for causal in [false, true] {
                if causal && ["linear-infsa", "laplacian-exact", "ssa"].contains(&id) {
                    continue;
                }
                let [q, k, v] = [(); 3].map(|()| random([1, 2, 17, 4], &device).autodiff().require_grad());
                let inputs = Inputs::new(q.clone(), k.clone(), v.clone());
                let sequences = Sequences::new(&BOUNDS).unwrap();
                let packed = attend_sequences(&inputs, &mechanism, &sequences, causal, strategy).unwrap();
                let alone = (0..5).map(|n| {
                    let [q, k, v] = [&q, &k, &v].map(|x| part(x, &BOUNDS, n));
                    let mask = Mask { causal, ..Mask::none() };
                    attend(&Inputs::new(q, k, v), &mechanism, &mask, strategy).unwrap().out
                });
                let alone = Tensor::cat(alone.collect(), 2);
                let what = format!("{id} {strategy:?} causal {causal}");
                assert_close(&what, packed.out.clone(), alone.clone());
                let dout = random([1, 2, 17, 4], &device).autodiff();
                let gradients = [packed.out, alone].map(|out| (out * dout.clone()).sum().backward());
                for (name, x) in [("q", &q), ("k", &k), ("v", &v)] {
                    let [got, expected] =
                        [0, 1].map(|n| x.grad(&gradients[n]).unwrap_or_else(|| x.clone().inner().zeros_like()));
                    assert_close(&format!("{what} d{name}"), got, expected);
                }
            }
        }
    }
}

#[test]
fn cross_attention_has_bounds_of_its_own() {
    let device = Device::flex();
    let (mechanism, keys) = (Mechanism::preset("fna").unwrap(), [0, 2, 3, 7, 9, 10]);
    let q = random([1, 2, 17, 4], &device);
    let [k, v] = [(); 2].map(|()| random([1, 2, 10, 4], &device));
    let sequences = Sequences::cross(&BOUNDS, &keys).unwrap();
    let inputs = Inputs::new(q.clone(), k.clone(), v.clone());
    let packed = attend_sequences(&inputs, &mechanism, &sequences, false, Strategy::Auto).unwrap();
    let alone = |n: usize| {
        let inputs = Inputs::new(part(&q, &BOUNDS, n), part(&k, &keys, n), part(&v, &keys, n));
        attend(&inputs, &mechanism, &Mask::none(), Strategy::Auto).unwrap()
    };
    assert_close("out", packed.out, Tensor::cat((0..5).map(|n| alone(n).out).collect(), 2));
    assert_close("lse", packed.lse.unwrap(), Tensor::cat((0..5).map(|n| alone(n).lse.unwrap()).collect(), 2));
}

/// The module on sequences end to end and on the same sequences padded, in training and with rotary positions.
#[test]
fn the_module_does_without_padding() {
    let device = Device::flex();
    for id in ["softmax", "fna"] {
        let config = MultiHeadAttentionConfig::new(8, 2, Mechanism::preset(id).unwrap()).with_rotary(true);
        let module = config.init(&device);
        let tokens = random([1, 17, 8], &device);
        let input = MhaInput::self_attn(tokens.clone()).sequences(Sequences::new(&BOUNDS).unwrap());
        let packed = module.forward(input.causal()).context;
        let rows = (0..5).map(|n| {
            let row = tokens.clone().narrow(1, BOUNDS[n], BOUNDS[n + 1] - BOUNDS[n]);
            let [_, len, _] = row.dims();
            Tensor::cat(vec![row, Tensor::full([1, 5 - len + 1, 8], 7.0, &device)], 1)
        });
        let rows = Tensor::cat(rows.collect(), 0);
        let pad: Vec<bool> = (0..5).flat_map(|n| (0..6).map(move |i| i >= BOUNDS[n + 1] - BOUNDS[n])).collect();
        let pad = Tensor::<1, Bool>::from_data(&pad[..], &device).reshape([5, 6]);
        let padded = module.forward(MhaInput::self_attn(rows).mask_pad(pad).causal()).context;
        let kept = (0..5).map(|n| padded.clone().narrow(0, n, 1).narrow(1, 0, BOUNDS[n + 1] - BOUNDS[n]));
        assert_close(id, packed, Tensor::cat(kept.collect(), 1));

        let learns = Device::flex().autodiff();
        let module = module.to_device(&learns);
        let tokens = random([1, 17, 8], &learns).require_grad();
        let input = MhaInput::self_attn(tokens.clone()).sequences(Sequences::new(&BOUNDS).unwrap());
        let context = module.forward(input).context;
        // Another sequence's tokens get no gradient.
        let gradient = values(tokens.grad(&context.narrow(1, 3, 5).sum().backward()).unwrap());
        let (own, others) = (&gradient[24..64], [&gradient[..24], &gradient[64..]].concat());
        assert!(own.iter().all(|&x| x != 0.0) && others.iter().all(|&x| x == 0.0));
    }
}

/// What the module does itself is done sequence by sequence; heads with mechanisms of their own, too.
#[test]
fn what_mixes_tokens_stays_within_a_sequence() {
    let device = Device::flex();
    let of = |id: &str| Mechanism::preset(id).unwrap();
    let config = MultiHeadAttentionConfig::new(8, 2, of("softmax"));
    let groups = vec![
        HeadGroup { heads: vec![0], mechanism: of("fna") },
        HeadGroup { heads: vec![1], mechanism: of("softmax") },
    ];
    let by_head = config.init(&device).with_head_groups(groups).unwrap();
    let shared = config.clone().with_kv_heads(Some(1)).with_rotary(true).init(&device);
    for (what, module) in [("heads", by_head), ("shared heads", shared)] {
        let tokens = random([1, 17, 8], &device);
        let input = MhaInput::self_attn(tokens.clone()).sequences(Sequences::new(&BOUNDS).unwrap());
        let alone = (0..5).map(|n| {
            let row = tokens.clone().narrow(1, BOUNDS[n], BOUNDS[n + 1] - BOUNDS[n]);
            module.forward(MhaInput::self_attn(row)).context
        });
        assert_close(what, module.forward(input).context, Tensor::cat(alone.collect(), 1));
    }
}

#[test]
fn groups_draw_other_pairs() {
    let device = Device::flex();
    let mechanism = Mechanism::preset("softmax").unwrap();
    // Two sequences of the same tokens, in groups of their own because a third token differs in number.
    let row = random([1, 1, 40, 4], &device);
    let q = Tensor::cat(vec![row.clone(), row.clone(), random([1, 1, 1, 4], &device)], 2);
    let sequences = Sequences::new(&[0, 40, 81]).unwrap();
    let extras = Extras::default().with_dropout(Dropout::weights(0.5, 1).unwrap());
    let inputs = Inputs { extras, ..Inputs::new(q.clone(), q.clone(), Tensor::ones([1, 1, 81, 1], &device)) };
    let out = || values(attend_sequences(&inputs, &mechanism, &sequences, true, Strategy::Auto).unwrap().out);
    assert_eq!(out(), out());
    // Causal: the first rows of both see the same tokens.
    assert_ne!(out()[..40], out()[40..80]);
    // Every path draws the same pairs.
    let composed = attend_sequences(&inputs, &mechanism, &sequences, true, Strategy::Composed).unwrap().out;
    assert!(relative_distance(&values(composed), &out()) <= 1e-5);
}

#[test]
fn mistakes_are_named() {
    for bounds in [&[][..], &[0], &[1, 3], &[0, 3, 3], &[0, 5, 4]] {
        assert!(matches!(Sequences::new(bounds), Err(Error::OutOfRange { field: "cu_seqlens", .. })), "{bounds:?}");
    }
    assert!(matches!(Sequences::cross(&[0, 3], &[0, 1, 2]), Err(Error::OutOfRange { field: "keys", .. })));
    let device = Device::flex();
    let x = || random([1, 2, 12, 4], &device);
    let (sequences, softmax) = (Sequences::new(&BOUNDS).unwrap(), Mechanism::preset("softmax").unwrap());
    let error = |inputs: &Inputs, mechanism: &Mechanism| {
        attend_sequences(inputs, mechanism, &sequences, false, Strategy::Auto).unwrap_err().to_string()
    };
    assert!(error(&Inputs::new(x(), x(), x()), &softmax).contains("[17]"));
    let pooled = Mechanism::from_json(r#"{"mechanism": "linear-infsa", "broadcast": false}"#).unwrap();
    assert!(error(&Inputs::new(x(), x(), x()), &pooled).contains("broadcast"));
    let module = MultiHeadAttentionConfig::new(8, 2, softmax).init(&device);
    let tokens = random([1, 17, 8], &device);
    let pad = Tensor::<2, Bool>::from_data([[false; 17]], &device);
    let both = MhaInput::self_attn(tokens).sequences(sequences).mask_pad(pad);
    assert!(module.try_forward(both).unwrap_err().to_string().contains("sequences"));
}
