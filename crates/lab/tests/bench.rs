//! `bench::run` beside peers that answer as they are told, and on a machine that is said to be busy. No time is asserted.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use resolvent_kernels::Mechanism;
use resolvent_lab::{
    bench::{self, BenchOptions, BenchReport},
    environment::Load,
    report::bench_page,
};

/// A benchmark of softmax that takes as little time as any, and what it said.
fn ran(options: BenchOptions) -> (BenchReport, String) {
    let said = Arc::new(Mutex::new(String::new()));
    let heard = said.clone();
    let report = bench::run(&BenchOptions {
        mechanisms: vec![Mechanism::preset("softmax").unwrap().into()],
        tokens: vec![16],
        heads: 1,
        head_dim: 4,
        rounds: 1,
        turn: Duration::ZERO,
        rivals: false,
        progress: Arc::new(move |line| *heard.lock().unwrap() += &format!("{line}\n")),
        ..options
    });
    let said = said.lock().unwrap().clone();
    (report.unwrap(), said)
}

#[test]
fn a_busy_machine_is_told_of() {
    let on = |average| ran(BenchOptions { load: Some(Load { average, cores: 4 }), ..BenchOptions::default() });
    let (report, said) = on(3.0);
    assert!(said.contains("warning: the load average of the last minute is 3.0 on 4 cores"), "{said}");
    assert!(report.table().contains("warning: ") && report.load.is_some_and(|load| load.is_busy()));
    assert!(bench_page(&report).contains("The load average of the last minute is 3.0 on 4 cores"));
    let (report, said) = on(0.5);
    assert!(
        !said.contains("warning") && !report.table().contains("warning") && !bench_page(&report).contains("Warning")
    );
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["load"], serde_json::json!({"average": 0.5, "cores": 4}));
}

#[cfg(unix)]
mod peers {
    use std::{
        fs,
        os::unix::fs::PermissionsExt,
        path::{Path, PathBuf},
    };

    use base64::{Engine, prelude::BASE64_STANDARD};
    use resolvent_kernels::{Extras, Inputs, Mask, Precision, Shape, reference};
    use serde_json::{Value, json};

    use super::*;

    /// Ways in f32, in bf16, and in bf16 without a backward pass; and a framework that is not there.
    fn hello() -> Value {
        let way = |way: &str, dtype: &str, trains: bool| json!({"way": way, "label": format!("fake {way}"), "dtype": dtype, "trains": trains});
        let ways = [way("full", "float32", true), way("rounded", "bfloat16", true), way("output", "bfloat16", false)];
        json!({"versions": {"fake": "1.2", "other": "3"}, "missing": {"third": "No module named 'third'"}, "ways": {"softmax": ways}})
    }

    /// A program in `folder` that answers `check` as told, keeps what it is asked to, and claims times.
    fn peer(folder: &Path, check: &str) -> PathBuf {
        let path = folder.join("peer");
        let script = format!(
            r#"#!/bin/sh
cd '{}'
while read -r x; do
  case "$x" in
    *'"op":"hello"'*) cat hello;;
    *'"op":"check"'*) printf '%s\n' "$x" > asked; {check};;
    *'"op":"open"'*'"output"'*) echo '{{"id": 1, "peak_bytes": [null, null]}}';;
    *'"op":"open"'*) echo '{{"id": 0, "peak_bytes": [1000, 3000]}}';;
    *'"id":1'*) echo '{{"seconds": [0.001, null]}}';;
    *'"id":0'*) echo '{{"seconds": [0.002, 0.004]}}';;
    *) echo '{{}}';;
  esac
done
"#,
            folder.display()
        );
        fs::write(folder.join("hello"), format!("{}\n", hello())).unwrap();
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// The exact answer to a request, all numbers `off` times as large.
    fn answer(asked: &Value, off: f64) -> Value {
        let tensor = |name: &str| -> Vec<f64> {
            let bytes = BASE64_STANDARD.decode(asked[name].as_str().unwrap()).unwrap();
            bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x).into()).collect()
        };
        let [q, k, v, dout] = ["q", "k", "v", "dout"].map(tensor);
        let sizes: Vec<usize> = serde_json::from_value(asked["shape"].clone()).unwrap();
        let shape = Shape::square(sizes[0], sizes[1], sizes[2], sizes[3]);
        let (softmax, mask) = (Mechanism::preset("softmax").unwrap(), Mask::NONE);
        let inputs = Inputs { q: &q, k: Some(&k), v: &v, extras: Extras::default() };
        let out = reference::forward(&softmax, &shape, &inputs, &mask).unwrap().out;
        let gradients = reference::backward(&softmax, &shape, &inputs, &mask, &dout).unwrap();
        let text = |x: &[f64]| {
            let bytes: Vec<u8> = x.iter().flat_map(|&x| ((x * off) as f32).to_le_bytes()).collect();
            BASE64_STANDARD.encode(bytes)
        };
        json!({
            "out": text(&out),
            "dq": text(&gradients.dq),
            "dk": text(&gradients.dk.unwrap()),
            "dv": text(&gradients.dv),
        })
    }

    /// A benchmark beside a peer whose results are `off` times the exact ones.
    fn beside(precision: Precision, off: f64) -> (BenchReport, String) {
        let folder = tempfile::tempdir().unwrap();
        let options = |check: &str| {
            let peers = Some(peer(folder.path(), check));
            BenchOptions { precision, peers, ..BenchOptions::default() }
        };
        ran(options(r#"echo '{"error": "not yet"}'"#));
        let asked: Value = serde_json::from_slice(&fs::read(folder.path().join("asked")).unwrap()).unwrap();
        assert_eq!(
            (&asked["layout"], &asked["kv_heads"], &asked["sequences"]),
            (&"heads".into(), &1.into(), &json!([]))
        );
        fs::write(folder.path().join("answer"), format!("{}\n", answer(&asked, off))).unwrap();
        ran(options("cat answer"))
    }

    fn passed(report: &BenchReport) -> Vec<(&str, bool)> {
        report.rivals.iter().map(|check| (check.label.as_str(), check.passed)).collect()
    }

    #[test]
    fn what_rounds_to_bf16_runs_beside_ours_of_bf16_and_may_be_off_as_much() {
        let (report, said) = beside(Precision::Bf16, 1.015);
        let expected = [
            ("third", false),
            ("fake full softmax", false),
            ("fake rounded softmax", true),
            ("fake output softmax", true),
        ];
        assert_eq!(passed(&report), expected, "{said}");
        assert!(said.contains("third: not compared with the reference: No module named 'third'\n"), "{said}");
        assert!(said.contains("fake full softmax: DIFFERS") && said.contains("no backward pass)"), "{said}");
        assert_eq!(report.peer.as_deref(), Some("fake 1.2, other 3"));
        let [rounded, output] =
            ["rounded", "output"].map(|way| report.point(&format!("fake {way} softmax"), 16).unwrap());
        assert_eq!([rounded.dtype, output.dtype], [Some(bench::TensorType::Bfloat16); 2]);
        assert_eq!(rounded.training.as_ref().unwrap().median, 0.004);
        // Results of bf16, 2 bytes each, are taken off: an output of 64 elements.
        assert_eq!(rounded.forward.as_ref().unwrap().peak_bytes, Some(1000 - 128));
        assert!(output.is_forward_only() && output.forward.as_ref().unwrap().median == 0.001);
        assert!(report.table().contains("fake output softmax: bfloat16, no backward pass"), "{}", report.table());
        assert!(said.contains("fake output softmax at 16 tokens: forward 1.00 ms, no backward pass"), "{said}");
        let page = bench_page(&report);
        assert!(page.contains("bfloat16, no backward pass") && !page.contains("NaN"));
        let (report, said) = beside(Precision::Bf16, 1.03);
        assert!(passed(&report)[1..].iter().all(|(_, passed)| !passed), "{said}");
    }

    #[test]
    fn beside_full_precision_only_f32_runs() {
        let (report, said) = beside(Precision::Full, 1.0);
        assert_eq!(passed(&report), [("third", false), ("fake full softmax", true)], "{said}");
        assert!(report.point("fake full softmax", 16).is_some() && report.points.len() == 2);
        assert!(report.points.iter().all(|point| point.dtype == Some(bench::TensorType::Float32)));
        let (report, said) = beside(Precision::Full, 1.015);
        assert_eq!(passed(&report)[1], ("fake full softmax", false), "{said}");
        // Three products of bf16 stand for one of f32.
        let (report, said) = beside(Precision::Bf16x3, 1.0);
        assert_eq!(passed(&report), [("third", false), ("fake full softmax", true)], "{said}");
        assert_eq!(report.points.len(), 2);
    }
}
