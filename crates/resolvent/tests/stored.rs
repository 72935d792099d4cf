//! Modules that an earlier version wrote, whose learned parameters were fields: configuration, checkpoint and weights still load.
//! `tests/data/attention` has them, and what they made of [`tokens`].

use std::path::{Path, PathBuf};

use burn::{
    config::Config,
    module::{Module, ModuleVisitor, Param, ParamId},
    tensor::{Device, Tensor, TensorData},
};
use resolvent::{
    Mechanism, Parameter,
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, Trained},
    convert::{load_weights, save_weights},
};

/// The stored modules and the paths of their learned parameters.
const STORED: [(&str, &[&str]); 4] = [
    ("infsa", &["gamma_logit"]),
    ("fna", &["alpha_logit", "kappa_log"]),
    ("laplacian", &["lambda_log"]),
    ("soft", &["scale_log"]),
];

fn stored(name: &str, end: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/attention").join(format!("{name}.{end}"))
}

fn built(name: &str) -> MultiHeadAttention {
    MultiHeadAttentionConfig::load(stored(name, "json")).unwrap().init(&Device::flex())
}

/// What the stored modules were applied to.
fn tokens() -> Tensor<3> {
    let values: Vec<f32> = (0..48).map(|i| ((i * i) as f32 * 0.37 + 1.0).sin()).collect();
    Tensor::from_data(TensorData::new(values, [1, 6, 8]), &Device::flex())
}

#[track_caller]
fn assert_is_stored(module: &MultiHeadAttention, name: &str) {
    let expected: Vec<f32> = serde_json::from_str(&std::fs::read_to_string(stored(name, "out.json")).unwrap()).unwrap();
    let got: Vec<f32> = module.forward(MhaInput::self_attn(tokens())).context.into_data().iter().collect();
    let unit = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let worst = got.iter().zip(&expected).fold(0.0f32, |most, (got, expected)| most.max((got - expected).abs()));
    assert!(got.len() == expected.len() && worst <= 1e-5 * unit, "{name}: {worst:e} of {unit:e}");
}

/// Paths and ids of all tensors.
fn tensors(module: &MultiHeadAttention) -> Vec<(String, ParamId)> {
    #[derive(Default)]
    struct Paths {
        path: Vec<String>,
        found: Vec<(String, ParamId)>,
    }
    impl ModuleVisitor for Paths {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }
        fn exit_module(&mut self, name: &str, _: &str) {
            assert_eq!(self.path.pop().as_deref(), Some(name));
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.found.push((self.path.join("."), param.id));
        }
    }
    let mut paths = Paths::default();
    module.visit(&mut paths);
    assert!(paths.path.is_empty());
    paths.found
}

#[test]
fn checkpoints_load_with_the_ids_that_an_optimiser_knows() {
    for (name, learned) in STORED {
        let fresh = built(name);
        let record = burn::store::ModuleRecord::load(stored(name, "bpk")).unwrap();
        let module = fresh.clone().try_load_record(record).unwrap();
        assert_is_stored(&module, name);
        let (before, after) = (tensors(&fresh), tensors(&module));
        for path in learned {
            let id = |tensors: &[(String, ParamId)]| tensors.iter().find(|(p, _)| p == path).map(|(_, id)| *id);
            assert!(id(&after).is_some() && id(&before) != id(&after), "{name}: {path}");
        }
        assert_eq!(before.len(), after.len());
    }
}

#[test]
fn weights_load_and_are_written_under_the_same_names() {
    for (name, learned) in STORED {
        let mut module = built(name);
        load_weights(&mut module, &stored(name, "safetensors")).unwrap();
        assert_is_stored(&module, name);
        let file = tempfile::NamedTempFile::new().unwrap();
        save_weights(&module, file.path(), &Default::default()).unwrap();
        let names = |path: &Path| {
            let bytes = std::fs::read(path).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let mut names: Vec<String> = file.names().iter().map(ToString::to_string).collect();
            names.sort();
            names
        };
        let written = names(file.path());
        assert_eq!(written, names(&stored(name, "safetensors")), "{name}");
        assert!(learned.iter().all(|path| written.iter().any(|name| name == path)), "{name}: {written:?}");
    }
}

#[test]
fn configurations_load_and_are_written_under_the_same_names() {
    for (name, _) in STORED {
        let text = std::fs::read_to_string(stored(name, "json")).unwrap();
        let old: serde_json::Value = serde_json::from_str(&text).unwrap();
        let config: MultiHeadAttentionConfig = serde_json::from_str(&text).unwrap();
        let new = serde_json::to_value(&config).unwrap();
        for (field, value) in old.as_object().unwrap() {
            assert_eq!(new[field], *value, "{name}: {field}");
        }
        let added: Vec<&String> = new.as_object().unwrap().keys().filter(|key| old.get(key).is_none()).collect();
        assert_eq!(added, ["bias_trainable", "offset_trainable", "precision"], "{name}");
    }
}

/// What is not said has its default, the decay among it.
#[test]
fn fields_that_are_left_out_have_their_defaults() {
    let short = r#"{"d_model": 8, "n_heads": 2, "mechanism": {"mechanism": "infsa"}, "kappa_trainable": true}"#;
    let config: MultiHeadAttentionConfig = serde_json::from_str(short).unwrap();
    assert_eq!(config.trained, Trained::from([Parameter::Kappa, Parameter::Gamma]));
    let default = MultiHeadAttentionConfig::new(8, 2, Mechanism::preset("infsa").unwrap());
    let default = default.with_trained(config.trained.clone());
    assert_eq!(serde_json::to_value(&config).unwrap(), serde_json::to_value(&default).unwrap());
    let wrong = short.replace("\"kappa_trainable\": true", "\"kappa_trainable\": 3");
    assert!(serde_json::from_str::<MultiHeadAttentionConfig>(&wrong).is_err());
}
