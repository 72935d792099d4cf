//! Layers with products of bf16 against products of rounded operands in f64, by every level and unit that the processor has.

use half::bf16;
use resolvent_kernels::simd::{Bf16Unit, Level};
use resolvent_layers::{MlpGradients, MlpWeights, bf16::Bf16Layers, gelu, gelu_backward};

/// As many numbers of no more digits than f32 has, in [-1, 1].
fn numbers(len: usize, seed: f32) -> Vec<f32> {
    (0..len).map(|i| ((i as f32 + seed) * 0.7311).sin()).collect()
}

fn rounded(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(bf16::from_f32(x))).collect()
}

fn of(level: Level) -> impl Iterator<Item = Bf16Layers> {
    Bf16Unit::available(level).into_iter().filter_map(move |unit| Bf16Layers::new(level, unit))
}

fn all() -> Vec<Bf16Layers> {
    Level::available().into_iter().flat_map(of).collect()
}

/// A matrix, or its transpose.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    data: &'a [f64],
    rows: usize,
    cols: usize,
    transposed: bool,
}

impl<'a> Matrix<'a> {
    fn of(data: &'a [f64], rows: usize, cols: usize) -> Self {
        Self { data, rows, cols, transposed: false }
    }

    fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, transposed: !self.transposed, ..self }
    }

    fn at(&self, i: usize, j: usize) -> f64 {
        if self.transposed { self.data[j * self.rows + i] } else { self.data[i * self.cols + j] }
    }
}

/// Whether `got` is `left right + bias`, up to what sums of as many f32 may lose: each of `depth + 1` additions rounds relatively by
/// 2^-24, tiles of AMX in their own order and without denormals.
fn assert_product(got: &[f32], left: Matrix<'_>, right: Matrix<'_>, bias: Option<&[f32]>, of: &str) {
    assert_eq!(got.len(), left.rows * right.cols, "{of}");
    for (at, &got) in got.iter().enumerate() {
        let (i, j) = (at / right.cols, at % right.cols);
        let (mut sum, mut size) = (0.0, 1e-30);
        for c in 0..left.cols {
            let product = left.at(i, c) * right.at(c, j);
            (sum, size) = (sum + product, size + product.abs());
        }
        if let Some(bias) = bias {
            (sum, size) = (sum + f64::from(bias[j]), size + f64::from(bias[j].abs()));
        }
        let bound = size * (left.cols + 1) as f64 * 2.0_f64.powi(-24);
        assert!((f64::from(got) - sum).abs() <= bound, "{of} at ({i}, {j}): {got}, not {sum} within {bound}");
    }
}

#[test]
fn layers_are_products_of_rounded_operands() {
    for [rows, inputs, outputs] in [
        [1, 1, 1],
        [3, 5, 7],
        [17, 33, 65],
        [70, 64, 300],
        [130, 31, 257],
        [1030, 20, 40],
        [2, 0, 3],
        [0, 4, 2],
        [4, 2, 0],
        [0, 0, 0],
    ] {
        let (x, dout) = (numbers(rows * inputs, 0.1), numbers(rows * outputs, 0.2));
        let (weight, bias) = (numbers(inputs * outputs, 0.3), numbers(outputs, 0.4));
        let (wide_x, wide_w, wide_d) = (rounded(&x), rounded(&weight), rounded(&dout));
        let (xs, ws) = (Matrix::of(&wide_x, rows, inputs), Matrix::of(&wide_w, inputs, outputs));
        let ds = Matrix::of(&wide_d, rows, outputs);
        for layers in all() {
            let of = |what: &str| format!("{what} of [{rows}, {inputs}, {outputs}] by {layers:?}");
            assert_product(&layers.linear(rows, &x, &weight, &bias), xs, ws, Some(&bias), &of("y"));
            let gradients = layers.linear_backward(rows, &x, &weight, &dout, outputs, [true; 3]);
            assert_product(&gradients.dx.unwrap(), ds, ws.t(), None, &of("dx"));
            assert_product(&gradients.dweight.unwrap(), xs.t(), ds, None, &of("dweight"));
            let (ones, exact) = (vec![1.0; rows], dout.iter().copied().map(f64::from).collect::<Vec<_>>());
            let exact = Matrix::of(&exact, rows, outputs);
            assert_product(&gradients.dbias.unwrap(), Matrix::of(&ones, 1, rows), exact, None, &of("dbias"));
            let one = layers.linear_backward(rows, &x, &weight, &dout, outputs, [false, true, false]);
            assert!(one.dx.is_none() && one.dbias.is_none() && one.dweight.is_some());
        }
    }
}

/// What is not finite shows, as it does in f32.
#[test]
fn infinities_and_nans_show() {
    for layers in all() {
        let y = layers.linear(2, &[f32::NAN, 1.0, f32::INFINITY, 0.0], &[1.0, 2.0], &[0.0]);
        assert!(y[0].is_nan() && y[1] == f32::INFINITY, "{layers:?}: {y:?}");
    }
}

struct Case {
    rows: usize,
    tensors: [Vec<f32>; 6],
}

impl Case {
    fn new([rows, inputs, hidden, outputs]: [usize; 4]) -> Self {
        let lens = [rows * inputs, rows * outputs, inputs * hidden, hidden, hidden * outputs, outputs];
        let mut seed = 0.0;
        let tensors = lens.map(|len| {
            seed += 0.1;
            numbers(len, seed)
        });
        Self { rows, tensors }
    }

    fn weights(&self) -> MlpWeights<'_> {
        let [_, _, weight_in, bias_in, weight_out, bias_out] = &self.tensors;
        MlpWeights { weight_in, bias_in, weight_out, bias_out }
    }

    fn run(&self, layers: &Bf16Layers) -> (Vec<f32>, Vec<f32>, MlpGradients) {
        let (x, dout) = (&self.tensors[0], &self.tensors[1]);
        let (y, hidden) = layers.mlp(self.rows, x, &self.weights(), true).unwrap();
        let gradients = layers.mlp_backward(self.rows, x, &hidden, &self.weights(), dout).unwrap();
        (y, hidden, gradients)
    }
}

/// Whether two orders of summation of the same give these.
fn assert_close(got: &[f32], expected: &[f32], of: &str) {
    assert_eq!(got.len(), expected.len(), "{of}");
    let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() <= 1e-5 * largest, "{of} at {at}: {got}, not {expected}");
    }
}

/// On the level of the GELU beside them, bit for bit.
#[test]
fn mlps_are_their_layers_one_after_the_other() {
    for sizes in [[3, 5, 7, 4], [1024, 33, 40, 21], [1500, 70, 300, 65], [0, 3, 4, 5], [1100, 0, 3, 2], [1100, 4, 0, 2]]
    {
        let case = Case::new(sizes);
        let [rows, _, width, outputs] = sizes;
        let [x, dout, ..] = &case.tensors;
        let MlpWeights { weight_in, bias_in, weight_out, bias_out } = case.weights();
        for layers in of(Level::selected().unwrap()) {
            let of = |what: &str| format!("{what} of {sizes:?} by {layers:?}");
            let (y, hidden, got) = case.run(&layers);
            let before = layers.linear(rows, x, weight_in, bias_in);
            assert!(hidden == before, "{}", of("hidden"));
            let after = gelu(&before).unwrap();
            assert!(y == layers.linear(rows, &after, weight_out, bias_out), "{}", of("y"));
            let (same, none) = layers.mlp(rows, x, &case.weights(), false).unwrap();
            assert!(same == y && none.is_empty());
            let outer = layers.linear_backward(rows, &after, weight_out, dout, outputs, [true; 3]);
            let dhidden = gelu_backward(&before, &outer.dx.unwrap()).unwrap();
            let inner = layers.linear_backward(rows, x, weight_in, &dhidden, width, [true; 3]);
            assert!(got.dx == inner.dx.unwrap(), "{}", of("dx"));
            assert!(got.dweight_in == inner.dweight.unwrap(), "{}", of("dweight_in"));
            assert_close(&got.dbias_in, &inner.dbias.unwrap(), &of("dbias_in"));
            assert!(got.dweight_out == outer.dweight.unwrap(), "{}", of("dweight_out"));
            assert_close(&got.dbias_out, &outer.dbias.unwrap(), &of("dbias_out"));
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_threads_or_the_other_rows() {
    let [rows, inputs, outputs] = [1100, 70, 600];
    let (x, dout) = (numbers(rows * inputs, 0.1), numbers(rows * outputs, 0.2));
    let (weight, bias) = (numbers(inputs * outputs, 0.3), numbers(outputs, 0.4));
    let case = Case::new([2100, 40, 300, 30]);
    for layers in all() {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let gradients = layers.linear_backward(rows, &x, &weight, &dout, outputs, [true; 3]);
                (layers.linear(rows, &x, &weight, &bias), gradients, case.run(&layers))
            })
        };
        let one = run(1);
        assert!(one == run(2) && one == run(5), "{layers:?}");
        let few = layers.linear(3, &x[7 * inputs..10 * inputs], &weight, &bias);
        assert!(few == one.0[7 * outputs..10 * outputs], "{layers:?}");
    }
}
