//! What plans say that calls cost, against a stored table: benchmarks divide by these numbers, so that they change on purpose
//! or not at all. `RESOLVENT_WRITE_PLANS=1 cargo test --release --test calls plans` writes the table anew.

use crate::{support, threads};

use std::fmt::Write;

use resolvent_kernels::{Heads, Mechanism, Plan, Sequences, Shape, Strategy, VarlenOperator, plan};
use support::random::{VARIANTS, fitting};
use threads::on_threads;

const TABLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels/tests/data/plans.txt");

/// Few tokens; more queries than keys and more than a tile of both; a long sequence.
const SHAPES: [Shape; 3] = [
    Shape { batch: 1, heads: 1, seq_q: 5, seq_kv: 7, head_dim: 3, value_dim: 4 },
    Shape { batch: 2, heads: 3, seq_q: 700, seq_kv: 300, head_dim: 16, value_dim: 24 },
    Shape { batch: 1, heads: 2, seq_q: 4096, seq_kv: 4096, head_dim: 64, value_dim: 64 },
];

/// FLOPs, exponentials and bytes, each forward and backward.
fn costs(mechanism: &Mechanism, shape: &Shape, strategy: Strategy) -> [u64; 6] {
    let plan = plan(mechanism, shape, false, strategy).unwrap();
    let (flops, exps) = ([plan.flops_forward, plan.flops_backward], [plan.exps_forward, plan.exps_backward]);
    let bytes = [plan.bytes_forward, plan.bytes_backward];
    [flops, exps, bytes].concat().try_into().unwrap()
}

/// Every structure with every series that it has.
fn compositions() -> Vec<String> {
    let structures = [
        r#""structure": {"kind": "dense"}"#,
        r#""score": {"kind": "levy"}, "normalisation": {"kind": "row", "density_exponent": 0.5}"#,
        r#""score": {"kind": "dot-relu"}, "normalisation": {"kind": "frobenius"}, "structure": {"kind": "dense", "window": 70, "sinks": 2}"#,
        r#""structure": {"kind": "clustered", "clusters": 3, "samples": 2}"#,
        r#""structure": {"kind": "clustered", "clusters": 3, "estimator": "centroid", "routes": 2}"#,
        r#""score": {"kind": "cosine-exp"}, "structure": {"kind": "nystrom", "landmarks": {"kind": "pool", "count": 4}}"#,
        r#""score": {"kind": "levy"}, "structure": {"kind": "nystrom", "landmarks": {"kind": "pool", "count": 3}}"#,
        r#""score": {"kind": "gaussian"}, "normalisation": {"kind": "symmetric"}, "tied": true, "structure": {"kind": "nystrom", "landmarks": {"kind": "pool", "count": 400}, "newton_iterations": 8}"#,
        r#""structure": {"kind": "features", "map": "favor"}"#,
        r#""structure": {"kind": "features", "map": "elu"}"#,
    ];
    let series = [r#""one-hop""#, r#"{"kind": "hops", "count": 3}"#, r#"{"kind": "resolvent", "gamma": 0.5}"#];
    let product = structures.iter().flat_map(|values| series.iter().map(move |series| (values, series)));
    // What landmarks give has no resolvent.
    let product = product.filter(|(values, series)| !(values.contains("nystrom") && series.contains("resolvent")));
    product.map(|(values, series)| format!(r#"{{"mechanism": "composed", {values}, "series": {series}}}"#)).collect()
}

fn table() -> String {
    let mut table = String::new();
    let presets = Mechanism::IDS.map(|id| format!(r#"{{"mechanism": "{id}"}}"#));
    let composed = compositions();
    for json in VARIANTS.iter().copied().chain(presets.iter().chain(&composed).map(String::as_str)) {
        writeln!(table, "{json}").unwrap();
        for shape in SHAPES {
            let mechanism = Mechanism::from_json(json).unwrap();
            let (mechanism, shape) = fitting(mechanism, shape);
            let [fused, reference] = [Strategy::Auto, Strategy::Reference].map(|by| costs(&mechanism, &shape, by));
            let sizes = format!("{}x{} to {}", shape.seq_q, shape.head_dim, shape.seq_kv);
            let [plan, naive] =
                [Strategy::Auto, Strategy::Reference].map(|by| plan(&mechanism, &shape, false, by).unwrap());
            writeln!(table, "  {sizes}: {fused:?}, {}, reference {:?}, {}", held(&plan), &reference[4..], held(&naive))
                .unwrap();
        }
    }
    table
}

/// What a call holds beside its tensors: numbers that are saved, f32 of scratch and allocated bytes.
fn held(plan: &Plan) -> String {
    let (scratch, allocated) =
        ([plan.scratch_forward, plan.scratch_backward], [plan.allocated_forward, plan.allocated_backward]);
    format!("saved {}, scratch {scratch:?}, allocated {allocated:?}", plan.stats)
}

/// Sequences in one call: of all strategies those that copy rows, and those that share heads of keys.
fn packed() -> String {
    let mut table = String::new();
    let sequences = Sequences::new(&[0, 5, 300, 301, 900]).unwrap();
    for (id, kv_heads) in
        ["softmax", "infsa", "sigmoid", "laplacian", "linear"].iter().flat_map(|id| [(id, 4), (id, 2)])
    {
        let heads = Heads { heads: 4, kv_heads, head_dim: 16, value_dim: 8 };
        let mechanism = Mechanism::preset(id).unwrap();
        let plan = *VarlenOperator::new(&mechanism, heads, &sequences, false, Strategy::Auto).unwrap().plan();
        writeln!(table, "packed {id}, 4 heads over {kv_heads}: {}", held(&plan)).unwrap();
    }
    table
}

#[test]
fn costs_are_those_stored() {
    let got = on_threads(2, || table() + &packed()); // as many heads are planned at a time
    if std::env::var_os("RESOLVENT_WRITE_PLANS").is_some() {
        std::fs::write(TABLE, &got).unwrap();
    }
    let stored = std::fs::read_to_string(TABLE).unwrap();
    for (n, (got, stored)) in got.lines().zip(stored.lines()).enumerate() {
        assert_eq!(got, stored, "line {} of {TABLE}", n + 1);
    }
    assert_eq!(got.lines().count(), stored.lines().count());
}

/// Twice the work is twice the cost: heads are alike.
/// A tile is no larger than what it is a part of.
#[test]
fn tiles_lie_within_the_call() {
    for id in ["softmax", "infsa", "fna", "laplacian-exact"] {
        let (mechanism, shape) = (Mechanism::preset(id).unwrap(), Shape::square(1, 1, 12, 4));
        let (rows, columns) = plan(&mechanism, &shape, false, Strategy::Fused).unwrap().tile;
        assert!((1..=12).contains(&rows) && (1..=12).contains(&columns), "{id}: {rows} x {columns}");
    }
}

#[test]
fn costs_grow_with_the_heads() {
    for json in VARIANTS {
        let (mechanism, shape) = fitting(Mechanism::from_json(json).unwrap(), Shape::square(1, 1, 130, 12));
        let one = costs(&mechanism, &shape, Strategy::Auto);
        let many = costs(&mechanism, &Shape { batch: 2, heads: 3, ..shape }, Strategy::Auto);
        assert_eq!(many, one.map(|cost| 6 * cost), "{json}");
    }
}
