//! Codebooks that follow the tokens, and plans that layers share.

use burn::{
    module::{Module, Param},
    tensor::{Bool, Device, Distribution, Tensor, TensorData},
};
use resolvent::{
    Mechanism, SharedClusters, Strategy,
    attention::{CodebookConfig, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
    models::{TextConfig, VitConfig},
};

fn ssa(fields: &str) -> Mechanism {
    Mechanism::from_json(&format!(r#"{{"mechanism": "ssa", "estimator": "centroid"{fields}}}"#)).unwrap()
}

fn module(every: usize, decay: f64, fields: &str) -> MultiHeadAttention {
    let config = MultiHeadAttentionConfig::new(8, 2, ssa(&format!(r#", "clusters": 3{fields}"#)));
    config.with_codebook(Some(CodebookConfig { every, decay })).init(&Device::flex().autodiff())
}

fn tokens(batch: usize, seq: usize) -> Tensor<3> {
    Tensor::random([batch, seq, 8], Distribution::Normal(0.0, 1.0), &Device::flex().autodiff())
}

fn centroids(module: &MultiHeadAttention) -> Vec<f32> {
    module.codebook.as_ref().unwrap().values()
}

/// Centroids move at the first pass of training and every so many passes, and not in between or without autodiff.
#[test]
fn centroids_move_when_it_is_time() {
    let module = module(3, 0.5, "");
    let (start, x) = (centroids(&module), tokens(2, 20));
    let plain = module.valid();
    plain.forward(MhaInput::self_attn(x.clone().inner()));
    assert_eq!(centroids(&plain), start, "evaluation moved it");
    let mut changes = Vec::new();
    for _ in 0..8 {
        let before = centroids(&module);
        module.forward(MhaInput::self_attn(tokens(2, 20)));
        changes.push(centroids(&module) != before);
    }
    assert_eq!(changes, [true, false, false, true, false, false, true, false]);
    assert_eq!(centroids(&module.valid()), centroids(&module));
}

/// An update is the mean of the nearest queries, blended; where no query is nearest, nothing moves.
#[test]
fn updates_are_moving_averages() {
    let module = module(1, 0.75, "");
    module.forward(MhaInput::self_attn(tokens(2, 30)));
    for step in 0..3 {
        let (before, x) = (centroids(&module), tokens(1, 25));
        let absent: Vec<bool> = (0..25).map(|n| n % 4 == step).collect();
        let device = Device::flex().autodiff();
        let padding = Tensor::<2, Bool>::from_data(TensorData::new(absent, [1, 25]), &device);
        module.forward(MhaInput::self_attn(x.clone()).mask_pad(padding));
        let after = centroids(&module);
        let (weight, bias) = (module.projection.weight.val(), module.projection.bias.as_ref().unwrap().val());
        let q = x.squeeze_dim::<2>(0).matmul(weight.narrow(1, 0, 8)) + bias.narrow(0, 0, 8).unsqueeze();
        let q: Vec<f32> = q.into_data().iter::<f32>().collect();
        for h in 0..2 {
            let centroid = |all: &[f32], c: usize| all[(h * 3 + c) * 4..][..4].to_vec();
            let mut sums = vec![(vec![0.0_f64; 4], 0.0); 3];
            for n in (0..25).filter(|n| n % 4 != step) {
                let query = &q[n * 8 + h * 4..][..4];
                let distance =
                    |c: &usize| -> f32 { centroid(&before, *c).iter().zip(query).map(|(c, q)| (c - q).powi(2)).sum() };
                let nearest = (0..3).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap();
                sums[nearest].0.iter_mut().zip(query).for_each(|(sum, &q)| *sum += f64::from(q));
                sums[nearest].1 += 1.0;
            }
            for (c, (sum, count)) in sums.iter().enumerate() {
                for (channel, sum) in sum.iter().enumerate() {
                    let old = f64::from(centroid(&before, c)[channel]);
                    let want = if *count > 0.0 { 0.75 * old + 0.25 * sum / count } else { old };
                    let got = f64::from(centroid(&after, c)[channel]);
                    assert!((got - want).abs() < 1e-4, "head {h}, centroid {c}: {got} instead of {want}");
                }
            }
        }
    }
}

/// A pass uses the centroids of earlier passes: what a causal layer computes depends on no later token.
#[test]
fn a_pass_does_not_see_its_own_update() {
    let module = module(1, 0.0, r#", "causal": true"#);
    let x = tokens(1, 16);
    let other = x.clone().slice_assign([0..1, 10..16, 0..8], tokens(1, 6));
    let rows = |x: Tensor<3>| {
        let copy = module.clone().valid().train();
        let rows = copy.forward(MhaInput::self_attn(x)).context.narrow(1, 0, 10);
        rows.into_data().iter::<f32>().collect::<Vec<_>>()
    };
    assert_eq!(rows(x), rows(other));
}

/// No gradient reaches the centroids, and their state goes with the record.
#[test]
fn centroids_are_a_state() {
    let module = module(2, 0.5, "");
    let loss = module.forward(MhaInput::self_attn(tokens(2, 12))).context.sum();
    loss.backward();
    assert!(!module.codebook.as_ref().unwrap().centroids.value().is_require_grad());
    let fresh = self::module(2, 0.5, "");
    assert_ne!(centroids(&fresh), centroids(&module));
    let loaded = fresh.load_record(module.clone().into_record());
    assert_eq!(centroids(&loaded), centroids(&module));
    let x = tokens(2, 12);
    for module in [&module, &loaded] {
        module.forward(MhaInput::self_attn(x.clone()));
        module.forward(MhaInput::self_attn(x.clone()));
    }
    assert_eq!(centroids(&loaded), centroids(&module), "the number of passes was not kept");
}

/// Whatever attends along clusters has a codebook: its clusters are of the tokens that are nearest to a centroid.
#[test]
fn compositions_on_clusters_have_codebooks() {
    let module = module(1, 0.5, r#", "score": "cosine-exp""#);
    let (start, x) = (centroids(&module), tokens(1, 24));
    let rows = |module: &MultiHeadAttention| {
        module.valid().forward(MhaInput::self_attn(x.clone().inner())).context.into_data()
    };
    let before = rows(&module);
    module.forward(MhaInput::self_attn(x.clone()));
    assert_ne!(centroids(&module), start, "training moves it");
    assert_ne!(rows(&module), before, "clusters are of the centroids");
    let without = MultiHeadAttention { codebook: None, ..module.clone() };
    assert_ne!(rows(&module), rows(&without));
}

/// Keys that are the queries lie where these do, and tokens one by one are attended to along the codebook as all at once.
#[test]
fn tied_and_decoded_tokens_follow_their_codebook() {
    for json in [
        r#"{"mechanism": "routed", "clusters": 3}"#,
        r#"{"mechanism": "routed", "clusters": 3, "tied": true}"#,
        r#"{"mechanism": "routed", "clusters": 3, "score": "cosine-exp"}"#,
    ] {
        let config = MultiHeadAttentionConfig::new(8, 2, Mechanism::from_json(json).unwrap());
        let config = config.with_codebook(Some(CodebookConfig { every: 1, decay: 0.0 }));
        let (module, x) = (config.init(&Device::flex().autodiff()), tokens(1, 24));
        if json.contains("tied") {
            let mut valueless = module.clone().valid().train();
            let queries = valueless.projection.weight.val().narrow(1, 0, 8);
            let weight = Tensor::cat(vec![queries.clone(), queries.zeros_like()], 1);
            valueless.projection.weight = Param::from_tensor(weight.detach());
            valueless.forward(MhaInput::self_attn(x.clone()));
            module.forward(MhaInput::self_attn(x.clone()));
            assert_eq!(centroids(&valueless), centroids(&module), "no value enters a centroid");
        }
        module.forward(MhaInput::self_attn(x.clone()));
        let (module, x) = (module.valid(), x.inner());
        let whole = module.forward(MhaInput::self_attn(x.clone()).causal()).context;
        let composed = MultiHeadAttention { strategy: Strategy::Composed, ..module.clone() };
        for module in [&module, &composed] {
            let (mut past, mut rows) = (None, vec![]);
            for (first, step) in [(0, 9), (9, 1), (10, 14)] {
                rows.push(module.attend_next(x.clone().narrow(1, first, step), &mut past).unwrap());
            }
            let far = (Tensor::cat(rows, 1) - whole.clone()).abs().max().into_scalar::<f32>();
            assert!(far < 1e-5, "{json}: {far}");
        }
    }
}

#[test]
fn impossible_codebooks_are_refused() {
    let config = |fields: &str, codebook| {
        MultiHeadAttentionConfig::new(8, 2, ssa(fields)).with_codebook(Some(codebook)).validate()
    };
    let fits = CodebookConfig::default();
    for (fields, codebook, field) in [
        ("", fits, "clusters"),
        (r#", "clusters": 3, "jl_dim": 2"#, fits, "jl_dim"),
        (r#", "clusters": 3"#, CodebookConfig { every: 0, ..fits }, "codebook.every"),
        (r#", "clusters": 3"#, CodebookConfig { decay: 1.0, ..fits }, "codebook.decay"),
    ] {
        let message = config(fields, codebook).unwrap_err().to_string();
        assert!(message.contains(&format!("`{field}`")), "{message}");
    }
    let softmax = MultiHeadAttentionConfig::new(8, 2, Mechanism::preset("softmax").unwrap());
    assert!(softmax.with_codebook(Some(fits)).init(&Device::flex()).codebook.is_none());
}

/// Layers with one place for a plan use the plan of the first; each with its own make their own.
#[test]
fn layers_share_plans() {
    let device = Device::flex();
    let layers: Vec<MultiHeadAttention> =
        (0..2).map(|_| MultiHeadAttentionConfig::new(8, 2, ssa(r#", "clusters": 4"#)).init(&device)).collect();
    let x = tokens(1, 24).inner();
    let shared = SharedClusters::default();
    let run = |layer: &MultiHeadAttention, shared: &SharedClusters| {
        layer.forward(MhaInput::self_attn(x.clone()).share_clusters(shared.clone())).context.into_data()
    };
    let (first, second) = (run(&layers[0], &shared), run(&layers[1], &shared));
    let plan = shared.plan().unwrap().clone();
    assert_eq!(first, layers[0].forward(MhaInput::self_attn(x.clone())).context.into_data());
    assert_ne!(second, layers[1].forward(MhaInput::self_attn(x.clone())).context.into_data());
    let again = SharedClusters::default();
    run(&layers[0], &again);
    assert_eq!(again.plan().unwrap(), &plan);
    // Other sizes do not fit.
    let longer = tokens(1, 25).inner();
    assert!(layers[0].try_forward(MhaInput::self_attn(longer).share_clusters(shared)).is_err());
}

/// Models hand plans on: with as many layers as there are, all use the first block's.
#[test]
fn models_share_plans() {
    let device = Device::flex();
    let base = VitConfig::new([16, 16], 1, 2, 3, ssa(r#", "clusters": 5"#));
    let config = VitConfig { dim: 8, depth: 3, heads: 2, mlp_dim: 12, ..base };
    let model = config.init(&device);
    let images = Tensor::random([2, 1, 16, 16], Distribution::Normal(0.0, 1.0), &device);
    let logits = |layers: usize| {
        let mut model = model.clone();
        model.plan_layers = layers;
        model.forward(images.clone()).into_data()
    };
    assert_eq!(logits(1), model.forward(images.clone()).into_data());
    assert_ne!(logits(1), logits(2));
    assert_ne!(logits(2), logits(3));
    assert_eq!(logits(3), logits(100));
    let text = TextConfig { plan_layers: 0, ..TextConfig::new(9, ssa("")) };
    assert!(text.validate().unwrap_err().to_string().contains("plan_layers"));
}
