//! What `Strategy::Auto` becomes once a calibration is installed. In a program of its own, because that is for good.

use std::collections::BTreeMap;

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use resolvent::{
    Calibration, Dropout, Inputs, Mask, Mechanism, Precision, Strategy, attend,
    ops::{Crossing, Timed},
    plan,
};

fn crossing(composed_up_to: usize) -> Crossing {
    let timed = Timed { tokens: 16, fused: [2.0, 2.0], composed: [1.0, 1.0] };
    Crossing { composed_up_to, sizes: vec![timed] }
}

fn inputs(tokens: usize) -> Inputs {
    let numbers: Vec<f32> = (0..2 * tokens * 8).map(|i| (i as f32 * 0.7).sin()).collect();
    let x = || Tensor::<4>::from_data(TensorData::new(numbers.clone(), [1, 2, tokens, 8]), &Device::flex());
    Inputs::new(x(), x() * 0.5, x() + 1.0)
}

#[test]
fn auto_follows_the_calibration_and_computes_the_same() {
    let resolvent = Mechanism::preset("infsa-resolvent").unwrap();
    let strategy = |mechanism: &Mechanism, inputs: &Inputs| {
        plan(inputs, mechanism, &Mask::none(), Strategy::Auto).unwrap().strategy
    };
    let fused = attend(&inputs(12), &resolvent, &Mask::none(), Strategy::Auto).unwrap().out;
    assert_eq!(strategy(&resolvent, &inputs(12)), Strategy::Fused);

    let crossings = BTreeMap::from([("infsa-resolvent".into(), crossing(12)), ("softmax".into(), crossing(12))]);
    let calibration = Calibration { crossings };
    assert!(calibration.clone().install() && !Calibration::default().install());
    assert_eq!(Calibration::installed(), Some(&calibration));
    let cases = [("infsa-resolvent", 12, Strategy::Composed), ("infsa-resolvent", 13, Strategy::Fused)];
    for (id, tokens, expected) in cases.into_iter().chain([("infsa", 12, Strategy::Fused)]) {
        assert_eq!(strategy(&Mechanism::preset(id).unwrap(), &inputs(tokens)), expected, "{id} at {tokens}");
    }
    let composed = attend(&inputs(12), &resolvent, &Mask::none(), Strategy::Auto).unwrap().out;
    let distance = (composed - fused.clone()).abs().max().into_scalar::<f32>();
    assert!(distance < 1e-5 * fused.abs().max().into_scalar::<f32>(), "{distance}");

    // What was not timed stays fused: an iteration limit, dropped weights, half precision, products of bf16.
    let limited = Mechanism::from_json(r#"{"mechanism": "infsa-resolvent", "max_iter": 40}"#).unwrap();
    assert_eq!(strategy(&limited, &inputs(12)), Strategy::Fused);
    let softmax = Mechanism::preset("softmax").unwrap();
    assert_eq!(strategy(&softmax, &inputs(12)), Strategy::Composed);
    let mut dropped = inputs(12);
    dropped.extras = dropped.extras.with_dropout(Dropout::weights(0.5, 1).unwrap());
    assert_eq!(strategy(&softmax, &dropped), Strategy::Fused);
    let mut rounded = inputs(12);
    rounded.extras = rounded.extras.with_precision(Precision::Bf16);
    assert_eq!(strategy(&softmax, &rounded), Strategy::Fused);
    let Inputs { q, k, v, .. } = inputs(12);
    let half = |x: Tensor<4>| x.cast(FloatDType::F16);
    assert_eq!(strategy(&softmax, &Inputs::new(half(q), half(k.unwrap()), half(v))), Strategy::Fused);
}

#[test]
fn a_measurement_covers_every_mechanism_and_reads_back() {
    let calibration = Calibration::measure().unwrap();
    assert_eq!(calibration.crossings.len(), Mechanism::IDS.len());
    for (id, crossing) in &calibration.crossings {
        let times = crossing.sizes.iter().flat_map(|timed| timed.fused.into_iter().chain(timed.composed));
        assert!(!crossing.sizes.is_empty() && times.into_iter().all(|t| t.is_finite() && t > 0.0), "{id}");
        assert!(crossing.composed_up_to <= crossing.sizes.last().unwrap().tokens, "{id}");
    }
    let text = serde_json::to_string(&calibration).unwrap();
    assert_eq!(serde_json::from_str::<Calibration>(&text).unwrap(), calibration);
}
