//! Every stored case of every family through `resolvent attend --grad`: the output and every gradient, on every
//! instruction set of this machine and through the reference.

mod support;

use std::{fs, path::PathBuf};

use resolvent_kernels::{Mechanism, Parameter, Tol, relative_distance, simd::Level};
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
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../kernels/tests/data");
    let folders = ["infsa", "fna", "soft", "laplacian"].map(|folder| fs::read_dir(data.join(folder)).unwrap());
    let mut paths: Vec<_> = folders.into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let cases: Vec<_> = paths.into_iter().filter_map(case).collect();
    assert_eq!(cases.len(), 17 + 15 + 16 + 18);
    cases
}

/// `None` for a file that is no call of a mechanism but holds diagnostics.
fn case(path: PathBuf) -> Option<Case> {
    let bytes = fs::read(&path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let mut case: Value = serde_json::from_str(&header.metadata().as_ref().unwrap()["case"]).unwrap();
    let mut config = case["args"].take();
    config["mechanism"] = case["mechanism"].take();
    let name = path.file_stem().unwrap().to_string_lossy().into_owned();
    if !Mechanism::IDS.iter().any(|&id| config["mechanism"] == id) {
        return None;
    }
    let mechanism = Mechanism::from_value(config.clone()).unwrap();
    Some(Case { name, config, mechanism, expected: Tensors::read(&path), path })
}

/// Runs every case with `args` under `simd` and compares all that the case knows of the result.
fn check(args: &[&str], simd: Option<Level>, dtype: Dtype, tolerance: impl Fn(&Case) -> Tol) {
    let sandbox = Sandbox::new();
    let output = sandbox.path("out.safetensors");
    for case in cases() {
        let config = sandbox.write("mechanism.json", case.config.to_string());
        let mut command = resolvent();
        command.arg("attend").arg("--config").arg(config).arg("--input").arg(&case.path).arg("--output").arg(&output);
        command.args(args).envs(simd.map(|level| ("RESOLVENT_SIMD", level.name())));
        Outcome::of(&mut command).success();
        let got = Tensors::read(&output);
        let parameters = Parameter::ALL.map(Parameter::gradient_name);
        for name in ["out", "lse", "dq", "dk", "dv"].into_iter().chain(parameters) {
            let what = format!("{} {name} {simd:?} {args:?}", case.name);
            if !case.expected.names().contains(&name) {
                // The cases do not store the gradients of what the configuration says.
                let configured = ["dgamma", "dscale", "dlambda"].contains(&name);
                assert!(configured || !got.names().contains(&name), "{what} is not expected");
                continue;
            }
            assert_eq!((got.dtype(name), got.shape(name)), (dtype, case.expected.shape(name)), "{what}");
            let heads = if parameters.contains(&name) { 1 } else { got.shape(name)[..2].iter().product() };
            let scores = largest_scores(&case, heads);
            let tols = scores
                .iter()
                .map(|&s| if dtype == Dtype::F32 { tolerance(&case).with_scores(s) } else { tolerance(&case) });
            compare(&what, &got.values(name), &case.expected.values(name), tols, matches!(name, "out" | "lse"));
        }
    }
}

/// The largest magnitude of the scores' logarithms in each of `parts`, where they are stored.
fn largest_scores(case: &Case, parts: usize) -> Vec<f64> {
    let stored = if case.expected.names().contains(&"lse") { case.expected.values("lse") } else { vec![0.0; parts] };
    let largest = |part: &[f64]| part.iter().filter(|x| x.is_finite()).fold(0.0_f64, |most, x| most.max(x.abs()));
    stored.chunks(stored.len() / parts).map(largest).collect()
}

/// Each head within its relative tolerance, or within the noise (root mean square) or what f32 can hold.
fn compare(what: &str, got: &[f64], expected: &[f64], tols: impl ExactSizeIterator<Item = Tol>, forward: bool) {
    let len = expected.len() / tols.len();
    // Rows without keys have -inf, on both sides.
    let finite = |x: &[f64]| x.iter().map(|&x| if x == f64::NEG_INFINITY { -1e30 } else { x }).collect::<Vec<_>>();
    for (head, ((got, expected), tol)) in got.chunks(len).zip(expected.chunks(len)).zip(tols).enumerate() {
        let relative = if forward { tol.forward } else { tol.backward };
        let noise = tol.noise.max(f32::MIN_POSITIVE.into());
        let (got, expected) = (finite(got), finite(expected));
        let distance = relative_distance(&got, &expected);
        let error = got.iter().zip(&expected).map(|(g, e)| (g - e).powi(2)).sum::<f64>().sqrt();
        let close = distance <= relative || error <= noise * (len as f64).sqrt();
        assert!(close, "{what}, head {head}: relative distance {distance:.2e} > {relative:.0e}, error {error:.1e}");
    }
}

/// How near f32 comes: not as near where landmarks almost coincide, or the inverse between them has not converged.
fn f32_tolerance(case: &Case) -> Tol {
    let usual = Tol::f32(&case.mechanism);
    match case.name.as_str() {
        // Terms of order one that cancel to nothing.
        "05_one_token" => usual.with_noise(1.0),
        "03_soft_d1" | "10_softpp_near_singular" => Tol { forward: 2e-4, backward: 5e-3, ..usual },
        "15_softpp_paper" | "nystrom_bare" => Tol { forward: 1e-4, backward: 1e-2, ..usual },
        _ => usual,
    }
}

#[test]
fn fused_kernels_reproduce_every_case_on_every_instruction_set() {
    check(&["--grad"], None, Dtype::F32, f32_tolerance);
    for level in Level::available() {
        check(&["--grad"], Some(level), Dtype::F32, f32_tolerance);
    }
}

#[test]
fn the_reference_reproduces_every_case() {
    check(&["--grad", "--reference"], None, Dtype::F64, |_| Tol::F64);
}
