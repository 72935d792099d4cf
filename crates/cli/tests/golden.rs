//! Every stored case of the InfSA family through `resolvent attend --grad`: the output and every gradient, on every
//! instruction set of this machine and through the reference.

mod support;

use std::{fs, path::PathBuf};

use resolvent_kernels::{Mechanism, Tol, relative_distance, simd::Level};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use support::{Outcome, Sandbox, Tensors, resolvent};

struct Case {
    name: String,
    path: PathBuf,
    config: Value,
    mechanism: Mechanism,
    expected: Tensors,
}

fn cases() -> Vec<Case> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../kernels/tests/data/infsa");
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert_eq!(paths.len(), 17);
    paths.into_iter().map(case).collect()
}

fn case(path: PathBuf) -> Case {
    let bytes = fs::read(&path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let mut case: Value = serde_json::from_str(&header.metadata().as_ref().unwrap()["case"]).unwrap();
    let mut config = case["args"].take();
    config["mechanism"] = case["mechanism"].take();
    let name = path.file_stem().unwrap().to_string_lossy().into_owned();
    let mechanism = Mechanism::from_value(config.clone()).unwrap();
    Case { name, config, mechanism, expected: Tensors::read(&path), path }
}

/// Runs every case with `args` under `simd` and compares all that the case knows of the result.
fn check(args: &[&str], simd: Option<Level>, dtype: Dtype, tolerance: impl Fn(&Mechanism) -> Tol) {
    let sandbox = Sandbox::new();
    let output = sandbox.path("out.safetensors");
    for case in cases() {
        let config = sandbox.write("mechanism.json", case.config.to_string());
        let mut command = resolvent();
        command.arg("attend").arg("--config").arg(config).arg("--input").arg(&case.path).arg("--output").arg(&output);
        command.args(args).envs(simd.map(|level| ("RESOLVENT_SIMD", level.name())));
        Outcome::of(&mut command).success();
        let got = Tensors::read(&output);
        for name in ["out", "dq", "dk", "dv", "dgamma"] {
            let what = format!("{} {name} {simd:?} {args:?}", case.name);
            if !case.expected.names().contains(&name) {
                // The cases without a gamma tensor do not store the gradient of the configured one.
                assert!(name == "dgamma" || !got.names().contains(&name), "{what} is not expected");
                continue;
            }
            assert_eq!((got.dtype(name), got.shape(name)), (dtype, case.expected.shape(name)), "{what}");
            let heads = if name == "dgamma" { 1 } else { got.shape(name)[..2].iter().product() };
            let Tol { forward, backward, .. } = tolerance(&case.mechanism);
            let tolerance = if name == "out" { forward } else { backward };
            compare(&what, &got.values(name), &case.expected.values(name), heads, tolerance);
        }
    }
}

fn compare(what: &str, got: &[f64], expected: &[f64], heads: usize, tolerance: f64) {
    let len = expected.len() / heads;
    for (head, (got, expected)) in got.chunks(len).zip(expected.chunks(len)).enumerate() {
        let distance = relative_distance(got, expected);
        assert!(distance <= tolerance, "{what}, head {head}: relative distance {distance:.2e} > {tolerance:.0e}");
    }
}

#[test]
fn fused_kernels_reproduce_every_case_on_every_instruction_set() {
    check(&["--grad"], None, Dtype::F32, Tol::f32);
    for level in Level::available() {
        check(&["--grad"], Some(level), Dtype::F32, Tol::f32);
    }
}

#[test]
fn the_reference_reproduces_every_case() {
    check(&["--grad", "--reference"], None, Dtype::F64, |_| Tol::F64);
}
