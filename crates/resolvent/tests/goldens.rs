//! The stored cases through `attend`: output and every gradient, by every strategy.

use std::path::Path;

use burn::tensor::{Bool, Device, Tensor, TensorData};
use resolvent::{Inputs, Mask, Mechanism, Parameter, Shape, Strategy, attend};
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
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/tests/data");
        let cases = ["infsa", "fna"].into_iter().flat_map(|folder| {
            let files = std::fs::read_dir(data.join(folder)).unwrap();
            let cases: Vec<_> = files.filter_map(|file| Self::read(&file.unwrap().path())).collect();
            assert!(cases.len() > 10, "{folder}");
            cases
        });
        cases.collect()
    }

    /// `None` for a file that is no call of a mechanism but holds diagnostics.
    fn read(path: &Path) -> Option<Self> {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let case = &header.metadata().as_ref().unwrap()["case"];
        let mut case: serde_json::Value = serde_json::from_str(case).unwrap();
        let mut config = case["args"].take();
        config["mechanism"] = case["mechanism"].take();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let known = Mechanism::IDS.iter().any(|&id| config["mechanism"] == id);
        known.then(|| Self { name, mechanism: Mechanism::from_value(config).unwrap(), bytes })
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

    /// The largest magnitude of the scores' logarithms, where they are stored.
    fn largest_score(&self) -> f64 {
        let stored = self.get("lse").map_or(Vec::new(), |(lse, _)| lse);
        stored.into_iter().filter(|x| x.is_finite()).fold(0.0, |most, x| most.max(x.abs()))
    }

    #[track_caller]
    fn assert_close<const D: usize>(&self, name: &str, got: Tensor<D>, slices: usize, rtol: f64) {
        let noise = Tol::f32(&self.mechanism).with_scores(self.largest_score()).noise;
        let (expected, shape) = self.get(name).unwrap_or_else(|| panic!("{}: no `{name}`", self.name));
        assert_eq!(got.dims().to_vec(), shape, "{} {name}", self.name);
        let got: Vec<f64> = got.into_data().iter::<f64>().collect();
        let len = got.len() / slices;
        for (got, expected) in got.chunks(len).zip(expected.chunks(len)) {
            let distance = relative_distance(got, expected);
            let error = got.iter().zip(expected).map(|(g, e)| (g - e).powi(2)).sum::<f64>().sqrt();
            let close = distance <= rtol || error <= noise * (len as f64).sqrt();
            assert!(close, "{} {name}: relative distance {distance:.3e} > {rtol:.0e}, error {error:.1e}", self.name);
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
    // As tensors, the configured values get gradients.
    let [_, heads, _, head_dim] = q.dims();
    let kernel: Vec<_> = [Parameter::Alpha, Parameter::Kappa]
        .into_iter()
        .filter(|parameter| case.mechanism.parameters().contains(parameter))
        .map(|parameter| {
            let values = case.mechanism.parameter_default(parameter, &Shape::square(1, heads, 1, head_dim));
            let values = Tensor::<1>::from_floats(values.as_slice(), &device).require_grad();
            inputs = inputs.clone().with(parameter, values.clone());
            (parameter.name(), values)
        })
        .collect();
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
    for (name, x) in kernel {
        if case.get(&format!("d{name}")).is_some() {
            let gradient = x.grad(&gradients).expect("a gradient for every parameter");
            case.assert_close(&format!("d{name}"), gradient, 1, backward);
        }
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
