//! What tells the attention module where tokens are: rotations, and filters over the values.

mod support;

use burn::{
    nn::{PaddingConfig2d, conv::Conv2dConfig},
    tensor::{Bool, Device, Distribution, Tensor},
};
use resolvent::{
    Inputs, Mask, Mechanism, Strategy, attend,
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, ValueConv},
    ops::depthwise,
};
use support::random;

const D_MODEL: usize = 16;
const HEADS: usize = 2;

fn config(id: &str) -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(D_MODEL, HEADS, Mechanism::preset(id).unwrap())
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

#[track_caller]
fn assert_close<const D: usize>(got: Tensor<D>, expected: Tensor<D>, what: &str) {
    let (got, expected) = (values(got), values(expected));
    let worst = got.iter().zip(&expected).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(got.len() == expected.len() && worst < 2e-5, "{what}: off by {worst}");
}

#[test]
fn depthwise_is_the_convolution_with_its_gradients() {
    let device = Device::flex().autodiff();
    for (grid, side, channels) in [([5, 7], 3, 6), ([1, 1], 3, 1), ([4, 2], 9, 5), ([8, 8], 5, 32), ([3, 3], 1, 2)] {
        let tokens = grid[0] * grid[1];
        let x = random([3, tokens, channels], &device).require_grad();
        let conv = Conv2dConfig::new([channels, channels], [side, side])
            .with_groups(channels)
            .with_padding(PaddingConfig2d::Same)
            .with_bias(false)
            .init(&device);
        let weight = Tensor::from_inner(conv.weight.val().inner().reshape([channels, side * side])).require_grad();
        let dout = random([3, tokens, channels], &device);
        let ours = depthwise(x.clone(), weight.clone(), Some(grid)).unwrap();
        let gradients = (ours.clone() * dout.clone()).sum().backward();

        let picture = x.clone().inner().swap_dims(1, 2).reshape([3, channels, grid[0], grid[1]]);
        let picture = Tensor::from_inner(picture).require_grad();
        let filtered = conv.forward(picture.clone()).reshape([3, channels, tokens]).swap_dims(1, 2);
        let theirs = (filtered.clone() * dout).sum().backward();
        let what = format!("{grid:?} side {side}");
        assert_close(ours.inner(), filtered.inner(), &what);
        let dx = picture.grad(&theirs).unwrap().reshape([3, channels, tokens]).swap_dims(1, 2);
        assert_close(x.grad(&gradients).unwrap(), dx, &what);
        let dweight = conv.weight.val().grad(&theirs).unwrap().reshape([channels, side * side]);
        assert_close(weight.grad(&gradients).unwrap(), dweight, &what);
    }
}

#[test]
fn a_sequence_is_filtered_along_its_one_axis() {
    let device = Device::flex();
    let x = random([2, 9, 3], &device);
    let weight = random([3, 5], &device);
    let row = Tensor::cat(vec![weight.clone().zeros_like().repeat_dim(1, 2), weight.clone()], 1);
    let square = Tensor::cat(vec![row, weight.clone().zeros_like().repeat_dim(1, 2)], 1);
    let on_a_grid = depthwise(x.clone(), square, Some([1, 9])).unwrap();
    assert_close(depthwise(x.clone(), weight.clone(), None).unwrap(), on_a_grid, "one row");
    for (weight, grid, what) in [
        (weight.clone().narrow(1, 0, 4), None, "odd side"),
        (weight.clone(), Some([3, 3]), "side * side"),
        (random([3, 9], &device), Some([2, 4]), "as many places"),
    ] {
        let error = depthwise(x.clone(), weight, grid).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}

/// `rotary` by complex numbers.
fn rotated(x: &[f32], head_dim: usize, grid: Option<[usize; 2]>) -> Vec<f32> {
    let mut out = x.to_vec();
    for (token, row) in out.chunks_exact_mut(D_MODEL).enumerate() {
        for head in row.chunks_exact_mut(head_dim) {
            for (p, pair) in head.chunks_exact_mut(2).enumerate() {
                let angle = match grid {
                    None => token as f64 * 10000_f64.powf(-2.0 * p as f64 / head_dim as f64),
                    Some([_, width]) => {
                        let quarter = head_dim / 4;
                        let place = if p < quarter { token / width } else { token % width };
                        place as f64 * 10000_f64.powf(-((p % quarter) as f64) / quarter as f64)
                    }
                };
                let (sin, cos) = angle.sin_cos();
                let [a, b] = [f64::from(pair[0]), f64::from(pair[1])];
                (pair[0], pair[1]) = ((a * cos - b * sin) as f32, (a * sin + b * cos) as f32);
            }
        }
    }
    out
}

#[test]
fn rotations_are_those_of_the_pairs() {
    let device = Device::flex();
    for grid in [None, Some([3, 4])] {
        for tied in [false, true] {
            let module =
                config("laplacian-exact").with_rotary(true).with_grid(grid).with_tied(Some(tied)).init(&device);
            let tokens = random([1, 12, D_MODEL], &device);
            let parts = if tied { 2 } else { 3 };
            let packed = module.projection.forward(tokens.clone());
            let part = |i: usize| packed.clone().narrow(2, i * D_MODEL, D_MODEL);
            let heads = |x: Tensor<3>| x.reshape([1, 12, HEADS, D_MODEL / HEADS]).swap_dims(1, 2);
            let turned = |x: Tensor<3>| {
                let data = rotated(&values(x), D_MODEL / HEADS, grid);
                heads(Tensor::<1>::from_floats(data.as_slice(), &device).reshape([1, 12, D_MODEL]))
            };
            let (q, v) = (turned(part(0)), heads(part(parts - 1)));
            let inputs = if tied { Inputs::tied(q, v) } else { Inputs::new(q, turned(part(1)), v) };
            let attended = attend(&inputs, &module.mechanism, &Mask::none(), Strategy::Auto).unwrap().out;
            let expected = module.output.forward(attended.swap_dims(1, 2).reshape([1, 12, D_MODEL]));
            assert_close(module.forward(MhaInput::self_attn(tokens)).context, expected, &format!("{grid:?} {tied}"));
        }
    }
}

fn padded(tokens: Tensor<3>, kept: usize) -> MhaInput {
    let [batch, seq, _] = tokens.dims();
    let device = tokens.device();
    let places = Tensor::<1, burn::tensor::Int>::arange(0..seq as i64, &device);
    let padding: Tensor<2, Bool> = places.greater_equal_elem(kept as i64).unsqueeze::<2>().expand([batch, seq]);
    MhaInput::self_attn(tokens).mask_pad(padding)
}

#[test]
fn padding_is_beyond_the_edge_of_the_filter() {
    let device = Device::flex();
    for (id, conv) in [
        ("softmax", ValueConv::PerHead { side: 3 }),
        ("linear-infsa", ValueConv::PerChannel { side: 5 }),
        ("uniform", ValueConv::PerChannel { side: 3 }),
    ] {
        let module: MultiHeadAttention = config(id).with_value_conv(conv).with_rotary(true).init(&device);
        let tokens = random([2, 9, D_MODEL], &device);
        let garbage = Tensor::random([2, 4, D_MODEL], Distribution::Uniform(50.0, 99.0), &device);
        let long = Tensor::cat(vec![tokens.clone().narrow(1, 0, 5), garbage], 1);
        let short = module.forward(MhaInput::self_attn(tokens.narrow(1, 0, 5))).context;
        let long = module.forward(padded(long, 5)).context;
        assert_close(long.clone().narrow(1, 0, 5), short, id);
        assert!(values(long.narrow(1, 5, 4)).iter().all(|&x| x == 0.0));
    }
}

#[test]
fn filters_are_counted_and_misuse_is_named() {
    use burn::module::Module;
    let device = Device::flex();
    for grid in [None, Some([3, 4])] {
        for conv in [ValueConv::None, ValueConv::PerHead { side: 3 }, ValueConv::PerChannel { side: 5 }] {
            let config = config("softmax").with_value_conv(conv).with_grid(grid);
            assert_eq!(config.init(&device).num_params(), config.parameter_count(), "{conv:?} {grid:?}");
        }
    }
    let module =
        config("softmax").with_value_conv(ValueConv::PerHead { side: 3 }).with_grid(Some([3, 4])).init(&device);
    let tokens = || random([1, 12, D_MODEL], &device);
    let error = |input: MhaInput| module.try_forward(input).unwrap_err().to_string();
    let wrong = error(MhaInput::self_attn(tokens()).grid([2, 5]));
    assert!(wrong.contains("grid") && wrong.contains("12 tokens"), "{wrong}");
    assert!(error(MhaInput::new(tokens(), tokens(), tokens())).contains("cross-attention"));
    assert!(error(MhaInput::self_attn(tokens()).causal()).contains("reads later tokens"));
    let narrow = MultiHeadAttentionConfig::new(6, 1, Mechanism::preset("softmax").unwrap()).with_rotary(true);
    narrow.validate().unwrap();
    let error = narrow.with_grid(Some([2, 2])).validate().unwrap_err().to_string();
    assert!(error.contains("`head_dim` is 6") && error.contains("multiple of 4"), "{error}");
}
