//! The language model: its size, what it may see, and decoding.

use burn::{
    module::Module,
    tensor::{Device, Int, Tensor, TensorData},
};
use resolvent::{
    Mechanism, Parameter, Sequences,
    models::{LanguageConfig, LanguageModel, NormOrder, Positions, TextConfig},
};

const VOCABULARY: usize = 11;
const CONTEXT: usize = 40;

/// The blocks' mechanisms, in turn.
const PATTERNS: [&[&str]; 13] = [
    &[r#"{"mechanism": "softmax"}"#],
    &[r#"{"mechanism": "uniform"}"#],
    &[r#"{"mechanism": "infsa"}"#],
    &[r#"{"mechanism": "fna"}"#],
    &[r#"{"mechanism": "fna", "norm_exponent": 0.5}"#],
    &[r#"{"mechanism": "laplacian-exact", "whitening": "none", "centering": "none"}"#],
    &[r#"{"mechanism": "ssa", "estimator": "centroid"}"#],
    &[r#"{"mechanism": "ssa"}"#],
    &[r#"{"mechanism": "ssa", "estimator": "centroid"}"#, r#"{"mechanism": "softmax"}"#],
    &[r#"{"mechanism": "ssa", "estimator": "centroid", "global_tokens": 2}"#],
    &[r#"{"mechanism": "ssa", "estimator": "raw", "cluster_on": "keys", "balance": null}"#],
    &[r#"{"mechanism": "routed", "causal_clusters": {"kind": "segment", "size": 4}, "clusters": 2, "routes": 1}"#],
    &[r#"{"mechanism": "routed", "causal_clusters": {"kind": "segment", "size": 3}, "global_tokens": 1, "routes": 2}"#],
];

fn config(layers: &[&str]) -> LanguageConfig {
    let layers = layers.iter().map(|json| Mechanism::from_json(json).unwrap()).collect();
    let base = LanguageConfig::new(VOCABULARY, CONTEXT, layers);
    LanguageConfig { text: TextConfig { dim: 16, depth: 3, heads: 4, mlp_dim: 24, ..base.text }, ..base }
}

/// Learned positions, and rotary ones with shared keys.
fn variants(layers: &[&str]) -> [LanguageModel; 2] {
    let learned = config(layers);
    let rotary = LanguageConfig { positions: Positions::Rotary, kv_heads: Some(2), ..learned.clone() };
    [learned, rotary].map(|config| config.try_init(&Device::flex()).unwrap())
}

/// Two texts of `seq` tokens; those of the first from `changed` on are others than usual.
fn tokens(seq: usize, changed: usize) -> Tensor<2, Int> {
    let token = |i: usize| ((i * i + 3 * i) / 2 + usize::from(i < seq && i >= changed) * (1 + i % 5)) % VOCABULARY;
    let ids: Vec<i32> = (0..2 * seq).map(|i| token(i) as i32).collect();
    Tensor::from_data(TensorData::new(ids, [2, seq]), &Device::flex())
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

#[test]
fn no_token_changes_what_comes_before_it() {
    for layers in PATTERNS {
        for model in variants(layers) {
            let (shown, seq) = (model.try_forward(tokens(33, 33)).unwrap(), 33);
            for changed in [1, 17, 32] {
                let other = model.try_forward(tokens(seq, changed)).unwrap();
                let rows =
                    |x: &Tensor<3>, from: usize, to: usize| values(x.clone().slice([0..1, from..to, 0..VOCABULARY]));
                assert_eq!(
                    rows(&shown, 0, changed),
                    rows(&other, 0, changed),
                    "{layers:?}: {changed} is seen before it"
                );
                assert_ne!(rows(&shown, changed, seq), rows(&other, changed, seq), "{layers:?}: {changed} is not read");
            }
        }
    }
}

#[test]
fn token_by_token_gives_the_logits_of_the_whole() {
    for layers in PATTERNS {
        for model in variants(layers) {
            let tokens = tokens(29, 29);
            let whole = model.try_forward(tokens.clone()).unwrap();
            let mut state = model.begin();
            for step in [6, 1, 1, 12, 1, 1, 7] {
                let first = state.len();
                let logits = model.next(tokens.clone().narrow(1, first, step), &mut state).unwrap();
                let expected = whole.clone().narrow(1, first + step - 1, 1).squeeze_dim::<2>(1);
                let worst: f32 = (logits - expected).abs().max().into_scalar();
                assert!(worst < 2e-5 && state.len() == first + step, "{layers:?} at {first}: off by {worst}");
            }
        }
    }
}

#[test]
fn texts_end_to_end_are_read_as_if_alone() {
    let texts = Sequences::new(&[0, 7, 8, 20, 33]).unwrap();
    for layers in PATTERNS {
        for model in variants(layers) {
            let tokens = tokens(33, 33).narrow(0, 0, 1);
            let together = values(model.forward_sequences(tokens.clone(), &texts).unwrap());
            let alone = (0..4).map(|n| {
                let range = texts.range(n);
                model.try_forward(tokens.clone().narrow(1, range.start, range.len())).unwrap()
            });
            let alone = values(Tensor::cat(alone.collect(), 1));
            let gap = together.iter().zip(&alone).fold(0.0_f32, |gap, (a, b)| gap.max((a - b).abs()));
            assert!(gap <= 1e-5, "{layers:?}: {gap}");
        }
    }
    let [model, _] = variants(&[r#"{"mechanism": "softmax"}"#]);
    let error = |seq: usize, bounds: &[usize]| {
        let texts = Sequences::new(bounds).unwrap();
        model.forward_sequences(tokens(seq, 0).narrow(0, 0, 1), &texts).unwrap_err().to_string()
    };
    assert!(error(33, &[0, 7, 20]).contains("`sequences`"));
    assert!(error(CONTEXT + 3, &[0, 1, CONTEXT + 3]).contains("context"));
}

#[test]
fn positions_count() {
    for id in ["softmax", "ssa"] {
        let layers = format!(r#"{{"mechanism": "{id}"}}"#);
        for model in variants(&[&layers]) {
            let logits = |ids: [i32; 4]| {
                let tokens = Tensor::<2, Int>::from_ints([ids], &Device::flex());
                values(model.try_forward(tokens).unwrap().narrow(1, 3, 1))
            };
            let (a, b) = (logits([1, 2, 3, 4]), logits([2, 1, 3, 4]));
            assert!(a.iter().zip(&b).any(|(a, b)| (a - b).abs() > 1e-6), "{id} knows no order");
        }
    }
}

#[test]
fn weights_are_counted_and_the_published_shapes_have_their_sizes() {
    for (name, weights) in [("gpt2-small", 124_439_808), ("gpt2-medium", 354_823_168)] {
        let softmax = Mechanism::preset("softmax").unwrap();
        assert_eq!(LanguageConfig::preset(name, vec![softmax]).unwrap().parameter_count(), weights);
    }
    assert!(LanguageConfig::preset("gpt3", vec![]).unwrap_err().to_string().contains("gpt2-medium"));
    for layers in PATTERNS {
        for (positions, kv_heads, norm) in
            [(Positions::Learned, None, NormOrder::Pre), (Positions::Rotary, Some(2), NormOrder::Post)]
        {
            let base = config(layers);
            let config = LanguageConfig { positions, kv_heads, text: TextConfig { norm, ..base.text }, ..base };
            let model = config.try_init(&Device::flex()).unwrap();
            let decays =
                model.blocks.iter().filter(|block| block.attention.learned.free(Parameter::Gamma).is_some()).count()
                    * 4;
            assert_eq!(model.num_params(), config.parameter_count() + decays, "{layers:?}");
        }
    }
}

#[test]
fn the_embedding_learns_from_both_its_ends() {
    let device = Device::flex().autodiff();
    let model = config(PATTERNS[8]).try_init(&device).unwrap();
    let tokens = Tensor::<2, Int>::from_ints([[1, 2, 3, 4]], &device);
    let grads = model.try_forward(tokens).unwrap().powi_scalar(2).sum().backward();
    let embedding = values(model.embedding.weight.grad(&grads).unwrap());
    assert!(embedding.iter().all(|g| g.is_finite()));
    // A token that is not read still gets logits.
    assert!(embedding[9 * 16..10 * 16].iter().any(|&g| g != 0.0));
    assert!(model.blocks.iter().all(|block| block.attention.projection.weight.grad(&grads).is_some()));
}

#[test]
fn what_is_not_strictly_causal_is_refused() {
    for json in [
        r#"{"mechanism": "linear-infsa"}"#,
        r#"{"mechanism": "infsa-resolvent"}"#,
        r#"{"mechanism": "soft"}"#,
        r#"{"mechanism": "laplacian"}"#,
        r#"{"mechanism": "ssa", "causal_clusters": {"kind": "block", "size": 8}}"#,
        r#"{"mechanism": "ssa", "cluster_on": "dual"}"#,
        r#"{"mechanism": "ssa", "outlier_globals": 2}"#,
        r#"{"mechanism": "routed", "outlier_globals": 2}"#,
    ] {
        let id = Mechanism::from_json(json).unwrap().id();
        for layers in [&[json][..], &[PATTERNS[0][0], json]] {
            let message = config(layers).try_init(&Device::flex()).expect_err(json).to_string();
            assert!(message.contains(id) && message.contains("caus"), "{message}");
        }
    }
}

#[test]
fn impossible_models_and_texts_are_named() {
    let error = |change: fn(&mut LanguageConfig)| {
        let mut config = config(PATTERNS[0]);
        change(&mut config);
        config.try_init(&Device::flex()).unwrap_err().to_string()
    };
    assert!(error(|c| c.context = 0).contains("context"));
    assert!(error(|c| c.text.vocabulary = 0).contains("vocabulary"));
    assert!(error(|c| c.kv_heads = Some(3)).contains("kv_heads"));
    assert!(error(|c| c.text.heads = 5).contains("16"));
    for model in variants(PATTERNS[6]) {
        let message = model.try_forward(tokens(CONTEXT + 1, 0)).unwrap_err().to_string();
        assert!(message.contains("41") && message.contains("context"), "{message}");
        let mut state = model.begin();
        model.next(tokens(CONTEXT, 0), &mut state).unwrap();
        assert!(model.next(tokens(1, 0), &mut state).is_err());
    }
}
