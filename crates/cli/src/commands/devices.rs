//! `resolvent devices`: where models can run; and the argument by which other commands are told.

use clap::Args;
use resolvent_lab::{
    device::{self, Choice, Chosen, Device, Found},
    progress::tell,
};
use serde_json::json;

use crate::{args::Global, calibrate, error::Result, output};

/// List where models can run: the CPU, and the GPUs that the program was built for and finds
///
/// Every GPU is tried with a small computation. Commands that run models take one of the first column as --device. GPUs need a program
/// that was built with one of the features wgpu, vulkan, metal, cuda and rocm, as in `cargo build --release -p resolvent-cli --features wgpu`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Devices {}

const EXAMPLES: &str = "\
Examples:
  resolvent devices
  resolvent devices --json
  resolvent train --device gpu:0";

/// Where a command's model runs.
#[derive(Debug, Args)]
pub struct DeviceArg {
    /// Where the model runs: cpu, auto (the first GPU that works, else the CPU), gpu, or gpu:N as `resolvent devices` lists them
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: Choice,
}

impl DeviceArg {
    /// The device; what was chosen is said on standard error where it is not simply the CPU.
    pub fn choose(&self, global: &Global) -> Result<Device> {
        let Chosen { device, note } = device::choose(self.device)?;
        if let Some(note) = note.filter(|_| !global.quiet) {
            tell(format_args!("device: {note}"));
        }
        if device == Device::flex() {
            calibrate()?;
        }
        Ok(device)
    }

    /// Whether nothing else than the CPU is asked for.
    pub fn is_cpu(&self) -> bool {
        self.device == Choice::Cpu
    }
}

/// Runs the command.
pub fn run(_args: &Devices, global: &Global) -> Result<()> {
    let (compiled, found) = (device::compiled(), device::list());
    let built = match compiled.as_slice() {
        [] => format!("built for the CPU alone; one of the features {} brings GPUs", device::FEATURES.join(", ")),
        features if found.len() == 1 => format!("built with {}; no GPU was found", features.join(", ")),
        features => format!("built with {}", features.join(", ")),
    };
    let lines: String = found.iter().map(line).collect();
    output::result(global, &json!({"features": compiled, "devices": found}), &format!("{lines}{built}"))
}

/// `gpu:0  vulkan  24.0 GB  NVIDIA L4`, and what is to be known of it.
fn line(found: &Found) -> String {
    let memory = found.memory_bytes.map_or_else(|| "-".into(), |bytes| format!("{:.1} GB", bytes as f64 / 1e9));
    let name = found.name.as_deref().unwrap_or("unnamed");
    let software = if found.software { ", a driver that runs on the processor" } else { "" };
    let problem = found.problem.as_ref().map_or_else(String::new, |problem| format!("; does not work: {problem}"));
    format!("{:<8}{:<8}{memory:>9}  {name}{software}{problem}\n", found.device, found.backend)
}
