//! The models: their sizes, their forward pass, and their weights in files.

mod support;

use burn::{
    module::Module,
    tensor::{Device, Tensor},
};
use resolvent::{
    Error, Mechanism,
    convert::{load_weights, save_weights},
    models::{Pool, VitConfig},
};
use support::random;

/// Parameter counts of "Infinite Self-Attention", table 2: clean, and with the projections that the paper counts.
const COUNTS: [(&str, usize, usize); 6] = [
    ("infvit-linear-4", 48_203_752, 53_451_752),
    ("infvit-pure-4", 52_402_152, 57_650_152),
    ("vit-4", 52_402_152, 57_650_152),
    ("infvit-linear-24", 279_136_232, 305_376_232),
    ("infvit-pure-24", 304_326_632, 330_566_632),
    ("vit-24", 304_326_632, 330_566_632),
];

fn small(mechanism: &str) -> VitConfig {
    let base = VitConfig::new([8, 12], 2, 4, 5, Mechanism::preset(mechanism).unwrap());
    VitConfig { dim: 16, depth: 2, heads: 2, mlp_dim: 24, ..base }
}

/// "Infinite Self-Attention" has 10.07 and 11.22 billion of the models of four layers at 224 x 224 pixels, with the layers that its code adds.
#[test]
fn vision_transformers_cost_the_published_operations() {
    let published = |name| VitConfig { extra_proj: true, pre_logits: true, ..VitConfig::preset(name).unwrap() };
    for (name, billions) in [("infvit-linear-4", 10.07), ("infvit-pure-4", 11.22)] {
        let counted = published(name).multiply_adds([224; 2]).unwrap() as f64;
        assert!((counted / (billions * 1e9) - 1.0).abs() < 0.01, "{name}: {counted}");
    }
    let config = published("infvit-pure-4");
    assert!(config.multiply_adds([225, 224]).is_err(), "patches of 16 do not divide 225 pixels");
    let [small, large] = [224, 448].map(|side| config.multiply_adds([side; 2]).unwrap() as f64);
    assert!(large > 4.0 * small && large < 16.0 * small);
}

#[test]
fn published_models_have_the_published_sizes() {
    for (name, clean, with_extras) in COUNTS {
        let config = VitConfig::preset(name).unwrap();
        assert_eq!(config.parameter_count(), clean, "{name}");
        let extended = VitConfig { extra_proj: true, pre_logits: true, ..config };
        assert_eq!(extended.parameter_count(), with_extras, "{name}");
        extended.validate().unwrap();
    }
}

#[test]
fn parameters_are_counted() {
    let device = Device::flex();
    for id in Mechanism::IDS {
        for (pool, extended) in [(Pool::Cls, false), (Pool::Mean, true)] {
            let config = VitConfig { pool, extra_proj: extended, pre_logits: extended, ..small(id) };
            let gammas = config.mechanism.gamma().map_or(0, |_| config.depth * config.heads);
            assert_eq!(config.init(&device).num_params(), config.parameter_count() + gammas, "{id}");
        }
    }
}

#[test]
fn every_mechanism_gives_logits_and_gradients() {
    let device = Device::flex().autodiff();
    for id in Mechanism::IDS {
        for pool in [Pool::Cls, Pool::Mean] {
            let config =
                VitConfig { pool, drop_path: 0.2, dropout: 0.1, pre_logits: true, extra_proj: true, ..small(id) };
            let model = config.init(&device);
            let logits = model.forward(random([3, 2, 8, 12], &device));
            assert_eq!(logits.dims(), [3, 5]);
            let gradients = logits.square().sum().backward();
            let projection = model.blocks[0].attention.projection.weight.val();
            let gradient: Vec<f32> = projection.grad(&gradients).unwrap().into_data().iter().collect();
            assert!(gradient.iter().all(|x| x.is_finite()) && gradient.iter().any(|&x| x != 0.0), "{id}");
        }
    }
}

#[test]
fn positions_are_interpolated_to_other_sizes() {
    let device = Device::flex();
    for pool in [Pool::Cls, Pool::Mean] {
        let model = VitConfig { pool, ..small("infsa") }.init(&device);
        assert_eq!(model.forward(random([1, 2, 16, 20], &device)).dims(), [1, 5]);
        // One picture after another is the same as both at once.
        let pictures = random([2, 2, 16, 8], &device);
        let both = model.forward(pictures.clone()).narrow(0, 1, 1);
        let alone = model.forward(pictures.narrow(0, 1, 1));
        assert!(both.all_close(alone, Some(1e-4), Some(1e-5)));
    }
    let model = small("infsa").init(&device);
    let error = model.try_forward(random([1, 2, 9, 12], &device)).unwrap_err().to_string();
    assert!(error.contains("[1, 2, 9, 12]") && error.contains("multiples of the patch"), "{error}");
}

/// 150 x 150 tokens: without autodiff the MLP takes them in two parts.
#[test]
fn long_sequences_in_parts_are_the_same() {
    let device = Device::flex();
    let base = VitConfig::new([150, 150], 1, 1, 3, Mechanism::preset("linear-infsa").unwrap());
    let model = VitConfig { dim: 8, depth: 2, heads: 2, mlp_dim: 16, ..base }.init(&device);
    let picture: Tensor<4> = random([1, 1, 150, 150], &device);
    let values = |x: Tensor<2>| x.into_data().iter::<f32>().collect::<Vec<_>>();
    let parts = values(model.forward(picture.clone()));
    let learns = device.autodiff();
    let whole = values(model.to_device(&learns).forward(Tensor::from_data(picture.into_data(), &learns)));
    assert!(parts.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-5), "{parts:?} {whole:?}");
}

/// The grid of 2 x 3 patches is one window of 4 x 4; six tokens in a row would be two of 4.
#[test]
fn windows_lie_on_the_grid_of_patches() {
    let device = Device::flex();
    let pooled = r#"{"mechanism": "soft", "landmarks": {"kind": "pool", "ratio": 4}}"#;
    let first = |pool: Pool| {
        let mechanism = Mechanism::from_json(pooled).unwrap();
        VitConfig { mechanism, pool, ..small("soft") }.init(&device).blocks.remove(0).attention
    };
    assert_eq!(first(Pool::Mean).grid, Some([2, 3]));
    assert_eq!(first(Pool::Cls).grid, None);
    let mechanism = Mechanism::from_json(pooled).unwrap();
    let model = VitConfig { mechanism, ..small("soft") }.init(&device);
    // Another picture size is another grid.
    assert_eq!(model.forward(Tensor::ones([1, 2, 12, 12], &device)).dims(), [1, 5]);
}

#[test]
fn configurations_survive_the_file_and_mistakes_are_named() {
    let config = VitConfig { drop_path: 0.1, tied: Some(true), ..small("infsa") };
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<VitConfig>(&text).unwrap(), config);
    let misspelt = text.replacen("\"drop_path\"", "\"droppath\"", 1);
    assert!(serde_json::from_str::<VitConfig>(&misspelt).unwrap_err().to_string().contains("droppath"));

    let error = |config: VitConfig| config.validate().unwrap_err().to_string();
    assert!(error(VitConfig { patch: 5, ..small("infsa") }).contains("`image` is 8 x 12"));
    assert!(error(VitConfig { depth: 0, ..small("infsa") }).contains("`depth`"));
    assert!(error(VitConfig { drop_path: 1.0, ..small("infsa") }).contains("`drop_path`"));
    assert_eq!(
        VitConfig { heads: 3, ..small("infsa") }.validate().unwrap_err(),
        Error::Heads { d_model: 16, n_heads: 3 }
    );
    let causal = Mechanism::from_json(r#"{"mechanism": "infsa", "causal": true}"#).unwrap();
    assert!(error(VitConfig { mechanism: causal, ..small("infsa") }).contains("causal"));
    let elsewhere = Mechanism::from_json(r#"{"mechanism": "soft", "grid": [3, 2]}"#).unwrap();
    assert!(error(VitConfig { mechanism: elsewhere, ..small("soft") }).contains("`mechanism.grid`"));
    assert!(error(VitConfig { tied: Some(false), ..small("soft") }).contains("`tied` is false"));
    assert!(error(VitConfig { tied: Some(true), ..small("ssa") }).contains("`tied` is true"));
    VitConfig { tied: Some(true), ..small("uniform") }.validate().unwrap();
    assert!(VitConfig::preset("vit").unwrap_err().to_string().contains("vit-tiny-28"));
    for name in VitConfig::PRESETS {
        VitConfig::preset(name).unwrap().validate().unwrap();
    }
}

#[test]
fn weights_survive_the_file_and_misfits_are_named() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let model = small("infsa").init(&device);
    save_weights(&model, &path, &[("epoch".into(), "3".into())].into()).unwrap();
    let mut copy = small("infsa").init(&device);
    load_weights(&mut copy, &path).unwrap();
    let images = random([1, 2, 8, 12], &device);
    let logits: Vec<f32> = model.forward(images.clone()).into_data().iter().collect();
    assert_eq!(copy.forward(images.clone()).into_data().iter::<f32>().collect::<Vec<_>>(), logits);

    let mut deeper = VitConfig { depth: 3, ..small("infsa") }.init(&device);
    let error = load_weights(&mut deeper, &path).unwrap_err().to_string();
    assert!(error.contains("model.safetensors") && error.contains("missing tensors: blocks.2."), "{error}");
    let mut shallower = VitConfig { depth: 1, ..small("infsa") }.init(&device);
    let error = load_weights(&mut shallower, &path).unwrap_err().to_string();
    assert!(error.contains("unexpected tensors: blocks.1."), "{error}");
    let mut wider = VitConfig { mlp_dim: 32, ..small("infsa") }.init(&device);
    let before: Vec<f32> = wider.forward(images.clone()).into_data().iter().collect();
    let error = load_weights(&mut wider, &path).unwrap_err().to_string();
    assert!(error.contains("mlp_in"), "{error}");
    assert_eq!(wider.forward(images).into_data().iter::<f32>().collect::<Vec<_>>(), before);

    std::fs::write(&path, b"not safetensors").unwrap();
    let error = load_weights(&mut copy, &path).unwrap_err();
    assert!(matches!(&error, Error::Weights { path: named, .. } if *named == path), "{error}");
    let absent = folder.path().join("absent.safetensors");
    assert!(load_weights(&mut copy, &absent).unwrap_err().to_string().contains("absent.safetensors"));
}
