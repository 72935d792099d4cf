//! The structure `features` beside `linear-infsa`, whose cost is what its tensors take to be read, and beside `softmax`.
//! `cargo bench --bench features`; every figure is a median over interleaved rounds. With `-- bf16 bf16x3`
//! what has such products a second and third time with them.

use std::time::Instant;

use resolvent_kernels::{
    ExtraGradients, Extras, Gradients, Inputs, Mask, Mechanism, Operator, Precision, Result, Scratch, Shape, Strategy,
};

const ROUNDS: usize = 9;

/// One operator with warm buffers.
struct Case {
    op: Operator,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
    stats: Vec<f32>,
    gradients: [Vec<f32>; 3],
    scratch: Scratch,
    times: [Vec<f64>; 2],
}

impl Case {
    fn new(json: &str, shape: Shape, precision: Precision) -> Result<Self> {
        let op = Operator::new(&Mechanism::from_json(json)?, shape, false, Strategy::Auto)?.with_precision(precision);
        let numbers = |n: usize, seed: u32| (0..n as u32).map(|i| noise(i.wrapping_add(seed))).collect::<Vec<_>>();
        let (q, k, v) = (numbers(shape.q_len(), 1), numbers(shape.k_len(), 2), numbers(shape.v_len(), 3));
        let (out, stats) = (vec![1.0; op.out_len()], vec![1.0; op.plan().stats]);
        let gradients = [shape.q_len(), shape.k_len(), shape.v_len()].map(|n| vec![1.0; n]);
        Ok(Self { op, q, k, v, out, stats, gradients, scratch: Scratch::default(), times: Default::default() })
    }

    /// The seconds of a forward and of a backward pass.
    fn run(&mut self) -> Result<[f64; 2]> {
        let inputs = Inputs { q: &self.q, k: Some(&self.k), v: &self.v, extras: Extras::default() };
        let start = Instant::now();
        self.op.forward(&inputs, &Mask::NONE, &mut self.out, &mut self.stats, &mut self.scratch)?;
        let forward = start.elapsed().as_secs_f64();
        let [dq, dk, dv] = &mut self.gradients;
        let mut gradients = Gradients { dq, dk: Some(dk), dv, extras: ExtraGradients::default() };
        let (out, stats, dout) = (&self.out, &self.stats, &self.v);
        self.op.backward(&inputs, &Mask::NONE, out, stats, dout, &mut gradients, &mut self.scratch)?;
        Ok([forward, start.elapsed().as_secs_f64() - forward])
    }
}

/// Deterministic numbers in [-2, 2).
fn noise(i: u32) -> f32 {
    let x = i.wrapping_mul(0x9e37_79b9);
    ((x ^ (x >> 15)).wrapping_mul(0x85eb_ca6b) >> 8) as f32 / (1 << 22) as f32 - 2.0
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

const CASES: [(&str, &str); 6] = [
    ("linear-infsa", r#"{"mechanism": "linear-infsa"}"#),
    ("elu", r#"{"mechanism": "composed", "structure": {"kind": "features"}}"#),
    ("elu, causal", r#"{"mechanism": "composed", "structure": {"kind": "features"}, "causal": true}"#),
    ("favor", r#"{"mechanism": "composed", "structure": {"kind": "features", "map": "favor"}}"#),
    (
        "favor, causal",
        r#"{"mechanism": "composed", "structure": {"kind": "features", "map": "favor"}, "causal": true}"#,
    ),
    ("softmax", r#"{"mechanism": "softmax"}"#),
];

fn main() -> Result<()> {
    let asked = |precision: &Precision| std::env::args().skip(1).any(|arg| arg == precision.name());
    let rounded: Vec<_> = [Precision::Bf16, Precision::Bf16x3].into_iter().filter(asked).collect();
    println!("{} threads", rayon::current_num_threads());
    for [heads, tokens, dim] in [[8, 4096, 64], [32, 197, 64], [8, 32_768, 16]] {
        // Pairs of many tokens would take minutes.
        let fits = |name: &str| name != "softmax" || tokens <= 4096;
        let shape = Shape::square(1, heads, tokens, dim);
        let mut cases = Vec::new();
        for (name, json) in CASES.iter().filter(|(name, _)| fits(name)) {
            cases.push((name.to_string(), Case::new(json, shape, Precision::Full)?));
            for precision in rounded.iter().copied() {
                let case = Case::new(json, shape, precision)?;
                if case.op.plan().arithmetic.runs == precision {
                    cases.push((format!("{name}, {}", precision.name()), case));
                }
            }
        }
        for round in 0..=ROUNDS {
            for (_, case) in &mut cases {
                let times = case.run()?;
                if round > 0 {
                    case.times.iter_mut().zip(times).for_each(|(all, time)| all.push(time));
                }
            }
        }
        println!("[1, {heads}, {tokens}, {dim}]: ms forward (times linear-infsa), and backward");
        let mut base = [1.0; 2];
        for (n, (name, case)) in cases.iter_mut().enumerate() {
            let times = [0, 1].map(|pass| median(&mut case.times[pass]));
            base = if n == 0 { times } else { base };
            let shown = [0, 1].map(|pass| format!("{:.3} ({:.2}x)", times[pass] * 1e3, times[pass] / base[pass]));
            println!("  {name}: {}, {}", shown[0], shown[1]);
        }
    }
    Ok(())
}
