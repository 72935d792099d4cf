//! `linear-infsa` against the memory it moves: GB/s beside a measured copy, and how its time grows with the tokens.
//! `cargo bench --bench pooled`; every figure is a median over interleaved rounds.

use std::time::Instant;

use resolvent_kernels::{
    ExtraGradients, Extras, Gradients, Inputs, Mask, Mechanism, Operator, Parameter, Result, Scratch, Shape, Strategy,
};

const ROUNDS: usize = 5;

/// One operator with warm buffers.
struct Case {
    name: String,
    op: Operator,
    q: Vec<f32>,
    k: Option<Vec<f32>>,
    v: Vec<f32>,
    out: Vec<f32>,
    stats: Vec<f32>,
    gradients: Option<[Vec<f32>; 4]>,
    scratch: Scratch,
}

impl Case {
    fn new(json: &str, shape: Shape, train: bool) -> Result<Self> {
        let op = Operator::new(&Mechanism::from_json(json)?, shape, false, Strategy::Auto)?;
        let numbers = |n: usize, seed: u32| (0..n as u32).map(|i| noise(i.wrapping_add(seed))).collect::<Vec<_>>();
        let tied = op.mechanism().tied;
        let (q, v) = (numbers(shape.q_len(), 1), numbers(shape.v_len(), 3));
        let k = (!tied).then(|| numbers(shape.k_len(), 2));
        let (out, stats) = (vec![1.0; op.out_len()], vec![1.0; op.plan().stats]);
        let k_len = if tied { 0 } else { shape.k_len() };
        let gradients = train.then(|| [shape.q_len(), k_len, shape.v_len(), shape.heads].map(|n| vec![1.0; n]));
        let Shape { batch, heads, seq_q, head_dim, .. } = shape;
        let name = format!("{json} [{batch}, {heads}, {seq_q}, {head_dim}]{}", if train { " training" } else { "" });
        Ok(Self { name, op, q, k, v, out, stats, gradients, scratch: Scratch::default() })
    }

    fn run(&mut self) -> Result<()> {
        let inputs = Inputs { q: &self.q, k: self.k.as_deref(), v: &self.v, extras: Extras::default() };
        self.op.forward(&inputs, &Mask::NONE, &mut self.out, &mut self.stats, &mut self.scratch)?;
        let Some([dq, dk, dv, dgamma]) = &mut self.gradients else { return Ok(()) };
        let dk = self.k.is_some().then_some(&mut dk[..]);
        let extras = match self.op.mechanism().parameters()[..] {
            [] => ExtraGradients::default(),
            _ => ExtraGradients::default().with(Parameter::Gamma, dgamma),
        };
        let mut gradients = Gradients { dq, dk, dv, extras };
        let (out, stats, dout) = (&self.out, &self.stats, &self.v);
        self.op.backward(&inputs, &Mask::NONE, out, stats, dout, &mut gradients, &mut self.scratch)
    }

    fn bytes(&self) -> u64 {
        let plan = self.op.plan();
        plan.bytes_forward + if self.gradients.is_some() { plan.bytes_backward } else { 0 }
    }
}

/// Deterministic numbers in [-0.5, 0.5).
fn noise(i: u32) -> f32 {
    let x = i.wrapping_mul(0x9e37_79b9);
    ((x ^ (x >> 15)).wrapping_mul(0x85eb_ca6b) >> 8) as f32 / (1 << 24) as f32 - 0.5
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn timed(case: &mut Case) -> Result<f64> {
    let mut outcome = Ok(());
    let time = seconds(|| outcome = case.run());
    outcome.map(|()| time)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Bytes per second, read and written, of a copy between two buffers far larger than any cache.
fn copy_round(from: &[f32], to: &mut [f32]) -> f64 {
    let middle = from.len() / 2;
    let (a, b) = to.split_at_mut(middle);
    let time = seconds(|| {
        rayon::join(|| a.copy_from_slice(&from[..middle]), || b.copy_from_slice(&from[middle..]));
    });
    8.0 * from.len() as f64 / time
}

const UNTIED: &str = r#"{"mechanism": "linear-infsa"}"#;
const TIED: &str = r#"{"mechanism": "linear-infsa", "tied": true}"#;
const UNIFORM: &str = r#"{"mechanism": "uniform"}"#;

fn main() -> Result<()> {
    let copied = vec![1.0; 1 << 27];
    let mut copy = vec![0.0; 1 << 27];
    let wide = |heads, seq, dim| Shape::square(1, heads, seq, dim);
    let mut cases = vec![
        Case::new(TIED, wide(64, 331_776, 16), false)?,
        Case::new(UNTIED, wide(64, 331_776, 16), false)?,
        Case::new(UNIFORM, wide(64, 331_776, 16), false)?,
        Case::new(TIED, wide(8, 4096, 64), false)?,
        Case::new(UNTIED, wide(8, 4096, 64), false)?,
        Case::new(TIED, wide(8, 4096, 64), true)?,
        Case::new(UNTIED, wide(8, 4096, 64), true)?,
        Case::new(UNTIED, wide(1, 331_776, 64), true)?,
    ];
    let (mut rates, mut times) = (Vec::new(), vec![Vec::new(); cases.len()]);
    for round in 0..=ROUNDS {
        let rate = copy_round(&copied, &mut copy);
        for (case, times) in cases.iter_mut().zip(&mut times) {
            let time = timed(case)?;
            if round > 0 {
                times.push(time);
            }
        }
        rates.push(rate);
    }
    let rate = median(rates);
    println!("copy: {:.1} GB/s on {} threads", rate / 1e9, rayon::current_num_threads());
    for (case, times) in cases.iter().zip(times) {
        let time = median(times);
        let got = case.bytes() as f64 / time;
        println!("{}: {:.3} ms, {:.1} GB/s = {:.0} % of copy", case.name, time * 1e3, got / 1e9, 100.0 * got / rate);
    }
    drop(cases);
    slope(TIED)
}

/// Time against tokens at 64 heads of 16, and the slope of the fitted line in log-log coordinates.
fn slope(json: &str) -> Result<()> {
    let mut points = Vec::new();
    for seq in [4096, 16_384, 65_536, 331_776] {
        let mut case = Case::new(json, Shape::square(1, 64, seq, 16), false)?;
        case.run()?;
        let time = median((0..ROUNDS).map(|_| timed(&mut case)).collect::<Result<_>>()?);
        println!("{seq} tokens: {:.3} ms, {:.3} ns per token and head", time * 1e3, time * 1e9 / (64 * seq) as f64);
        points.push(((seq as f64).ln(), time.ln()));
    }
    let n = points.len() as f64;
    let (x, y) = points.iter().fold((0.0, 0.0), |(x, y), p| (x + p.0 / n, y + p.1 / n));
    let (xy, xx) = points.iter().fold((0.0, 0.0), |(xy, xx), p| (xy + (p.0 - x) * (p.1 - y), xx + (p.0 - x).powi(2)));
    println!("log-log slope: {:.3}", xy / xx);
    Ok(())
}
