//! Stored cases: inputs in f32 and what the equations make of them in f64.

use std::{collections::BTreeMap, path::Path};

use resolvent_kernels::{ClusterPlan, Mechanism, Parameter, PlanTensors, Shape, Tol};
use safetensors::{Dtype, SafeTensors};

use super::problem::{Problem, Solution};

/// The folders whose mechanisms are there.
const FOLDERS: [&str; 4] = ["infsa", "fna", "soft", "laplacian"];

/// One case of `tests/data/<folder>`.
pub struct Golden {
    pub name: String,
    pub problem: Problem,
    tensors: BTreeMap<String, Vec<f64>>,
}

impl Golden {
    /// Every case of every folder of `FOLDERS`.
    pub fn every() -> Vec<Self> {
        FOLDERS.into_iter().flat_map(Self::all).collect()
    }

    /// Every case of `folder` that is a call of a mechanism (others hold diagnostics), in the order of the file names.
    pub fn all(folder: &str) -> Vec<Self> {
        let data = concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels/tests/data"); // from any crate of the workspace
        let folder = Path::new(data).join(folder);
        let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        assert!(!paths.is_empty());
        paths.iter().filter_map(|path| Self::read(path)).collect()
    }

    fn read(path: &Path) -> Option<Self> {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let mut mechanism = configured(&header.metadata().as_ref().unwrap()["case"])?;
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let dims = |name: &str| <[usize; 4]>::try_from(file.tensor(name).unwrap().shape()).unwrap();
        let ([batch, heads, seq_q, head_dim], [_, _, seq_kv, value_dim]) = (dims("q"), dims("v"));
        let tensors: BTreeMap<_, _> = file.iter().map(|(name, t)| (name.to_string(), decode(&t))).collect();
        let tensor = |name: &str| tensors.get(name).cloned();
        let mask = |name: &str| Some(tensor(name)?.into_iter().map(|x| x == 1.0).collect());
        let shape = Shape { batch, heads, seq_q, seq_kv, head_dim, value_dim };
        if let Ok(given) = file.tensor(Parameter::GivenLandmarks.name()) {
            mechanism = mechanism.with_given_landmarks(given.shape()[2]);
        }
        let problem = Problem {
            shape,
            q: tensor("q").unwrap(),
            k: tensor("k"),
            v: tensor("v").unwrap(),
            parameters: mechanism
                .parameters()
                .iter()
                .filter_map(|&p| Some((p, tensor(p.name())?.iter().map(|&x| x as f32).collect())))
                .collect(),
            landmark_indices: tensor("landmark_indices").map(|x| x.iter().map(|&x| x as i64).collect()),
            dropout: None,
            mechanism,
            codebook: tensor("codebook").map(|book| book.iter().map(|&x| x as f32).collect()),
            clusters: tensors.contains_key("label_q").then(|| plan(&tensors, &shape)),
            key_mask: mask("key_mask"),
            query_mask: mask("query_mask"),
            dout: tensor("dout").unwrap(),
        };
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        Some(Self { name, problem, tensors })
    }

    /// How near f32 kernels come: not as near where the inverse between landmarks hangs on digits that f32 has not, as
    /// they coincide or, without a ridge, the iteration has not converged.
    pub fn tol(&self) -> Tol {
        let usual = Tol::f32(&self.problem.mechanism);
        match self.name.as_str() {
            "03_soft_d1" | "10_softpp_near_singular" => Tol { forward: 2e-4, backward: 5e-3, ..usual },
            "15_softpp_paper" | "nystrom_bare" => Tol { forward: 1e-4, backward: 1e-2, ..usual },
            _ => usual,
        }
    }

    /// A stored tensor.
    pub fn get(&self, name: &str) -> Option<&[f64]> {
        self.tensors.get(name).map(Vec::as_slice)
    }

    /// The outputs and gradients that the case stores: a parameter's only where it is an input.
    pub fn solution(&self) -> Solution {
        let parameters = Parameter::ALL.into_iter().map(Parameter::gradient_name);
        ["out", "lse", "dq", "dk", "dv"]
            .into_iter()
            .chain(parameters)
            .filter_map(|name| Some((name, self.get(name)?.to_vec())))
            .collect()
    }
}

/// The mechanism of a case; `None` for a case of something else.
fn configured(case: &str) -> Option<Mechanism> {
    let mut case: serde_json::Value = serde_json::from_str(case).unwrap();
    if !Mechanism::IDS.contains(&case["mechanism"].as_str().unwrap()) {
        return None;
    }
    let mut config = case["args"].take();
    config["mechanism"] = case["mechanism"].take();
    Some(Mechanism::from_value(config).unwrap())
}

/// The stored plan of a clustered case.
fn plan(tensors: &BTreeMap<String, Vec<f64>>, shape: &Shape) -> ClusterPlan {
    let integers = |name: &str| tensors[name].iter().map(|&x| x as i64).collect::<Vec<_>>();
    let triples = |name: &str| integers(name).as_chunks::<3>().0.to_vec();
    let tensors = PlanTensors {
        label_q: integers("label_q"),
        label_k: integers("label_k"),
        exact_blocks: triples("exact_blocks"),
        edges: triples("edges"),
        edge_log_weight: tensors["edge_log_weight"].clone(),
    };
    ClusterPlan::from_tensors(&tensors, shape).unwrap()
}

fn decode(t: &safetensors::tensor::TensorView<'_>) -> Vec<f64> {
    let data = t.data();
    match t.dtype() {
        Dtype::F64 => data.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
        Dtype::F32 => data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect(),
        Dtype::I64 => data.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64).collect(),
        Dtype::U8 => data.iter().map(|&b| b.into()).collect(),
        other => panic!("unexpected dtype {other:?}"),
    }
}
