//! The numbers of `resolvent analyze` beside those that a test computes for itself, in f64, from the same tensors; and its
//! verdicts where softmax, or a mechanism, has no output that could be compared.

mod support;

use serde_json::Value;
use support::{Outcome, Sandbox, Tensors, resolvent};

const N: usize = 20;
const D: usize = 4;

fn analyze(sandbox: &Sandbox, tensors: &Tensors, args: &[&str]) -> Value {
    let input = sandbox.write("dump.safetensors", tensors.file());
    let mut command = resolvent();
    command.args(["analyze", "--json", "--input"]).arg(input).arg("--out").arg(sandbox.path("out")).args(args);
    Outcome::of(&mut command).success().json()
}

fn head<'a>(json: &'a Value, mechanism: &str, head: usize) -> &'a Value {
    let own = |found: &&Value| found["mechanism"] == mechanism && found["head"] == head;
    json["heads"].as_array().unwrap().iter().find(own).unwrap_or_else(|| panic!("no {mechanism} on head {head}"))
}

fn verdict<'a>(json: &'a Value, id: &str) -> &'a Value {
    json["verdicts"].as_array().unwrap().iter().find(|verdict| verdict["mechanism"] == id).unwrap()
}

#[track_caller]
fn near(value: &Value, expected: f64, tol: f64) {
    let got = value.as_f64().unwrap_or_else(|| panic!("{value} is no number"));
    assert!((got - expected).abs() <= tol * expected.abs().max(1.0), "{got} is not {expected}");
}

/// `exp(scale q_i.k_j)` of one head.
fn kernel(q: &[f64], k: &[f64]) -> Vec<Vec<f64>> {
    let dot = |i: usize, j: usize| (0..D).map(|c| q[i * D + c] * k[j * D + c]).sum::<f64>() / (D as f64).sqrt();
    (0..N).map(|i| (0..N).map(|j| dot(i, j).exp()).collect()).collect()
}

fn perplexity(rows: &[Vec<f64>]) -> f64 {
    let entropy = |row: &Vec<f64>| {
        let total: f64 = row.iter().sum();
        row.iter().filter(|w| **w > 0.0).map(|w| -(w / total) * (w / total).ln()).sum::<f64>()
    };
    rows.iter().map(|row| entropy(row).exp()).sum::<f64>() / rows.len() as f64
}

/// The eigenvalues of a symmetric matrix, descending, by Jacobi's rotations.
fn spectrum(mut a: Vec<Vec<f64>>) -> Vec<f64> {
    let n = a.len();
    for (p, q) in (0..40).flat_map(|_| (0..n).flat_map(|p| (p + 1..n).map(move |q| (p, q)))) {
        if a[p][q].abs() > 1e-300 {
            let angle = 0.5 * (2.0 * a[p][q]).atan2(a[q][q] - a[p][p]);
            let (s, c) = angle.sin_cos();
            for row in a.iter_mut() {
                (row[p], row[q]) = (c * row[p] - s * row[q], s * row[p] + c * row[q]);
            }
            let [first, second] = [p, q].map(|row| a[row].clone());
            let turned = |c: f64, s: f64| first.iter().zip(&second).map(|(x, y)| c * x + s * y).collect();
            (a[p], a[q]) = (turned(c, -s), turned(s, c));
        }
    }
    let mut values: Vec<f64> = (0..n).map(|i| a[i][i]).collect();
    values.sort_by(|x, y| y.total_cmp(x));
    values
}

/// The error of `out` after the best factor, and as it is.
fn errors(out: &[f64], reference: &[f64]) -> (f64, f64) {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let far = |c: f64| {
        let rest: Vec<f64> = out.iter().zip(reference).map(|(x, y)| c * x - y).collect();
        (dot(&rest, &rest) / dot(reference, reference)).sqrt()
    };
    (far(dot(out, reference) / dot(out, out)), far(1.0))
}

#[test]
fn softmax_and_the_mean_are_those_of_the_definitions() {
    let sandbox = Sandbox::new();
    let tensors = Tensors::call(&[2, N, D]);
    let json = analyze(&sandbox, &tensors, &["--mechanisms", "uniform", "--full"]);
    let [q, k, v] = ["q", "k", "v"].map(|name| tensors.values(name));
    for h in 0..2 {
        let own = |x: &[f64]| x[h * N * D..][..N * D].to_vec();
        let (w, v) = (kernel(&own(&q), &own(&k)), own(&v));
        let graph = &head(&json, "softmax", h)["graph"];
        near(&graph["perplexity"], perplexity(&w), 1e-9);
        let symmetric = |i: usize, j: usize| 0.5 * (w[i][j] + w[j][i]);
        let degree: Vec<f64> = (0..N).map(|i| (0..N).map(|j| symmetric(i, j)).sum()).collect();
        let walk = (0..N).map(|i| (0..N).map(|j| symmetric(i, j) / (degree[i] * degree[j]).sqrt()).collect()).collect();
        let values = spectrum(walk);
        near(&graph["gap"], 1.0 - values[1], 1e-9);
        (0..16).for_each(|rank| near(&graph["eigenvalues"][rank], values[rank], 1e-9));
        let spread = (2.0 * values[1..].iter().map(|eta| eta * eta).sum::<f64>()).sqrt();
        near(&graph["diffusion"][0], spread, 1e-9);
        // Rows of one: every token starts as many walks, and keeps what the decay leaves.
        (0..3).for_each(|at| near(&graph["walks"]["absorption"][at], 0.15, 1e-5));
        let (low, high) = degree.iter().fold((f64::MAX, 0.0_f64), |(l, h), &d| (l.min(d), h.max(d)));
        near(&graph["degree_ratio"], high / low, 1e-9);
        let size = |f: &dyn Fn(usize, usize) -> f64| (0..N * N).map(|at| f(at / N, at % N).powi(2)).sum::<f64>().sqrt();
        near(&graph["asymmetry"], size(&|i, j| w[i][j] - w[j][i]) / size(&|i, j| w[i][j]), 1e-9);
        let softmax: Vec<f64> = (0..N * D)
            .map(|at| {
                let row = &w[at / D];
                (0..N).map(|j| row[j] * v[j * D + at % D]).sum::<f64>() / row.iter().sum::<f64>()
            })
            .collect();
        let mean: Vec<f64> = (0..N * D).map(|at| (0..N).map(|j| v[j * D + at % D]).sum::<f64>() / N as f64).collect();
        let (scaled, relative) = errors(&mean, &softmax);
        let uniform = head(&json, "uniform", h);
        near(&uniform["output"]["scaled"], scaled, 1e-5);
        near(&uniform["output"]["relative"], relative, 1e-5);
        near(&uniform["mean_of_values"], scaled, 1e-5);
    }
}

/// The graph of every head is that of the call which its error is of: `ssa` plans each head of a call differently.
#[test]
fn the_graph_is_that_of_the_call() {
    let sandbox = Sandbox::new();
    let tensors = Tensors::call(&[3, N, D]);
    sandbox.write("ssa.json", r#"{"mechanism": "ssa"}"#);
    sandbox.write("in.safetensors", tensors.file());
    let args =
        ["attend", "--config", "ssa.json", "--input", "in.safetensors", "--output", "out.safetensors", "--weights"];
    sandbox.run(&args).success();
    let weights = Tensors::read(&sandbox.path("out.safetensors")).values("weights");
    let json = analyze(&sandbox, &tensors, &["--mechanisms", "ssa"]);
    let rows: Vec<Vec<f64>> = weights.chunks(N).map(<[f64]>::to_vec).collect();
    for h in 0..3 {
        near(&head(&json, "ssa", h)["graph"]["perplexity"], perplexity(&rows[h * N..][..N]), 1e-5);
    }
    let other = analyze(&sandbox, &tensors, &["--mechanisms", "ssa", "--seed", "5"]);
    let call = |json: &Value| json["calls"][1]["mechanism"]["seed"].clone();
    assert_eq!((call(&json), call(&other)), (0.into(), 5.into()));
    assert_ne!(head(&other, "ssa", 0)["output"], head(&json, "ssa", 0)["output"], "another plan");
}

/// The verdict on one mechanism does not depend on which others are asked for.
#[test]
fn verdicts_stand_alone() {
    let sandbox = Sandbox::new();
    let tensors = Tensors::call(&[2, N, D]);
    let among = analyze(&sandbox, &tensors, &["--mechanisms", "laplacian,infsa,uniform"]);
    for id in ["laplacian", "infsa"] {
        let alone = analyze(&sandbox, &tensors, &["--mechanisms", id]);
        for field in ["finding", "numbers/mean_of_values", "numbers/error_median"] {
            let pointer = format!("/{field}");
            assert_eq!(verdict(&alone, id).pointer(&pointer), verdict(&among, id).pointer(&pointer), "{id} {field}");
        }
    }
    assert_eq!(verdict(&among, "laplacian")["finding"], "not-here");
    let causal = analyze(&sandbox, &tensors, &["--mechanisms", "uniform", "--causal"]);
    let told = verdict(&causal, "uniform")["sentence"].as_str().unwrap();
    assert!(told.contains("of the tokens so far") && !told.contains("the same value"), "{told}");
}

/// Values of zero, and scores beyond f32: softmax has nothing to compare with, and no mechanism "replaces" it.
#[test]
fn nothing_replaces_what_is_not_there() {
    let sandbox = Sandbox::new();
    let mut zero = Tensors::call(&[N, D]);
    zero.f32("v", &[N, D], &[0.0; N * D]);
    let mut huge = Tensors::call(&[N, D]);
    for name in ["q", "k"] {
        let values: Vec<f32> = huge.values(name).iter().map(|&x| (x * 1e25) as f32).collect();
        huge.f32(name, &[N, D], &values);
    }
    for (tensors, why) in [(&zero, "softmax's output is zero"), (&huge, "the scores leave f32")] {
        let json = analyze(&sandbox, tensors, &[]);
        for id in ["uniform", "infsa", "ssa", "fna", "laplacian"] {
            let found = verdict(&json, id);
            // Scores that leave f32 are refused as well where a mechanism makes them.
            let (finding, why) = match id {
                "ssa" if why.contains("scores") => ("refused", "tensor `q`"),
                _ => ("incomparable", why),
            };
            assert_eq!(found["finding"], finding, "{found}");
            assert!(found["sentence"].as_str().unwrap().contains(why) && found["numbers"]["error_median"].is_null());
            assert!(finding == "refused" || head(&json, id, 0)["output"].is_null());
        }
        let softmax = head(&json, "softmax", 0);
        assert!(softmax["notes"][0].as_str().unwrap().contains(why), "{softmax}");
        let page = std::fs::read_to_string(sandbox.path("out").join("report.html")).unwrap();
        let text = format!("{page}{json}");
        for broken in ["NaN", ">inf<", " inf "] {
            assert!(
                !text.contains(broken),
                "{broken}: {}",
                &text[text.find(broken).unwrap().saturating_sub(80)..][..160]
            );
        }
    }
}

/// Two groups of tokens that do not see each other, in turns, and one without edges: no gap, a free cut, no mixing.
#[test]
fn disconnected_graphs_have_free_cuts() {
    let sandbox = Sandbox::new();
    let q: Vec<f32> = (0..9)
        .flat_map(|i| match i {
            4 => [0.0, 0.0],
            _ if i % 2 == 0 => [1.0 + i as f32 / 9.0, 0.0],
            _ => [0.0, 1.0],
        })
        .collect();
    let mut tensors = Tensors::default();
    tensors.f32("q", &[9, 2], &q).noise("v", &[9, 2], 3);
    let json = analyze(&sandbox, &tensors, &["--mechanisms", "infsa,infsa-resolvent", "--full"]);
    for id in ["infsa", "infsa-resolvent"] {
        let graph = &head(&json, id, 0)["graph"];
        assert_eq!((graph["gap"].as_f64().unwrap() < 1e-9, graph["cheeger"].as_f64()), (true, Some(0.0)), "{graph}");
        assert!(graph["mixing"].is_null() && graph["notes"].to_string().contains("never mixes"));
        assert!(graph.get("diffusion_map").is_none() && graph["notes"].to_string().contains("no map of it"));
    }
}

/// Many sequences: all are in the JSON, the report lists the first and says so.
#[test]
fn a_long_dump_has_a_short_report() {
    let sandbox = Sandbox::new();
    let tensors = Tensors::call(&[1001, 1, 3, 2]);
    let json = analyze(&sandbox, &tensors, &["--mechanisms", "uniform", "--full"]);
    assert_eq!((json["heads"].as_array().unwrap().len(), json["distances"].as_array().unwrap().len()), (2002, 1001));
    assert_eq!(json["calls"].as_array().unwrap().len(), 2002);
    assert_eq!(verdict(&json, "uniform")["numbers"]["heads"], 1001);
    let page = std::fs::read_to_string(sandbox.path("out").join("report.html")).unwrap();
    assert!(page.contains("results.json") && page.contains("of 2\u{2009}002"));
}

/// What landmarks lose is how far the operator is from its kernel; at the matched length scale the match is one.
#[test]
fn landmarks_and_matched_kernels() {
    let sandbox = Sandbox::new();
    let mut tensors = Tensors::default();
    tensors.noise("q", &[1, N, D], 3).noise("v", &[1, N, D], 4);
    sandbox.write("soft.json", r#"{"mechanism": "soft", "inverse": "cholesky"}"#);
    sandbox.write("in.safetensors", tensors.file());
    let args =
        ["attend", "--config", "soft.json", "--input", "in.safetensors", "--output", "out.safetensors", "--weights"];
    sandbox.run(&args).success();
    let weights = Tensors::read(&sandbox.path("out.safetensors")).values("weights");
    let q = tensors.values("q");
    let exact: Vec<f64> = (0..N * N)
        .map(|at| {
            let square: f64 = (0..D).map(|c| (q[at / N * D + c] - q[at % N * D + c]).powi(2)).sum();
            (-0.5 * square / (D as f64).sqrt()).exp()
        })
        .collect();
    let config = sandbox.path("soft.json").display().to_string();
    let json = analyze(&sandbox, &tensors, &["--mechanisms", &config]);
    let found = &head(&json, "soft", 0)["graph"]["landmarks"];
    near(&found["error"], errors(&weights, &exact).1, 1e-5);
    assert_eq!(found["landmarks"], 5);
    assert!(found["condition"].as_f64().unwrap() > 1.0 && found["effective_rank"].as_f64().unwrap() < 5.0, "{found}");

    let mut scale = 3.0;
    for round in 0..2 {
        let config = sandbox.write("fna.json", format!(r#"{{"mechanism": "fna", "kappa": {scale}}}"#));
        let json = analyze(&sandbox, &tensors, &["--mechanisms", &config.display().to_string()]);
        let matched = head(&json, "fna", 0)["graph"]["matched_kappa"].as_f64().unwrap();
        assert_eq!((matched - 1.0).abs() < 1e-4, round == 1, "{matched}");
        scale *= matched;
    }
}
