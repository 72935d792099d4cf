//! `resolvent attend`: one mechanism, applied to the tensors of a file.

mod by_head;
mod call;
mod clusters;
mod compute;
mod sequences;

use std::path::{Path, PathBuf};

use clap::Args;
use resolvent_kernels::{Arithmetic, Mechanism, Operator, Plan, Precision, Shape, Strategy, reference};
use resolvent_lab::{fit::FitFile, source::Document};
use serde_json::{Value, json};

use self::call::{Layout, Tensors};
use super::recipe::read_mechanism;
use crate::{
    Error,
    args::{Global, precision},
    destination::Destination,
    error::Result,
    output,
    tensors::{self, Named, TensorFile},
};

/// Apply a mechanism to tensors from a file, forward and backward
///
/// INPUT is a safetensors file with `q` [B,H,Nq,D], `k` [B,H,Nk,D] (absent when the mechanism is tied) and
/// `v` [B,H,Nk,Dv], in f32, f16 or bf16; rank 2 or 3 is read as [N,D] or [H,N,D]. Heads of k and v may be fewer, each shared by
/// as many heads of q in a row (grouped-query attention). Optional: `key_mask` [B,Nk] and
/// `query_mask` [B,Nq] (u8 or bool, 1 = keep), the mechanism's own tensors (such as `gamma` [H]; the `bias` of one that has such, as numbers
/// or a mask; for `ssa` a `codebook` [H,clusters,D] or a stored plan, see --clusters), `cu_seqlens` (cumulative lengths from 0, i32 or i64:
/// the tokens are sequences end to end, each of which attends to itself alone; `cu_seqlens_k` where keys are other tokens), and with --grad
/// `dout`, shaped like the output.
///
/// OUTPUT gets `out`, `lse` where the mechanism has it, and with --grad `dq`, `dk`, `dv` and the gradients of the mechanism's own
/// tensors (such as `dgamma`), all in f32.
/// It appears whole or not at all; its folder must exist.
///
/// It computes with the kernels and the f64 reference, which are the CPU's: there is no --device as for commands that run models.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Attend {
    /// The mechanism, for instance {"mechanism": "infsa", "gamma": 0.9}; or a fit.json of `resolvent analyze --fit`, by which heads have
    /// mechanisms of their own
    #[arg(long, value_name = "M.json")]
    pub config: PathBuf,
    /// The layer of a fit that is meant; where INPUT has tensors NAME.q, NAME.k, NAME.v, as a dump of a model does, it is read from these
    #[arg(long, value_name = "NAME")]
    pub layer: Option<String>,
    /// The tensors it is applied to
    #[arg(long, value_name = "IN.safetensors")]
    pub input: PathBuf,
    /// Where the result goes
    #[arg(long, value_name = "OUT.safetensors", required_unless_present = "plan", conflicts_with = "plan")]
    pub output: Option<PathBuf>,
    /// Also compute the gradients of <dout, out>
    #[arg(long)]
    pub grad: bool,
    /// Query i sees keys j <= i + Nk - Nq only, as `"causal": true` does
    #[arg(long)]
    pub causal: bool,
    /// Also write the dense matrix `weights` [B,H,Nq,Nk]; takes O(N^2) memory
    #[arg(long, conflicts_with = "plan")]
    pub weights: bool,
    /// Also write the plan of a clustered mechanism: `label_q`, `label_k`, `exact_blocks`, `edges` (i64) and `edge_log_weight`
    /// (f64). A file that holds them is attended along this plan, whatever made it
    #[arg(long, conflicts_with = "plan")]
    pub clusters: bool,
    /// Also write how far, at most, a clustered mechanism is from dense softmax in every row: `missed_mass`,
    /// `total_variation` and `output_error` [B,H,Nq], f64
    #[arg(long, conflicts_with = "plan")]
    pub certificate: bool,
    /// Compute naively in f64, and write f64; takes O(N^2) memory
    #[arg(long)]
    pub reference: bool,
    /// Precision of the products: full (f32), or bf16 with sums in f32, for softmax, infsa, fna, dense scores of products and performer;
    /// bf16x3 (three of bf16 for each of f32, 16 bits) for the same but fna, on processors with AMX; others run in full, as --plan says
    #[arg(long, value_name = "PRECISION", default_value = "full", value_parser = precision)]
    pub precision: Precision,
    /// Only print what would be done: strategy, precision, operations, bytes, scratch
    #[arg(long)]
    pub plan: bool,
}

const EXAMPLES: &str = "\
Examples:
  echo '{\"mechanism\": \"infsa\", \"gamma\": 0.9}' > M.json
  resolvent attend --config M.json --input qkv.safetensors --output out.safetensors

  Gradients too, causal:   ... --output grads.safetensors --grad --causal
  In f64, with the matrix: ... --output exact.safetensors --reference --weights
  How far off it may be:   ... --output out.safetensors --certificate   (M.json of `ssa` or `routed`)
  Products of bf16:        ... --output out.safetensors --precision bf16
  What it would take:      resolvent attend --config M.json --input qkv.safetensors --plan
  A layer as it was fitted: resolvent attend --config runs/fit/fit.json --layer layers.0 --input dump.safetensors --output out.safetensors";

/// Runs the command.
pub fn run(args: &Attend, global: &Global) -> Result<()> {
    let destination = match &args.output {
        Some(output) => Some((output.as_path(), Destination::new(output, &[&args.config, &args.input])?)),
        None => None,
    };
    let file = TensorFile::read(&args.input)?.of_layer(args.layer.as_deref());
    let text = Document::read(&args.config)?;
    if FitFile::is_one(&text) {
        let layer = by_head::layer(args, global, &text)?;
        return by_head::run(args, global, &layer, &file, destination);
    }
    if let Some(layer) = args.layer.as_ref().filter(|_| !file.is_layer()) {
        let problem = format!("has no tensor `{layer}.q` (--layer); it holds: {}", file.names().join(", "));
        return Err(Error::file(&args.input, problem));
    }
    let mechanism = read_mechanism(&args.config)?;
    let mechanism = match global.seed {
        Some(seed) => mechanism.with_seed(seed),
        None => mechanism,
    };
    let mechanism = call::with_given_landmarks(mechanism, &file);
    let layout = Layout::read(&file, &mechanism)?;
    if let Some(sequences) = sequences::read(&file, &layout)? {
        return sequences::run(args, global, &mechanism, &file, (&layout, &sequences), destination);
    }
    let strategy = if args.reference { Strategy::Reference } else { Strategy::Auto };
    let operator =
        Operator::new(&mechanism, layout.shape, args.causal, strategy).map_err(Error::kernels(&args.input))?;
    let operator = operator.with_precision(args.precision);
    let operator = operator.with_kv_heads(layout.heads_taken(args.reference)).map_err(Error::kernels(&args.input))?;
    warn_of_precision(&operator);
    if let Some(caution) = mechanism.caution_at(&layout.shape) {
        tracing::warn!("{}: {caution}", mechanism.id());
    }
    let shape = shape_json(&layout.shape);
    let Some((output, destination)) = destination else {
        return print_plan(&mechanism, &shape, operator.plan(), global);
    };
    let unused = call::unused(&file, &mechanism, args.grad);
    if !unused.is_empty() {
        tracing::info!("note: {} holds tensors that are not used: {}", args.input.display(), unused.join(", "));
    }
    if args.reference || args.weights {
        check_memory(&operator, args.reference && args.grad, &args.input)?;
    }
    let tensors = if args.reference {
        let tensors = Tensors::<f64>::load(&file, &operator, &layout, args.grad)?;
        compute::reference(&operator, &layout, &tensors, args)
    } else {
        let tensors = Tensors::<f32>::load(&file, &operator, &layout, args.grad)?;
        compute::fused(&operator, &layout, &tensors, args)
    };
    let tensors = tensors.map_err(Error::kernels(&args.input))?;
    let about = json!({"version": env!("CARGO_PKG_VERSION"), "mechanism": mechanism, "causal": args.causal});
    write(&tensors, &about, output, destination)?;
    report(&Done { mechanism: &mechanism, shape, plan: operator.plan() }, &tensors, &unused, output, global)
}

/// Writes `tensors`, whole or not at all.
fn write(tensors: &[Named], about: &Value, output: &Path, destination: Destination) -> Result<()> {
    let bytes = tensors::serialise(tensors, about.to_string()).map_err(|e| Error::file(output, e.to_string()))?;
    destination.write(&bytes)
}

/// Refuses what the reference has no memory for before anything is loaded; `differentiated` with its gradients.
fn check_memory(operator: &Operator, differentiated: bool, input: &Path) -> Result<()> {
    let needed = |backward| reference::memory_needed(operator.mechanism(), operator.shape(), backward);
    let bytes = needed(false).max(if differentiated { needed(true) } else { 0 });
    resolvent_kernels::check_memory("the reference", bytes).map_err(Error::kernels(input))
}

fn print_plan(mechanism: &Mechanism, shape: &Value, plan: &Plan, global: &Global) -> Result<()> {
    let text = format!(
        "{} by {:?}: {}\nprecision  {} by {}: {}\ntile       {} x {}\nforward    {:.3e} operations, {:.3e} bytes, scratch {} f32, allocated {} bytes\n\
         backward   {:.3e} operations, {:.3e} bytes, scratch {} f32, allocated {} bytes\nsaved      {} f32",
        mechanism.id(),
        plan.strategy,
        plan.reason,
        plan.arithmetic.runs.name(),
        plan.arithmetic.instructions,
        plan.arithmetic.reason,
        plan.tile.0,
        plan.tile.1,
        plan.flops_forward as f64,
        plan.bytes_forward as f64,
        plan.scratch_forward,
        plan.allocated_forward,
        plan.flops_backward as f64,
        plan.bytes_backward as f64,
        plan.scratch_backward,
        plan.allocated_backward,
        plan.stats,
    );
    output::result(global, &json!({"mechanism": mechanism, "shape": shape, "plan": plan}), &text)
}

/// What was carried out.
struct Done<'a> {
    mechanism: &'a Mechanism,
    shape: Value,
    plan: &'a Plan,
}

/// Says why a precision that was asked for is not what runs.
fn warn_of_precision(operator: &Operator) {
    let Arithmetic { asked, runs, reason, .. } = operator.plan().arithmetic;
    if asked != runs {
        tracing::warn!("{} runs in {} precision: {reason}", operator.mechanism().id(), runs.name());
    }
}

fn report(done: &Done<'_>, tensors: &[Named], unused: &[String], output: &Path, global: &Global) -> Result<()> {
    let shapes = tensors.iter().map(|t| (t.name.to_owned(), json!(t.shape))).collect::<serde_json::Map<_, _>>();
    let json = json!({
        "mechanism": done.mechanism,
        "shape": done.shape,
        "strategy": done.plan.strategy,
        "arithmetic": done.plan.arithmetic,
        "output": output.display().to_string(),
        "tensors": shapes,
        "unused": unused,
    });
    let listed: Vec<_> = tensors.iter().map(|t| format!("{} {:?}", t.name, t.shape)).collect();
    output::result(global, &json, &format!("{}: {}", output.display(), listed.join(", ")))
}

fn shape_json(s: &Shape) -> Value {
    json!({
        "batch": s.batch, "heads": s.heads, "seq_q": s.seq_q, "seq_kv": s.seq_kv,
        "head_dim": s.head_dim, "value_dim": s.value_dim,
    })
}
