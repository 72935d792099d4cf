//! Threads that share a buffer, at the smallest sizes at which they do, as in the kernels' test of this name: small enough for the
//! interpreter Miri (`scripts/miri.sh`).

#[path = "../../kernels/tests/support/threads.rs"]
mod threads;

use resolvent_layers::{
    MlpWeights, TernaryMatrix, layer_norm, layer_norm_backward, linear, linear_backward, mlp, mlp_backward,
};
use threads::on_threads;

fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * 0.7311).sin()).collect()
}

/// The layers around attention leave no element unwritten.
#[test]
fn layers() {
    let (rows, inputs, hidden, outputs) = (1030, 3, 5, 2); // two blocks of tokens and more
    let (x, dout) = (numbers(rows * inputs), numbers(rows * outputs));
    let (weight_in, bias_in, weight_out, bias_out) =
        (numbers(inputs * hidden), numbers(hidden), numbers(hidden * outputs), numbers(outputs));
    let weights = MlpWeights { weight_in: &weight_in, bias_in: &bias_in, weight_out: &weight_out, bias_out: &bias_out };
    on_threads(2, || {
        let y = linear(rows, &x, &weight_in, &bias_in);
        let gradients = linear_backward(rows, &x, &weight_in, &y, hidden, [true; 3]);
        let (whole, kept) = mlp(rows, &x, &weights, true).unwrap();
        assert_eq!(whole, mlp(rows, &x, &weights, false).unwrap().0);
        assert_eq!(kept, y, "the hidden layer is the linear layer");
        let through = mlp_backward(rows, &x, &kept, &weights, &dout).unwrap();
        let normed = layer_norm(&x, &[1.0; 3], &[0.0; 3], 1e-5).unwrap();
        let normed_back = layer_norm_backward(&x, &[1.0; 3], &normed, 1e-5).unwrap();
        let matrix = TernaryMatrix::quantise(&weight_in, [hidden, inputs]).unwrap();
        let mut ternary = vec![f32::NAN; rows * hidden];
        matrix.forward(&x, None, &mut ternary).unwrap();
        for written in [gradients.dx.unwrap(), gradients.dweight.unwrap(), through.dx, normed_back.dx, ternary] {
            assert!(written.iter().all(|x| x.is_finite()));
        }
    });
}
