//! Heads of keys and values that several heads of queries share.

mod support;

use half::bf16;
use resolvent_kernels::{
    Element, Error, ExtraGradients, Extras, Gradients, Inputs, Mask, Mechanism, Operator, Parameter, Result, Scratch,
    Shape, Strategy,
};

const SHAPE: Shape = Shape { batch: 2, heads: 6, seq_q: 9, seq_kv: 9, head_dim: 5, value_dim: 4 };

fn numbers<T: Element>(len: usize, seed: usize) -> Vec<T> {
    (0..len).map(|n| T::narrow(((n * 7 + seed * 13) as f32 * 0.61).sin())).collect()
}

/// `out`, `dq`, `dk`, `dv` and the gradients of the parameters.
fn solve<T: Element>(op: &Operator, [q, k, v]: [&[T]; 3], dout: &[T], mask: &Mask<'_>) -> Result<Vec<Vec<f32>>> {
    let inputs = Inputs { q, k: Some(k), v, extras: Extras::default() };
    let (mut out, mut stats) = (vec![T::narrow(f32::NAN); op.out_len()], vec![0.0; op.plan().stats]);
    let mut scratch = Scratch::default();
    op.forward(&inputs, mask, &mut out, &mut stats, &mut scratch)?;
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| vec![T::narrow(f32::NAN); x.len()]);
    let mut gamma = vec![f32::NAN; SHAPE.heads];
    let has_gamma = op.mechanism().parameters().contains(&Parameter::Gamma);
    let extras = ExtraGradients::default();
    let extras = if has_gamma { extras.with(Parameter::Gamma, &mut gamma) } else { extras };
    let mut gradients = Gradients { dq: &mut dq, dk: Some(&mut dk), dv: &mut dv, extras };
    op.backward(&inputs, mask, &out, &stats, dout, &mut gradients, &mut scratch)?;
    let wide = |x: &[T]| x.iter().map(|x| x.widen()).collect::<Vec<f32>>();
    let mut all = vec![wide(&out), wide(&dq), wide(&dk), wide(&dv)];
    all.extend(has_gamma.then_some(gamma));
    Ok(all)
}

/// Every head of `x`, `times` in a row.
fn repeated<T: Copy>(x: &[T], len: usize, times: usize) -> Vec<T> {
    x.chunks(len).flat_map(|head| head.repeat(times)).collect()
}

#[test]
fn shared_heads_are_repeated_ones() {
    let mechanisms = ["softmax", "infsa", "fna", "ssa", "linear-infsa", "uniform", "laplacian-exact", "linear"];
    for (seed, id) in mechanisms.into_iter().enumerate() {
        for (kv_heads, strategy) in
            [(1, Strategy::Auto), (2, Strategy::Fused), (3, Strategy::Reference), (6, Strategy::Auto)]
        {
            let op = Operator::new(&Mechanism::preset(id).unwrap(), SHAPE, false, strategy).unwrap();
            let grouped = op.clone().with_kv_heads(kv_heads).unwrap();
            let (times, [k_len, v_len]) = (6 / kv_heads, [9 * 5, 9 * 4]);
            let (q, dout) = (numbers::<f32>(SHAPE.q_len(), seed), numbers::<f32>(op.out_len(), seed + 1));
            let (k, v) =
                (numbers::<f32>(2 * kv_heads * k_len, seed + 2), numbers::<f32>(2 * kv_heads * v_len, seed + 3));
            let keep: Vec<bool> = (0..18).map(|n| n % 5 != 2).collect();
            let mask = Mask::padding(&keep);
            let got = solve(&grouped, [&q, &k, &v], &dout, &mask).unwrap();
            let each = [&repeated(&k, k_len, times)[..], &repeated(&v, v_len, times)];
            let mut expected = solve(&op, [&q, each[0], each[1]], &dout, &mask).unwrap();
            for (n, len) in [(2, k_len), (3, v_len)] {
                let sum = |heads: &[f32]| {
                    (0..len).map(|c| heads.iter().skip(c).step_by(len).copied().reduce(|a, b| a + b).unwrap()).collect()
                };
                expected[n] = expected[n].chunks(len * times).flat_map(|heads| -> Vec<f32> { sum(heads) }).collect();
            }
            assert_eq!(got, expected, "{id}, {kv_heads}");
        }
    }
}

#[test]
fn half_types_are_summed_before_they_are_rounded() {
    let op = Operator::new(&Mechanism::preset("softmax").unwrap(), SHAPE, true, Strategy::Auto).unwrap();
    let op = op.with_kv_heads(1).unwrap();
    let narrow = [SHAPE.q_len(), 2 * 45, 2 * 36, SHAPE.out_len()];
    let narrow: Vec<Vec<bf16>> = narrow.into_iter().enumerate().map(|(seed, len)| numbers(len, seed)).collect();
    let wide: Vec<Vec<f32>> = narrow.iter().map(|x| x.iter().map(|x| x.to_f32()).collect()).collect();
    let got = solve(&op, [&narrow[0], &narrow[1], &narrow[2]], &narrow[3], &Mask::NONE).unwrap();
    let expected = solve(&op, [&wide[0], &wide[1], &wide[2]], &wide[3], &Mask::NONE).unwrap();
    // The backward pass is given the rounded output.
    for (got, expected) in got.iter().zip(&expected).take(4) {
        let most = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        assert!(got.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 0.01 * most));
    }
}

#[test]
fn heads_that_do_not_divide_are_refused() {
    let op = |json: &str| Operator::new(&Mechanism::from_json(json).unwrap(), SHAPE, false, Strategy::Auto).unwrap();
    let softmax = op(r#"{"mechanism": "softmax"}"#);
    for kv_heads in [0, 4, 12] {
        let error = softmax.clone().with_kv_heads(kv_heads).unwrap_err();
        assert!(matches!(error, Error::OutOfRange { field: "kv_heads", .. }), "{error}");
    }
    let tied = op(r#"{"mechanism": "softmax", "tied": true}"#).with_kv_heads(2).unwrap_err();
    assert!(matches!(tied, Error::Unsupported { .. }), "{tied}");
    let grouped = softmax.with_kv_heads(2).unwrap();
    let (q, k) = (numbers::<f32>(SHAPE.q_len(), 1), numbers::<f32>(SHAPE.k_len(), 2));
    let error = solve(&grouped, [&q, &k, &k], &q, &Mask::NONE).unwrap_err();
    assert!(matches!(error, Error::Length { tensor: "k", expected: 180, .. }), "{error}");
}
