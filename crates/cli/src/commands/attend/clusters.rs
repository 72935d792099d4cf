//! What a clustered mechanism reads beside q, k and v: fixed centroids, and a plan that replaces planning.

use resolvent_kernels::{Certificate, ClusterPlan, Extras, Mechanism, PlanTensors, mechanism::Ssa};

use super::call::{Layout, expect};
use crate::{
    Error,
    error::Result,
    tensors::{Named, Stored, TensorFile},
};

/// The tensors of a stored plan.
const PLAN: [&str; 5] = ["label_q", "label_k", "exact_blocks", "edges", "edge_log_weight"];

/// Whether a call of `mechanism` reads the tensor `name` of `file`: a stored plan makes centroids needless.
pub fn reads(file: &TensorFile, mechanism: &Mechanism, name: &str) -> bool {
    mechanism.clustering().is_some() && (PLAN.contains(&name) || name == "codebook" && !holds_plan(file))
}

/// Whether the file has a stored plan, or a part of one.
fn holds_plan(file: &TensorFile) -> bool {
    PLAN.iter().any(|name| file.get(name).is_some())
}

/// The tensors of a clustered call that the file has.
#[derive(Debug, Clone, Default)]
pub struct Clusters {
    codebook: Option<Vec<f32>>,
    plan: Option<ClusterPlan>,
}

impl Clusters {
    /// Reads them, if `mechanism` does.
    ///
    /// # Errors
    /// A plan of which a tensor is missing, a wrong type or shape, an index beyond what it points to.
    pub fn load(file: &TensorFile, mechanism: &Mechanism, layout: &Layout) -> Result<Self> {
        let Some(clustering) = mechanism.clustering() else { return Ok(Self::default()) };
        let plan = holds_plan(file).then(|| plan(file, &clustering, layout)).transpose()?;
        let centroids = file.get("codebook").filter(|_| plan.is_none());
        let codebook = centroids.map(|tensor| codebook(&tensor, layout)).transpose()?;
        Ok(Self { codebook, plan })
    }

    /// Adds them to a call.
    pub fn extend<'a>(&'a self, extras: Extras<'a>) -> Extras<'a> {
        let extras = self.codebook.iter().fold(extras, |extras, codebook| extras.with_codebook(codebook));
        self.plan.iter().fold(extras, |extras, plan| extras.with_clusters(plan))
    }
}

fn codebook(tensor: &Stored<'_>, layout: &Layout) -> Result<Vec<f32>> {
    let s = &layout.shape;
    let clusters = tensor.shape.get(1).copied().unwrap_or(1);
    expect(tensor, &[s.heads, clusters, s.head_dim], "centroids of every head, [H, clusters, D]")?;
    tensor.reals()
}

/// What a plan in memory says of strays.
const STRAY: i64 = -2;

/// Tells strays from global tokens: a file has -1 for either, and the configuration says which are global.
fn mark_strays(tensors: &mut PlanTensors, ssa: &Ssa, seq: usize) {
    let globals = ssa.globals(seq);
    for (n, (query, key)) in tensors.label_q.iter_mut().zip(&mut tensors.label_k).enumerate() {
        if *query == -1 && *key == -1 && !globals.contains(&(n % seq)) {
            *query = STRAY;
            // Every query sees the keys that are taken out of their clusters.
            *key = if ssa.outlier_globals == 0 { STRAY } else { -1 };
        }
    }
}

fn plan(file: &TensorFile, ssa: &Ssa, layout: &Layout) -> Result<ClusterPlan> {
    let s = &layout.shape;
    let read =
        |name| file.require(name, "a stored plan has all of label_q, label_k, exact_blocks, edges, edge_log_weight");
    let labels = |name, seq: usize| {
        let tensor = read(name)?;
        expect(&tensor, &per_token(layout, seq), "the cluster of every token")?;
        tensor.integers()
    };
    let triples = |name| {
        let tensor = read(name)?;
        let rows = tensor.shape.first().copied().unwrap_or(0);
        expect(&tensor, &[rows, 3], "rows of three indices")?;
        Ok::<_, Error>(tensor.integers()?.as_chunks::<3>().0.to_vec())
    };
    let mut tensors = PlanTensors {
        label_q: labels("label_q", s.seq_q)?,
        label_k: labels("label_k", s.seq_kv)?,
        exact_blocks: triples("exact_blocks")?,
        edges: triples("edges")?,
        edge_log_weight: read("edge_log_weight")?.reals()?,
    };
    let weights = read("edge_log_weight")?;
    expect(&weights, &[tensors.edges.len()], "one weight per edge")?;
    if ssa.shared() {
        mark_strays(&mut tensors, ssa, s.seq_kv);
    }
    ClusterPlan::from_tensors(&tensors, s).map_err(Error::kernels(file.path()))
}

/// The bounds of a certificate as they are written to a file.
pub fn certificate(bounds: &Certificate, layout: &Layout) -> Vec<Named> {
    let shape = per_token(layout, layout.shape.seq_q);
    let Certificate { missed_mass, total_variation, output_error } = bounds;
    vec![
        Named::new("missed_mass", shape.clone(), missed_mass),
        Named::new("total_variation", shape.clone(), total_variation),
        Named::new("output_error", shape, output_error),
    ]
}

/// The shape of one value for each of `seq` tokens of every head.
fn per_token(layout: &Layout, seq: usize) -> Vec<usize> {
    let mut shape = layout.stored(&[layout.shape.batch, layout.shape.heads, seq, 1]);
    shape.pop();
    shape
}

/// A plan as it is written to a file: -1 for every token without a cluster.
pub fn stored(plan: &ClusterPlan, layout: &Layout) -> Vec<Named> {
    let s = &layout.shape;
    let mut tensors = plan.to_tensors();
    let strays = tensors.label_q.iter_mut().chain(&mut tensors.label_k).filter(|label| **label == STRAY);
    strays.for_each(|label| *label = -1);
    let edges = tensors.edges.len();
    vec![
        Named::integers("label_q", per_token(layout, s.seq_q), &tensors.label_q),
        Named::integers("label_k", per_token(layout, s.seq_kv), &tensors.label_k),
        Named::integers("exact_blocks", vec![tensors.exact_blocks.len(), 3], tensors.exact_blocks.as_flattened()),
        Named::integers("edges", vec![edges, 3], tensors.edges.as_flattened()),
        Named::new("edge_log_weight", vec![edges], &tensors.edge_log_weight),
    ]
}
