//! Ternary matrices: the stored case, exact storage, and integer products against their definition in f64.

use proptest::{prelude::*, test_runner::RngSeed};
use resolvent_layers::{Error, TernaryMatrix};
use safetensors::SafeTensors;

fn stored(name: &str) -> (Vec<usize>, Vec<f64>) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/ternary_linear.safetensors");
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor(name).unwrap();
    let values = match tensor.dtype() {
        safetensors::Dtype::F32 => {
            tensor.data().as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x).into()).collect()
        }
        _ => tensor.data().as_chunks::<8>().0.iter().map(|x| f64::from_le_bytes(*x)).collect(),
    };
    (tensor.shape().to_vec(), values)
}

fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}

#[test]
fn the_stored_case() {
    let ((shape, w), (_, x)) = (stored("w"), stored("x"));
    let matrix = TernaryMatrix::quantise(&narrow(&w), [shape[0], shape[1]]).unwrap();
    let codes: Vec<f64> = matrix.codes().iter().map(|&code| code.into()).collect();
    assert_eq!(codes, stored("codes").1);
    assert!((f64::from(matrix.scale()) - stored("gamma").1[0]).abs() < 1e-7);
    let (out_shape, expected) = stored("out");
    let mut out = vec![f32::NAN; out_shape.iter().product()];
    matrix.forward(&narrow(&x), None, &mut out).unwrap();
    for (n, (got, want)) in out.iter().zip(expected).enumerate() {
        assert!((f64::from(*got) - want).abs() < 1e-6, "out[{n}]: {got} instead of {want}");
    }
}

fn noise(len: usize, seed: u32) -> Vec<f32> {
    (0..len).map(|n| ((n as f64 * 0.7 + f64::from(seed)).sin() * 43_758.545).fract() as f32).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, rng_seed: RngSeed::Fixed(4), failure_persistence: None, ..ProptestConfig::default() })]

    /// What is stored is what was quantised; products are those of the codes.
    #[test]
    fn storage_is_exact_and_so_are_products(
        outputs in 1..40_usize, inputs in 1..200_usize, tokens in 0..50_usize, seed in any::<u32>(), with_bias in any::<bool>(),
    ) {
        let (w, x, b) = (noise(outputs * inputs, seed % 1000), noise(tokens * inputs, seed % 999), noise(outputs, 5));
        let matrix = TernaryMatrix::quantise(&w, [outputs, inputs]).unwrap();
        let read = TernaryMatrix::from_packed(matrix.packed().to_vec(), matrix.shape(), matrix.scale()).unwrap();
        prop_assert_eq!(&read, &matrix);
        prop_assert_eq!(matrix.packed().len() + 4, TernaryMatrix::bytes([outputs, inputs]));
        let codes = matrix.codes();
        prop_assert!(codes.iter().zip(&w).all(|(&c, w)| c == (w / matrix.scale()).round_ties_even().clamp(-1.0, 1.0) as i8));
        let mut out = vec![f32::NAN; tokens * outputs];
        matrix.forward(&x, with_bias.then_some(&b[..]), &mut out).unwrap();
        for (n, got) in out.iter().enumerate() {
            let (token, o) = (&x[n / outputs * inputs..][..inputs], n % outputs);
            let a = token.iter().fold(1e-5_f32, |most, x| most.max(x.abs())) / 127.0;
            let sum: i64 = token.iter().zip(&codes[o * inputs..]).map(|(x, &c)| (x / a).round_ties_even() as i64 * i64::from(c)).sum();
            let want = f64::from(a) * f64::from(matrix.scale()) * sum as f64 + if with_bias { f64::from(b[o]) } else { 0.0 };
            prop_assert!((f64::from(*got) - want).abs() <= 1e-6 * (1.0 + want.abs()), "{got} instead of {want}");
        }
    }
}

/// Matrices side by side round the tokens once, and give the bits that they give one by one; so do few tokens and many.
#[test]
fn matrices_side_by_side_and_tokens_one_by_one() {
    let (inputs, tokens, widths) = (333, 71, [9, 300, 1]);
    let matrix = |outputs: usize| TernaryMatrix::quantise(&noise(outputs * inputs, outputs as u32), [outputs, inputs]);
    let matrices = widths.map(|width| matrix(width).unwrap());
    let (x, bias) = (noise(tokens * inputs, 1), noise(310, 2));
    let mut all = vec![f32::NAN; tokens * 310];
    TernaryMatrix::forward_all(&matrices, &x, Some(&bias), &mut all).unwrap();
    let mut first = 0;
    for matrix in &matrices {
        let [width, _] = matrix.shape();
        for (x, all) in x.chunks_exact(inputs).zip(all.chunks_exact(310)) {
            let mut one = vec![f32::NAN; width];
            matrix.forward(x, Some(&bias[first..first + width]), &mut one).unwrap();
            assert_eq!(one, all[first..first + width]);
        }
        first += width;
    }
}

/// The sums of the longest rows fit their integers, at the largest activations of either sign.
#[test]
fn long_rows_do_not_overflow() {
    let inputs = 100_000;
    let matrix = TernaryMatrix::quantise(&vec![-2.0; inputs], [1, inputs]).unwrap();
    for x in [3.0, -3.0] {
        let mut out = [f32::NAN];
        matrix.forward(&vec![x; inputs], None, &mut out).unwrap();
        assert!((out[0] / (-2.0 * x * inputs as f32) - 1.0).abs() < 1e-5);
    }
}

/// Rows of zeros, of weights or of activations, have a scale.
#[test]
fn zeros_stay_zero() {
    let matrix = TernaryMatrix::quantise(&[0.0; 6], [2, 3]).unwrap();
    assert_eq!((matrix.codes(), matrix.scale()), (vec![0; 6], 1e-5));
    let mut out = [f32::NAN; 4];
    matrix.forward(&[0.0, 0.0, 0.0, 1.0, -1.0, 5.0], Some(&[0.5, -0.5]), &mut out).unwrap();
    assert_eq!(out, [0.5, -0.5, 0.5, -0.5]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let matrix = TernaryMatrix::quantise(&[1.0; 6], [2, 3]).unwrap();
    let tensor = |error: Error| match error {
        Error::Length { tensor, .. } | Error::NonFinite { tensor, .. } | Error::Index { tensor, .. } => tensor,
        Error::OutOfRange { field, .. } => field,
        other => panic!("{other}"),
    };
    let mut out = [0.0; 2];
    assert_eq!(tensor(matrix.forward(&[1.0; 4], None, &mut out).unwrap_err()), "x");
    assert_eq!(tensor(matrix.forward(&[1.0; 3], None, &mut out[..1]).unwrap_err()), "out");
    assert_eq!(tensor(matrix.forward(&[1.0; 3], Some(&[0.0]), &mut out).unwrap_err()), "bias");
    assert_eq!(tensor(matrix.forward(&[1.0, f32::NAN, 1.0], None, &mut out).unwrap_err()), "x");
    let other = TernaryMatrix::quantise(&[1.0; 4], [2, 2]).unwrap();
    let all = |matrices: &[TernaryMatrix]| TernaryMatrix::forward_all(matrices, &[1.0; 3], None, &mut [0.0; 4]);
    assert_eq!(tensor(all(&[matrix.clone(), other]).unwrap_err()), "matrices");
    assert_eq!(tensor(all(&[]).unwrap_err()), "matrices");
    assert_eq!(tensor(TernaryMatrix::quantise(&[1.0; 5], [2, 3]).unwrap_err()), "weight");
    assert_eq!(tensor(TernaryMatrix::quantise(&[f32::INFINITY], [1, 1]).unwrap_err()), "weight");
    assert_eq!(tensor(TernaryMatrix::quantise(&[], [0, 3]).unwrap_err()), "outputs");
    assert_eq!(tensor(TernaryMatrix::quantise(&[], [3, 0]).unwrap_err()), "inputs");
    assert_eq!(tensor(TernaryMatrix::from_packed(vec![0; 63], [2, 3], 1.0).unwrap_err()), "packed");
    assert_eq!(
        tensor(TernaryMatrix::from_packed([vec![0; 63], vec![243]].concat(), [2, 3], 1.0).unwrap_err()),
        "packed"
    );
    assert_eq!(tensor(TernaryMatrix::from_packed(vec![0; 64], [2, 3], f32::NAN).unwrap_err()), "scale");
}

/// Sizes beyond any memory are refused before anything is counted or reserved.
#[test]
fn sizes_beyond_any_memory_are_refused() {
    let error = TernaryMatrix::from_packed(Vec::new(), [1 << 60, 20], 1.0).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { field: "outputs", .. }), "{error}");
    assert_eq!(TernaryMatrix::bytes([usize::MAX, usize::MAX]), usize::MAX);
}
