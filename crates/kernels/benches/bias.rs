//! Time of softmax with a bias against softmax without, f32, warm buffers, runs interleaved; medians are printed.
//!
//! `cargo bench --bench bias -- [--shape 1,8,4096,64] [--runs 5] [--threads 2]`

use std::time::Instant;

use resolvent_kernels::{
    ExtraGradients, Extras, Gradients, Inputs, Mask, Mechanism, Operator, Parameter, Scratch, Shape, Strategy,
};

/// What is timed: a name and the bias. Of a mask nobody wants the gradient.
const CASES: [(&str, Option<&str>); 9] = [
    ("none", None),
    ("mask [1,1,N,N]", Some(r#"{"kind": "tensor", "heads": false}"#)),
    ("mask [B,1,1,N]", Some(r#"{"kind": "tensor", "batch": true, "heads": false, "queries": false}"#)),
    ("[1, 1, N, N]", Some(r#"{"kind": "tensor", "heads": false}"#)),
    ("[1, H, N, N]", Some(r#"{"kind": "tensor"}"#)),
    ("[B, H, N, N]", Some(r#"{"kind": "tensor", "batch": true}"#)),
    ("[B, 1, 1, N]", Some(r#"{"kind": "tensor", "batch": true, "heads": false, "queries": false}"#)),
    ("alibi", Some(r#"{"kind": "alibi"}"#)),
    ("buckets", Some(r#"{"kind": "buckets"}"#)),
];

/// An operator with its own tensors.
struct Case {
    name: &'static str,
    op: Operator,
    bias: Vec<f32>,
    dbias: Vec<f32>,
    scratch: Scratch,
    /// Forward, and forward and backward.
    seconds: [Vec<f64>; 2],
}

fn noise(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state as f32 / u32::MAX as f32 * 2.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

impl Case {
    fn new((name, bias): (&'static str, Option<&str>), shape: Shape) -> Self {
        let bias = bias.map_or(String::new(), |bias| format!(r#", "bias": {bias}"#));
        let mechanism = Mechanism::from_json(&format!(r#"{{"mechanism": "softmax"{bias}}}"#)).expect("a mechanism");
        let len = if bias.is_empty() { 0 } else { mechanism.parameter_len(Parameter::Bias, &shape) };
        let op = Operator::new(&mechanism, shape, false, Strategy::Fused).expect("an operator");
        let given = mechanism.requires(Parameter::Bias, &shape);
        let bias = if given { noise(5, len) } else { mechanism.parameter_default(Parameter::Bias, &shape) };
        let bias = if len == 0 { Vec::new() } else { bias };
        let dbias = bias.clone();
        Self { name, op, bias, dbias, scratch: Scratch::default(), seconds: Default::default() }
    }

    fn run(&mut self, [q, k, v, dout]: &[Vec<f32>; 4]) {
        let extras = Extras::default();
        let extras = if self.bias.is_empty() { extras } else { extras.with(Parameter::Bias, &self.bias) };
        let inputs = Inputs { q, k: Some(k), v, extras };
        let (mut out, mut stats) = (vec![0.0; v.len()], vec![0.0; self.op.plan().stats]);
        let [mut dq, mut dk, mut dv] = [q.len(), k.len(), v.len()].map(|len| vec![0.0; len]);
        let start = Instant::now();
        self.op.forward(&inputs, &Mask::NONE, &mut out, &mut stats, &mut self.scratch).expect("an output");
        self.seconds[0].push(start.elapsed().as_secs_f64());
        let extras = ExtraGradients::default();
        let unwanted = self.dbias.is_empty() || self.name.starts_with("mask");
        let extras = if unwanted { extras } else { extras.with(Parameter::Bias, &mut self.dbias) };
        let mut gradients = Gradients { dq: &mut dq, dk: Some(&mut dk), dv: &mut dv, extras };
        let done = self.op.backward(&inputs, &Mask::NONE, &out, &stats, dout, &mut gradients, &mut self.scratch);
        done.expect("gradients");
        self.seconds[1].push(start.elapsed().as_secs_f64());
    }

    /// Medians of all runs but the first.
    fn medians(&self) -> [f64; 2] {
        let median = |seconds: &Vec<f64>| {
            let mut sorted = seconds[1..].to_vec();
            sorted.sort_by(f64::total_cmp);
            sorted[sorted.len() / 2]
        };
        [median(&self.seconds[0]), median(&self.seconds[1])]
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let value =
        |name: &str, default| args.iter().position(|arg| arg == name).map_or(default, |at| args[at + 1].as_str());
    let numbers = |text: &str| text.split(',').map(|x| x.parse::<usize>().expect("a number")).collect::<Vec<_>>();
    rayon::ThreadPoolBuilder::new().num_threads(numbers(value("--threads", "0"))[0]).build_global().expect("threads");
    let sizes = numbers(value("--shape", "1,8,4096,64"));
    let shape = Shape::square(sizes[0], sizes[1], sizes[2], sizes[3]);
    let tensors = [1, 2, 3, 4].map(|seed| noise(seed, shape.q_len()));
    let mut cases = CASES.map(|case| Case::new(case, shape));
    for _ in 0..=numbers(value("--runs", "5"))[0] {
        cases.iter_mut().for_each(|case| case.run(&tensors));
    }
    let [forward, training] = cases[0].medians();
    println!(
        "softmax, {sizes:?}, {} threads; milliseconds, and over those without a bias",
        rayon::current_num_threads()
    );
    for case in &cases {
        let [a, b] = case.medians();
        let name = case.name;
        println!("{name:>14} {:9.2} {:9.2} {:6.2} {:6.2}", a * 1e3, b * 1e3, a / forward, b / training);
    }
}
