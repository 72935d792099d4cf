//! A training step of a vision transformer in f32 and with products of bf16, beside the same model in eager PyTorch, by itself and
//! under its autocast to bf16.
//!
//! `cargo bench --bench vit_step -- [PYTHON]`: width 192, 12 blocks, 3 heads, 197 tokens, batch 32, cross-entropy,
//! AdamW, two threads. All steps are taken in turns, those of PyTorch too where the path of a Python is given that has it. Medians;
//! of ours on Linux also the mean processor time of a step, which other programs disturb less.

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Instant,
};

use burn::{
    module::Module,
    nn::loss::CrossEntropyLossConfig,
    optim::{AdamWConfig, GradientsParams, ModuleOptimizer},
    tensor::{Device, Distribution, Int, Tensor},
};
use mimalloc::MiMalloc;
use resolvent::{
    Mechanism, Precision,
    models::{Pool, Vit, VitConfig},
};

/// As the program's own, freed pages kept.
#[global_allocator]
static MEMORY: MiMalloc = MiMalloc;

const THREADS: usize = 2;
const STEPS: usize = 9;
const PIXELS: usize = 224;
const PATCH: usize = 16;
const CLASSES: usize = 1000;
const BATCH: usize = 32;
const DIM: usize = 192;
const DEPTH: usize = 12;
const HEADS: usize = 3;
const MLP_DIM: usize = 4 * DIM;

/// Seconds of the forward pass, of the backward pass and of the optimiser.
type Phases = [f64; 3];

struct Ours {
    model: Option<Vit>,
    optimiser: ModuleOptimizer,
    pictures: Tensor<4>,
    labels: Tensor<1, Int>,
}

impl Ours {
    fn new(device: &Device, precision: Precision) -> Self {
        device.seed(1);
        let base = VitConfig::new([PIXELS; 2], 3, PATCH, CLASSES, Mechanism::preset("softmax").expect("an id"));
        let sizes = VitConfig { dim: DIM, depth: DEPTH, heads: HEADS, mlp_dim: MLP_DIM, pool: Pool::Cls, ..base };
        let config = VitConfig { precision, ..sizes };
        Self {
            model: Some(config.init(device)),
            optimiser: AdamWConfig::new().with_weight_decay(0.05).init(),
            pictures: Tensor::random([BATCH, 3, PIXELS, PIXELS], Distribution::Normal(0.0, 1.0), device),
            labels: Tensor::arange(0..BATCH as i64, device),
        }
    }

    fn step(&mut self) -> Phases {
        let model = self.model.take().expect("a model");
        let start = Instant::now();
        let logits = model.forward(self.pictures.clone());
        let loss = CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, self.labels.clone());
        let _ = loss.clone().into_scalar::<f32>();
        let forward = start.elapsed().as_secs_f64();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let backward = start.elapsed().as_secs_f64();
        self.model = Some(self.optimiser.step(1e-3, model, grads));
        [forward, backward - forward, start.elapsed().as_secs_f64() - backward]
    }
}

struct Peer {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    fn start(python: &str) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/vit.py");
        let sizes = [THREADS, BATCH, PIXELS, PATCH, DIM, DEPTH, HEADS, MLP_DIM, CLASSES];
        let mut child = Command::new(python)
            .arg(script)
            .args(sizes.map(|size| size.to_string()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a Python");
        let requests = child.stdin.take().expect("a pipe");
        let answers = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut peer = Self { child, requests, answers };
        println!("PyTorch, parameters: {}", peer.answer());
        peer
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("an answer");
        line.trim().to_owned()
    }

    fn step(&mut self, precision: &str) -> Phases {
        writeln!(self.requests, "{precision}").and_then(|()| self.requests.flush()).expect("a request");
        let seconds: Vec<f64> = self.answer().split(' ').map(|n| n.parse().expect("seconds")).collect();
        seconds.try_into().expect("three phases")
    }

    fn stop(mut self) {
        drop(self.requests);
        self.child.wait().expect("the end of the peer");
    }
}

/// Seconds that the processors have worked for this process, in hundredths, where the system tells.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the name, which may hold anything: user and system time are the fields 14 and 15.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
    fields.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints the medians; milliseconds of a whole step.
fn show(name: &str, steps: &[Phases]) -> f64 {
    let phase = |i: usize| 1e3 * median(steps.iter().map(|step| step[i]).collect());
    let whole = 1e3 * median(steps.iter().map(|step| step.iter().sum()).collect());
    println!(
        "{name:<10} {whole:7.0} ms a step: forward {:.0}, backward {:.0}, optimiser {:.0}",
        phase(0),
        phase(1),
        phase(2)
    );
    whole
}

fn main() {
    const KEEP_FREED: &str = "MIMALLOC_PURGE_DELAY";
    if std::env::var_os(KEEP_FREED).is_none() {
        // The allocator reads it before `main`.
        let program = std::env::current_exe().expect("a path");
        let mut again = Command::new(program);
        again.args(std::env::args_os().skip(1)).env(KEEP_FREED, "-1");
        assert!(again.status().expect("this program").success());
        return;
    }
    rayon::ThreadPoolBuilder::new().num_threads(THREADS).build_global().expect("no pool yet");
    let python = std::env::args().skip(1).find(|arg| arg != "--bench");
    let device = Device::flex().autodiff();
    let [mut ours, mut rounded] = [Precision::Full, Precision::Bf16].map(|precision| Ours::new(&device, precision));
    let mut peer = python.as_deref().map(Peer::start);
    ours.step();
    rounded.step();
    println!("ours, parameters: {}", ours.model.as_ref().map_or(0, Module::num_params));
    let precisions = ["f32", "bf16"];
    if let Some(peer) = &mut peer {
        // Not timed: a first step allocates.
        for precision in precisions {
            peer.step(precision);
        }
    }
    let (mut own, mut own_rounded, mut others) = (Vec::new(), Vec::new(), [Vec::new(), Vec::new()]);
    let mut worked = [0.0; 2];
    for _ in 0..STEPS {
        for (n, (ours, steps)) in [(&mut ours, &mut own), (&mut rounded, &mut own_rounded)].into_iter().enumerate() {
            let before = processor_seconds();
            steps.push(ours.step());
            worked[n] += processor_seconds() - before;
        }
        if let Some(peer) = &mut peer {
            others.iter_mut().zip(precisions).for_each(|(steps, precision)| steps.push(peer.step(precision)));
        }
    }
    let (own, own_rounded) = (show("ours", &own), show("ours, bf16", &own_rounded));
    println!("ours / ours, bf16: {:.2}", own / own_rounded);
    let [full, rounded] = worked.map(|seconds| 1e3 * seconds / STEPS as f64);
    if rounded > 0.0 {
        println!("processor time: {full:.0} ms a step, bf16 {rounded:.0}: {:.2}", full / rounded);
    }
    if let Some(peer) = peer {
        let [full, autocast] = [("PyTorch", &others[0]), ("autocast", &others[1])].map(|(name, x)| show(name, x));
        println!("PyTorch / ours: {:.2}; autocast / ours, bf16: {:.2}", full / own, autocast / own_rounded);
        peer.stop();
    }
}
