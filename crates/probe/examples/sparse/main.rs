//! The tables on spectral sparse attention in `docs/evidence.md`, as Markdown:
//!
//! `cargo run --release --example sparse -- [needle] [clusters] [pareto] [edges] [spectra] [certificates] [energy] [--seed N]`
//!
//! `--seed` is of what is drawn, for all but `energy`.
//!
//! Or a generated head as a file: `... -- head KIND TOKENS SEED FILE`.

mod certificates;
mod clusters;
mod edges;
mod energy;
mod heads;
mod needle;
mod pareto;
mod proxy;
mod rivals;
mod spectra;

use heads::Head;
use resolvent_kernels::{ClusterPlan, Extras, Inputs, Mask, Mechanism, Operator, Result, Scratch, Shape, Strategy};

/// A table's name, and what prints it.
type Table = (&'static str, fn(u64) -> Result<()>);

fn main() -> Result<()> {
    let mut chosen: Vec<String> = std::env::args().skip(1).collect();
    if chosen.first().is_some_and(|first| first == "head") {
        return heads::write(&chosen[1..]);
    }
    let mut seed = 0;
    if let Some(at) = chosen.iter().position(|word| word == "--seed") {
        seed = chosen.get(at + 1).and_then(|seed| seed.parse().ok()).expect("a number behind --seed");
        chosen.drain(at..at + 2);
    }
    let tables: [Table; 7] = [
        ("needle", needle::table),
        ("clusters", clusters::table),
        ("pareto", pareto::table),
        ("edges", edges::table),
        ("spectra", spectra::table),
        ("certificates", certificates::table),
        ("energy", |_| energy::table()),
    ];
    for (name, table) in tables {
        if chosen.is_empty() || chosen.iter().any(|c| c == name) {
            println!("\n## {name}\n");
            table(seed)?;
        }
    }
    Ok(())
}

/// `ssa` with these fields, as JSON without braces; nothing for its defaults.
fn ssa(fields: &str) -> Result<Mechanism> {
    let comma = if fields.is_empty() { "" } else { ", " };
    Mechanism::from_json(&format!(r#"{{"mechanism": "ssa"{comma}{fields}}}"#))
}

/// A head as the inputs of a call.
fn inputs(head: &Head) -> Inputs<'_, f32> {
    Inputs { q: &head.q, k: Some(&head.k), v: &head.v, extras: Extras::default() }
}

/// The output of `mechanism` on a head.
fn attend(mechanism: &Mechanism, head: &Head) -> Result<Vec<f32>> {
    let op = Operator::new(mechanism, head.shape(), false, Strategy::Fused)?;
    let (mut out, mut stats) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats]);
    op.forward(&inputs(head), &Mask::NONE, &mut out, &mut stats, &mut Scratch::default())?;
    Ok(out)
}

/// The plan that `mechanism` makes of a head.
fn plan(mechanism: &Mechanism, head: &Head) -> Result<ClusterPlan> {
    ClusterPlan::new(mechanism, &head.shape(), &head.q, &head.k, None, &Mask::NONE)
}

/// Entries of a plan of one head: exact pairs, sampled edges, clusters of keys that queries see as one token.
fn entries(plan: &ClusterPlan, shape: &Shape) -> [usize; 3] {
    let tensors = plan.to_tensors();
    let count = |labels: &[i64], label: i64| labels.iter().filter(|&&l| l == label).count();
    let [_, clusters] = plan.clusters(0);
    let unlabelled = [count(&tensors.label_q, -1), count(&tensors.label_k, -1)];
    let of_block = |block: &[i64; 3]| count(&tensors.label_q, block[1]) * count(&tensors.label_k, block[2]);
    let seen = |block: &[i64; 3]| count(&tensors.label_q, block[1]);
    let exact: usize = tensors.exact_blocks.iter().map(of_block).sum();
    let labelled = shape.seq_q - unlabelled[0];
    let global = unlabelled[0] * shape.seq_kv + labelled * unlabelled[1];
    let far = labelled * clusters - tensors.exact_blocks.iter().map(seen).sum::<usize>();
    [exact + global, tensors.edges.len(), far]
}

/// The share of all pairs that an estimator looks at; a cluster's mean is one, where there are `means`.
fn density(mechanism: &Mechanism, head: &Head, means: bool) -> Result<f64> {
    let [exact, sampled, far] = entries(&plan(mechanism, head)?, &head.shape());
    Ok((exact + sampled + if means { far } else { 0 }) as f64 / (head.tokens * head.tokens) as f64)
}

/// The mean over the rows of the cosine between two outputs.
fn mean_cosine(x: &[f32], y: &[f32], dim: usize) -> f64 {
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum::<f64>();
    let rows = x.chunks_exact(dim).zip(y.chunks_exact(dim));
    let sum: f64 = rows.map(|(x, y)| dot(x, y) / (dot(x, x) * dot(y, y)).sqrt().max(1e-30)).sum();
    sum / (x.len() / dim) as f64
}

fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}
