//! `resolvent analyze` on small dumps: what it finds and writes, and what it refuses. No time is asserted.

mod support;

use safetensors::Dtype;
use serde_json::Value;
use support::{Outcome, Sandbox, Tensors, resolvent};

/// Two layers of two heads, 24 tokens: one whole, one without keys and values.
fn dump(sandbox: &Sandbox) -> std::path::PathBuf {
    let mut tensors = Tensors::default();
    for (seed, name) in ["layers.0.q", "layers.0.k", "layers.0.v", "layers.1.q"].into_iter().enumerate() {
        tensors.noise(name, &[2, 2, 24, 8], seed as u32);
    }
    tensors.u8("mask", &[1], &[1]);
    sandbox.write("dump.safetensors", tensors.file())
}

fn analyze(sandbox: &Sandbox, input: &std::path::Path, args: &[&str]) -> Outcome {
    let mut command = resolvent();
    command.args(["analyze", "--json", "--input"]).arg(input).arg("--out").arg(sandbox.path("out")).args(args);
    Outcome::of(&mut command)
}

fn verdict<'a>(json: &'a Value, id: &str) -> &'a Value {
    let verdicts = json["verdicts"].as_array().unwrap();
    verdicts.iter().find(|verdict| verdict["mechanism"] == id).unwrap_or_else(|| panic!("no verdict on {id}"))
}

/// Number of presets, and `ssa` with centroids.
const IDS: usize = resolvent_kernels::Mechanism::IDS.len() + 1;

#[test]
fn every_mechanism_is_tried_on_every_head() {
    let sandbox = Sandbox::new();
    let outcome = analyze(&sandbox, &dump(&sandbox), &[]).success();
    let json = outcome.json();
    let results = std::fs::read_to_string(sandbox.path("out").join("results.json")).unwrap();
    assert_eq!(results.trim(), outcome.stdout.trim());
    assert_eq!(json["unread"], serde_json::json!(["mask"]));
    let verdicts = json["verdicts"].as_array().unwrap();
    let heads = json["heads"].as_array().unwrap();
    assert_eq!((verdicts.len(), heads.len()), (IDS, IDS * 8));
    assert_eq!((&verdicts[0]["mechanism"], &verdicts[0]["finding"]), (&"softmax".into(), &"baseline".into()));
    for verdict in verdicts {
        assert!(verdict["numbers"]["time_ratio"].as_f64().unwrap() > 0.0, "{verdict}");
        assert!(verdict["numbers"]["peak_bytes"].is_f64(), "{verdict}");
        assert!(verdict["sentence"].as_str().unwrap().len() > 40, "{verdict}");
    }
    for head in heads.iter().filter(|head| head["mechanism"] == "softmax") {
        assert_eq!(head["output"]["relative"], 0.0);
        let graph = &head["graph"];
        let (gap, rows) = (graph["gap"].as_f64().unwrap(), graph["perplexity"].as_f64().unwrap());
        assert!(gap > 0.0 && gap <= 2.0 && rows > 1.0 && rows <= 24.0, "{graph}");
        assert!((graph["eigenvalues"][0].as_f64().unwrap() - 1.0).abs() < 1e-5);
        assert_eq!((graph["negative"].as_f64(), graph["notes"].as_array().unwrap().len()), (Some(0.0), 0));
    }
    let uniform = heads.iter().find(|head| head["mechanism"] == "uniform").unwrap();
    assert!((uniform["graph"]["perplexity"].as_f64().unwrap() - 24.0).abs() < 1e-4);
    assert!((uniform["graph"]["gap"].as_f64().unwrap() - 1.0).abs() < 1e-5);
    let laplacian = heads.iter().find(|head| head["mechanism"] == "laplacian-exact").unwrap();
    assert!(laplacian["graph"]["gap"].is_null() && !laplacian["graph"]["notes"].as_array().unwrap().is_empty());
    let page = std::fs::read_to_string(sandbox.path("out").join("report.html")).unwrap();
    assert!(page.contains("class=\"sortable\"") && page.contains("<script>") && page.contains("linear-infsa"));
    assert!(!page.contains("NaN") && !page.contains("http"));
}

/// The headings of the table of the graphs' numbers, the mechanism's left out.
fn columns(sandbox: &Sandbox) -> usize {
    let page = std::fs::read_to_string(sandbox.path("out").join("report.html")).unwrap();
    let table = page.split("The graphs in numbers").nth(1).unwrap().split("</thead>").next().unwrap();
    table.matches("<th ").count() - 1
}

/// Thirteen numbers of a graph, and all of them with `--full`.
#[test]
fn thirteen_numbers_are_told_and_the_rest_in_full() {
    let sandbox = Sandbox::new();
    let (input, asked) = (dump(&sandbox), "ssa,soft,fna,linear-infsa");
    let json = analyze(&sandbox, &input, &["--mechanisms", asked]).success().json();
    assert_eq!((&json["distances"], columns(&sandbox)), (&serde_json::json!([]), 13));
    let more = ["asymmetry", "degree_ratio", "mixing", "walks", "diffusion", "full"];
    let graph = |json: &Value, id: &str| {
        json["heads"].as_array().unwrap().iter().find(|head| head["mechanism"] == id).unwrap()["graph"].clone()
    };
    let own = [("ssa", "distortion"), ("linear-infsa", "dominant")];
    assert!(more.iter().all(|name| graph(&json, "softmax")[name].is_null()), "{json}");
    assert!(own.iter().all(|(id, name)| graph(&json, id)[name].is_null()));
    let full = analyze(&sandbox, &input, &["--mechanisms", asked, "--full"]).success().json();
    assert!(columns(&sandbox) > 40 && full["distances"].as_array().unwrap().len() == 8);
    assert!(more.iter().all(|name| !graph(&full, "softmax")[name].is_null()), "{full}");
    assert!(own.iter().all(|(id, name)| !graph(&full, id)[name].is_null()));
    // What is told is the same.
    for id in ["softmax", "ssa", "fna"] {
        let [few, all] = [&json, &full].map(|json| graph(json, id));
        for name in [
            "perplexity",
            "effective_rank",
            "gap",
            "walk_gap",
            "cheeger",
            "row_sums",
            "negative",
            "centrality",
            "subspace",
            "matched_kappa",
        ] {
            assert_eq!(few[name], all[name], "{id} {name}");
        }
    }
}

/// Clusters that are all one are dense softmax: it replaces itself. Causality refuses who has none.
#[test]
fn verdicts_follow_the_tensors() {
    let sandbox = Sandbox::new();
    let input = dump(&sandbox);
    let one = sandbox.write("one.json", r#"{"mechanism": "ssa", "clusters": 1}"#);
    let json =
        analyze(&sandbox, &input, &["--mechanisms", &format!("{},uniform", one.display()), "--full"]).success().json();
    assert_eq!(verdict(&json, "ssa")["finding"], "replaces");
    assert!(verdict(&json, "ssa")["numbers"]["error_worst"].as_f64().unwrap() < 1e-4);
    assert_ne!(verdict(&json, "uniform")["finding"], "replaces");
    let full = &json["heads"][0]["graph"]["full"];
    assert_eq!(full["singular_values"].as_array().unwrap().len(), 24);
    assert!((full["moduli"][0].as_f64().unwrap() - 1.0).abs() < 1e-5 && full["mixing_time"].is_u64());
    let chosen = ["--mechanisms", "infsa-resolvent,fna", "--causal", "--layers", "layers.0", "--sequences", "1"];
    let json = analyze(&sandbox, &input, &chosen).success().json();
    assert_eq!(json["heads"].as_array().unwrap().len(), 2 * 2);
    assert_eq!(verdict(&json, "infsa-resolvent")["finding"], "refused");
    assert!(verdict(&json, "infsa-resolvent")["sentence"].as_str().unwrap().contains("causal"));
    assert!(verdict(&json, "fna")["numbers"]["heads"] == 2);
}

/// What is softmax by another name, or no nearer to it than the mean of all values, replaces nothing.
#[test]
fn replacements_are_others_and_beat_the_mean() {
    let sandbox = Sandbox::new();
    let near = sandbox.write("near.json", r#"{"mechanism": "softmax", "scale": 0.36}"#);
    let asked = ["--mechanisms", &format!("softmax,local,uniform,{}", near.display())];
    let json = analyze(&sandbox, &dump(&sandbox), &asked).success().json();
    let local = verdict(&json, "local");
    assert_eq!(local["finding"], "is-softmax", "a window of 256 on 24 tokens");
    assert!(local["sentence"].as_str().unwrap().contains("window of 256 leaves none of the 24 tokens out"), "{local}");
    let by_name = |json: &Value, name: &str| {
        json["verdicts"].as_array().unwrap().iter().find(|verdict| verdict["name"] == name).unwrap().clone()
    };
    let near_verdict = by_name(&json, "near");
    assert_eq!(near_verdict["finding"], "replaces");
    assert!(near_verdict["sentence"].as_str().unwrap().contains("nearer than the mean of all values ("));

    // Queries that see no difference between keys: softmax is the mean of all values, and so is everything.
    let mut flat = Tensors::default();
    for (seed, name) in ["k", "v"].into_iter().enumerate() {
        flat.noise(name, &[2, 2, 24, 8], seed as u32);
    }
    flat.f32("q", &[2, 2, 24, 8], &[0.0; 2 * 2 * 24 * 8]);
    let outcome = analyze(&sandbox, &sandbox.write("flat.safetensors", flat.file()), &asked).success();
    for name in ["uniform", "near"] {
        let verdict = by_name(&outcome.json(), name);
        assert_eq!(
            (&verdict["finding"], &verdict["numbers"]["close"]),
            (&"like-the-mean".into(), &4.into()),
            "{verdict}"
        );
        assert_eq!(verdict["numbers"]["close_nearer"], 0);
    }
    let page = std::fs::read_to_string(sandbox.path("out").join("report.html")).unwrap();
    assert!(page.contains("Nothing replaces softmax here better than the mean of all values"));
}

/// One mechanism in several configurations, each by the name of its file; the first softmax is what all are compared with.
#[test]
fn configurations_of_one_mechanism_stand_side_by_side() {
    let sandbox = Sandbox::new();
    let input = dump(&sandbox);
    let file = |name: &str, json: &str| sandbox.write(&format!("{name}.json"), json).display().to_string();
    let near = file("near", r#"{"mechanism": "fna", "alpha": 2.0}"#);
    let far = file("far", r#"{"mechanism": "fna", "alpha": 1.0, "kappa": 0.5}"#);
    let sharp = file("sharp", r#"{"mechanism": "softmax", "scale": 4.0}"#);
    let asked = ["fna", &near, "softmax", &far, &sharp, "uniform"].join(",");
    let json = analyze(&sandbox, &input, &["--mechanisms", &asked]).success().json();
    let verdicts = json["verdicts"].as_array().unwrap();
    let named: Vec<_> = verdicts.iter().map(|verdict| verdict["name"].as_str().unwrap()).collect();
    assert_eq!(named, ["softmax", "fna", "near", "far", "sharp", "uniform"]);
    assert_eq!((&verdicts[0]["finding"], &verdicts[2]["mechanism"]), (&"baseline".into(), &"fna".into()));
    let rows = |at: usize| verdicts[at]["numbers"]["perplexity"].as_f64().unwrap();
    assert!(rows(1) != rows(2) && rows(2) != rows(3) && rows(4) < rows(0), "{verdicts:?}");
    assert!(verdicts[4]["sentence"].as_str().unwrap().starts_with("sharp "), "{}", verdicts[4]);
    // Uniform attention is the mean of all values, and no nearer than that.
    assert_eq!(verdicts[5]["finding"], "not-here");
    let page = std::fs::read_to_string(sandbox.path("out").join("report.html")).unwrap();
    let chip =
        |name: &str| page.split(&format!("</span>{name}</th>")).next().unwrap().rsplit('"').nth(1).unwrap().to_owned();
    let chips: std::collections::BTreeSet<_> = named.iter().map(|name| chip(name)).collect();
    assert_eq!(chips.len(), named.len(), "each has a colour of its own: {chips:?}");
    std::fs::create_dir(sandbox.path("other")).unwrap();
    let other = file("other/near", r#"{"mechanism": "fna"}"#);
    let outcome = analyze(&sandbox, &input, &["--mechanisms", &format!("{near},{other}")]);
    assert!(outcome.failure(1).contains("`near` twice"));
}

/// Cross-attention has outputs to compare and no graph; a few tokens have little of one.
#[test]
fn odd_shapes() {
    let sandbox = Sandbox::new();
    let mut cross = Tensors::default();
    cross.noise("q", &[5, 4], 0).noise("k", &[9, 4], 1).noise("v", &[9, 3], 2);
    let path = sandbox.write("cross.safetensors", cross.file());
    let json = analyze(&sandbox, &path, &["--mechanisms", "fna,soft"]).success().json();
    assert_eq!(json["heads"].as_array().unwrap().len(), 2);
    assert!(json["heads"][1]["graph"].is_null() && json["heads"][1]["output"]["scaled"].is_f64());
    assert_eq!(verdict(&json, "soft")["finding"], "refused");
    let mut one = Tensors::default();
    one.noise("q", &[1, 4], 0);
    let path = sandbox.write("one.safetensors", one.file());
    let json = analyze(&sandbox, &path, &[]).success().json();
    assert_eq!(verdict(&json, "fna")["finding"], "like-the-mean", "of one token everything is its value");
}

#[test]
fn what_cannot_be_read_is_named() {
    let sandbox = Sandbox::new();
    let refused = |tensors: &Tensors, args: &[&str], named: &[&str]| {
        let path = sandbox.write("bad.safetensors", tensors.file());
        let outcome = analyze(&sandbox, &path, args);
        let error = outcome.failure(1);
        assert!(named.iter().all(|named| error.contains(named)), "{error}");
        assert!(!sandbox.path("out").join("results.json").exists());
    };
    let mut nan = Tensors::default();
    let mut values = vec![0.5; 24];
    values[17] = f32::NAN;
    nan.noise("l.q", &[1, 2, 3, 4], 0).f32("l.k", &[1, 2, 3, 4], &values);
    refused(&nan, &[], &["`l.k` is NaN at [0, 1, 1, 1]"]);
    let mut good = Tensors::default();
    good.noise("q", &[6, 4], 0);
    refused(&good, &["--layers", "other"], &["`other`", "layer"]);
    refused(&good, &["--sequences", "0"], &["sequences", "at least 1"]);
    refused(&good, &["--mechanisms", "fna,fna"], &["`fna` twice"]);
    refused(good.clone().u8("q", &[6, 4], &[0; 24]), &[], &["`q` has type U8"]);
    refused(good.clone().raw("v", Dtype::F32, &[0, 4], Vec::new()), &[], &["`v` has shape [0, 4]"]);
    let whole = std::fs::read(sandbox.path("bad.safetensors")).unwrap();
    for (name, bytes) in
        [("cut", &whole[..whole.len() - 5]), ("short", &whole[..6]), ("text", b"not a dump at all" as &[u8])]
    {
        let path = sandbox.write(name, bytes);
        let outcome = analyze(&sandbox, &path, &[]);
        assert!(outcome.failure(1).contains(name), "{name}");
    }
    let outcome = analyze(&sandbox, &sandbox.path("nowhere"), &[]);
    assert!(outcome.failure(1).contains("nowhere"));
}

/// Every sequence is what it is in the whole batch: clusters and landmarks are drawn by its number.
#[test]
fn sequences_are_those_of_the_batch() {
    let sandbox = Sandbox::new();
    let tensors = Tensors::call(&[3, 2, 24, 8]);
    let input = sandbox.write("in.safetensors", tensors.file());
    let ssa = sandbox.write("ssa.json", r#"{"mechanism": "ssa", "clusters": 6, "estimator": "centroid"}"#);
    let soft =
        sandbox.write("soft.json", r#"{"mechanism": "soft", "landmarks": {"kind": "random", "count": 5, "seed": 3}}"#);
    let softmax = sandbox.write("softmax.json", r#"{"mechanism": "softmax"}"#);
    let out = |config: &std::path::Path| {
        let to = sandbox.path("out.safetensors");
        let mut command = resolvent();
        command.args(["attend", "--config"]).arg(config).arg("--input").arg(&input).arg("--output").arg(&to);
        Outcome::of(&mut command).success();
        Tensors::read(&to).values("out")
    };
    let named = format!("{},{}", ssa.display(), soft.display());
    let json = analyze(&sandbox, &input, &["--mechanisms", &named]).success().json();
    let reference = out(&softmax);
    for (config, name) in [(&ssa, "ssa"), (&soft, "soft")] {
        // `soft` has one tensor for queries and keys, which analyze takes from the queries.
        if name == "soft" {
            let mut tied = tensors.clone();
            sandbox.write("in.safetensors", tied.remove("k").file());
        }
        let own = out(config);
        let heads = json["heads"].as_array().unwrap().iter().filter(|head| head["mechanism"] == name);
        for (at, head) in heads.enumerate() {
            let part = |x: &[f64]| x[at * 24 * 8..][..24 * 8].to_vec();
            let (own, wanted) = (part(&own), part(&reference));
            let square = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
            let error = square(&mut own.iter().zip(&wanted).map(|(x, y)| x - y)) / square(&mut wanted.iter().copied());
            let told = head["output"]["relative"].as_f64().unwrap();
            assert!((error.sqrt() - told).abs() < 1e-5, "{name}, head {at}: {} {told}", error.sqrt());
        }
    }
}

/// The report and the command end in what is nearest, and rank by it.
#[test]
fn an_analysis_has_a_headline() {
    let sandbox = Sandbox::new();
    let input = dump(&sandbox);
    let mut command = resolvent();
    let args = ["--mechanisms", "uniform,ssa,softmax", "--quiet"];
    command.args(["analyze", "--input"]).arg(&input).arg("--out").arg(sandbox.path("out")).args(args);
    let text = Outcome::of(&mut command).success().stdout;
    let page = std::fs::read_to_string(sandbox.path("out").join("report.html")).unwrap();
    let headline = text.lines().rev().find(|line| line.contains("softmax")).unwrap().replace('\'', "&#39;");
    assert!(headline.contains("nearest is") || headline.contains("can replace"), "{headline}");
    assert!(page.contains(&headline.replace("&#39;", "'")) || page.contains(&headline), "{headline}");
    let json: Value =
        serde_json::from_str(&std::fs::read_to_string(sandbox.path("out").join("results.json")).unwrap()).unwrap();
    assert_eq!(json["verdicts"][1]["name"], "uniform", "results keep the order that was asked for");
    assert!(json["verdicts"][1]["numbers"]["error_interval"]["low"].is_f64());
}
