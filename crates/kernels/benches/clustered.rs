//! Time of clustered attention against fused dense softmax, f32, warm buffers, runs interleaved; medians are printed.
//!
//! `cargo bench --bench clustered -- [--seq 1024,4096,16384] [--heads 1] [--dim 64] [--runs 5]
//! [--threads 2] [--config '{"mechanism": "ssa", "estimator": "centroid"}'] [--causal] [--alone]`

use std::time::Instant;

use resolvent_kernels::{
    ClusterPlan, ExtraGradients, Extras, Gradients, Inputs, Mask, Mechanism, Operator, Scratch, Shape, Strategy,
};

/// What is timed, in the order of the columns.
const COLUMNS: [&str; 5] = ["dense fwd", "dense bwd", "plan", "attend fwd", "attend bwd"];

struct Case {
    shape: Shape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
    scratch: Scratch,
    seconds: [Vec<f64>; COLUMNS.len()],
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let value =
        |name: &str, default| args.iter().position(|arg| arg == name).map_or(default, |at| args[at + 1].as_str());
    let number = |name: &str, default| value(name, default).parse::<usize>().expect("a number");
    rayon::ThreadPoolBuilder::new().num_threads(number("--threads", "0")).build_global().expect("threads");
    let config = value("--config", r#"{"mechanism": "ssa", "estimator": "centroid"}"#);
    let causal = args.iter().any(|arg| arg == "--causal");
    let sees = |m: Mechanism| if causal { m.with_causal(true) } else { m };
    let clustered = sees(Mechanism::from_json(config).expect("a mechanism"));
    let dense = sees(Mechanism::preset("softmax").expect("a preset"));
    let alone = args.iter().any(|arg| arg == "--alone");
    println!("{config}, {} threads; milliseconds", rayon::current_num_threads());
    println!("{:>8} {}   with plan  without   both", "tokens", COLUMNS.map(|name| format!("{name:>11}")).join(" "));
    for seq in value("--seq", "512,1024,2048,4096,16384").split(',') {
        let seq = seq.parse().expect("a number of tokens");
        let mut case = Case::new(Shape::square(1, number("--heads", "1"), seq, number("--dim", "64")));
        for _ in 0..=number("--runs", "5") {
            if !alone {
                case.run(&dense, None, 0);
            }
            let start = Instant::now();
            let plan = ClusterPlan::new(&clustered, &case.shape, &case.q, &case.k, None, &Mask::NONE).expect("a plan");
            case.seconds[2].push(start.elapsed().as_secs_f64());
            case.run(&clustered, Some(&plan), 3);
        }
        case.print(seq);
    }
}

impl Case {
    fn new(shape: Shape) -> Self {
        let noise = |seed: u32, len: usize| {
            let mut state = seed;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                state as f32 / u32::MAX as f32 * 2.0 - 1.0
            };
            (0..len).map(|_| next()).collect::<Vec<_>>()
        };
        Self {
            shape,
            q: noise(1, shape.q_len()),
            k: noise(2, shape.k_len()),
            v: noise(3, shape.v_len()),
            dout: noise(4, shape.out_len()),
            scratch: Scratch::default(),
            seconds: Default::default(),
        }
    }

    /// Times forward and backward pass into the columns from `column`.
    fn run(&mut self, mechanism: &Mechanism, plan: Option<&ClusterPlan>, column: usize) {
        let op = Operator::new(mechanism, self.shape, false, Strategy::Fused).expect("an operator");
        let extras = plan.map_or(Extras::default(), |plan| Extras::default().with_clusters(plan));
        let inputs = Inputs { q: &self.q, k: Some(&self.k), v: &self.v, extras };
        let (mut out, mut stats) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats]);
        let (mut dq, mut dk, mut dv) = (self.q.clone(), self.k.clone(), self.v.clone());
        let start = Instant::now();
        op.forward(&inputs, &Mask::NONE, &mut out, &mut stats, &mut self.scratch).expect("forward");
        self.seconds[column].push(start.elapsed().as_secs_f64());
        let extras = ExtraGradients::default();
        let mut gradients = Gradients { dq: &mut dq, dk: Some(&mut dk), dv: &mut dv, extras };
        let start = Instant::now();
        op.backward(&inputs, &Mask::NONE, &out, &stats, &self.dout, &mut gradients, &mut self.scratch)
            .expect("backward");
        self.seconds[column + 1].push(start.elapsed().as_secs_f64());
    }

    fn print(&mut self, seq: usize) {
        let [dense, dense_back, plan, attend, attend_back] = self.seconds.each_mut().map(|seconds| {
            if !seconds.is_empty() {
                seconds.remove(0); // the cold run
            }
            seconds.sort_by(f64::total_cmp);
            seconds.get(seconds.len() / 2).map_or(f64::NAN, |s| s * 1e3)
        });
        let columns = [dense, dense_back, plan, attend, attend_back].map(|ms| format!("{ms:11.2}")).join(" ");
        let both = (dense + dense_back) / (plan + attend + attend_back);
        println!("{seq:8} {columns} {:10.2}x {:8.2}x {both:6.2}x", dense / (plan + attend), dense / attend);
    }
}
