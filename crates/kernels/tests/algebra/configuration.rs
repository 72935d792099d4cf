//! Reading a mechanism: every field with its default, read and written back.

use resolvent_kernels::{
    Mechanism, Shape,
    mechanism::{
        Activation, Centering, CosineExp, Degree, DistanceKernel, Fna, Infsa, InfsaResolvent, Inverse, InverseGradient,
        Landmarks, Laplacian, LaplacianExact, LinearInfsa, Manifold, NewtonInit, NormBias, PoolWindows, PowerOperator,
        Soft, Softmax, Uniform, WeightScale, Whitening,
    },
};

fn with(id: &str, fields: &str) -> String {
    format!(r#"{{"mechanism": "{id}", {fields}}}"#)
}

/// The fields that each mechanism takes, with a value that is not the default.
const FIELDS: [(&str, &[&str]); 10] = [
    ("softmax", &[r#""scale": 0.25"#, r#""causal": true"#, r#""tied": true"#]),
    ("uniform", &[r#""causal": true"#]),
    (
        "infsa",
        &[
            r#""gamma": 1.0"#,
            r#""activation": "abs""#,
            r#""scale": 0.25"#,
            r#""eps": 0.0"#,
            r#""tied": true"#,
            r#""causal": true"#,
        ],
    ),
    (
        "infsa-resolvent",
        &[
            r#""gamma": 0.95"#,
            r#""activation": "gelu""#,
            r#""scale": 2.0"#,
            r#""eps": 0.5"#,
            r#""tied": true"#,
            r#""tol": 0.001"#,
            r#""max_iter": 5"#,
        ],
    ),
    (
        "linear-infsa",
        &[
            r#""gamma": 0.25"#,
            r#""activation": "abs""#,
            r#""scale": 2.0"#,
            r#""eps": 0.5"#,
            r#""tied": true"#,
            r#""iterations": 64"#,
            r#""operator": "exact""#,
            r#""norm_bias": 0.5"#,
            r#""norm_bias": "auto""#,
            r#""broadcast": false"#,
        ],
    ),
    (
        "fna",
        &[
            r#""alpha": 2.0"#,
            r#""kappa": "vision""#,
            r#""kappa": 2.5"#,
            r#""manifold": "sphere""#,
            r#""intrinsic_dim": 3.0"#,
            r#""tied": true"#,
            r#""norm_exponent": 0.5"#,
            r#""causal": true"#,
            r#""kernel": "student""#,
        ],
    ),
    ("soft", SOFT),
    ("soft-pp", &[r#""degree": "token""#, r#""landmarks": {"kind": "all"}"#, r#""inverse": "cholesky""#]),
    (
        "laplacian",
        &[
            r#""lambda": 2.5"#,
            r#""landmarks": {"kind": "conv", "ratio": 2}"#,
            r#""landmarks": {"kind": "stride", "ratio": 8}"#,
            r#""grid": [2, 3]"#,
            r#""inverse": "cg""#,
            r#""inverse": "cholesky""#,
            r#""newton_iterations": 64"#,
            r#""ridge": 0.0"#,
            r#""centering": "per-query""#,
            r#""whitening": "none""#,
            r#""whiten_eps": 0.5"#,
            r#""weight_scale": "inv-n""#,
            r#""bias_one_over_n": false"#,
            r#""causal": true"#,
            r#""tied": true"#,
        ],
    ),
    (
        "laplacian-exact",
        &[
            r#""lambda": 2.5"#,
            r#""centering": "none""#,
            r#""whitening": "full""#,
            r#""whiten_eps": 0.5"#,
            r#""weight_scale": "inv-sqrt-n""#,
            r#""bias_one_over_n": false"#,
            r#""causal": true"#,
            r#""tied": true"#,
        ],
    ),
];

const SOFT: &[&str] = &[
    r#""landmarks": {"kind": "pool", "ratio": 2}"#,
    r#""landmarks": {"kind": "pool", "count": 49}"#,
    r#""landmarks": {"kind": "conv", "ratio": 4}"#,
    r#""landmarks": {"kind": "random", "count": 3, "seed": 7}"#,
    r#""landmarks": {"kind": "first", "count": 3}"#,
    r#""landmarks": {"kind": "given"}"#,
    r#""landmarks": {"kind": "all"}"#,
    r#""grid": [4, 6]"#,
    r#""landmark_act": true"#,
    r#""scale": 0.25"#,
    r#""inverse": "eigen""#,
    r#""newton_iterations": 1"#,
    r#""newton_init": "paper""#,
    r#""newton_init": "backtrack""#,
    r#""newton_init": "official""#,
    r#""newton_init": "identity""#,
    r#""ridge": 0.5"#,
    r#""gradient": "unrolled""#,
    r#""eigen_cutoff": 0.0"#,
    r#""value_conv": 9"#,
    r#""causal": true"#,
];

#[test]
fn missing_fields_have_their_defaults() {
    let read = |id: &str| Mechanism::from_json(&format!(r#"{{"mechanism": "{id}"}}"#)).unwrap();
    let (gamma, activation, scale, eps, tied, causal) = (0.7, Activation::Relu, None, 1e-6, false, false);
    let (centering, whitening, weight_scale) = (Centering::PerKey, Whitening::Diagonal, WeightScale::Unit);
    let soft = Soft::default()
        .with_landmarks(Landmarks::Pool(PoolWindows::Ratio(4)))
        .with_grid(None)
        .with_landmark_act(false)
        .with_scale(scale)
        .with_inverse(Inverse::NewtonSchulz)
        .with_newton_iterations(20)
        .with_newton_init(NewtonInit::Scaled)
        .with_ridge(0.01)
        .with_gradient(InverseGradient::Implicit)
        .with_eigen_cutoff(1e-6)
        .with_degree(None)
        .with_value_conv(0)
        .with_causal(causal);
    let expected = [
        Mechanism::from(Softmax::default().with_scale(scale).with_causal(causal).with_tied(tied)),
        Mechanism::from(Uniform::default().with_causal(causal)),
        Mechanism::from(
            Infsa::default()
                .with_gamma(gamma)
                .with_activation(activation)
                .with_scale(scale)
                .with_eps(eps)
                .with_tied(tied)
                .with_causal(causal),
        ),
        Mechanism::from(
            InfsaResolvent::default()
                .with_gamma(gamma)
                .with_activation(activation)
                .with_scale(scale)
                .with_eps(eps)
                .with_tied(tied)
                .with_causal(causal)
                .with_tol(1e-6)
                .with_max_iter(None),
        ),
        Mechanism::from(
            LinearInfsa::default()
                .with_gamma(gamma)
                .with_activation(activation)
                .with_scale(scale)
                .with_eps(eps)
                .with_tied(tied)
                .with_causal(causal)
                .with_iterations(1)
                .with_operator(PowerOperator::Factored)
                .with_norm_bias(NormBias::Value(0.0))
                .with_broadcast(true),
        ),
        Mechanism::from(soft.clone()),
        Mechanism::from(soft.with_degree(Some(Degree::Landmark))),
        Mechanism::from(
            Fna::default()
                .with_alpha(1.2)
                .with_kappa(None)
                .with_manifold(Manifold::Euclidean)
                .with_intrinsic_dim(None)
                .with_tied(tied)
                .with_norm_exponent(0.0)
                .with_causal(causal)
                .with_kernel(DistanceKernel::Levy),
        ),
        Mechanism::from(
            Laplacian::default()
                .with_lambda(4.0)
                .with_landmarks(Landmarks::Pool(PoolWindows::Ratio(8)))
                .with_grid(None)
                .with_inverse(Inverse::NewtonSchulz)
                .with_newton_iterations(20)
                .with_ridge(1e-3)
                .with_centering(centering)
                .with_whitening(whitening)
                .with_whiten_eps(1e-5)
                .with_weight_scale(weight_scale)
                .with_bias_one_over_n(true)
                .with_causal(causal)
                .with_tied(tied),
        ),
        Mechanism::from(
            LaplacianExact::default()
                .with_lambda(4.0)
                .with_centering(centering)
                .with_whitening(whitening)
                .with_whiten_eps(1e-5)
                .with_weight_scale(weight_scale)
                .with_bias_one_over_n(true)
                .with_causal(causal)
                .with_tied(tied),
        ),
    ];
    for (id, expected) in Mechanism::IDS.into_iter().zip(expected) {
        assert_eq!(read(id), expected);
        assert_eq!(Mechanism::preset(id).unwrap(), expected);
        assert_eq!(expected.id(), id);
    }
}

#[test]
fn every_field_is_read_and_written_back() {
    for (id, fields) in FIELDS {
        let default = Mechanism::preset(id).unwrap();
        for field in fields {
            let read = Mechanism::from_json(&with(id, field)).unwrap();
            assert_ne!(read, default, "{id}: {field} has no effect");
            let written = serde_json::to_string(&read).unwrap();
            assert!(written.contains(&field.replace(": ", ":").replace(", ", ",")), "{field} is not in {written}");
            assert_eq!(Mechanism::from_json(&written).unwrap(), read);
        }
    }
}

#[test]
fn null_is_allowed_where_the_default_is_null() {
    let read = Mechanism::from_json(&with("infsa-resolvent", r#""scale": null, "max_iter": null"#)).unwrap();
    assert_eq!(read, Mechanism::preset("infsa-resolvent").unwrap());
}

/// A window is a field of what has one, and written as `null` where a preset has one and this has none.
#[test]
fn windows_are_written_where_something_may_have_one() {
    let window = |json: &str| {
        let written = serde_json::to_string(&Mechanism::from_json(json).unwrap()).unwrap();
        assert_eq!(Mechanism::from_json(&written).unwrap(), Mechanism::from_json(json).unwrap());
        written.split_once(r#""window":"#).map(|(_, rest)| rest.split([',', '}']).next().unwrap().to_owned())
    };
    assert_eq!(window(r#"{"mechanism": "composed", "score": "dot-relu"}"#), None);
    assert_eq!(window(r#"{"mechanism": "cosine"}"#), None);
    assert_eq!(window(r#"{"mechanism": "local", "window": 5}"#).as_deref(), Some("5"));
    assert_eq!(window(r#"{"mechanism": "local", "window": null}"#).as_deref(), Some("null"));
}

#[test]
fn tied_is_written_only_when_true() {
    let untied = serde_json::to_value(Mechanism::preset("infsa").unwrap()).unwrap();
    assert_eq!(untied.get("tied"), None);
    assert_eq!(untied["causal"], false);
}

/// Values computed from the rules' formulas with more digits.
#[test]
fn rules_for_kappa_know_the_width() {
    let kappa = |fields: &str, head_dim: usize, heads: usize| {
        let m = Mechanism::from_json(&with("fna", fields)).unwrap();
        m.as_fna().unwrap().resolve(head_dim, heads).kappa
    };
    for (head_dim, expected) in [(1, 1.0), (8, 31.2507), (16, 90.3469), (32, 258.3375), (64, 734.6671)] {
        assert!((kappa(r#""alpha": 1"#, head_dim, 2) - expected).abs() < 5e-5);
        assert_eq!(kappa(r#""alpha": 2"#, head_dim, 2), (head_dim as f64).sqrt());
        assert_eq!(kappa(r#""kappa": "vision""#, head_dim, 2), head_dim as f64);
    }
    for (head_dim, heads, expected) in [(2, 1, 1.46694), (8, 1, 17.68277), (8, 2, 20.42182), (32, 4, 86.25926)] {
        assert!((kappa(r#""manifold": "sphere""#, head_dim, heads) - expected).abs() < 5e-6);
        assert_eq!(kappa(r#""manifold": "sphere", "alpha": 2"#, head_dim, heads), 1.0);
    }
}

/// Recipes embed a mechanism in TOML: through serde, with the same errors.
#[test]
fn recipes_embed_a_mechanism() {
    #[derive(Debug, serde::Deserialize)]
    struct Recipe {
        attention: Mechanism,
    }
    let read = |text: &str| toml::from_str::<Recipe>(text);
    let recipe = read("[attention]\nmechanism = \"linear-infsa\"\nnorm_bias = \"auto\"\niterations = 3\ngamma = 1\n");
    let expected = LinearInfsa::default().with_norm_bias(NormBias::Auto).with_iterations(3).with_gamma(1.0);
    assert_eq!(recipe.unwrap().attention, Mechanism::from(expected));
    let recipe = read("[attention]\nmechanism = \"soft\"\nlandmarks = { kind = \"pool\", count = 49 }\n").unwrap();
    let landmarks = Landmarks::Pool(PoolWindows::Count(49));
    assert_eq!(recipe.attention, Mechanism::from(Soft::default().with_landmarks(landmarks)));
    let error = read("[attention]\nmechanism = \"infsa\"\ngama = 0.9\n").unwrap_err().to_string();
    assert!(error.contains("`gama`"), "{error}");
    let error = read("[attention]\nmechanism = \"infsa\"\ngamma = 1.5\n").unwrap_err().to_string();
    assert!(error.contains("`gamma`") && error.contains("[1e-12, 1]"), "{error}");
}

#[test]
fn automatic_norm_bias_is_the_mean_cosine() {
    for (head_dim, expected) in
        [(1, 1.0), (2, std::f64::consts::FRAC_2_PI), (12, 0.235_2), (16, 0.202_6), (64, 0.100_1)]
    {
        let got = NormBias::Auto.value(head_dim);
        assert!((got - expected).abs() < 5e-5, "{head_dim}: {got}");
    }
    assert_eq!(NormBias::Value(0.25).value(64), 0.25);
}

/// The scale of `cosine` where nothing tells it.
#[test]
fn cosines_are_taken_ten_times() {
    assert_eq!(CosineExp::default().scale, 10.0);
}

#[test]
fn worst_case_iterations_of_the_series() {
    for (gamma, expected) in [(0.7, 43), (0.95, 328), (0.99, 1833)] {
        assert_eq!(InfsaResolvent::worst_case_iterations(gamma, 1e-6), expected);
    }
}

#[test]
fn seeds_reach_what_is_drawn() {
    for json in [
        r#"{"mechanism": "soft", "landmarks": {"kind": "random", "count": 3, "seed": 7}}"#,
        r#"{"mechanism": "soft-pp", "landmarks": {"kind": "random", "count": 3, "seed": 7}}"#,
        r#"{"mechanism": "ssa", "seed": 7}"#,
        r#"{"mechanism": "routed", "seed": 7}"#,
        r#"{"mechanism": "fna", "structure": {"kind": "clustered", "seed": 7}}"#,
        r#"{"mechanism": "performer", "seed": 7}"#,
        r#"{"mechanism": "composed", "score": "gaussian", "structure": {"kind": "nystrom", "landmarks": {"kind": "random", "count": 3, "seed": 7}}, "normalisation": "none"}"#,
    ] {
        let seeded =
            |seed: &str| Mechanism::from_json(&json.replace("\"seed\": 7", &format!("\"seed\": {seed}"))).unwrap();
        assert_eq!(seeded("7").with_seed(9), seeded("9"));
    }
    let pooled = Mechanism::preset("soft").unwrap();
    assert_eq!(pooled.clone().with_seed(9), pooled);
}

#[test]
fn a_configured_number_of_landmarks_stays() {
    for [begin, end] in [
        [r#"{"mechanism": "soft", "#, "}"],
        [r#"{"mechanism": "composed", "score": "levy", "structure": {"kind": "nystrom", "#, "}}"],
    ] {
        let given = |count: &str| {
            Mechanism::from_json(&format!(r#"{begin}"landmarks": {{"kind": "given"{count}}}{end}"#)).unwrap()
        };
        assert_eq!(given("").with_given_landmarks(5), given(r#", "count": 5"#));
        assert_eq!(given(r#", "count": 3"#).with_given_landmarks(5), given(r#", "count": 3"#));
    }
}

/// Fields of landmarks are those of whatever mechanism has landmarks.
#[test]
fn landmarks_are_told_of_and_changed_whatever_has_them() {
    let nystrom = r#""structure": {"kind": "nystrom", "grid": [3, 4], "value_conv": 3, "landmarks": {"kind": "random", "count": 5, "seed": 7}}"#;
    let soft = r#""grid": [3, 4], "value_conv": 3, "landmarks": {"kind": "random", "count": 5, "seed": 7}"#;
    for json in [
        format!(r#"{{"mechanism": "composed", "score": "levy", {nystrom}}}"#),
        with("soft", soft),
        with("soft-pp", soft),
    ] {
        let m = Mechanism::from_json(&json).unwrap();
        assert_eq!((m.drawn_landmarks(), m.grid(), m.value_conv()), (Some(5), Some([3, 4]), 3), "{json}");
        let first = m.clone().with_landmarks(|_| Landmarks::First { count: 2 }).with_grid(Some([4, 3])).with_grid(None);
        assert_eq!(first.landmark_kind(), Some(Landmarks::First { count: 2 }), "{json}");
        assert_eq!((first.drawn_landmarks(), first.grid()), (None, Some([4, 3])), "{json}");
        let Some(Landmarks::Random { seed, .. }) = m.with_seed(9).landmark_kind() else { panic!("{json}") };
        assert_eq!(seed, 9);
    }
    let dense = Mechanism::preset("softmax").unwrap();
    assert_eq!((dense.landmark_kind(), dense.grid(), dense.value_conv()), (None, None, 0));
    assert_eq!(dense.clone().with_landmarks(|_| Landmarks::All).with_grid(Some([2, 2])), dense);
}

#[test]
fn a_single_landmark_of_several_tokens_is_a_caution() {
    let soft = Mechanism::from_json(&with("soft", r#""landmarks": {"kind": "pool", "ratio": 4}"#)).unwrap();
    let caution = |tokens| soft.caution_at(&Shape::square(1, 1, tokens, 4));
    assert!(caution(4).unwrap().contains("single landmark"));
    assert_eq!([caution(1), caution(8)], [None; 2]);
}

#[test]
fn many_steps_without_a_ridge_are_a_caution() {
    let caution = |fields: &str| Mechanism::from_json(&with("soft", fields)).unwrap().caution();
    assert!(caution(r#""newton_iterations": 25, "ridge": 0.0"#).unwrap().contains("ridge"));
    assert_eq!(caution(r#""newton_iterations": 24, "ridge": 0.0"#), None);
    assert_eq!(caution(r#""newton_iterations": 25, "ridge": 0.01"#), None);
    assert_eq!(caution(r#""newton_iterations": 25, "ridge": 0.0, "inverse": "cholesky""#), None);
}
