//! What `resolvent attend` promises beside the numbers: ranks, types, masks, notes, and how files are written.

mod support;

use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::json;
use support::{Outcome, Sandbox, Tensors};

const SHAPE: [usize; 4] = [1, 1, 5, 4];

fn sandbox(mechanism: serde_json::Value, tensors: &Tensors) -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("m.json", mechanism.to_string());
    sandbox.write("in.safetensors", tensors.file());
    sandbox
}

#[track_caller]
fn attend(sandbox: &Sandbox, args: &[&str]) -> (Outcome, Tensors) {
    let fixed = ["attend", "--config", "m.json", "--input", "in.safetensors", "--output", "out.safetensors"];
    let outcome = sandbox.run(&[&fixed, args].concat()).success();
    (outcome, Tensors::read(&sandbox.path("out.safetensors")))
}

#[test]
fn lower_ranks_are_the_same_call_without_their_axes() {
    for (mechanism, extra) in [("softmax", "lse"), ("infsa", "dgamma"), ("linear-infsa", "dgamma")] {
        let (_, full) = attend(&sandbox(json!({"mechanism": mechanism}), &Tensors::call(&SHAPE)), &["--grad"]);
        for rank in [3, 2] {
            let mut tensors = Tensors::call(&SHAPE[4 - rank..]);
            tensors.u8("query_mask", &[1, 5], &[1; 5]);
            if rank == 2 {
                tensors.u8("key_mask", &[5], &[1; 5]);
            }
            let (_, got) = attend(&sandbox(json!({"mechanism": mechanism}), &tensors), &["--grad"]);
            assert_eq!(got.names(), full.names());
            assert!(got.names().contains(&extra));
            for name in got.names() {
                assert_eq!(got.values(name), full.values(name), "{mechanism} {name}");
                let missing = if name == "dgamma" { 0 } else { 4 - rank };
                assert_eq!(got.shape(name), &full.shape(name)[missing..], "{mechanism} {name}");
            }
        }
    }
}

#[test]
fn products_of_bf16_are_near_those_of_f32_and_plans_say_what_runs() {
    let tensors = Tensors::call(&SHAPE);
    for (mechanism, runs) in
        [("softmax", "bf16"), ("infsa", "bf16"), ("fna", "bf16"), ("cosine", "bf16"), ("linear", "full")]
    {
        let sandbox = sandbox(json!({"mechanism": mechanism}), &tensors);
        let (_, full) = attend(&sandbox, &["--grad"]);
        let (outcome, half) = attend(&sandbox, &["--grad", "--precision", "bf16", "--json"]);
        let told: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
        assert_eq!((&told["arithmetic"]["asked"], &told["arithmetic"]["runs"]), (&json!("bf16"), &json!(runs)));
        assert_eq!(outcome.stderr.contains("runs in full precision"), runs == "full", "{}", outcome.stderr);
        let [full, half] = [full.values("out"), half.values("out")];
        let far = full.iter().zip(&half).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
        assert_eq!(far > 0.0, runs == "bf16", "{mechanism}");
        assert!(far < 0.02, "{mechanism}: {far}");
        let plan = ["attend", "--config", "m.json", "--input", "in.safetensors", "--plan", "--precision", "bf16"];
        let text = sandbox.run(&plan).success().stdout;
        assert!(text.contains(&format!("precision  {runs} by ")), "{text}");
        assert_eq!(text.contains("as many features"), mechanism == "linear", "{text}");
    }
    let sandbox = sandbox(json!({"mechanism": "softmax"}), &tensors);
    let wrong = ["attend", "--config", "m.json", "--input", "in.safetensors", "--plan", "--precision", "f8"];
    assert!(sandbox.run(&wrong).failure(2).contains("expected full or bf16"));
}

#[test]
fn a_pooled_value_is_returned_once() {
    let mut tensors = Tensors::call(&[2, 3, 5, 4]);
    tensors.noise("dout", &[2, 3, 1, 4], 7);
    let config = json!({"mechanism": "linear-infsa", "broadcast": false});
    let (_, got) = attend(&sandbox(config, &tensors), &["--grad", "--weights"]);
    assert_eq!((got.shape("out"), got.shape("weights")), (&[2, 3, 1, 4][..], &[2, 3, 1, 5][..]));
}

#[test]
fn half_types_are_widened_exactly() {
    let q = Tensors::call(&SHAPE).values("q");
    let (h, b) = (|x: &f64| f16::from_f64(*x), |x: &f64| bf16::from_f64(*x));
    for dtype in [Dtype::F16, Dtype::BF16] {
        let (mut narrow, mut wide) = (Tensors::call(&SHAPE), Tensors::call(&SHAPE));
        let (bytes, values): (Vec<[u8; 2]>, Vec<f32>) = match dtype {
            Dtype::F16 => q.iter().map(|x| (h(x).to_le_bytes(), h(x).to_f32())).unzip(),
            _ => q.iter().map(|x| (b(x).to_le_bytes(), b(x).to_f32())).unzip(),
        };
        narrow.raw("q", dtype, &SHAPE, bytes.concat());
        wide.f32("q", &SHAPE, &values);
        let config = json!({"mechanism": "softmax"});
        let (_, narrow) = attend(&sandbox(config.clone(), &narrow), &["--grad"]);
        let (_, wide) = attend(&sandbox(config, &wide), &["--grad"]);
        for name in wide.names() {
            assert_eq!((narrow.dtype(name), narrow.bytes(name)), (Dtype::F32, wide.bytes(name)), "{dtype} {name}");
        }
    }
}

#[test]
fn the_reference_reads_and_writes_f64() {
    let mut tensors = Tensors::call(&SHAPE);
    let v = tensors.values("v");
    tensors.raw("v", Dtype::F64, &SHAPE, v.iter().flat_map(|x| (x + 1e-12).to_le_bytes()).collect());
    let (_, got) = attend(&sandbox(json!({"mechanism": "uniform"}), &tensors), &["--reference"]);
    let mean = |c: usize| v.iter().skip(c).step_by(4).sum::<f64>() / 5.0 + 1e-12;
    let error = got.values("out").iter().enumerate().map(|(n, x)| (x - mean(n % 4)).abs()).fold(0.0, f64::max);
    assert!(got.dtype("out") == Dtype::F64 && error < 1e-15, "{error}");
}

#[test]
fn weights_map_the_values_to_the_output() {
    for (mechanism, flags) in [("softmax", ["--causal"].as_slice()), ("infsa", &["--causal"]), ("infsa-resolvent", &[])]
    {
        let (_, got) = attend(
            &sandbox(json!({"mechanism": mechanism}), &Tensors::call(&SHAPE)),
            &[&["--weights"], flags].concat(),
        );
        let (w, out, v) = (got.values("weights"), got.values("out"), Tensors::call(&SHAPE).values("v"));
        assert_eq!(got.shape("weights"), [1, 1, 5, 5]);
        for (i, c) in (0..20).map(|n| (n / 4, n % 4)) {
            let product: f64 = (0..5).map(|j| w[i * 5 + j] * v[j * 4 + c]).sum();
            assert!((product - out[i * 4 + c]).abs() < 1e-5, "{mechanism} [{i}, {c}]");
        }
        assert_eq!(w[4] != 0.0, flags.is_empty(), "{mechanism}: the first token sees the last unless causal");
    }
}

#[test]
fn causal_is_one_thing_however_it_is_asked_for() {
    let bytes = |config, args: &[&str]| attend(&sandbox(config, &Tensors::call(&SHAPE)), args).1.bytes("out").to_vec();
    let plain = bytes(json!({"mechanism": "infsa"}), &[]);
    let flag = bytes(json!({"mechanism": "infsa"}), &["--causal"]);
    assert_ne!(plain, flag);
    assert_eq!(flag, bytes(json!({"mechanism": "infsa", "causal": true}), &[]));
    assert_eq!(flag, bytes(json!({"mechanism": "infsa", "causal": true}), &["--causal"]));
}

#[test]
fn masked_tokens_are_absent() {
    let (mut masked, mut cut) = (Tensors::call(&SHAPE), Tensors::call(&SHAPE));
    masked.raw("key_mask", Dtype::BOOL, &[1, 5], vec![1, 1, 1, 0, 0]).u8("query_mask", &[1, 5], &[1, 1, 1, 0, 0]);
    for name in ["q", "k", "v", "dout"] {
        let kept: Vec<f32> = cut.values(name)[..12].iter().map(|&x| x as f32).collect();
        cut.f32(name, &[1, 1, 3, 4], &kept);
    }
    for mechanism in ["softmax", "uniform", "infsa", "infsa-resolvent", "linear-infsa"] {
        let (_, masked) = attend(&sandbox(json!({"mechanism": mechanism}), &masked), &["--grad"]);
        let (_, cut) = attend(&sandbox(json!({"mechanism": mechanism}), &cut), &["--grad"]);
        for name in ["out", "dq", "dk", "dv"] {
            let (masked, cut) = (masked.values(name), cut.values(name));
            assert!(masked[12..].iter().all(|&x| x == 0.0), "{mechanism} {name}: {masked:?}");
            let error = masked.iter().zip(&cut).map(|(m, c)| (m - c).abs()).fold(0.0, f64::max);
            assert!(error < 1e-5, "{mechanism} {name} differs by {error}");
        }
    }
}

#[test]
fn the_result_is_told_and_what_is_not_used_is_listed() {
    let mut tensors = Tensors::call(&SHAPE);
    tensors.noise("bias", &[5, 5], 3).f32("gamma", &[1], &[0.5]);
    let sandbox = sandbox(json!({"mechanism": "softmax"}), &tensors);
    let (outcome, _) = attend(&sandbox, &["--json"]);
    assert!(outcome.stderr.contains("not used: bias, dout, gamma"), "{}", outcome.stderr);
    let json = outcome.json();
    assert_eq!(json["unused"], json!(["bias", "dout", "gamma"]));
    assert_eq!(json["tensors"], json!({"out": [1, 1, 5, 4], "lse": [1, 1, 5]}));
    assert_eq!(json["strategy"], "fused");
    assert!(attend(&sandbox, &["--quiet"]).0.stderr.is_empty());
}

#[test]
fn a_seed_draws_other_landmarks() {
    let mut tensors = Tensors::default();
    let shape = [1, 1, 12, 4];
    tensors.noise("q", &shape, 1).noise("v", &shape, 2);
    let random = json!({"mechanism": "soft", "landmarks": {"kind": "random", "count": 3, "seed": 0}});
    let sandbox = sandbox(random, &tensors);
    let out = |args: &[&str]| attend(&sandbox, args).1.values("out").to_vec();
    assert_eq!(out(&[]), out(&["--seed", "0"]));
    assert_ne!(out(&[]), out(&["--seed", "5"]));
}

#[test]
fn a_likely_mistake_is_told() {
    let steps =
        json!({"mechanism": "soft", "newton_iterations": 40, "ridge": 0.0, "landmarks": {"kind": "first", "count": 1}});
    let mut tensors = Tensors::default();
    tensors.noise("q", &SHAPE, 1).noise("v", &SHAPE, 2);
    let (outcome, _) = attend(&sandbox(steps, &tensors), &[]);
    assert!(outcome.stderr.contains("warning: soft: more than 24"), "{}", outcome.stderr);
}

#[test]
fn a_single_landmark_is_told() {
    let mut tensors = Tensors::default();
    let shape = [1, 1, 12, 4];
    tensors.noise("q", &shape, 1).noise("v", &shape, 2);
    for (windows, told) in [(r#""ratio": 16"#, true), (r#""count": 3"#, false)] {
        let text = format!(r#"{{"mechanism": "soft", "landmarks": {{"kind": "pool", {windows}}}}}"#);
        let (outcome, _) = attend(&sandbox(serde_json::from_str(&text).unwrap(), &tensors), &[]);
        assert_eq!(outcome.stderr.contains("warning: soft: a single landmark"), told, "{}", outcome.stderr);
    }
}

#[test]
fn a_plan_is_printed_and_nothing_written() {
    let sandbox = sandbox(json!({"mechanism": "infsa"}), &Tensors::call(&[2, 3, 5, 4]));
    let before = sandbox.snapshot();
    let plan = ["attend", "--config", "m.json", "--input", "in.safetensors", "--plan"];
    let json = sandbox.run(&[&plan[..], &["--json"]].concat()).success().json();
    assert_eq!(json["shape"]["heads"], 3);
    assert!(json["plan"]["flops_forward"].as_u64().unwrap() >= 2 * 2 * 3 * 5 * 5 * 8, "{json}");
    assert!(sandbox.run(&plan).success().stdout.contains("scratch"));
    assert_eq!(sandbox.snapshot(), before);
}

#[cfg(unix)]
#[test]
fn an_output_replaces_what_was_there_and_keeps_links() {
    use std::os::unix::fs::PermissionsExt;
    let sandbox = sandbox(json!({"mechanism": "softmax"}), &Tensors::call(&SHAPE));
    sandbox.write("real.safetensors", "old");
    std::os::unix::fs::symlink("real.safetensors", sandbox.path("out.safetensors")).unwrap();
    let (_, got) = attend(&sandbox, &[]);
    assert!(std::fs::symlink_metadata(sandbox.path("out.safetensors")).unwrap().is_symlink());
    assert_eq!(Tensors::read(&sandbox.path("real.safetensors")).bytes("out"), got.bytes("out"));
    let mode = |name| std::fs::metadata(sandbox.path(name)).unwrap().permissions().mode();
    assert_eq!(mode("real.safetensors"), mode("m.json"), "as any new file");
    assert_eq!(sandbox.snapshot().len(), 4, "no temporary file is left");
}

#[test]
fn a_bias_is_read_from_the_file_and_has_a_gradient() {
    let mut tensors = Tensors::call(&[1, 2, 5, 4]);
    let mut numbers: Vec<f32> = (0..50).map(|n| (n as f32).sin()).collect();
    numbers[7] = f32::NEG_INFINITY;
    tensors.f32("bias", &[1, 2, 5, 5], &numbers);
    let config = json!({"mechanism": "infsa", "bias": "tensor"});
    let sandbox = sandbox(config, &tensors);
    let (_, got) = attend(&sandbox, &["--grad", "--weights"]);
    let (_, expected) = attend(&sandbox, &["--grad", "--weights", "--reference"]);
    for name in ["out", "dq", "dk", "dv", "dbias", "weights"] {
        let pairs = got.values(name).into_iter().zip(expected.values(name));
        assert_eq!(got.shape(name), expected.shape(name));
        assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-5), "{name}");
    }
    assert_eq!((got.shape("dbias"), got.values("dbias")[7], got.values("weights")[7]), (&[1, 2, 5, 5][..], 0.0, 0.0));
    // A mask of single pairs is a bias of zeros and minus infinity.
    let mask: Vec<u8> = (0..50).map(|n| u8::from(n % 7 != 3)).collect();
    let added: Vec<f32> = mask.iter().map(|&keep| if keep == 1 { 0.0 } else { f32::NEG_INFINITY }).collect();
    let [by_mask, by_numbers] = [true, false].map(|masked| {
        let mut tensors = Tensors::call(&[1, 2, 5, 4]);
        match masked {
            true => tensors.u8("bias", &[1, 2, 5, 5], &mask),
            false => tensors.f32("bias", &[1, 2, 5, 5], &added),
        };
        sandbox.write("in.safetensors", tensors.file());
        attend(&sandbox, &["--grad"]).1.values("dq")
    });
    assert_eq!(by_mask, by_numbers);
    sandbox.write("in.safetensors", Tensors::call(&[1, 2, 5, 4]).file());
    let outcome =
        sandbox.run(&["attend", "--config", "m.json", "--input", "in.safetensors", "--output", "o.safetensors"]);
    assert!(outcome.failure(1).contains("bias"), "{outcome:?}");
}

/// Heads of keys and values that several heads of queries share are those heads written out, and their gradients the sums.
#[test]
fn heads_of_keys_may_be_shared() {
    let (q, kv) = ([2, 4, 5, 3], [2, 2, 5, 3]);
    let mut grouped = Tensors::default();
    grouped.noise("q", &q, 1).noise("dout", &q, 4).noise("k", &kv, 2).noise("v", &kv, 3);
    let mut whole = Tensors::default();
    whole.noise("q", &q, 1).noise("dout", &q, 4);
    for name in ["k", "v"] {
        let values: Vec<f32> = grouped.values(name).iter().map(|&x| x as f32).collect();
        let heads = values.chunks(15).flat_map(|head| [head, head]).flatten();
        whole.f32(name, &q, &heads.copied().collect::<Vec<_>>());
    }
    for flags in [&["--grad"][..], &["--grad", "--reference"]] {
        for config in [json!({"mechanism": "fna"}), json!({"mechanism": "routed", "clusters": 2, "routes": 1})] {
            let (_, got) = attend(&sandbox(config.clone(), &grouped), flags);
            let (_, expected) = attend(&sandbox(config, &whole), flags);
            assert_eq!((got.bytes("out"), got.bytes("dq")), (expected.bytes("out"), expected.bytes("dq")));
            for name in ["dk", "dv"] {
                assert_eq!(got.shape(name), kv);
                let each = expected.values(name);
                for (n, x) in got.values(name).into_iter().enumerate() {
                    let sum: f64 = (0..2).map(|head| each[(n / 15 * 2 + head) * 15 + n % 15]).sum();
                    assert!((x - sum).abs() <= 1e-6 * sum.abs(), "{name}[{n}]: {x}, not {sum}");
                }
            }
        }
    }
    // What is described besides is of every head of queries.
    let described = ["--weights", "--clusters", "--certificate", "--reference"];
    let routed = json!({"mechanism": "routed", "clusters": 2, "routes": 1});
    for flags in [&described[..3], &described] {
        let [got, expected] = [&grouped, &whole].map(|tensors| attend(&sandbox(routed.clone(), tensors), flags).1);
        assert!(expected.names().contains(&"missed_mass") && got.names() == expected.names());
        for name in expected.names() {
            assert_eq!((got.shape(name), got.bytes(name)), (expected.shape(name), expected.bytes(name)), "{name}");
        }
    }
    let mut odd = Tensors::default();
    odd.noise("q", &[1, 4, 5, 3], 1).noise("k", &[1, 3, 5, 3], 2).noise("v", &[1, 3, 5, 3], 3);
    let refused = sandbox(json!({"mechanism": "softmax"}), &odd);
    let refused =
        refused.run(&["attend", "--config", "m.json", "--input", "in.safetensors", "--output", "o.safetensors"]);
    assert!(refused.failure(1).contains("heads of q"), "{}", refused.failure(1));
}

/// Sequences end to end are calls of their own, in one call and in the reference, whatever the rank of the tensors.
#[test]
fn sequences_end_to_end_attend_each_to_itself() {
    let bounds = [0_usize, 4, 5, 12];
    let integers = |bounds: &[usize]| bounds.iter().flat_map(|&x| (x as i32).to_le_bytes()).collect::<Vec<u8>>();
    let slice = |whole: &Tensors, name: &str, heads: usize, range: std::ops::Range<usize>| -> Vec<f32> {
        let values: Vec<f32> = whole.values(name).iter().map(|&x| x as f32).collect();
        let row = values.len() / heads / 12;
        values.chunks(12 * row).flat_map(|head| head[range.start * row..range.end * row].to_vec()).collect()
    };
    let configs = [
        json!({"mechanism": "softmax"}),
        json!({"mechanism": "infsa", "gamma": 0.7}),
        json!({"mechanism": "routed", "clusters": 2, "routes": 1}),
        json!({"mechanism": "linear"}),
    ];
    for (n, config) in configs.into_iter().enumerate() {
        let (shape, kv) = ([1, 4, 12, 3], [1, if n == 0 { 4 } else { 2 }, 12, 3]);
        let mut tensors = Tensors::default();
        tensors.noise("q", &shape, 1).noise("k", &kv, 2).noise("v", &kv, 3).noise("dout", &shape, 4);
        tensors.raw("cu_seqlens", Dtype::I32, &[4], integers(&bounds));
        let mut keep = [1; 12];
        keep[7] = 0;
        tensors.u8("key_mask", &[1, 12], &keep).u8("query_mask", &[1, 12], &keep);
        for flags in [&["--grad"][..], &["--grad", "--reference"]] {
            let (outcome, got) = attend(&sandbox(config.clone(), &tensors), flags);
            assert!(!outcome.stderr.contains("not used"), "{}", outcome.stderr);
            for pair in bounds.windows(2) {
                let range = pair[0]..pair[1];
                let mut own = Tensors::default();
                for (name, shape) in [("q", shape), ("k", kv), ("v", kv), ("dout", shape)] {
                    let [_, heads, _, channels] = shape;
                    own.f32(name, &[1, heads, range.len(), channels], &slice(&tensors, name, heads, range.clone()));
                }
                let keep = &keep[range.clone()];
                own.u8("key_mask", &[1, range.len()], keep).u8("query_mask", &[1, range.len()], keep);
                let (_, expected) = attend(&sandbox(config.clone(), &own), flags);
                assert_eq!(got.names(), expected.names());
                for name in expected.names().into_iter().filter(|name| expected.shape(name).len() > 2) {
                    let heads = expected.shape(name)[1];
                    let rows = slice(&got, name, heads, range.clone());
                    let expected: Vec<f32> = expected.values(name).iter().map(|&x| x as f32).collect();
                    assert_eq!(rows, expected, "{config} {flags:?} {name} {range:?}");
                }
            }
        }
    }
    // Of rank 2, with other keys, and how it will be done.
    let mut tensors = Tensors::default();
    tensors.noise("q", &[5, 3], 1).noise("k", &[7, 3], 2).noise("v", &[7, 2], 3);
    tensors.raw("cu_seqlens", Dtype::I32, &[3], integers(&[0, 2, 5]));
    tensors.raw("cu_seqlens_k", Dtype::I32, &[3], integers(&[0, 4, 7]));
    let sandbox = sandbox(json!({"mechanism": "softmax"}), &tensors);
    let (_, got) = attend(&sandbox, &[]);
    assert_eq!((got.shape("out"), got.shape("lse")), (&[5, 2][..], &[5][..]));
    let plan = ["attend", "--config", "m.json", "--input", "in.safetensors", "--plan", "--json"];
    let plan = sandbox.run(&plan).success().json();
    assert_eq!(plan["shape"]["sequences"], 2, "{plan}");
    assert_eq!(plan["plan"]["exps_forward"], 2 * 4 + 3 * 3);
}
