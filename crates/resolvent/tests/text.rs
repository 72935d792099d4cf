//! The models of text: padding, normalisation, and every mechanism.

use burn::{
    module::Module,
    tensor::{Bool, Device, Int, Tensor},
};
use resolvent::{
    Error, Mechanism, Sequences,
    attention::MhaInput,
    models::{NormOrder, TextConfig},
};

fn config(mechanism: &str) -> TextConfig {
    let base = TextConfig::new(30, Mechanism::preset(mechanism).unwrap().with_max_tokens(12));
    TextConfig { dim: 16, depth: 2, heads: 2, mlp_dim: 24, ..base }
}

fn tokens(rows: [[i32; 6]; 2], device: &Device) -> Tensor<2, Int> {
    Tensor::from_ints(rows, device)
}

/// The last two places of the second text are padding.
fn padding(device: &Device) -> Tensor<2, Bool> {
    tokens([[0; 6], [0, 0, 0, 0, 1, 1]], device).equal_scalar(1)
}

#[test]
fn padding_changes_no_answer_and_gets_no_gradient() {
    let device = Device::flex().autodiff();
    for id in Mechanism::IDS {
        let model = config(id).try_init_classifier(3, &device).unwrap();
        let logits = |last: i32| {
            let rows = tokens([[3, 9, 4, 4, 8, 20], [7, 5, 9, 1, last, last]], &device);
            model.forward(rows, Some(padding(&device)))
        };
        let shown = logits(28);
        assert_eq!(shown.clone().into_data(), logits(2).into_data(), "{id}");
        let alone = model.forward(Tensor::<2, Int>::from_ints([[7, 5, 9, 1]], &device), None);
        let gap: f32 = (shown.clone().narrow(0, 1, 1) - alone).abs().max().into_scalar();
        // How many clusters `ssa` makes follows from the width of the batch.
        assert!(gap < 1e-4 || id == "ssa", "{id}: {gap}");

        let grads = shown.powi_scalar(2).sum().backward();
        let embedding: Vec<f32> = model.encoder.embedding.weight.grad(&grads).unwrap().into_data().iter().collect();
        let row = |token: usize| &embedding[token * 16..][..16];
        assert!(row(28).iter().all(|&g| g == 0.0), "{id}: padding learns");
        assert!(row(7).iter().any(|&g| g != 0.0) && embedding.iter().all(|g| g.is_finite()), "{id}");
    }
}

#[test]
fn a_pair_is_judged_by_both_means_their_product_and_their_difference() {
    let device = Device::flex();
    let rows = |row: &[i32]| Tensor::<1, Int>::from_ints(row, &device).reshape([1, row.len() as i32]);
    for id in ["softmax", "infsa", "fna"] {
        let model = config(id).try_init_matcher(3, &device).unwrap();
        let (first, second) = (rows(&[3, 9, 4, 4, 8, 20]), rows(&[7, 5, 9]));
        let mean = |tokens: Tensor<2, Int>| -> Vec<f32> {
            let encoded = model.encoder.forward(tokens, None).unwrap();
            encoded.mean_dim(1).into_data().iter().collect()
        };
        let (a, b) = (mean(first.clone()), mean(second.clone()));
        let pairs = || a.iter().zip(&b);
        let product = pairs().map(|(a, b)| a * b);
        let features: Vec<f32> =
            a.iter().chain(&b).copied().chain(product).chain(pairs().map(|(a, b)| a - b)).collect();
        let linear = |layer: &burn::nn::Linear, x: &[f32]| -> Vec<f32> {
            let [rows, columns] = layer.weight.dims();
            let weight: Vec<f32> = layer.weight.val().into_data().iter().collect();
            let bias: Vec<f32> = layer.bias.as_ref().unwrap().val().into_data().iter().collect();
            assert_eq!(rows, x.len());
            (0..columns).map(|j| bias[j] + (0..rows).map(|i| x[i] * weight[i * columns + j]).sum::<f32>()).collect()
        };
        let hidden: Vec<f32> = linear(&model.hidden, &features).into_iter().map(|x| x.max(0.0)).collect();
        let expected = linear(&model.head, &hidden);
        let close = |logits: Tensor<2>| {
            let found: Vec<f32> = logits.into_data().iter().collect();
            let gap = found.iter().zip(&expected).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
            assert!(found.len() == 3 && gap < 1e-4, "{id}: {found:?}, expected {expected:?}");
        };
        close(model.forward((first.clone(), None), (second, None)));
        let padded = (rows(&[7, 5, 9, 28, 28]), Some(rows(&[0, 0, 0, 1, 1]).equal_scalar(1)));
        close(model.forward((first, None), padded));
    }
    assert!(config("softmax").try_init_matcher(0, &device).is_err());
}

#[test]
fn texts_end_to_end_are_classified_as_if_alone() {
    let device = Device::flex();
    let texts = Sequences::new(&[0, 5, 6, 12]).unwrap();
    let tokens = Tensor::<2, Int>::from_ints([[3, 9, 4, 4, 8, 20, 7, 5, 9, 1, 2, 28]], &device);
    for id in Mechanism::IDS {
        let model = config(id).try_init_classifier(3, &device).unwrap();
        let together = model.forward_sequences(tokens.clone(), &texts).unwrap();
        let alone = (0..3).map(|n| {
            let range = texts.range(n);
            model.forward(tokens.clone().narrow(1, range.start, range.len()), None)
        });
        let gap: f32 = (together - Tensor::cat(alone.collect(), 0)).abs().max().into_scalar();
        assert!(gap < 1e-5, "{id}: {gap}");
    }
    let model = config("softmax").try_init_classifier(3, &device).unwrap();
    let texts = Sequences::new(&[0, 5, 6]).unwrap();
    assert!(matches!(model.forward_sequences(tokens, &texts), Err(Error::Field { field: "sequences", .. })));
}

#[test]
fn post_norm_leaves_normalised_tokens_and_pre_norm_ends_in_a_norm() {
    let device = Device::flex();
    for norm in [NormOrder::Post, NormOrder::Pre] {
        let encoder = TextConfig { norm, ..config("softmax") }.try_init(&device).unwrap();
        assert_eq!(encoder.norm.is_some(), norm == NormOrder::Pre);
        let encoded = encoder.forward(tokens([[3, 9, 4, 4, 8, 20], [7, 5, 9, 1, 2, 2]], &device), None).unwrap();
        let values: Vec<f32> = encoded.into_data().iter().collect();
        for token in values.chunks_exact(16) {
            let mean = token.iter().sum::<f32>() / 16.0;
            let variance = token.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 16.0;
            assert!(mean.abs() < 1e-5 && (variance - 1.0).abs() < 1e-3, "{norm:?}: {mean} {variance}");
        }
    }
}

#[test]
fn tokens_have_an_order() {
    let device = Device::flex();
    let model = config("uniform").try_init_classifier(2, &device).unwrap();
    let logits = |row: [i32; 3]| model.forward(Tensor::<2, Int>::from_ints([row], &device), None).into_data();
    assert_ne!(logits([4, 9, 9]), logits([9, 9, 4]), "positions");
}

#[test]
fn hidden_tokens_are_no_keys_but_still_ask() {
    let device = Device::flex();
    for id in ["softmax", "fna", "infsa", "uniform"] {
        let model = TextConfig { depth: 1, ..config(id) }.try_init(&device).unwrap();
        let attention = &model.blocks[0].attention;
        let x = model.forward(tokens([[3, 9, 4, 4, 8, 20], [7, 5, 9, 1, 2, 2]], &device), None).unwrap();
        let hidden = tokens([[0, 1, 0, 0, 1, 0]; 2], &device).equal_scalar(1);
        let input = |x: Tensor<3>| MhaInput::self_attn(x).hide_keys(hidden.clone());
        let context = |x: Tensor<3>| attention.forward(input(x)).context;
        let (shown, other) = (
            context(x.clone()),
            context(x.clone().mask_fill(hidden.clone().unsqueeze_dim::<3>(2).expand([2, 6, 16]), 3.0)),
        );
        let token = |x: &Tensor<3>, place: usize| x.clone().narrow(1, place, 1).into_data();
        if id != "infsa" {
            assert_eq!(token(&shown, 0), token(&other, 0), "{id}: a hidden key is seen");
        }
        if id != "uniform" {
            assert_ne!(token(&shown, 1), token(&other, 1), "{id}: a hidden token asks");
        }
        let all = MhaInput::self_attn(x).hide_keys(tokens([[1; 6]; 2], &device).equal_scalar(1));
        let nothing = attention.forward(all).context - attention.output.bias.as_ref().unwrap().val().unsqueeze();
        let most: f32 = nothing.abs().max().into_scalar();
        assert!(most < 1e-6, "{id}: {most}");
    }
}

#[test]
fn options_of_the_mechanism_reach_it() {
    let device = Device::flex();
    let base = config("fna");
    let params = |config: &TextConfig| config.try_init(&device).unwrap().num_params();
    let learned = TextConfig { alpha_trainable: true, kappa_trainable: true, ..base.clone() };
    assert_eq!(params(&learned), params(&base) + 2 * 2 * 2, "per head and block");
    let orthogonal = TextConfig { orthogonal: true, ..base.clone() }.try_init(&device).unwrap();
    assert!(orthogonal.blocks.iter().all(|block| block.attention.orthogonal.is_some()));
}

#[test]
fn impossible_models_are_refused() {
    let device = Device::flex();
    let refused = |config: TextConfig| config.try_init(&device).expect_err("refused");
    assert!(matches!(refused(TextConfig { heads: 3, ..config("softmax") }), Error::Heads { .. }));
    assert!(matches!(refused(TextConfig { depth: 0, ..config("softmax") }), Error::Field { field: "depth", .. }));
    let causal = Mechanism::from_json(r#"{"mechanism": "softmax", "causal": true}"#).unwrap();
    assert!(refused(TextConfig { mechanism: causal, ..config("softmax") }).to_string().contains("causal"));
    assert!(config("softmax").try_init_classifier(0, &device).is_err());
}
