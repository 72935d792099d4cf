//! A training step of a vision transformer, beside the same model in eager PyTorch.
//!
//! `cargo bench -p resolvent --bench vit_step -- [PYTHON]`: width 192, 12 blocks, 3 heads, 197 tokens, batch 32, cross-entropy,
//! AdamW, two threads. With the path of a Python that has PyTorch, its steps alternate with ours. Medians of the steps.

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
    Mechanism,
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
    fn new(device: &Device) -> Self {
        device.seed(1);
        let base = VitConfig::new([PIXELS; 2], 3, PATCH, CLASSES, Mechanism::preset("softmax").expect("an id"));
        let config = VitConfig { dim: DIM, depth: DEPTH, heads: HEADS, mlp_dim: MLP_DIM, pool: Pool::Cls, ..base };
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

    fn step(&mut self) -> Phases {
        writeln!(self.requests).and_then(|()| self.requests.flush()).expect("a request");
        let seconds: Vec<f64> = self.answer().split(' ').map(|n| n.parse().expect("seconds")).collect();
        seconds.try_into().expect("three phases")
    }

    fn stop(mut self) {
        drop(self.requests);
        self.child.wait().expect("the end of the peer");
    }
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
    let mut ours = Ours::new(&Device::flex().autodiff());
    let mut peer = python.as_deref().map(Peer::start);
    ours.step();
    println!("ours, parameters: {}", ours.model.as_ref().map_or(0, Module::num_params));
    if let Some(peer) = &mut peer {
        peer.step();
    }
    let (mut own, mut others) = (Vec::new(), Vec::new());
    for _ in 0..STEPS {
        own.push(ours.step());
        others.extend(peer.as_mut().map(Peer::step));
    }
    let own = show("ours", &own);
    if let Some(peer) = peer {
        let other = show("PyTorch", &others);
        println!("PyTorch / ours: {:.2}", other / own);
        peer.stop();
    }
}
