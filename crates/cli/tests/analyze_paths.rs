//! What `resolvent analyze` tells of paths: between the tokens of graphs that are known, beside the algorithm of Floyd and Warshall, and
//! beside the figures of hops that it reports.

mod support;

use serde_json::{Value, json};
use support::{Outcome, Sandbox, Tensors, resolvent};

fn command(sandbox: &Sandbox, tensors: &Tensors, args: &[&str]) -> Outcome {
    let input = sandbox.write("dump.safetensors", tensors.file());
    let mut command = resolvent();
    command.args(["analyze", "--input"]).arg(input).arg("--out").arg(sandbox.path("out")).args(args);
    Outcome::of(&mut command)
}

fn analyze(sandbox: &Sandbox, tensors: &Tensors, args: &[&str]) -> Value {
    command(sandbox, tensors, &[&["--json"], args].concat()).success().json()
}

fn graph<'a>(json: &'a Value, mechanism: &str) -> &'a Value {
    let own = |found: &&Value| found["mechanism"] == mechanism;
    &json["heads"].as_array().unwrap().iter().find(own).unwrap_or_else(|| panic!("no {mechanism}"))["graph"]
}

/// Queries and keys whose scores are `scores`, `[n, n]`, after division by the root of the channels.
fn scored(n: usize, score: impl Fn(usize, usize) -> f32) -> Tensors {
    let mut tensors = Tensors::default();
    let root = (n as f32).sqrt();
    let q: Vec<f32> = (0..n * n).map(|at| score(at / n, at % n)).collect();
    let k: Vec<f32> = (0..n * n).map(|at| if at / n == at % n { root } else { 0.0 }).collect();
    tensors.f32("q", &[n, n], &q).f32("k", &[n, n], &k).noise("v", &[n, 4], 3);
    tensors
}

#[track_caller]
fn near(value: &Value, expected: f64) {
    let got = value.as_f64().unwrap_or_else(|| panic!("{value} is no number"));
    assert!((got - expected).abs() <= 1e-6 * expected, "{got} is not {expected}");
}

/// A chain 0 to 3 by large scores, all others below zero: softmax has weak edges beside it, infsa none at all.
#[test]
fn the_paths_of_a_chain() {
    let sandbox = Sandbox::new();
    let tensors = scored(4, |i, j| if j == i + 1 { 4.0 } else { -1.0 });
    let asked = ["--mechanisms", "infsa,laplacian", "--path", "0,3", "--path", "3,0", "--hop-matrix"];
    let json = analyze(&sandbox, &tensors, &asked);
    let chain = &graph(&json, "infsa")["paths"];
    assert_eq!((&chain[0]["tokens"], &chain[0]["hops"]), (&json!([0, 1, 2, 3]), &3.into()));
    // Three equal scores over their Frobenius norm, times the decay of .7.
    let weight = 0.7 / 3.0_f64.sqrt();
    near(&chain[0]["weights"][2], weight);
    near(&chain[0]["length"], 3.0 / weight);
    let none = json!({"from": 3, "to": 0, "hops": null, "length": null, "tokens": [], "weights": []});
    assert_eq!(chain[1], none);
    let hops = json!([[0, 1, 2, 3], [null, 0, 1, 2], [null, null, 0, 1], [null, null, null, 0]]);
    assert_eq!(graph(&json, "infsa")["hop_matrix"], hops);
    // Rows of softmax: one score of 4 beside three of -1, and the last one even.
    let strong = 1.0 / (1.0 + 3.0 * (-5.0_f64).exp());
    let soft = &graph(&json, "softmax")["paths"];
    assert_eq!((&soft[0]["tokens"], &soft[1]["tokens"]), (&json!([0, 1, 2, 3]), &json!([3, 0])));
    near(&soft[0]["length"], 3.0 / strong);
    near(&soft[1]["length"], 4.0);
    // Weights below zero have no lengths.
    let laplacian = graph(&json, "laplacian");
    assert!(laplacian.get("paths").is_none() && laplacian.get("hop_matrix").is_none(), "{laplacian}");
    assert!(laplacian["notes"].to_string().contains("negative"), "{laplacian}");

    let page = std::fs::read_to_string(sandbox.path("out/report.html")).unwrap();
    for told in
        ["Paths between tokens", "no path", "0 →<small>0.404</small> 1", "Hops between the tokens of layer, head 0"]
    {
        assert!(page.contains(told), "{told}");
    }
    let printed = command(&sandbox, &tensors, &asked).success().stdout;
    for told in [
        "head 0: 0 -> 1 -> 2 -> 3: 3 hops, length 7.4231",
        "head 0: no path from 3 to 0",
        "3 -> 0: 1 hop, length 4.0000",
    ] {
        assert!(printed.contains(told), "{told}: {printed}");
    }
    // Earlier tokens lead nowhere later.
    let json = analyze(&sandbox, &tensors, &["--mechanisms", "fna", "--path", "0,3", "--path", "3,0", "--causal"]);
    for id in ["softmax", "fna"] {
        let paths = &graph(&json, id)["paths"];
        assert!(paths[0]["hops"].is_null() && paths[1]["hops"].is_u64(), "{paths}");
    }
    let plain = analyze(&sandbox, &tensors, &["--mechanisms", "fna"]);
    assert!(graph(&plain, "fna").get("paths").is_none() && graph(&plain, "fna").get("hop_matrix").is_none());
}

/// Lengths and hops between all pairs, by trying every token in between.
fn floyd_warshall(n: usize, weight: impl Fn(usize, usize) -> f64) -> Vec<(f64, u64)> {
    let edge = |at: usize| if at / n == at % n { (0.0, 0) } else { (1.0 / weight(at / n, at % n), 1) };
    let mut best: Vec<(f64, u64)> = (0..n * n).map(edge).collect();
    for via in 0..n {
        for at in 0..n * n {
            let (first, second) = (best[at / n * n + via], best[via * n + at % n]);
            let through = (first.0 + second.0, first.1 + second.1);
            best[at] = if through < best[at] { through } else { best[at] };
        }
    }
    best
}

/// The matrix is that of another algorithm, its figures are those that are reported, and the longest path has as many hops as these.
#[test]
fn the_longest_path_is_the_reported_one() {
    const N: usize = 60;
    let sandbox = Sandbox::new();
    let score = |i: usize, j: usize| 7.0 * ((i * 37 + j * 91 + i * j * 13) as f32).sin();
    let tensors = scored(N, score);
    let json = analyze(&sandbox, &tensors, &["--mechanisms", "fna", "--full", "--hop-matrix"]);
    let total: Vec<f64> = (0..N).map(|i| (0..N).map(|j| f64::from(score(i, j)).exp()).sum()).collect();
    let expected = floyd_warshall(N, |i, j| f64::from(score(i, j)).exp() / total[i]);
    let hops = |id: &str| -> Vec<u64> {
        let rows: Vec<Vec<u64>> = serde_json::from_value(graph(&json, id)["hop_matrix"].clone()).unwrap();
        rows.concat()
    };
    assert!(hops("softmax").iter().eq(expected.iter().map(|(_, hops)| hops)));
    for id in ["softmax", "fna"] {
        let (hops, told) = (hops(id), &graph(&json, id)["hops"]);
        assert_eq!(told["max"].as_u64(), hops.iter().copied().max());
        near(&told["mean"], hops.iter().sum::<u64>() as f64 / (N * (N - 1)) as f64);
    }
    let (farthest, (length, most)) = expected.iter().enumerate().max_by_key(|(_, (_, hops))| hops).unwrap();
    assert!(*most > 3, "a path worth looking for: {most}");
    let [from, to] = [farthest / N, farthest % N];
    let asked = ["--mechanisms", "softmax", "--path", &format!("{from},{to}")];
    let json = analyze(&sandbox, &tensors, &asked);
    let path = &graph(&json, "softmax")["paths"][0];
    assert_eq!(path["hops"].as_u64(), Some(*most));
    near(&path["length"], *length);
    let tokens: Vec<usize> = serde_json::from_value(path["tokens"].clone()).unwrap();
    assert_eq!((tokens[0], tokens[tokens.len() - 1], tokens.len() as u64), (from, to, most + 1));
    for (edge, weight) in tokens.windows(2).zip(path["weights"].as_array().unwrap()) {
        near(weight, f64::from(score(edge[0], edge[1])).exp() / total[edge[0]]);
    }
}

/// Sequences of different lengths: tokens that one of them lacks are no tokens of it, and its remark says so.
#[test]
fn paths_of_sequences_that_a_mask_cuts() {
    let sandbox = Sandbox::new();
    let mut tensors = Tensors::call(&[2, 1, 5, 4]);
    tensors.u8("key_mask", &[2, 5], &[1, 1, 1, 0, 0, 1, 1, 1, 1, 1]);
    let json =
        analyze(&sandbox, &tensors, &["--mechanisms", "softmax", "--path", "2,0", "--path", "0,4", "--hop-matrix"]);
    let graphs: Vec<&Value> = json["heads"].as_array().unwrap().iter().map(|head| &head["graph"]).collect();
    let count = |graph: &Value, field: &str| graph[field].as_array().unwrap().len();
    assert_eq!([count(graphs[0], "paths"), count(graphs[1], "paths")], [1, 2]);
    assert_eq!([count(graphs[0], "hop_matrix"), count(graphs[1], "hop_matrix")], [3, 5]);
    assert!(graphs[0]["notes"].to_string().contains("the sequence has 3 tokens: no path from 0 to 4"), "{}", graphs[0]);
    let page = std::fs::read_to_string(sandbox.path("out/report.html")).unwrap();
    assert!(page.contains("no path from 0 to 4"), "a remark");

    // Those that are absent at the beginning are none of the numbers.
    tensors.u8("key_mask", &[2, 5], &[0, 0, 1, 1, 1, 1, 1, 1, 1, 1]);
    let json = analyze(&sandbox, &tensors, &["--mechanisms", "softmax", "--path", "2,0"]);
    let notes: Vec<String> = json["heads"].as_array().unwrap().iter().map(|head| head["notes"].to_string()).collect();
    assert!(notes[0].contains("the first 2 tokens are left out: tokens are counted from the next"), "{notes:?}");
    assert!(!notes[1].contains("left out"), "{notes:?}");
}

#[test]
fn what_has_no_paths_is_refused() {
    let sandbox = Sandbox::new();
    let square = Tensors::call(&[1, 1, 5, 4]);
    let mut crossed = Tensors::default();
    crossed.noise("q", &[5, 4], 1).noise("k", &[6, 4], 2);
    let mut long = Tensors::default();
    long.noise("q", &[257, 1], 1);
    for (tensors, args, told) in [
        (&square, &["--path", "3,3"][..], "from token 3 to itself"),
        (&square, &["--path", "1,2", "--path", "1,2"], "1,2 twice"),
        (&square, &["--path", "1,5"], "layer `layer`, which has no token 5: it has 5, from 0 to 4"),
        (&crossed, &["--path", "0,1"], "other tokens for keys than for queries"),
        (&crossed, &["--hop-matrix"], "other tokens for keys than for queries"),
        (&long, &["--hop-matrix"], "257 tokens, and this is told of 256 at most; choose others with --layers"),
    ] {
        let outcome = command(&sandbox, tensors, args);
        assert!(outcome.failure(1).contains(told), "{told}: {}", outcome.stderr);
    }
    for args in [
        &["--path", "1"][..],
        &["--path", "1,-2"],
        &["--path", "0,1", "--fit", "0.9"],
        &["--hop-matrix", "--fit", "0.9"],
    ] {
        command(&sandbox, &square, args).failure(2);
    }
}
