//! `resolvent explain` and `analyze --checkpoint` on tiny trained models of pictures: vision transformers, pyramids, boxes, and what is refused.

mod support;

use image::{ImageFormat, RgbImage};
use serde_json::Value;
use support::{
    Sandbox,
    tiny::{self, explain},
};

/// A folder with a run of a tiny vision transformer in `run`.
fn trained(attention: &str) -> Sandbox {
    let sandbox = tiny::sandbox();
    sandbox.run(&tiny::train("run", &["--attention", attention, "--epochs", "1", "--quiet"])).success();
    sandbox
}

fn maps(json: &Value) -> Vec<&str> {
    json["maps"].as_array().unwrap().iter().map(|map| map["map"].as_str().unwrap()).collect()
}

/// Two pictures of 40 x 24 pixels with an annotation each.
fn photographs(sandbox: &Sandbox) {
    std::fs::create_dir_all(sandbox.path("photos")).unwrap();
    for (name, shift) in [("a", 0), ("b", 90)] {
        let picture = RgbImage::from_fn(40, 24, |x, y| [(x * 5) as u8, (y * 7) as u8, shift].into());
        picture.save_with_format(sandbox.path(&format!("photos/{name}.png")), ImageFormat::Png).unwrap();
        sandbox.write(&format!("photos/{name}.xml"), annotation(10, 24));
    }
}

fn annotation(left: i32, bottom: i32) -> String {
    format!(
        "<annotation><size><width>40</width><height>24</height></size><object><name>thing</name><bndbox><xmin>{left}</xmin>\
         <ymin>12</ymin><xmax>20.5</xmax><ymax>{bottom}</ymax></bndbox></object></annotation>"
    )
}

#[test]
fn pictures_are_explained() {
    let sandbox = trained("softmax");
    let outcome = sandbox.run(&explain(&["--examples", "6", "--show", "2", "--rollout"])).success();
    let json = outcome.json();
    assert_eq!(maps(&json), ["attention", "rollout", "random", "uniform"]);
    assert_eq!((&json["examples"], &json["layer"]), (&6.into(), &"blocks.0".into()));
    let scores = &json["maps"][0];
    let share = |value: &Value| (0.0..=1.0).contains(&value.as_f64().unwrap());
    assert!(share(&scores["roc_auc"]["mean"]) && share(&scores["average_precision"]["mean"]), "{scores}");
    assert_eq!((&scores["morf"][0], scores["morf"].as_array().unwrap().len()), (&serde_json::json!([1.0, 0.0]), 21));
    assert_eq!(scores["morf"][20], scores["lerf"][20], "nothing is left, in whatever order");
    let ours = |what: &str| json["shown"][0]["name"].as_str().unwrap().to_owned() + what;
    let uniform = &json["maps"][3];
    assert_eq!(uniform["roc_auc"]["mean"], 0.5);
    assert_eq!(uniform["average_precision"]["mean"], uniform["prevalence"]["mean"]);
    let shown = &json["shown"][1];
    assert_eq!(
        (shown["layers"][0]["mean"].as_array().unwrap().len(), shown["boxes"].as_array().unwrap().len()),
        (16, 1)
    );
    assert_eq!(shown["layers"][0]["heads"].as_array().unwrap().len(), 2);
    let overlay = image::open(sandbox.path("out/overlays/2.png")).unwrap();
    assert_eq!((overlay.width(), overlay.height()), (256, 256));
    assert!(!sandbox.path("out/overlays/3.png").exists());
    let mine = sandbox.write("out/overlays/mine.txt", "mine");
    let page = std::fs::read_to_string(sandbox.path("out/report.html")).unwrap();
    assert!(
        page.contains("data:image/png;base64,") && page.contains("MoRF-AOC") && page.contains("class=\"sortable\"")
    );
    assert!(!page.contains("NaN") && !page.contains("http"));
    // Every picture says what it is, and where its map is strongest.
    let strongest = shown_maximum(&json["shown"][0]["layers"][0]["mean"], 4);
    assert!(
        page.contains(&ours(&format!(": blocks.0, mean of the heads; strongest in {strongest} of 4"))),
        "{strongest}"
    );
    assert_eq!(page.matches("role=\"img\" aria-label=\"\"").count(), 0);
    let again = sandbox.run(&explain(&["--examples", "6", "--show", "2", "--rollout"])).success().json();
    assert_eq!((&again["maps"], &again["answers"]), (&json["maps"], &json["answers"]), "the same bits");
    sandbox.run(&explain(&["--examples", "2", "--show", "1"])).success();
    assert!(mine.exists() && !sandbox.path("out/overlays/2.png").exists(), "old pictures go, others stay");
    for file in ["results.json", "report.html", "overlays/1.png"] {
        let theirs = sandbox.path("theirs").join(file);
        std::fs::create_dir_all(theirs.parent().unwrap()).unwrap();
        std::fs::write(&theirs, "theirs").unwrap();
        let outcome = sandbox.run(&["explain", "--checkpoint", "run", "--out", "theirs"]);
        assert!(outcome.failure(1).contains("not of a run of this program"), "{file}");
        std::fs::remove_dir_all(sandbox.path("theirs")).unwrap();
    }
}

/// The place of the largest weight on a square grid, in words.
fn shown_maximum(weights: &Value, columns: usize) -> String {
    let weights: Vec<f64> = weights.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    let most = (0..weights.len()).max_by(|&a, &b| weights[a].total_cmp(&weights[b])).unwrap();
    format!("row {} of 4, column {}", most / columns + 1, most % columns + 1)
}

#[test]
fn every_mechanism_has_maps() {
    for (id, flat) in
        [("uniform", true), ("linear-infsa", false), ("ssa", false), ("soft-pp", false), ("laplacian", false)]
    {
        let sandbox = trained(id);
        let json = sandbox.run(&explain(&["--examples", "2", "--show", "1"])).success().json();
        let mean: Vec<f64> =
            json["shown"][0]["layers"][0]["mean"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        assert_eq!(mean.iter().all(|&weight| weight == mean[0]), flat, "{id}: {mean:?}");
        assert!(mean.iter().all(|&weight| weight >= 0.0) && mean.iter().sum::<f64>() > 0.0, "{id}: {mean:?}");
        let breadth = json["layers"][0]["breadth"]["mean"].as_f64().unwrap();
        assert!(breadth > 0.0 && ((breadth - 1.0).abs() < 1e-6) == flat, "{id}: {breadth}");
    }
}

/// Two models beside each other: their own folders are as if each were explained alone, and the page has the maps of both.
#[test]
fn several_models_stand_side_by_side() {
    let sandbox = trained("softmax");
    sandbox.run(&tiny::train("other", &["--attention", "infsa", "--epochs", "1", "--quiet"])).success();
    let both =
        ["explain", "--checkpoint", "run", "--checkpoint", "other", "--examples", "4", "--show", "2", "--out", "both"];
    let outcome = sandbox.run(&both).success();
    assert!(outcome.stdout.contains("run\n") && outcome.stdout.contains("other\n"), "{}", outcome.stdout);
    let read = |path: &str| -> Value { serde_json::from_slice(&std::fs::read(sandbox.path(path)).unwrap()).unwrap() };
    let (json, alone) =
        (read("both/results.json"), sandbox.run(&explain(&["--examples", "4", "--show", "2"])).success().json());
    let models = json["models"].as_array().unwrap();
    assert_eq!(models.iter().map(|model| &model["name"]).collect::<Vec<_>>(), ["run", "other"]);
    assert_eq!((&models[0]["maps"], &read("both/run/results.json")["maps"]), (&alone["maps"], &alone["maps"]));
    assert_ne!(models[0]["maps"][0], models[1]["maps"][0]);
    assert!(sandbox.path("both/other/overlays/2.png").exists() && sandbox.path("both/run/report.html").exists());
    let page = std::fs::read_to_string(sandbox.path("both/report.html")).unwrap();
    // Of each example the picture, and the map of either model.
    assert_eq!((page.matches("<figcaption>picture").count(), page.matches("<figcaption>other: ").count()), (2, 2));
    assert!(page.contains(".picture3 {") && page.contains("href=\"other/report.html\"") && !page.contains("NaN"));
    std::fs::create_dir(sandbox.path("elsewhere")).unwrap();
    std::fs::rename(sandbox.path("other"), sandbox.path("elsewhere/run")).unwrap();
    let twice = ["explain", "--checkpoint", "run", "--checkpoint", "elsewhere/run", "--out", "twice"];
    assert!(sandbox.run(&twice).failure(1).contains("is the second folder called `run`"));
    assert!(!sandbox.path("twice").exists());
}

/// What several models cannot be asked together is refused before anything is computed, and what lies in the way stays.
#[test]
fn several_models_are_shown_the_same_and_overwrite_nothing() {
    let sandbox = trained("softmax");
    let elsewhere = tiny::DATA.replace("seed=1", "seed=2");
    sandbox.run(&tiny::train("other", &["--epochs", "1", "--quiet"])).success();
    let drawn = ["train", "--config", "tiny.toml", "--data", &elsewhere, "--out", "drawn", "--epochs", "1", "--quiet"];
    sandbox.run(&drawn).success();
    let both = |other: &str, more: &[&str]| {
        sandbox.run(&[&["explain", "--checkpoint", "run", "--checkpoint", other, "--examples", "2"], more].concat())
    };
    let unlike = both("drawn", &["--out", "out"]);
    assert!(unlike.failure(1).contains("say what all are to be shown with --data"), "{}", unlike.stderr);
    assert!(both("other", &["--layer", "blocks.7", "--out", "out"]).failure(1).contains("names `blocks.7`"));
    assert!(!sandbox.path("out").exists());
    both("drawn", &["--data", tiny::DATA, "--out", "out"]).success();
    // A folder of results may be explained into again; that of a run, or of somebody else, not.
    sandbox.run(&["explain", "--checkpoint", "run", "--examples", "2", "--out", "out/run"]).success();
    let report = std::fs::read(sandbox.path("run/report.html")).unwrap();
    both("other", &["--out", "."]).failure(1);
    assert_eq!(std::fs::read(sandbox.path("run/report.html")).unwrap(), report);
    std::fs::create_dir_all(sandbox.path("theirs/other")).unwrap();
    let theirs = sandbox.write("theirs/other/results.json", "theirs");
    assert!(both("other", &["--out", "theirs"]).failure(1).contains("not of a run of this program"));
    assert_eq!(std::fs::read_to_string(theirs).unwrap(), "theirs");
    assert!(!sandbox.path("theirs/run").exists());
}

/// The paper averages the heads' rows as they are; by default each head counts alike.
#[test]
fn heads_make_one_map_by_the_rule_asked_for() {
    let sandbox = trained("infsa");
    let found = |rule: &[&'static str]| {
        let outcome = sandbox.run(&explain(&[&["--examples", "2", "--show", "1"], rule].concat())).success();
        let page = std::fs::read_to_string(sandbox.path("out/report.html")).unwrap();
        (outcome.json(), page)
    };
    let numbers = |values: &Value| values.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
    for (asked, rule, words, alike) in [
        (&[][..], "equal-heads", "each with a sum of one", true),
        (&["--map-rule", "equal-heads"], "equal-heads", "each with a sum of one", true),
        (&["--map-rule", "paper"], "paper", "mean over the heads as they are", false),
    ] {
        let (json, page) = found(asked);
        assert_eq!(json["map_rule"], rule);
        assert!(page.contains(words), "{rule}");
        let layer = &json["shown"][0]["layers"][0];
        let heads: Vec<_> = layer["heads"].as_array().unwrap().iter().map(numbers).collect();
        let shares = |head: &[f64]| if alike { head.iter().sum::<f64>() } else { 1.0 };
        for (at, &weight) in numbers(&layer["mean"]).iter().enumerate() {
            let mean = heads.iter().map(|head| head[at] / shares(head)).sum::<f64>() / heads.len() as f64;
            assert!((weight - mean).abs() < 1e-5 * mean.max(1e-3), "{rule}: {weight} {mean}");
        }
    }
    let outcome = sandbox.run(&explain(&["--map-rule", "mean"]));
    let refused = outcome.failure(2);
    assert!(refused.contains("'mean'") && refused.contains("--map-rule"), "{refused}");
}

/// The weights of a model's own mechanism have the decay that its layers have learned, and its walks no second one.
#[test]
fn a_model_is_analysed_with_what_it_has_learned() {
    let sandbox = tiny::sandbox();
    sandbox.run(&tiny::train("run", &["--attention", "infsa", "--epochs", "2", "--quiet"])).success();
    let summary: Value = serde_json::from_slice(&std::fs::read(sandbox.path("run/summary.json")).unwrap()).unwrap();
    let gamma = summary["learned"]["blocks.0.gamma"].as_f64().unwrap();
    assert!((gamma - 0.7).abs() > 1e-4, "training moves it: {gamma}");
    let analyzed = |source: &[&str]| {
        let command =
            [&["analyze"], source, &["--mechanisms", "infsa", "--full", "--out", "analysis", "--json", "--quiet"]]
                .concat();
        let json = sandbox.run(&command).success().json();
        let own = |head: &&Value| head["mechanism"] == "infsa";
        json["heads"].as_array().unwrap().iter().filter(own).map(|head| head["graph"].clone()).collect::<Vec<_>>()
    };
    let model = analyzed(&["--checkpoint", "run", "--sequences", "1", "--save-dump", "dump.safetensors"]);
    let file = analyzed(&["--input", "dump.safetensors"]);
    // The file has queries and keys alone, the preset's decay is 0.7.
    let ratio =
        |(own, plain): (&Value, &Value)| own["row_sums"][1].as_f64().unwrap() / plain["row_sums"][1].as_f64().unwrap();
    let learned = model.iter().zip(&file).map(|pair| 0.7 * ratio(pair)).sum::<f64>() / model.len() as f64;
    assert!((learned - gamma).abs() < 1e-5, "{learned} {gamma}");
    assert!(model.iter().all(|graph| graph["walks"]["decay"] == 1.0), "{model:?}");
}

/// `fna` on a model of pictures is that of the paper's models of pictures.
#[test]
fn presets_suit_the_pictures_that_a_model_sees() {
    let sandbox = trained("softmax");
    let command = ["analyze", "--checkpoint", "run", "--sequences", "1", "--mechanisms", "fna", "--out", "a", "--json"];
    let json = sandbox.run(&command).success().json();
    let call = json["calls"].as_array().unwrap().iter().find(|call| call["mechanism"]["mechanism"] == "fna").unwrap();
    assert_eq!(call["mechanism"]["kappa"], "vision");
    let ordered = sandbox.run(&[&command[..], &["--causal"]].concat());
    assert!(ordered.failure(1).contains("patches have no order"), "{}", ordered.stderr);
}

#[test]
fn pictures_of_ones_own_with_boxes() {
    let sandbox = trained("fna");
    photographs(&sandbox);
    let json = sandbox.run(&explain(&["--input", "photos", "--boxes", "photos"])).success().json();
    assert_eq!((&json["examples"], &json["shown"][0]["name"]), (&2.into(), &"a.png".into()));
    // Of 40 x 24 the middle 24 columns are seen, at 16 x 16: 10..20.5 across is 4/3..8.33, 12..24 down is 8..16.
    let region = &json["shown"][0]["boxes"][0];
    let at = |edge: &str| region[edge].as_f64().unwrap();
    assert!((at("left") - 4.0 / 3.0).abs() < 1e-9 && (at("right") - 25.0 / 3.0).abs() < 1e-9, "{region}");
    assert_eq!((at("top"), at("bottom")), (8.0, 16.0));
    assert!(json["answers"][0]["label"].is_null() && json["answers"][0]["localisation"]["prevalence"] == 0.25);
    let one = ["--input", "photos/b.png", "--boxes", "photos/b.xml"];
    assert_eq!(sandbox.run(&explain(&one)).success().json()["examples"], 1);

    let refused = |args: &[&str], named: &[&str]| {
        let before = sandbox.snapshot();
        let outcome = sandbox.run(&[&["explain", "--checkpoint", "run", "--out", "out"], args].concat());
        let error = outcome.failure(1);
        assert!(named.iter().all(|named| error.contains(named)), "{error}");
        assert_eq!(sandbox.snapshot(), before, "nothing is half-written");
    };
    refused(&["--input", "photos/b.xml"], &["b.xml", "neither PNG, JPEG nor WebP"]);
    refused(&["--input", "run"], &["run", "holds no picture"]);
    refused(&["--input", "nowhere.png"], &["nowhere.png"]);
    refused(&["--layer", "blocks.7"], &["`blocks.7`", "blocks.0"]);
    refused(&["--text", "a cat"], &["trained on pictures"]);
    refused(&["--data", "listops:train=4,test=4"], &["trained on pictures"]);
    sandbox.write("photos/a.xml", annotation(-1, 24));
    refused(&["--input", "photos", "--boxes", "photos"], &["a.xml", "leaves the picture of 40 x 24"]);
    std::fs::remove_file(sandbox.path("photos/a.xml")).unwrap();
    refused(&["--input", "photos", "--boxes", "photos"], &["a.xml"]);
    let cut = std::fs::read(sandbox.path("photos/a.png")).unwrap();
    sandbox.write("photos/a.png", &cut[..cut.len() / 2]);
    refused(&["--input", "photos"], &["a.png", "cannot be decoded"]);
    let colours = RgbImage::from_fn(64, 64, |x, y| [(x * 4) as u8, (y * 4) as u8, (x * y) as u8].into());
    std::fs::remove_dir_all(sandbox.path("photos")).unwrap();
    std::fs::create_dir_all(sandbox.path("photos/folder.jpg")).unwrap();
    colours.save_with_format(sandbox.path("photos/c.jpg"), ImageFormat::Jpeg).unwrap();
    assert_eq!(sandbox.run(&explain(&["--input", "photos"])).success().json()["examples"], 1);
    let whole = std::fs::read(sandbox.path("photos/c.jpg")).unwrap();
    sandbox.write("photos/c.jpg", &whole[..whole.len() / 2]);
    refused(&["--input", "photos"], &["c.jpg", "ends in the middle"]);
    sandbox.write("photos/c.jpg", &whole);
    for name in ["photos/d.gif", "photos/d.webp"] {
        sandbox.write(name, "RIFF");
        refused(&["--input", "photos"], &[name, "neither PNG, JPEG nor WebP"]);
        std::fs::remove_file(sandbox.path(name)).unwrap();
    }
    colours.save_with_format(sandbox.path("photos/d.webp"), ImageFormat::WebP).unwrap();
    assert_eq!(sandbox.run(&explain(&["--input", "photos"])).success().json()["examples"], 2);
    std::fs::remove_file(sandbox.path("photos/d.webp")).unwrap();
    // The boxes of one picture are not those of all.
    photographs(&sandbox);
    sandbox.write("photos/c.jpg", &whole);
    refused(&["--input", "photos", "--boxes", "photos/b.xml"], &["b.xml", "of one picture, and there are 3"]);
    for other in [&["--text", "a"][..], &["--data", "shapes"], &[]] {
        let outcome = sandbox.run(&[&["explain", "--boxes", "photos"], other].concat());
        assert_eq!(outcome.code, Some(2), "boxes of no pictures: {other:?}");
    }
}

const PYRAMID: &str = "
name = 'tiny'
mechanism = 'soft'
[model]
kind = 'pyramid'
preset = 'soft-mini'
[schedule]
epochs = 1
warmup_epochs = 0.0
batch_size = 16
";

#[test]
fn pyramids_have_a_grid_per_stage() {
    let sandbox = Sandbox::new();
    sandbox.write("tiny.toml", PYRAMID);
    let data = "shapes:seed=1,size=32,train=32,test=16";
    sandbox.run(&["train", "--config", "tiny.toml", "--data", data, "--out", "run", "--quiet"]).success();
    let json = sandbox.run(&explain(&["--examples", "2"])).success().json();
    let layers = json["layers"].as_array().unwrap();
    let first = &layers[0];
    assert_eq!((&first["layer"], &first["grid"]), (&"stages.0.blocks.0".into(), &serde_json::json!([16, 16])));
    assert_eq!(layers.last().unwrap()["grid"], serde_json::json!([2, 2]));
    let scored = layers.iter().find(|layer| layer["layer"] == json["layer"]).unwrap();
    assert_eq!(scored["grid"], serde_json::json!([4, 4]), "the last with sixteen places");
    assert!(sandbox.run(&explain(&["--rollout"])).failure(1).contains("pyramid"));
    let analyzed =
        ["analyze", "--checkpoint", "run", "--sequences", "1", "--mechanisms", "softmax,fna", "--out", "a", "--json"];
    let json = sandbox.run(&analyzed).success().json();
    let tokens: Vec<_> =
        json["layers"].as_array().unwrap().iter().map(|layer| layer["tokens"].as_u64().unwrap()).collect();
    assert!(tokens.contains(&256) && tokens.contains(&16), "{tokens:?}");
}

/// What one place looks at is drawn beside the maps, on a pyramid's own grids too; a place that is not there is refused.
#[test]
fn a_place_has_its_own_rows() {
    let sandbox = trained("laplacian-exact");
    let asked = ["--examples", "2", "--show", "1", "--query", "2,3"];
    let json = sandbox.run(&explain(&asked)).success().json();
    let row = &json["shown"][0]["query"][0];
    assert_eq!((&row["place"], row["maps"]["mean"].as_array().unwrap().len()), (&6.into(), 16));
    let negative = |x: &Value| x.as_f64().unwrap() < 0.0;
    assert!(row["maps"]["mean"].as_array().unwrap().iter().any(negative), "{row}");
    let page = std::fs::read_to_string(sandbox.path("out/report.html")).unwrap();
    assert!(page.contains("row 2, column 3") && page.contains("class=\"colours\""));
    for (place, said) in [("5,1", "4 rows and 4 columns"), ("7", "give ROW,COLUMN")] {
        assert!(sandbox.run(&explain(&["--query", place])).failure(1).contains(said), "{place}");
    }
    sandbox.run(&explain(&["--query", "0,1"])).failure(2);
}

/// Files and folders of pictures, an answer each, in their order; texts are refused.
#[test]
fn pictures_are_classified() {
    let sandbox = trained("softmax");
    photographs(&sandbox);
    let lines = sandbox.run(&["classify", "run", "photos", "photos/a.png", "--top", "2", "--json"]).success().stdout;
    let answers: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let pictures: Vec<_> = answers.iter().map(|answer| answer["picture"].as_str().unwrap()).collect();
    assert_eq!(pictures, ["photos/a.png", "photos/b.png", "photos/a.png"]);
    assert_eq!((&answers[0]["top"], answers[0]["top"].as_array().unwrap().len()), (&answers[2]["top"], 2));
    assert_eq!(answers[0]["label"], answers[0]["top"][0][0]);
    let told = sandbox.run(&["classify", "--checkpoint", "run", "photos/b.png"]).success().stdout;
    assert!(told.starts_with(answers[1]["label"].as_str().unwrap()) && told.contains("photos/b.png"), "{told}");
    let explained = sandbox.run(&explain(&["--input", "photos", "--show", "0"])).success().json();
    assert_eq!(explained["answers"][1]["answer"], answers[1]["label"]);
    for args in [&["classify", "run"][..], &["classify", "run", "photos", "--text", "x"]] {
        assert!(sandbox.run(args).failure(1).contains("trained on pictures"), "{args:?}");
    }
    assert!(sandbox.run(&["classify", "run", "none.png"]).failure(1).contains("none.png"));
    assert!(
        sandbox
            .run(&["classify", "photos/a.png"])
            .failure(1)
            .contains("photos/a.png: is a file, not the folder of a run")
    );
}

/// A signal ends the reading of what a model is to be shown, before anything is written.
#[cfg(unix)]
#[test]
fn ctrl_c_ends_the_reading_of_pictures() {
    use std::process::{Command, Stdio};
    let sandbox = trained("softmax");
    std::fs::create_dir(sandbox.path("large")).unwrap();
    let first = sandbox.path("large/0.png");
    image::GrayImage::new(6000, 6000).save_with_format(&first, ImageFormat::Png).unwrap();
    (1..300).for_each(|i| std::fs::hard_link(&first, sandbox.path(&format!("large/{i}.png"))).unwrap());
    let mut command = support::resolvent();
    command.current_dir(sandbox.path(".")).args(explain(&["--input", "large", "--examples", "300"]));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(700));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let outcome = support::Outcome::from(child.wait_with_output().unwrap());
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(130), ""), "it ends where it is");
    assert!(!sandbox.path("out").exists());
}
