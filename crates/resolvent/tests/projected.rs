//! Modules with projected keys and values: they learn the maps, up to a longest sequence.

use burn::{
    module::Module,
    tensor::{Device, Distribution, Tensor},
};
use resolvent::{
    Mechanism,
    attention::{MhaInput, MultiHeadAttentionConfig},
};

fn config(fields: &str) -> MultiHeadAttentionConfig {
    let json = format!(r#"{{"mechanism": "composed", "structure": {{"kind": "projected", "count": 3{fields}}}}}"#);
    MultiHeadAttentionConfig::new(8, 2, Mechanism::from_json(&json).unwrap())
}

#[test]
fn maps_are_learned_and_serve_shorter_sequences() {
    let device = Device::flex().autodiff();
    for (fields, rows) in [(r#", "max_tokens": 10"#, 3), (r#", "max_tokens": 10, "per_head": true"#, 6)] {
        let config = config(fields);
        let module = config.init(&device);
        assert_eq!(module.num_params(), config.parameter_count());
        let x = Tensor::<3>::random([2, 7, 8], Distribution::Default, &device);
        let gradients = module.forward(MhaInput::self_attn(x)).context.powi_scalar(2).sum().backward();
        for map in [&module.landmarks.key_map, &module.landmarks.value_map] {
            let map = map.as_ref().unwrap().val();
            assert_eq!(map.dims(), [rows, 10]);
            let gradient: Vec<f32> = map.grad(&gradients).unwrap().into_data().iter().collect();
            for row in gradient.chunks(10) {
                assert!(row[..7].iter().any(|&x| x != 0.0) && row[7..].iter().all(|&x| x == 0.0), "{row:?}");
            }
        }
        let long = Tensor::<3>::zeros([1, 11, 8], &device);
        let error = module.try_forward(MhaInput::self_attn(long)).err().unwrap().to_string();
        assert!(error.contains("structure.max_tokens"), "{error}");
    }
    let error = config("").try_init(&device).err().unwrap().to_string();
    assert!(error.contains("structure.max_tokens") && error.contains("longest"), "{error}");
}
