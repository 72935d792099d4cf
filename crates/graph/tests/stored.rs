//! The diagnostics of stored cases, by an independent implementation in f64.

use std::{collections::BTreeMap, path::Path};

use resolvent_graph::{
    ClusterFit, Dense, LinearOperator, Reversible, UNREACHABLE, asymmetry, degree_ratio, diffusion_distances,
    diffusion_map, mixing_bounds, mixing_time, shortest_paths, spectral_gap, sweep_cut,
};
use resolvent_kernels::{
    Extras, Inputs, Mask, Mechanism, Shape,
    mechanism::{Fna, Kappa, KappaRule},
    reference,
};
use safetensors::{Dtype, SafeTensors};

/// The tensors of a stored case of `folder`, as f64.
fn stored(case: &str) -> BTreeMap<String, Vec<f64>> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels/tests/data")).join(case);
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let read = |tensor: &safetensors::tensor::TensorView<'_>| -> Vec<f64> {
        let (four, eight) = (tensor.data().as_chunks::<4>().0, tensor.data().as_chunks::<8>().0);
        match tensor.dtype() {
            Dtype::F32 => four.iter().map(|&x| f32::from_le_bytes(x).into()).collect(),
            Dtype::F64 => eight.iter().map(|&x| f64::from_le_bytes(x)).collect(),
            Dtype::I64 => eight.iter().map(|&x| i64::from_le_bytes(x) as f64).collect(),
            other => panic!("{other:?}"),
        }
    };
    file.iter().map(|(name, tensor)| (name.to_string(), read(&tensor))).collect()
}

/// Largest difference, relative to the largest value or 1.
#[track_caller]
fn assert_near(got: &[f64], expected: &[f64], tol: f64) {
    assert_eq!(got.len(), expected.len());
    let size = expected.iter().fold(1.0_f64, |size, x| size.max(x.abs()));
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() <= tol * size, "{at}: {got} is not {expected}");
    }
}

/// The weights of `fna` in f64 and, unnormalised, their logarithms.
fn fna(n: usize, q: &[f64], k: Option<&[f64]>) -> (Dense, Vec<f64>) {
    let fna = Fna::default().with_kappa(Some(Kappa::Rule(KappaRule::Vision))).with_tied(k.is_none());
    let shape = Shape { value_dim: 1, ..Shape::square(1, 1, n, q.len() / n) };
    let inputs = Inputs { q, k, v: &vec![0.0; n], extras: Extras::default() };
    let forward = reference::forward(&Mechanism::from(fna), &shape, &inputs, &Mask::NONE).unwrap();
    let lse = forward.lse.clone().unwrap();
    let weights = Dense::new(n, forward.weights().to_vec()).unwrap();
    let logs = weights.entries().iter().enumerate().map(|(at, w)| w.ln() + lse[at / n]).collect();
    (weights, logs)
}

#[test]
fn fractional_diffusion() {
    let case = stored("fna/16_diagnostics.safetensors");
    let n = case["eta"].len();
    let (weights, logs) = fna(n, &case["x"], None);
    assert_near(weights.entries(), &case["weights"], 1e-12);
    let graph = Reversible::from_log_weights(n, &logs).unwrap();
    let spectrum = graph.spectrum().unwrap();
    assert_near(&spectrum.walk(), &case["eta"], 1e-12);
    assert_near(&[spectral_gap(&weights).unwrap()], &case["gap"], 1e-12);
    assert_near(&[spectrum.gap()], &case["gap"], 1e-12);
    assert_near(&graph.stationary(), &case["stationary"], 1e-13);
    let one = diffusion_map(&graph, &spectrum, 1, 0.0);
    assert_near(&one.concat(), &case["psi1"], 1e-9);
    assert_near(&diffusion_map(&graph, &spectrum, 2, 3.0).concat(), &case["diffusion_map"], 1e-10);
    assert_near(&diffusion_distances(&graph, &spectrum, 3), &case["diffusion_distance2"], 1e-10);
    let paths = shortest_paths(&weights).unwrap();
    assert_near(&paths.lengths, &case["length"], 1e-12);
    assert_eq!(paths.hops.iter().map(|&h| f64::from(h)).collect::<Vec<_>>(), case["hops"]);
}

#[test]
fn fractional_diffusion_untied() {
    let case = stored("fna/16_diagnostics.safetensors");
    let n = 12;
    let (weights, _) = fna(n, &case["q"], Some(&case["k"]));
    assert_near(weights.entries(), &case["untied_weights"], 1e-12);
    assert_near(&[spectral_gap(&weights).unwrap()], &case["untied_gap"], 1e-12);
    let paths = shortest_paths(&weights).unwrap();
    assert_near(&paths.lengths, &case["untied_length"], 1e-12);
    assert_eq!(paths.hops.iter().map(|&h| f64::from(h)).collect::<Vec<_>>(), case["untied_hops"]);
    assert!(paths.hops.iter().all(|&h| h != UNREACHABLE));
}

#[test]
fn clustered_softmax() {
    let case = stored("ssa/diagnostics.safetensors");
    let (n, d, rank, eps) = (30, 8, 5, 0.05);
    let (q, k) = (&case["q"], &case["k"]);
    let score = |i: usize, j: usize| (0..d).map(|c| q[i * d + c] * k[j * d + c]).sum::<f64>() / (d as f64).sqrt();
    let logs: Vec<f64> = (0..n * n).map(|at| score(at / n, at % n)).collect();
    let graph = Reversible::from_log_weights(n, &logs).unwrap();
    let spectrum = graph.spectrum().unwrap();
    assert_near(&spectrum.values, &case["eigenvalues"], 1e-12);
    assert_near(&[spectrum.gap()], &case["gap"], 1e-12);
    assert_near(&[spectrum.absolute_gap()], &case["absolute_gap"], 1e-12);
    assert_near(&[spectrum.gap_at(rank).unwrap()], &case["gap_at_rank"], 1e-12);
    assert_near(&graph.stationary(), &case["pi"], 1e-13);
    let steps = mixing_time(&graph, eps).unwrap().unwrap() as f64;
    assert_eq!([steps], case["mixing_time"][..]);
    let (low, high) = mixing_bounds(&graph, &spectrum, eps).unwrap();
    assert!(low <= steps && steps <= high, "{low} {steps} {high}");
    let sweep = sweep_cut(&graph, &spectrum).unwrap();
    assert_near(&[sweep.conductance], &case["cheeger"], 1e-12);
    let (gap, cut) = (spectrum.gap(), sweep.conductance);
    assert!(gap / 2.0 <= cut && cut <= (2.0 * gap).sqrt());
    assert_near(&[degree_ratio(graph.log_degree())], &case["kappa_d"], 1e-12);
    let weights = Dense::new(n, logs.iter().map(|x| x.exp()).collect()).unwrap();
    assert_near(&[asymmetry(&weights).unwrap()], &case["asymmetry"], 1e-12);
    let labels: Vec<usize> = case["labels"].iter().map(|&x| x as usize).collect();
    let fit = ClusterFit::new(&weights, &labels).unwrap();
    assert_near(&[fit.eps_cluster], &case["eps_cluster"], 1e-12);
    assert_near(&[fit.row_leak], &case["row_leak"], 1e-12);
    assert_eq!((fit.clusters, graph.len()), (5, n));
}
