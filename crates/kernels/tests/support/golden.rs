//! Stored cases: inputs in f32 and what the equations make of them in f64.

use std::{collections::BTreeMap, path::PathBuf};

use resolvent_kernels::{Extras, Mask, Mechanism, Shape};
use safetensors::{Dtype, SafeTensors};

/// One case of `tests/data/<folder>`.
pub struct Golden {
    pub name: String,
    pub mechanism: Mechanism,
    pub shape: Shape,
    pub key_mask: Option<Vec<bool>>,
    pub query_mask: Option<Vec<bool>>,
    gamma: Option<Vec<f32>>,
    tensors: BTreeMap<String, Vec<f64>>,
}

impl Golden {
    /// Every case of `folder`, in the order of the file names.
    pub fn all(folder: &str) -> Vec<Self> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(folder);
        let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        assert!(!paths.is_empty());
        paths.iter().map(Self::read).collect()
    }

    fn read(path: &PathBuf) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let case = &header.metadata().as_ref().unwrap()["case"];
        let mut case: serde_json::Value = serde_json::from_str(case).unwrap();
        let mut config = case["args"].take();
        config["mechanism"] = case["mechanism"].take();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let dims = |name: &str| file.tensor(name).ok().map(|t| t.shape().to_vec());
        let (q, v) = (dims("q").unwrap(), dims("v").unwrap());
        let mask = |name: &str| file.tensor(name).ok().map(|t| t.data().iter().map(|&x| x == 1).collect());
        let tensors: BTreeMap<_, _> = file.iter().map(|(name, t)| (name.to_string(), decode(&t))).collect();
        Self {
            name: path.file_stem().unwrap().to_string_lossy().into_owned(),
            mechanism: Mechanism::from_value(config).unwrap(),
            shape: Shape { batch: q[0], heads: q[1], seq_q: q[2], seq_kv: v[2], head_dim: q[3], value_dim: v[3] },
            key_mask: mask("key_mask"),
            query_mask: mask("query_mask"),
            gamma: tensors.get("gamma").map(|gamma| gamma.iter().map(|&x| x as f32).collect()),
            tensors,
        }
    }

    /// A stored tensor, widened to f64.
    pub fn get(&self, name: &str) -> Option<&[f64]> {
        self.tensors.get(name).map(Vec::as_slice)
    }

    /// A stored tensor that the case must have.
    pub fn tensor(&self, name: &str) -> &[f64] {
        self.get(name).unwrap_or_else(|| panic!("{}: no tensor `{name}`", self.name))
    }

    pub fn mask(&self) -> Mask<'_> {
        Mask { causal: false, key: self.key_mask.as_deref(), query: self.query_mask.as_deref() }
    }

    pub fn extras(&self) -> Extras<'_> {
        self.gamma.as_deref().map_or(Extras::default(), Extras::gamma)
    }
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
