//! Time of the dense mechanisms, or of any that are given as JSON, forward and forward + backward, f32, warm buffers. Runs are interleaved, so that the
//! machine's moods meet every row alike; medians and the fastest run are printed.
//!
//! `cargo bench --bench dense -- [--shape 1,8,4096,64] [--runs 7] [--threads 2] [--level avx2]
//! [--precision full,bf16,bf16x3] [--unit widened] [--causal] [infsa ...] ['{"mechanism": "soft", "landmarks": {"kind": "pool", "ratio": 64}}' ...]`

use std::time::Instant;

use resolvent_kernels::{
    ExtraGradients, Extras, Gradients, Inputs, Mask, Mechanism, Operator, Precision, Scratch, Shape, Strategy,
    simd::{Bf16Unit, Level},
};

/// One row of the table.
struct Row {
    name: String,
    op: Operator,
    tensors: Tensors,
    scratch: Scratch,
    /// Seconds of each run: forward, forward + backward.
    times: [Vec<f64>; 2],
}

struct Tensors {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
    out: Vec<f32>,
    stats: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let value = |name: &str| args.iter().position(|arg| arg == name).map(|at| args[at + 1].as_str());
    let numbers = |text: &str| text.split(',').map(|n| n.parse().expect("a number")).collect::<Vec<usize>>();
    let threads = value("--threads").map_or(0, |n| n.parse().expect("a number of threads"));
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().expect("threads");
    let sizes = numbers(value("--shape").unwrap_or("1,8,4096,64"));
    let shape = Shape::square(sizes[0], sizes[1], sizes[2], sizes[3]);
    let levels: Vec<Level> = match value("--level") {
        Some(name) => Level::available().into_iter().filter(|level| level.name() == name).collect(),
        None => vec![Level::selected().expect("an instruction set")],
    };
    let given: Vec<&str> =
        args.iter().map(String::as_str).filter(|a| a.starts_with('{') || Mechanism::IDS.contains(a)).collect();
    let names = if given.is_empty() { vec!["softmax", "infsa"] } else { given };
    let causal = args.iter().any(|arg| arg == "--causal");
    let precision = |name| Precision::named(name).expect("a precision");
    let precisions: Vec<Precision> = value("--precision").unwrap_or("full").split(',').map(precision).collect();
    let unit = value("--unit");
    let mut rows = Vec::new();
    for name in names {
        for &level in &levels {
            rows.extend(precisions.iter().map(|&precision| row(name, shape, causal, (level, precision, unit))));
        }
    }
    let runs: usize = value("--runs").map_or(7, |n| n.parse().expect("a number of runs"));
    for _ in 0..=runs {
        rows.iter_mut().for_each(|row| row.run(causal));
    }
    println!("{shape:?}, {} threads, causal {causal}", rayon::current_num_threads());
    println!(
        "{:24} {:>10} {:>10} {:>8} {:>10} {:>10} {:>8}",
        "", "forward s", "fastest", "GFLOP/s", "both s", "fastest", "GFLOP/s"
    );
    rows.iter_mut().for_each(Row::print);
}

fn row(name: &str, shape: Shape, causal: bool, (level, precision, unit): (Level, Precision, Option<&str>)) -> Row {
    let mechanism = if name.starts_with('{') { Mechanism::from_json(name) } else { Mechanism::preset(name) };
    let mechanism = mechanism.expect("a mechanism");
    let op = Operator::new(&mechanism, shape, causal, Strategy::Fused).expect("an operator").with_level(level);
    let op = op.expect("an available level").with_precision(precision);
    let named = Bf16Unit::available(level).into_iter().find(|of| Some(of.name()) == unit);
    let op = match named.filter(|_| precision != Precision::Full) {
        Some(unit) => op.with_bf16_unit(unit).expect("an operator with products of bf16"),
        None => op,
    };
    let noise = |seed: u32, len: usize| {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state as f32 / u32::MAX as f32 * 2.0 - 1.0
        };
        (0..len).map(|_| next()).collect::<Vec<_>>()
    };
    let zeros = |len: usize| vec![0.0; len];
    let tensors = Tensors {
        q: noise(1, shape.q_len()),
        k: noise(2, shape.k_len()),
        v: noise(3, shape.v_len()),
        dout: noise(4, shape.out_len()),
        out: zeros(op.out_len()),
        stats: zeros(op.plan().stats),
        dq: zeros(shape.q_len()),
        dk: zeros(shape.k_len()),
        dv: zeros(shape.v_len()),
    };
    Row {
        name: format!("{} {} {}", mechanism.id(), precision.name(), op.plan().arithmetic.instructions),
        op,
        tensors,
        scratch: Scratch::default(),
        times: Default::default(),
    }
}

impl Row {
    fn run(&mut self, causal: bool) {
        let t = &mut self.tensors;
        let tied = self.op.mechanism().tied;
        let inputs = Inputs { q: &t.q, k: (!tied).then_some(&t.k), v: &t.v, extras: Extras::default() };
        let mask = Mask { causal, ..Mask::NONE };
        let start = Instant::now();
        self.op.forward(&inputs, &mask, &mut t.out, &mut t.stats, &mut self.scratch).expect("forward");
        self.times[0].push(start.elapsed().as_secs_f64());
        let dk = (!tied).then_some(&mut t.dk[..]);
        let mut gradients = Gradients { dq: &mut t.dq, dk, dv: &mut t.dv, extras: ExtraGradients::default() };
        self.op
            .backward(&inputs, &mask, &t.out, &t.stats, &t.dout, &mut gradients, &mut self.scratch)
            .expect("backward");
        self.times[1].push(start.elapsed().as_secs_f64());
    }

    fn print(&mut self) {
        let plan = self.op.plan();
        let flops = [plan.flops_forward, plan.flops_forward + plan.flops_backward];
        print!("{:24}", self.name);
        for (times, flops) in self.times.iter_mut().zip(flops) {
            times.remove(0); // the cold run
            times.sort_by(f64::total_cmp);
            let median = times[times.len() / 2];
            print!(" {median:10.4} {:10.4} {:8.0}", times[0], flops as f64 / median / 1e9);
        }
        println!();
    }
}
