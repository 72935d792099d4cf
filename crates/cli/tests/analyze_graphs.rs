//! What `resolvent analyze` says of graphs beside what a test computes from the same tensors: kernels of `fna`, diffusion maps,
//! clusters, landmarks on a grid; and what it says where there is nothing to say.

mod support;

use resolvent_kernels::{Extras, Inputs, Mask, Mechanism, Shape, reference};
use serde_json::{Value, json};
use support::{Outcome, Sandbox, Tensors, resolvent};

const N: usize = 16;
const D: usize = 4;

fn command(sandbox: &Sandbox, tensors: &Tensors, args: &[&str]) -> Outcome {
    let input = sandbox.write("dump.safetensors", tensors.file());
    let mut command = resolvent();
    command.args(["analyze", "--json", "--input"]).arg(input).arg("--out").arg(sandbox.path("out")).args(args);
    Outcome::of(&mut command)
}

fn analyze(sandbox: &Sandbox, tensors: &Tensors, args: &[&str]) -> Value {
    command(sandbox, tensors, args).success().json()
}

/// The analysis under one configuration beside softmax.
fn configured(sandbox: &Sandbox, tensors: &Tensors, config: &Value, args: &[&str]) -> Value {
    let path = sandbox.write("m.json", config.to_string()).display().to_string();
    analyze(sandbox, tensors, &[&["--mechanisms", &path], args].concat())
}

fn head<'a>(json: &'a Value, mechanism: &str, head: usize) -> &'a Value {
    let own = |found: &&Value| found["mechanism"] == mechanism && found["head"] == head;
    json["heads"].as_array().unwrap().iter().find(own).unwrap_or_else(|| panic!("no {mechanism} on head {head}"))
}

fn page(sandbox: &Sandbox) -> String {
    std::fs::read_to_string(sandbox.path("out/report.html")).unwrap()
}

#[track_caller]
fn near(value: &Value, expected: f64, tol: f64) {
    let got = value.as_f64().unwrap_or_else(|| panic!("{value} is no number"));
    assert!((got - expected).abs() <= tol * expected.abs().max(1.0), "{got} is not {expected}");
}

fn row(x: &[f64], i: usize) -> &[f64] {
    &x[i * D..][..D]
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// The mean over the rows of `exp` of their entropies.
fn perplexity(weights: impl Fn(usize, usize) -> f64) -> f64 {
    let of_row = |i: usize| {
        let row: Vec<f64> = (0..N).map(|j| weights(i, j)).collect();
        let total: f64 = row.iter().sum();
        row.iter().map(|w| -(w / total) * (w / total).ln()).sum::<f64>().exp()
    };
    (0..N).map(of_row).sum::<f64>() / N as f64
}

/// On the sphere the intrinsic dimension depends on the number of heads: the graph is of the heads that were called.
#[test]
fn fna_has_the_graph_of_its_call_in_f64() {
    let sandbox = Sandbox::new();
    let tensors = Tensors::call(&[2, N, D]);
    let json = configured(&sandbox, &tensors, &json!({"mechanism": "fna", "manifold": "sphere"}), &[]);
    let (q, k) = (tensors.values("q"), tensors.values("k"));
    let pi = std::f64::consts::PI;
    let (dim, alpha) = (D as f64, 1.2);
    let kappa = pi / (pi.powf(1.0 / dim) - 1.0);
    for h in 0..2 {
        let own = |x: &[f64]| x[h * N * D..][..N * D].to_vec();
        let (q, k) = (own(&q), own(&k));
        let weight = |i: usize, j: usize| {
            let (q, k) = (row(&q, i), row(&k, j));
            let angle = (dot(q, k) / (dot(q, q) * dot(k, k)).sqrt()).acos();
            (1.0 + angle / kappa).powf(-dim - alpha)
        };
        near(&head(&json, "fna", h)["graph"]["perplexity"], perplexity(weight), 1e-9);
    }
}

/// At the length scale that is told, rows are as sharp as softmax's; a tied mechanism has its queries for keys.
#[test]
fn the_matched_scale_matches() {
    let sandbox = Sandbox::new();
    let tensors = Tensors::call(&[1, N, D]);
    for tied in [false, true] {
        let fna = |kappa: f64| json!({"mechanism": "fna", "kappa": kappa, "tied": tied});
        let json = configured(&sandbox, &tensors, &fna(3.0), &[]);
        let matched = head(&json, "fna", 0)["graph"]["matched_kappa"].as_f64().unwrap();
        let json = configured(&sandbox, &tensors, &fna(3.0 * matched), &[]);
        let softmax = head(&json, "softmax", 0)["graph"]["perplexity"].as_f64().unwrap();
        near(&head(&json, "fna", 0)["graph"]["perplexity"], softmax, 1e-4);
        assert_eq!(page(&sandbox).contains("served as both: m"), tied);
    }
    let json = configured(&sandbox, &tensors, &json!({"mechanism": "fna", "norm_exponent": 1.0}), &[]);
    let graph = &head(&json, "fna", 0)["graph"];
    assert!(graph["matched_kappa"].is_null() && graph["notes"].to_string().contains("density"), "{graph}");
}

/// A head's slopes, maps and draws are those that it has in the call, not those of a call with one head and one sequence.
#[test]
fn heads_have_what_their_call_gives_them() {
    let sandbox = Sandbox::new();
    let tensors = Tensors::call(&[2, 3, N, D]);
    let [q, k] = ["q", "k"].map(|name| tensors.values(name));
    let shape = Shape::square(1, 3, N, D);
    for config in [
        json!({"mechanism": "softmax", "bias": "alibi"}),
        json!({"mechanism": "fna", "bias": "alibi"}),
        json!({"mechanism": "linformer", "count": 8, "per_head": true}),
        json!({"mechanism": "soft", "landmarks": {"kind": "random", "count": 6, "seed": 3}}),
    ] {
        let analysis = configured(&sandbox, &tensors, &config, &[]);
        let mechanism = Mechanism::from_value(config.clone()).unwrap();
        for sequence in 0..2 {
            let of = |x: &[f64]| x[sequence * 3 * N * D..][..3 * N * D].to_vec();
            let (q, k, v) = (of(&q), of(&k), vec![0.0; 3 * N * D]);
            let k = (!mechanism.tied).then_some(&k[..]);
            let extras = Extras::default().with_first_sequence(sequence);
            let inputs = Inputs { q: &q, k, v: &v, extras };
            let call = reference::forward(&mechanism, &shape, &inputs, &Mask::NONE).unwrap();
            for (number, weights) in call.weights().chunks(N * N).enumerate() {
                let sums: Vec<f64> = weights.chunks(N).map(|row| row.iter().sum()).collect();
                let own = |found: &&Value| {
                    found["mechanism"] == mechanism.id() && found["head"] == number && found["sequence"] == sequence
                };
                let heads = analysis["heads"].as_array().unwrap();
                let graph = &heads.iter().rev().find(own).unwrap()["graph"];
                near(&graph["row_sums"][0], sums.iter().copied().fold(f64::INFINITY, f64::min), 1e-4);
                near(&graph["row_sums"][2], sums.iter().copied().fold(f64::NEG_INFINITY, f64::max), 1e-4);
                assert!(config["bias"].is_null() || graph["perplexity"].is_number(), "{config}: {graph}");
                if let Some(rows) = graph["perplexity"].as_f64() {
                    assert!((rows - perplexity(|i, j| weights[i * N + j])).abs() < 1e-3, "{config}, {number}: {rows}");
                }
            }
        }
    }
}

/// All eigenvalues take a time that grows with the cube of the tokens.
#[test]
fn the_gap_of_many_tokens_weights_is_told_in_full() {
    let sandbox = Sandbox::new();
    let told = |tokens: usize, more: &[&str]| {
        let mut tensors = Tensors::default();
        tensors.noise("q", &[tokens, D], 1).noise("v", &[tokens, D], 2);
        let json = analyze(&sandbox, &tensors, &[&["--mechanisms", "softmax"], more].concat());
        head(&json, "softmax", 0)["graph"]["walk_gap"].is_number()
    };
    assert!(told(512, &[]) && !told(513, &[]) && told(513, &["--full"]));
}

/// Eigenvalues of triangular weights are their diagonal, and all copies of one count.
#[test]
fn eigenvalues_of_weights_that_are_far_from_normal() {
    let sandbox = Sandbox::new();
    let mut tensors = Tensors::default();
    let q: Vec<f32> = (0..60 * D).map(|at| 3.0 * (at as f32 * 1.7).sin()).collect();
    tensors.f32("q", &[60, D], &q).noise("v", &[60, D], 4);
    let json = analyze(&sandbox, &tensors, &["--causal", "--full"]);
    let graph = &head(&json, "softmax", 0)["graph"];
    let token = |i: usize| q[i * D..][..D].iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let score = |i: usize, j: usize| dot(&token(i), &token(j)) / (D as f64).sqrt();
    let own = |i: usize| 1.0 / (0..=i).map(|j| (score(i, j) - score(i, i)).exp()).sum::<f64>();
    let mut diagonal: Vec<f64> = (0..60).map(own).collect();
    diagonal.sort_by(|a, b| b.total_cmp(a));
    near(&graph["walk_gap"], 1.0 - diagonal[1], 1e-9);
    for (modulus, expected) in graph["full"]["moduli"].as_array().unwrap().iter().zip(&diagonal) {
        near(modulus, *expected, 1e-9);
    }
    let json = configured(&sandbox, &tensors, &json!({"mechanism": "local", "window": 1}), &["--full"]);
    near(&head(&json, "local", 0)["graph"]["walk_gap"], 0.0, 1e-12);
}

/// Calls that f32 refuses have no time and no row sums, and are not taken for ones that return nothing.
#[test]
fn refused_calls_are_not_measured() {
    let sandbox = Sandbox::new();
    let mut tensors = Tensors::call(&[3, 2, N, D]);
    let mut q: Vec<f32> = tensors.values("q").iter().map(|&x| x as f32).collect();
    for sequence in 0..2 {
        q[sequence * 2 * N * D] = 400.0;
    }
    tensors.f32("q", &[3, 2, N, D], &q);
    let json = analyze(&sandbox, &tensors, &["--mechanisms", "performer"]);
    let calls: Vec<&Value> = json["calls"].as_array().unwrap().iter().collect();
    let of = |sequence: usize| calls.iter().find(|c| c["name"] == "performer" && c["sequence"] == sequence).unwrap();
    assert!(of(0)["seconds"].is_null() && of(2)["seconds"].is_number(), "{} {}", of(0), of(2));
    let sentence = json["verdicts"][1]["sentence"].as_str().unwrap();
    assert!(sentence.contains("not finite") && !sentence.contains("no weight at all"), "{sentence}");
}

/// The map's coordinates are eigenvectors of the walk times their eigenvalues, of one size under the stationary distribution.
#[test]
fn diffusion_maps_are_of_the_walk() {
    let sandbox = Sandbox::new();
    let tensors = Tensors::call(&[2, N, D]);
    let json = analyze(&sandbox, &tensors, &["--mechanisms", "infsa,laplacian", "--full"]);
    let (q, k) = (tensors.values("q"), tensors.values("k"));
    let score = |i: usize, j: usize| (dot(row(&q, i), row(&k, j)) / (D as f64).sqrt()).exp();
    let w = |i: usize, j: usize| 0.5 * (score(i, j) + score(j, i));
    let degree: Vec<f64> = (0..N).map(|i| (0..N).map(|j| w(i, j)).sum()).collect();
    let volume: f64 = degree.iter().sum();
    let graph = &head(&json, "softmax", 0)["graph"];
    let map: Vec<[f64; 2]> = serde_json::from_value(graph["diffusion_map"].clone()).unwrap();
    assert_eq!(map.len(), N);
    for axis in 0..2 {
        let eta = graph["eigenvalues"][axis + 1].as_f64().unwrap();
        for (i, place) in map.iter().enumerate() {
            let walked: f64 = (0..N).map(|j| w(i, j) / degree[i] * map[j][axis]).sum();
            assert!((walked - eta * place[axis]).abs() < 1e-9, "{walked} {eta} {place:?}");
        }
        let size: f64 = map.iter().zip(&degree).map(|(place, d)| d / volume * place[axis].powi(2)).sum();
        assert!((size - eta * eta).abs() < 1e-9, "{size} {eta}");
    }
    // Drawn are the first heads of mechanisms whose graphs have no negative weights.
    assert!(head(&json, "softmax", 1)["graph"].get("diffusion_map").is_none());
    let page = page(&sandbox);
    assert!(page.contains("Diffusion map of layer: softmax, 16 tokens") && page.contains("token 15: "));
    assert!(page.contains("Diffusion map of layer: infsa") && !page.contains("Diffusion map of layer: laplacian"));
}

/// Two groups of tokens, far apart: the clusters are these, and the distortion is that of the definition.
#[test]
fn two_stage_distortion_of_two_groups() {
    let sandbox = Sandbox::new();
    let mut tensors = Tensors::default();
    tensors.noise("q", &[N, D], 1).noise("k", &[N, D], 2).noise("v", &[N, D], 3);
    let moved = |name: &str| -> Vec<f32> {
        let x = tensors.values(name);
        x.iter().enumerate().map(|(at, x)| *x as f32 + if (at / D).is_multiple_of(2) { 3.0 } else { -3.0 }).collect()
    };
    let (q, k) = (moved("q"), moved("k"));
    tensors.f32("q", &[N, D], &q).f32("k", &[N, D], &k);
    let json = configured(&sandbox, &tensors, &json!({"mechanism": "ssa", "clusters": 2}), &["--full"]);
    let (q, k) = (tensors.values("q"), tensors.values("k"));
    let mean = |x: &[f64], group: usize| -> Vec<f64> {
        (0..D).map(|c| (group..N).step_by(2).map(|i| x[i * D + c]).sum::<f64>() / (N / 2) as f64).collect()
    };
    let size = (N / 2) as f64;
    let score = |x: &[f64], y: &[f64]| (dot(x, y) / (D as f64).sqrt()).exp();
    let group_score = |a: usize| score(&mean(&q, a), &mean(&k, 1 - a));
    let remote = || (0..N * N).map(|at| (at / N, at % N)).filter(|(i, j)| i % 2 != j % 2);
    let all_wanted: f64 = remote().map(|(i, j)| score(row(&q, i), row(&k, j))).sum();
    let all_drawn = size * size * (group_score(0) + group_score(1));
    let ratio = |(i, j)| score(row(&q, i), row(&k, j)) / all_wanted / (group_score(i % 2) / all_drawn);
    let expected = remote().map(|pair| ratio(pair).max(1.0 / ratio(pair))).fold(1.0, f64::max);
    let graph = &head(&json, "ssa", 0)["graph"];
    assert_eq!(graph["clusters"]["clusters"], 2);
    near(&graph["distortion"], expected, 1e-9);
    assert!(page(&sandbox).contains("Two-stage distortion"));
}

/// Landmarks over windows of a grid: what is lost is how far the operator is from its kernel.
#[test]
fn landmarks_on_a_grid() {
    let sandbox = Sandbox::new();
    let mut tensors = Tensors::default();
    tensors.noise("q", &[1, N, D], 3).noise("v", &[1, N, D], 4);
    let config =
        json!({"mechanism": "soft", "inverse": "cholesky", "grid": [2, 8], "landmarks": {"kind": "pool", "ratio": 3}});
    sandbox.write("soft.json", config.to_string());
    sandbox.write("in.safetensors", tensors.file());
    let args =
        ["attend", "--config", "soft.json", "--input", "in.safetensors", "--output", "out.safetensors", "--weights"];
    sandbox.run(&args).success();
    let weights = Tensors::read(&sandbox.path("out.safetensors")).values("weights");
    let q = tensors.values("q");
    let kernel = |at: usize| {
        let square: f64 = row(&q, at / N).iter().zip(row(&q, at % N)).map(|(x, y)| (x - y).powi(2)).sum();
        (-0.5 * square / (D as f64).sqrt()).exp()
    };
    let exact: Vec<f64> = (0..N * N).map(kernel).collect();
    let lost: f64 = weights.iter().zip(&exact).map(|(w, k)| (w - k).powi(2)).sum();
    let json = configured(&sandbox, &tensors, &config, &[]);
    let found = &head(&json, "soft", 0)["graph"]["landmarks"];
    assert_eq!(found["landmarks"], 3);
    near(&found["error"], (lost / dot(&exact, &exact)).sqrt(), 1e-5);
}

/// Equal tokens: nothing is more important, so that nothing is correlated; and `--full` takes no report away.
#[test]
fn equal_tokens_rank_nothing() {
    let sandbox = Sandbox::new();
    let mut tensors = Tensors::default();
    tensors.f32("q", &[N, D], &[0.5; N * D]).noise("v", &[N, D], 4);
    let json = analyze(&sandbox, &tensors, &["--mechanisms", "fna,soft,laplacian", "--full"]);
    for id in ["fna", "soft"] {
        let graph = &head(&json, id, 0)["graph"];
        assert!(graph["centrality"]["spearman"].is_null(), "{graph}");
        assert!(graph["notes"].to_string().contains("equally important"), "{graph}");
    }
    assert!(!json["verdicts"].to_string().contains("rank correlation"), "{}", json["verdicts"]);
    // Kernels of one, 16 by pooled means: all but one eigenvalue is the ridge.
    let landmarks = &head(&json, "soft", 0)["graph"]["landmarks"];
    near(&landmarks["condition"], 4.01 / 0.01, 1e-6);
    assert!(landmarks["newton_residual"].as_f64().unwrap() < 1e-3, "{landmarks}");
}

/// No positive product: no weights at all, and the verdict says so.
#[test]
fn a_graph_without_weights_is_told() {
    let sandbox = Sandbox::new();
    let mut tensors = Tensors::default();
    let ones: Vec<f32> = (0..N * D).map(|at| 1.0 + at as f32 / 64.0).collect();
    let minus: Vec<f32> = ones.iter().map(|x| -x).collect();
    tensors.f32("q", &[N, D], &ones).f32("k", &[N, D], &minus).noise("v", &[N, D], 4);
    let json = analyze(&sandbox, &tensors, &["--mechanisms", "infsa"]);
    let verdict = json["verdicts"].as_array().unwrap().iter().find(|verdict| verdict["mechanism"] == "infsa").unwrap();
    let sentence = verdict["sentence"].as_str().unwrap();
    assert!(sentence.contains("no weight at all") && !sentence.contains("narrower"), "{sentence}");
    assert!(head(&json, "infsa", 0)["graph"]["notes"].to_string().contains("nothing to cut"));
}

/// Layers keep their names in the charts, in the order asked for; what some heads lack is counted.
#[test]
fn the_report_names_layers_and_counts_heads() {
    let sandbox = Sandbox::new();
    let mut tensors = Tensors::default();
    for layer in ["l.10", "l.2"] {
        tensors.noise(&format!("{layer}.q"), &[N, D], 3).noise(&format!("{layer}.v"), &[N, D], 4);
    }
    // One layer on which soft has negative weights, or at least another number of heads with hops, than the other.
    tensors.f32("l.2.q", &[N, D], &[0.5; N * D]);
    analyze(&sandbox, &tensors, &["--mechanisms", "fna", "--layers", "l.10,l.2"]);
    let page = page(&sandbox);
    assert!(page.contains(r#""names":["l.10","l.2"]"#), "what the page's script tells");
    let row = |layer: &str| page.find(&format!(">{layer}</th>")).unwrap();
    assert!(row("l.10") < row("l.2"), "the table below a chart");
    // Importance ranks nothing on the second.
    assert!(page.contains("<small>of 1</small>"), "{page}");
    for (args, why) in
        [(&["--layers", "l.2,l.2"][..], "`l.2` twice"), (&["--mechanisms", "causal.json,uniform"], "say --causal")]
    {
        let config = sandbox.write("causal.json", r#"{"mechanism": "softmax", "causal": true}"#).display().to_string();
        let args: Vec<String> = args.iter().map(|arg| arg.replace("causal.json", &config)).collect();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let outcome = command(&sandbox, &tensors, &args);
        assert!(outcome.failure(1).contains(why), "{}", outcome.failure(1));
    }
    let mut wide = Tensors::default();
    wide.raw("q", safetensors::Dtype::F64, &[1, 2], [1.0, 1e300_f64].iter().flat_map(|x| x.to_le_bytes()).collect());
    assert!(command(&sandbox, &wide, &[]).failure(1).contains("`q` is 1e300, beyond f32, at [0, 0, 0, 1]"));
    let mut masked = Tensors::call(&[2, 1, 3, D]);
    masked.u8("key_mask", &[3], &[1, 1, 0]);
    let outcome = command(&sandbox, &masked, &[]);
    let told = outcome.failure(1);
    assert!(told.contains("[1, 3]") && told.contains("expected [2, 3]"), "{told}");
}

/// Tokens keep their places: a mask leaves out some at the ends, not between others, and none that queries are aligned with.
#[test]
fn masks_that_would_move_tokens_are_refused() {
    let sandbox = Sandbox::new();
    let mut holes = Tensors::call(&[1, N, D]);
    let absent = |at: usize| u8::from(at % 3 != 2);
    holes.u8("key_mask", &[1, N], &(0..N).map(absent).collect::<Vec<_>>());
    let outcome = command(&sandbox, &holes, &["--mechanisms", "local"]);
    assert!(outcome.failure(1).contains("between others"), "{}", outcome.failure(1));
    let mut ends = Tensors::call(&[1, N, D]);
    ends.u8("key_mask", &[1, N], &(0..N).map(|at| u8::from((2..N - 3).contains(&at))).collect::<Vec<_>>());
    command(&sandbox, &ends, &["--mechanisms", "local"]).success();
    let mut cross = Tensors::default();
    cross.noise("q", &[1, 1, N, D], 1).noise("k", &[1, 1, N + 4, D], 2).noise("v", &[1, 1, N + 4, D], 3);
    cross.u8("key_mask", &[1, N + 4], &(0..N + 4).map(|at| u8::from(at < N)).collect::<Vec<_>>());
    let refusals = |arguments: &[&str]| -> Vec<Option<String>> {
        let calls = analyze(&sandbox, &cross, arguments)["calls"].as_array().unwrap().clone();
        calls.iter().map(|call| call["refused"].as_str().map(str::to_owned)).collect()
    };
    let moved = |why: &Option<String>| why.as_ref().is_some_and(|why| why.contains("mask leaves out the last"));
    let local = refusals(&["--mechanisms", "uniform,local"]);
    assert!(local.len() == 3 && local[..2] == [None, None] && moved(&local[2]), "{local:?}");
    let causal = refusals(&["--mechanisms", "uniform", "--causal"]);
    assert!(causal.len() == 2 && causal.iter().all(moved), "{causal:?}");
    // Without the first keys, the last still stand side by side.
    cross.u8("key_mask", &[1, N + 4], &(0..N + 4).map(|at| u8::from(at >= 4)).collect::<Vec<_>>());
    let calls = analyze(&sandbox, &cross, &["--mechanisms", "local", "--causal"])["calls"].as_array().unwrap().clone();
    assert!(calls.len() == 2 && calls.iter().all(|call| call["refused"].is_null()), "{calls:?}");
}

/// As many keys as queries, by a mask, are still other tokens: no graph, and nothing of what needs one.
#[test]
fn a_mask_makes_no_graph_of_cross_attention() {
    let sandbox = Sandbox::new();
    let mut tensors = Tensors::default();
    tensors.noise("q", &[2, 1, N, D], 1).noise("k", &[2, 1, N + 4, D], 2).noise("v", &[2, 1, N + 4, D], 3);
    let mask: Vec<u8> = (0..2 * (N + 4)).map(|at| u8::from(at >= 4)).collect();
    tensors.u8("key_mask", &[2, N + 4], &mask);
    let json = analyze(&sandbox, &tensors, &["--mechanisms", "fna,soft,infsa-resolvent"]);
    for call in json["calls"].as_array().unwrap() {
        let alone = ["soft", "infsa-resolvent"].contains(&call["mechanism"]["mechanism"].as_str().unwrap());
        assert_eq!(call["refused"].is_string(), alone, "{call}");
    }
    assert!(json["heads"].as_array().unwrap().iter().all(|head| head["graph"].is_null()), "{}", json["heads"]);
}

/// What cannot be applied to most heads does not replace softmax, however near it is on the others.
#[test]
fn heads_that_refuse_count() {
    let sandbox = Sandbox::new();
    let mut tensors = Tensors::default();
    tensors.noise("own.q", &[N, D], 4).noise("own.v", &[N, D], 3);
    for name in ["a", "b"] {
        tensors.noise(&format!("{name}.q"), &[N, D], 1).noise(&format!("{name}.k"), &[N + 1, D], 2);
    }
    // One cluster of all tokens is dense softmax.
    let json = configured(&sandbox, &tensors, &json!({"mechanism": "ssa", "clusters": 1}), &[]);
    let ssa = &json["verdicts"][1];
    assert_eq!((&ssa["numbers"]["close"], &ssa["numbers"]["refused"]), (&1.into(), &2.into()), "{ssa}");
    assert_eq!(ssa["finding"], "some-heads");
    let sentence = ssa["sentence"].as_str().unwrap();
    assert!(sentence.contains("in 1 of 3 heads") && sentence.contains("To 2 heads it cannot be applied"), "{sentence}");
    assert!(page(&sandbox).contains("1 of 3") && page(&sandbox).contains("m: cannot be applied to 2 heads"));
}
