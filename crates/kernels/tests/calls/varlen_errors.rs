//! Sequences in one call that do not fit, or of which one is at fault.

use crate::support;

use resolvent_kernels::{
    Error, Extras, Heads, Mask, Mechanism, Parameter, Scratch, Sequences, Strategy, Strided, VarlenInputs,
    VarlenOperator,
};
use support::varlen::{Case, numbers};

#[test]
fn mistakes_are_named() {
    for bounds in [&[][..], &[0], &[1, 3], &[0, 3, 3], &[0, 5, 4]] {
        assert!(matches!(Sequences::new(bounds), Err(Error::OutOfRange { field: "cu_seqlens", .. })), "{bounds:?}");
    }
    assert!(matches!(Sequences::cross(&[0, 3], &[0, 1, 2]), Err(Error::OutOfRange { field: "keys", .. })));
    let refused = |case: &Case| case.together::<f32>(Strategy::Auto, None).unwrap_err();

    let error = refused(&Case::new(r#"{"mechanism": "linear-infsa", "broadcast": false}"#));
    assert!(error.to_string().contains("broadcast"), "{error}");
    let error = refused(&Case::new(r#"{"mechanism": "softmax", "bias": {"kind": "grid", "height": 1, "width": 7}}"#));
    assert!(matches!(error, Error::Sequence { sequence: 1, .. }), "{error}");
    let mut case = Case::new(r#"{"mechanism": "softmax", "bias": {"kind": "tensor"}}"#);
    case.parameters.insert(Parameter::Bias, vec![0.0; 4 * 49]);
    assert!(matches!(refused(&case), Error::Unsupported { .. }));
    let mut case = Case::new("softmax");
    case.parameters.insert(Parameter::Gamma, vec![0.5; 4]);
    assert!(matches!(refused(&case), Error::Tensor { tensor: "gamma", .. }));
    case = Case::new("softmax");
    case.heads.kv_heads = 3;
    assert!(matches!(refused(&case), Error::OutOfRange { field: "kv_heads", .. }));
    case = Case::new("softmax");
    case.keep = Some(vec![true; 79]);
    assert!(matches!(refused(&case), Error::Length { tensor: "key_mask", got: 79, expected: 80, .. }));
}

#[test]
fn strides_that_do_not_fit_are_refused() {
    let sequences = Sequences::new(&[0, 3, 8]).unwrap();
    let op = VarlenOperator::new(
        &Mechanism::preset("softmax").unwrap(),
        Heads::new(2, 4),
        &sequences,
        false,
        Strategy::Auto,
    )
    .unwrap();
    let tokens = numbers(64, 1);
    let run = |x: Strided<&[f32]>, [head_stride, token_stride]: [usize; 2]| {
        let inputs = VarlenInputs { q: x, k: Some(x), v: x, extras: Extras::default(), clusters: None };
        let (mut out, mut stats) = (vec![0.0; 64], vec![0.0; op.plan().stats]);
        let into = Strided { data: &mut out[..], batch_stride: 0, head_stride, token_stride };
        op.forward(&inputs, &Mask::NONE, into, &mut stats, &mut Scratch::default())
    };
    let x = Strided::tokens_first(&tokens[..], [2, 8, 4]);
    assert_eq!(run(x, [4, 8]), Ok(()));
    assert_eq!(run(x, [32, 4]), Ok(()));
    // Reading a row for several heads, or several tokens, is no fault.
    assert_eq!(run(Strided { data: &tokens[..], batch_stride: 0, head_stride: 0, token_stride: 4 }, [4, 8]), Ok(()));
    for data in [&tokens[..63], &[]] {
        let error = run(Strided { data, ..x }, [4, 8]).unwrap_err();
        assert!(matches!(error, Error::Length { tensor: "q", expected: 64, .. }), "{error}");
    }
    let far = run(Strided { token_stride: usize::MAX / 2, ..x }, [4, 8]).unwrap_err();
    assert!(matches!(far, Error::Length { tensor: "q", .. }), "{far}");
    for strides in [[0, 4], [4, 4], [2, 8], [8, 3], [28, 4]] {
        let error = run(x, strides).unwrap_err();
        assert!(matches!(error, Error::Tensor { tensor: "out", .. }), "{strides:?}: {error}");
    }
    assert!(matches!(run(x, [4, 9]), Err(Error::Length { tensor: "out", .. })));
}

#[test]
fn the_first_sequence_at_fault_is_named() {
    let mut case = Case::new("softmax");
    case.heads = Heads::new(1, 2);
    case.sequences = Sequences::new(&[0, 2, 4, 6, 8]).unwrap();
    let op = case.operator(Strategy::Auto).unwrap();
    let mut x = [1.0_f32; 16];
    (x[9], x[13]) = (f32::NAN, f32::NAN);
    let view = Strided::heads_first(&x[..], [1, 8, 2]);
    let inputs = VarlenInputs { q: view, k: Some(view), v: view, extras: Extras::default(), clusters: None };
    let (mut out, mut stats) = (vec![0.0; 16], vec![0.0; op.plan().stats]);
    let into = Strided::heads_first(&mut out[..], [1, 8, 2]);
    let error = op.forward(&inputs, &Mask::NONE, into, &mut stats, &mut Scratch::default());
    // Tokens that are no numbers make rows that are none; nothing of another sequence sees them.
    match error {
        Err(error) => assert!(matches!(error, Error::Sequence { sequence: 2, .. }), "{error}"),
        Ok(()) => assert!(out[..8].iter().all(|x| *x == 1.0)),
    }
}
