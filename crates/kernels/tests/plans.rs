//! What plans say that calls cost, against a stored table: benchmarks divide by these numbers, so that they change on purpose
//! or not at all. `RESOLVENT_WRITE_PLANS=1 cargo test -p resolvent-kernels --test plans` writes the table anew.

mod support;
#[path = "support/threads.rs"]
mod threads;

use std::fmt::Write;

use resolvent_kernels::{Mechanism, Shape, Strategy, plan};
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

fn table() -> String {
    let mut table = String::new();
    let presets = Mechanism::IDS.map(|id| format!(r#"{{"mechanism": "{id}"}}"#));
    for json in VARIANTS.iter().copied().chain(presets.iter().map(String::as_str)) {
        writeln!(table, "{json}").unwrap();
        for shape in SHAPES {
            let mechanism = Mechanism::from_json(json).unwrap();
            let (mechanism, shape) = fitting(mechanism, shape);
            let [fused, reference] = [Strategy::Auto, Strategy::Reference].map(|by| costs(&mechanism, &shape, by));
            let sizes = format!("{}x{} to {}", shape.seq_q, shape.head_dim, shape.seq_kv);
            let plan = plan(&mechanism, &shape, false, Strategy::Auto).unwrap();
            let allocated = [plan.allocated_forward, plan.allocated_backward];
            writeln!(table, "  {sizes}: {fused:?}, reference {:?}, allocated {allocated:?}", &reference[4..]).unwrap();
        }
    }
    table
}

#[test]
fn costs_are_those_stored() {
    let got = on_threads(2, table); // as many heads are planned at a time
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
