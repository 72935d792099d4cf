//! The stored cases through `attend`: output and every gradient, by every strategy.

use std::path::Path;

use burn::tensor::{Bool, Device, Tensor, TensorData};
use resolvent::{Inputs, Mask, Mechanism, Strategy, attend};
use resolvent_kernels::{Tol, relative_distance};
use safetensors::{Dtype, SafeTensors};

/// One file: inputs in f32 and what the equations make of them in f64.
struct Case {
    name: String,
    mechanism: Mechanism,
    bytes: Vec<u8>,
}

impl Case {
    fn all() -> Vec<Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/tests/data/infsa");
        let cases: Vec<_> = std::fs::read_dir(folder).unwrap().map(|file| Self::read(&file.unwrap().path())).collect();
        assert!(!cases.is_empty());
        cases
    }

    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let case = &header.metadata().as_ref().unwrap()["case"];
        let mut case: serde_json::Value = serde_json::from_str(case).unwrap();
        let mut config = case["args"].take();
        config["mechanism"] = case["mechanism"].take();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        Self { name, mechanism: Mechanism::from_value(config).unwrap(), bytes }
    }

    /// Values and shape of a stored tensor.
    fn get(&self, name: &str) -> Option<(Vec<f64>, Vec<usize>)> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = file.tensor(name).ok()?;
        let data = view.data();
        let values = match view.dtype() {
            Dtype::F64 => data.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
            Dtype::F32 => data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect(),
            Dtype::U8 => data.iter().map(|&b| b.into()).collect(),
            other => panic!("unexpected dtype {other:?}"),
        };
        Some((values, view.shape().to_vec()))
    }

    fn tensor<const D: usize>(&self, name: &str, device: &Device) -> Option<Tensor<D>> {
        let (values, shape) = self.get(name)?;
        let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        Some(Tensor::from_data(TensorData::new(values, shape), device))
    }

    fn mask(&self, name: &str, device: &Device) -> Option<Tensor<2, Bool>> {
        Some(self.tensor::<2>(name, device)?.bool())
    }

    #[track_caller]
    fn assert_close<const D: usize>(&self, name: &str, got: Tensor<D>, slices: usize, rtol: f64) {
        let (expected, shape) = self.get(name).unwrap_or_else(|| panic!("{}: no `{name}`", self.name));
        assert_eq!(got.dims().to_vec(), shape, "{} {name}", self.name);
        let got: Vec<f64> = got.into_data().iter::<f64>().collect();
        let len = got.len() / slices;
        for (got, expected) in got.chunks(len).zip(expected.chunks(len)) {
            let distance = relative_distance(got, expected);
            assert!(distance <= rtol, "{} {name}: relative distance {distance:.3e} > {rtol:.0e}", self.name);
        }
    }
}

/// Runs one case forward and backward and compares everything that is stored.
fn check(case: &Case, strategy: Strategy) {
    let device = Device::flex().autodiff();
    let leaf = |name: &str| case.tensor::<4>(name, &device).map(Tensor::require_grad);
    let (q, k, v) = (leaf("q").unwrap(), leaf("k"), leaf("v").unwrap());
    let gamma = case.tensor::<1>("gamma", &device).map(Tensor::require_grad);
    let mut inputs = Inputs { k: k.clone(), ..Inputs::tied(q.clone(), v.clone()) };
    if let Some(gamma) = &gamma {
        inputs = inputs.with_gamma(gamma.clone());
    }
    let mask = Mask { causal: false, key: case.mask("key_mask", &device), query: case.mask("query_mask", &device) };
    let out = attend(&inputs, &case.mechanism, &mask, strategy).unwrap().out;
    let gradients = (out.clone() * case.tensor("dout", &device).unwrap()).sum().backward();

    let Tol { forward, backward, .. } = Tol::f32(&case.mechanism);
    let slices = q.dims()[0] * q.dims()[1];
    let gradient = |x: Tensor<4>| x.grad(&gradients).expect("a gradient for every input");
    case.assert_close("out", out, slices, forward);
    case.assert_close("dq", gradient(q), slices, backward);
    case.assert_close("dv", gradient(v), slices, backward);
    if let Some(k) = k {
        case.assert_close("dk", gradient(k), slices, backward);
    }
    if let Some(gamma) = gamma {
        case.assert_close("dgamma", gamma.grad(&gradients).expect("a gradient for gamma"), 1, backward);
    }
}

#[test]
fn fused_reproduces_every_case() {
    Case::all().iter().for_each(|case| check(case, Strategy::Fused));
}

#[test]
fn composed_reproduces_every_case() {
    Case::all().iter().for_each(|case| check(case, Strategy::Composed));
}

#[test]
fn reference_reproduces_every_case() {
    Case::all().iter().for_each(|case| check(case, Strategy::Reference));
}
