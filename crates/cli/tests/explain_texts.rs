//! `resolvent explain` and `analyze --checkpoint` on tiny trained models of texts: those that classify and those that write.

mod support;

use std::path::Path;

use serde_json::Value;
use support::{
    Sandbox,
    tiny::{self, explain},
};

const TEXT: &str = "
name = 'tiny-text'
[model]
kind = 'text'
mlp_dim = 16
[text]
max_tokens = 12
[schedule]
epochs = 1
warmup_epochs = 0.0
batch_size = 8
";

#[test]
fn texts_are_explained_and_analysed() {
    let sandbox = Sandbox::new();
    sandbox.write("tiny.toml", TEXT);
    let row =
        |i: usize| format!("\"A {} <film>, number {i}\",{}\n", ["awful", "lovely"][i % 2], ["bad", "good"][i % 2]);
    for part in ["train", "test"] {
        sandbox.write(&format!("{part}.csv"), format!("review,mood\n{}", (0..16).map(row).collect::<String>()));
    }
    let data = "text:.?text=review&label=mood";
    sandbox.run(&["train", "--config", "tiny.toml", "--data", data, "--out", "run", "--quiet"]).success();
    let texts = ["--text", "A lovely film", "--text", "An awful, awful <film> & more of that"];
    let json = sandbox.run(&explain(&[&texts[..], &["--rollout"]].concat())).success().json();
    assert_eq!(json["shown"][0]["tokens"], serde_json::json!(["A", "lovely", "film"]));
    assert_eq!(
        json["shown"][1]["layers"][0]["mean"].as_array().unwrap().len(),
        json["shown"][1]["tokens"].as_array().unwrap().len()
    );
    assert!(json["maps"][0]["roc_auc"].is_null() && json["maps"][0]["morf"][20] == serde_json::json!([0.0, 0.0]));
    assert_eq!(
        json,
        serde_json::from_slice::<Value>(&std::fs::read(sandbox.path("out/results.json")).unwrap()).unwrap()
    );
    let page = std::fs::read_to_string(sandbox.path("out/report.html")).unwrap();
    assert!(page.contains("&lt;") && !page.contains("<film>") && !page.contains("NaN"));
    // All texts given are shown; of a file as many as asked for, evenly spread. What is not read of them is told.
    let many: Vec<&str> = (0..21).flat_map(|_| ["--text", "A film"]).collect();
    assert_eq!(sandbox.run(&explain(&many)).success().json()["examples"], 21);
    sandbox.write("eight.txt", format!("{}{}\n", "A lovely film\n".repeat(7), "awful ".repeat(40)));
    let spread = sandbox.run(&explain(&["--input", "eight.txt", "--examples", "4"])).success().json();
    let names: Vec<_> = spread["answers"].as_array().unwrap().iter().map(|found| found["name"].clone()).collect();
    assert_eq!(
        (names, &spread["cut"]),
        (["text 1", "text 4", "text 5", "text 8"].map(Value::from).to_vec(), &1.into())
    );
    let few = sandbox.run(&explain(&["--input", "eight.txt", "--examples", "2"])).success().json();
    assert_eq!((&few["examples"], &few["cut"]), (&2.into(), &0.into()));
    let analyzed =
        ["analyze", "--checkpoint", "run", "--input", "eight.txt", "--sequences", "8", "--mechanisms", "uniform"];
    let outcome = sandbox.run(&[&analyzed[..], &["--out", "cut", "--path", "2,0"]].concat()).success();
    assert!(outcome.stdout.contains("1 of the texts were cut"), "{}", outcome.stdout);
    assert!(outcome.stdout.contains("head 0: 2 (film) -> 0 (A): 1 hop, length 3.0000"), "{}", outcome.stdout);
    assert!(!Path::new(&sandbox.path("out/overlays")).exists());
    assert_eq!(sandbox.run(&explain(&["--examples", "3"])).success().json()["examples"], 3);
    assert!(sandbox.run(&explain(&["--data", tiny::DATA])).failure(1).contains("trained on texts"));

    // Texts of different lengths: what was kept of the model is analysed alike with and without the file.
    let analyze = ["analyze", "--json", "--mechanisms", "softmax,fna,soft"];
    let watched =
        [&analyze[..], &["--checkpoint", "run", "--out", "a", "--save-dump", "kept.safetensors"], &texts].concat();
    let watched = sandbox.run(&watched).success().json();
    let kept = sandbox.run(&[&analyze[..], &["--input", "kept.safetensors", "--out", "b"]].concat()).success().json();
    let graphs =
        |json: &Value| json["heads"].as_array().unwrap().iter().map(|head| head["graph"].clone()).collect::<Vec<_>>();
    assert_eq!(graphs(&watched), graphs(&kept));
    assert!(watched["input"].as_str().unwrap().contains("the texts given"));
    assert_eq!((&kept["layers"][0]["name"], kept["unread"].as_array().unwrap().len()), (&"blocks.0".into(), 0));
    assert_eq!(kept["layers"][0]["sequences"], 2);
    assert_eq!(sandbox.run(&["analyze"]).code, Some(2));
    assert_eq!(sandbox.run(&["analyze", "--input", "kept.safetensors", "--save-dump", "x"]).code, Some(2));
    assert!(
        !std::fs::read_dir(sandbox.path("a")).unwrap().any(|file| file
            .unwrap()
            .file_name()
            .to_string_lossy()
            .starts_with(".tmp"))
    );
}

/// A language model's last token asks, nobody looks ahead, and the token that follows is its answer.
#[test]
fn language_models_are_explained() {
    let sandbox = Sandbox::of_letters(
        "name = 'letters'\nmechanism = 'softmax'\n[model]\nkind = 'language'\ncontext = 16\ndim = 16\ndepth = 2\nheads = 2\n\
         kv_heads = 1\nmlp_dim = 32\n",
    );
    let data = "corpus:text.txt";
    sandbox.run(&["train", "--config", "tiny.toml", "--data", data, "--out", "run", "--quiet"]).success();
    let outcome = sandbox.run(&explain(&["--text", "cdefgh", "--query", "2", "--rollout"])).success();
    let json = outcome.json();
    assert_eq!((&json["maps"], &json["rule"]), (&serde_json::json!([]), &"the last token's row".into()));
    let shown = &json["shown"][0];
    assert_eq!(
        (&shown["answer"], &json["answers"][0]["answer"]),
        (&"i".into(), &"i".into()),
        "it has learnt the alphabet"
    );
    let numbers = |value: &Value| value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
    let pairs: Vec<Vec<f64>> = shown["pairs"].as_array().unwrap().iter().map(numbers).collect();
    assert_eq!(pairs.iter().map(Vec::len).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6], "itself and those before");
    assert!(pairs.iter().all(|row| (row.iter().sum::<f64>() - 1.0).abs() < 1e-5), "{pairs:?}");
    let last = numbers(&shown["layers"][1]["mean"]);
    assert!(last.iter().zip(&pairs[5]).all(|(a, b)| (a - b).abs() < 1e-5), "{last:?} {pairs:?}");
    let row = numbers(&shown["query"][1]["maps"]["mean"]);
    assert!(row[..2].iter().zip(&pairs[1]).all(|(a, b)| (a - b).abs() < 1e-5) && row[2..] == [0.0; 4], "{row:?}");
    let page = std::fs::read_to_string(sandbox.path("out/report.html")).unwrap();
    assert!(page.contains("Token to token") && page.contains("goes on with &quot;i&quot;"));
    assert!(!page.contains("MoRF") && !page.contains("NaN"));
    // Without texts, windows of the test part.
    let json = sandbox.run(&explain(&["--examples", "2"])).success().json();
    assert_eq!((&json["examples"], json["shown"][0]["pairs"].as_array().unwrap().len()), (&2.into(), 16));
    assert!(sandbox.run(&explain(&["--text", "ab", "--query", "3"])).failure(1).contains("the text has 2 tokens"));
}

/// Clusters of a strictly causal model are those of its whole context, however short the text that it is shown: what a token looks at
/// does not depend on what follows. A text that is longer is cut, and that is told.
#[test]
fn maps_of_short_texts_have_the_clusters_of_the_context() {
    let sandbox = Sandbox::of_letters(
        "name = 'letters'\nmechanism = 'ssa'\n[model]\nkind = 'language'\ncontext = 32\ndim = 16\ndepth = 1\nheads = 2\n\
         mlp_dim = 32\n",
    );
    let data = "corpus:text.txt";
    sandbox.run(&["train", "--config", "tiny.toml", "--data", data, "--out", "run", "--quiet"]).success();
    let numbers = |value: &Value| value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
    let row = |text: &str| {
        let json = sandbox.run(&explain(&["--text", text, "--query", "9"])).success().json();
        numbers(&json["shown"][0]["query"][0]["maps"]["heads"][0])[..9].to_vec()
    };
    let (short, long) = (row("abcdefghi"), row("abcdefghijklmnopqrstuvwxyzabcd"));
    assert!(short.iter().zip(&long).all(|(a, b)| (a - b).abs() < 1e-6), "{short:?} {long:?}");
    let outcome = sandbox.run(&explain(&["--text", &"abcdefghij".repeat(4)])).success();
    assert_eq!((outcome.json()["cut"].as_u64(), outcome.json()["examples"].as_u64()), (Some(1), Some(1)));
}

/// Nothing taken away leaves the answer as it is, whatever a mechanism draws by an example's place in its batch.
#[test]
fn deletion_begins_with_the_whole_example() {
    let sandbox = Sandbox::new();
    sandbox.write("tiny.toml", TEXT.replace("name = 'tiny-text'", "name = 'tiny-text'\nmechanism = 'ssa'"));
    let row = |i: usize| format!("\"A {} film, number {i}\",{}\n", ["awful", "lovely"][i % 2], ["bad", "good"][i % 2]);
    for part in ["train", "test"] {
        sandbox.write(&format!("{part}.csv"), format!("review,mood\n{}", (0..16).map(row).collect::<String>()));
    }
    let data = "text:.?text=review&label=mood";
    sandbox.run(&["train", "--config", "tiny.toml", "--data", data, "--out", "run", "--quiet"]).success();
    let json = sandbox.run(&explain(&["--examples", "6"])).success().json();
    for map in json["maps"].as_array().unwrap() {
        for curve in ["morf", "lerf"] {
            let [mean, deviation] = [&map[curve][0][0], &map[curve][0][1]].map(|x| x.as_f64().unwrap());
            assert!((mean - 1.0).abs() < 1e-6 && deviation < 1e-6, "{curve} of {}: {mean} ({deviation})", map["map"]);
        }
    }
}
