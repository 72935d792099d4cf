//! The files of checkpoints: what other programs read of them, what is read when, damage, and those of earlier programs.

use std::{collections::BTreeMap, fs, path::Path};

use crate::support::{finished, newest, saved, stopping, weights};
use burn::{
    module::{Module, ModuleMapper, Param, ParamId},
    nn::{Initializer, Linear, LinearConfig},
    store::burn_pack::{Reader, Writer},
    tensor::{Device, Tensor},
};
use resolvent::convert;
use resolvent_lab::{
    Error, Recipe,
    checkpoint::{Checkpoint, parts},
    data::{PictureDataset, PictureSpec},
    eval,
    train::{self, PictureModel, Resume, TrainOptions},
};
use safetensors::SafeTensors;
use serde_json::Value;

fn pictures() -> PictureDataset {
    PictureSpec::parse("shapes:seed=3,size=16,train=64,test=16,difficulty=0").unwrap().load().unwrap()
}

/// One block of width 16 with an average, two epochs of four steps.
fn recipe(mechanism: &str) -> Recipe {
    let text = format!(
        "mechanism = '{mechanism}'\nseed = 5\n[model]\npatch = 8\ndim = 16\ndepth = 1\nheads = 2\nmlp_dim = 16\n\
         [schedule]\nepochs = 2\nbatch_size = 16\n[regularisation]\nema_decay = 0.9"
    );
    Recipe::from_toml(&text, "test").unwrap()
}

/// A run that was interrupted after three steps.
fn begun(run: &Path, data: &PictureDataset) -> Recipe {
    let recipe = recipe("infsa");
    train::run(&recipe, data, &stopping(run, 3, Resume::Never)).unwrap();
    recipe
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn weights_are_safetensors_that_say_what_they_are_of() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let recipe = begun(folder.path(), &data);
    let file = newest(folder.path()).join(parts::MODEL);
    let bytes = fs::read(&file).unwrap();
    let (header, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!((8 + header) % 8, 0, "data are aligned");
    let about: Value = serde_json::from_str(&metadata.metadata().as_ref().unwrap()["resolvent"]).unwrap();
    assert_eq!(about["recipe"], serde_json::to_value(&recipe).unwrap());
    assert_eq!((about["step"].as_u64(), about["expects"]["examples"].as_str()), (Some(3), Some("pictures")));

    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let weight = tensors.tensor("Vit.blocks.0.mlp_in.weight").unwrap();
    assert_eq!((weight.shape(), weight.dtype()), (&[16, 16][..], safetensors::Dtype::F32));
    // The library's own reader, which knows nothing of checkpoints, finds the same model.
    let mut model = train::build(&recipe, &data, &Device::flex()).unwrap();
    convert::load_weights(&mut model, &file).unwrap();
    let checkpoint = Checkpoint::newest(folder.path()).unwrap();
    let own = train::build(&recipe, &data, &Device::flex()).unwrap();
    let own = checkpoint.load_module(own, parts::MODEL).unwrap();
    let bytes = |model: PictureModel| model.into_record().into_bytes().unwrap();
    assert!(bytes(model) == bytes(own), "other weights");
}

#[test]
fn what_is_not_asked_for_is_not_read() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    begun(folder.path(), &data);
    let (_, whole) = eval::run(folder.path(), &data, &Device::flex()).unwrap();
    let last = newest(folder.path());
    for part in [parts::MODEL, parts::OPTIMISER] {
        fs::remove_file(last.join(part)).unwrap();
    }
    let (_, averaged) = eval::run(folder.path(), &data, &Device::flex()).unwrap();
    assert_eq!((averaged.loss, averaged.confusion), (whole.loss, whole.confusion), "the average is what counts");
    // A checkpoint that is open outlives its folder, as a run that goes on removes it.
    let open = Checkpoint::load(&last).unwrap();
    fs::remove_dir_all(&last).unwrap();
    if cfg!(unix) {
        let model = train::build(&recipe("infsa"), &data, &Device::flex()).unwrap();
        open.load_weights(model).unwrap();
    }
}

#[test]
fn damage_names_file_and_tensor() {
    let folder = tempfile::tempdir().unwrap();
    // Drawing would disturb the runs of other tests, for which Burn has one generator.
    let config = |inputs| LinearConfig::new(inputs, 256).with_initializer(Initializer::Ones);
    let layer = |inputs| config(inputs).init(&Device::flex());
    let checkpoint = saved(folder.path(), &layer(2048));
    let (file, state) = (checkpoint.path.join(parts::MODEL), checkpoint.path.join("state.json"));
    let (whole, manifest) = (fs::read(&file).unwrap(), fs::read(&state).unwrap());
    let says = |layer: Linear, expected: &[&str]| {
        let error = Checkpoint::load(&checkpoint.path).and_then(|found| found.load_weights(layer)).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
        let message = error.to_string();
        let all = expected.iter().chain(&[parts::MODEL]);
        assert!(all.into_iter().all(|piece| message.contains(piece)) && !message.contains('\n'), "{message}");
    };
    let damaged = |change: &dyn Fn(&mut Vec<u8>), expected: &[&str]| {
        let mut bytes = whole.clone();
        change(&mut bytes);
        fs::write(&file, bytes).unwrap();
        says(layer(2048), expected);
        fs::write(&file, &whole).unwrap();
    };
    damaged(&|bytes| *bytes.last_mut().unwrap() ^= 1, &["checksum", "`weight`", "delete the folder"]);
    let other = |bytes: &mut Vec<u8>| {
        let at = bytes.windows(6).position(|text| text == b"recipe").unwrap();
        bytes[at] = b'R';
    };
    damaged(&other, &["checksum", "delete the folder"]);
    damaged(&|bytes| bytes[8] = b'[', &["header", "delete the folder"]);
    damaged(&|bytes| bytes.truncate(bytes.len() - 4), &["cut off or another", "delete the folder"]);
    damaged(&|bytes| bytes[6] = 1, &["no valid safetensors file", "delete the folder"]);
    says(layer(1024), &["`weight`", "[2048, 256]", "[1024, 256]", "recipe"]);
    says(config(2048).with_bias(false).init(&Device::flex()), &["bias", "recipe"]);
    // A tensor that nobody wrote the checksum of.
    let unknown = String::from_utf8(manifest).unwrap().replace("\"weight\":", "\"height\":");
    fs::write(&state, unknown).unwrap();
    says(layer(2048), &["checksum", "`weight`"]);
}

/// Turns the newest checkpoint of `run` into one of the format before: weights in Burn's own format, with the ids of the parameters, which
/// are those of the moments; here `by` more than the model's own, as if Burn had drawn them.
fn as_before(run: &Path, recipe: &Recipe, data: &PictureDataset, by: u64) {
    struct Shifted(u64);
    impl ModuleMapper for Shifted {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (id, value, mapper) = param.consume();
            Param::from_mapped_value(ParamId::from(id.val() + self.0), value, mapper)
        }
    }
    let checkpoint = Checkpoint::newest(run).unwrap();
    let mut files: BTreeMap<&str, Vec<u8>> = BTreeMap::new();
    for (part, old) in [(parts::MODEL, "model.bpk"), (parts::AVERAGE, "average.bpk")] {
        let model = train::build(recipe, data, &Device::flex()).unwrap();
        let model = checkpoint.load_module(model, part).unwrap().map(&mut Shifted(by));
        files.insert(old, model.into_record().into_bytes().unwrap().to_vec());
        fs::remove_file(checkpoint.path.join(part)).unwrap();
    }
    let shifted = |name: &str| {
        let (number, field) = name.split_once('.').map_or((name, String::new()), |(n, field)| (n, format!(".{field}")));
        format!("{}{field}", number.parse::<u64>().unwrap() + by)
    };
    let reader = Reader::from_bytes(checkpoint.read(parts::OPTIMISER).unwrap()).unwrap();
    let (scalars, paths) = (reader.scalars().clone(), reader.metadata().clone());
    let mut tensors = reader.into_tensors().unwrap();
    for tensor in &mut tensors {
        (tensor.name, tensor.param_id) = (shifted(&tensor.name), tensor.param_id.map(|id| id + by));
    }
    let mut moments = Writer::new(tensors);
    for (name, value) in scalars {
        moments = moments.with_scalar(&shifted(&name), value);
    }
    for (number, path) in paths {
        moments = moments.with_metadata(&shifted(&number), &path);
    }
    files.insert(parts::OPTIMISER, moments.into_bytes().unwrap().to_vec());
    let state = checkpoint.path.join("state.json");
    let mut manifest = read_json(&state);
    let fingerprint = |bytes: &Vec<u8>| serde_json::json!({"bytes": bytes.len(), "crc32": crc32fast::hash(bytes)});
    manifest["files"] = files.iter().map(|(name, bytes)| ((*name).to_owned(), fingerprint(bytes))).collect();
    manifest["format"] = 2.into();
    fs::write(state, manifest.to_string()).unwrap();
    files.iter().for_each(|(name, bytes)| fs::write(checkpoint.path.join(name), bytes).unwrap());
}

#[test]
fn checkpoints_of_the_format_before_go_on_to_the_same_bits() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let whole = folder.path().join("whole");
    let expected = finished(train::run(&recipe("infsa"), &data, &TrainOptions::new(&whole)).unwrap());
    for by in [0, 1000] {
        let run = folder.path().join(format!("run-{by}"));
        let recipe = begun(&run, &data);
        let (_, evaluated) = eval::run(&run, &data, &Device::flex()).unwrap();
        as_before(&run, &recipe, &data, by);
        let (_, packed) = eval::run(&run, &data, &Device::flex()).unwrap();
        assert_eq!((packed.loss, packed.confusion), (evaluated.loss, evaluated.confusion), "{by}");
        // Once from the old format, once from the new one that follows it.
        train::run(&recipe, &data, &stopping(&run, 5, Resume::Always)).unwrap();
        assert!(newest(&run).join(parts::MODEL).exists());
        let options = TrainOptions { resume: Resume::Always, ..TrainOptions::new(&run) };
        let summary = finished(train::run(&recipe, &data, &options).unwrap());
        assert_eq!(weights(&run, &recipe, &data), weights(&whole, &recipe, &data), "{by}: every weight, bit for bit");
        assert_eq!(summary.test.loss, expected.test.loss, "{by}");
        let moments = |run: &Path| fs::read(newest(run).join(parts::OPTIMISER)).unwrap();
        assert!(moments(&run) == moments(&whole), "{by}: moments, byte for byte");
        let cut = folder.path().join(format!("cut-{by}"));
        begun(&cut, &data);
        as_before(&cut, &recipe, &data, by);
        let from = TrainOptions { from: Some(cut), ..TrainOptions::new(folder.path().join(format!("from-{by}"))) };
        finished(train::run(&recipe, &data, &from).unwrap());
    }
}

/// A damaged byte of the old format is found before anything is made of it.
#[test]
fn damage_of_the_format_before_is_found() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let recipe = begun(folder.path(), &data);
    as_before(folder.path(), &recipe, &data, 0);
    let file = newest(folder.path()).join("average.bpk");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let message = eval::run(folder.path(), &data, &Device::flex()).unwrap_err().to_string();
    assert!(message.contains("average.bpk") && message.contains("checksum"), "{message}");
}

/// The other mechanism has parameters in between, so that the numbers of those after them are others.
#[test]
fn runs_begin_with_the_weights_of_a_model_that_counts_otherwise() {
    let (folder, data) = (tempfile::tempdir().unwrap(), pictures());
    let source = folder.path().join("softmax");
    finished(train::run(&recipe("softmax"), &data, &TrainOptions::new(&source)).unwrap());
    let options = TrainOptions { from: Some(source), ..TrainOptions::new(folder.path().join("infsa")) };
    let summary = finished(train::run(&recipe("infsa"), &data, &options).unwrap());
    let origin = summary.origin.unwrap();
    assert_eq!(origin.fresh, ["Vit.blocks.0.attention.gamma_logit"]);
    let moments = Checkpoint::newest(&options.out_dir).unwrap().read(parts::OPTIMISER).unwrap();
    let reader = Reader::from_bytes(moments).unwrap();
    let paths: Vec<&String> = reader.metadata().values().collect();
    let gamma = paths.iter().filter(|path| path.ends_with("gamma_logit")).count();
    assert_eq!((gamma, paths.len()), (1, origin.taken + 1), "moments of each parameter");
}
