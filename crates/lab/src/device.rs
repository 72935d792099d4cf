//! Where models run: the CPU, and the GPUs of the backends that the program was built with.
//!
//! A GPU is known by its number in [`list`]. Whether it works is found out by computing on it: drivers answer with errors, panics of
//! Burn's runtime among them, which are caught here and told as data.

use std::{
    panic::{self, AssertUnwindSafe},
    str::FromStr,
};

pub use burn::tensor::Device;
use burn::tensor::{DeviceType, Tensor};
use serde::Serialize;

use crate::{
    Error, Result,
    environment::{Environment, cpu, total_memory},
};

/// The Cargo features that bring a GPU, the most capable first.
pub const FEATURES: [&str; 5] = ["cuda", "rocm", "metal", "vulkan", "wgpu"];

/// What the user asks for: `cpu`, `auto`, `gpu` (the first) or `gpu:N`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Choice {
    /// The CPU, with the fused kernels.
    #[default]
    Cpu,
    /// The first GPU that works, else the CPU. Drivers that run on the processor do not count: the fused kernels are faster there.
    Auto,
    /// The GPU of this number in [`list`].
    Gpu(usize),
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let number = |n: &str| n.parse().map_err(|_| format!("`{n}` is no number; `resolvent devices` lists them"));
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "auto" => Ok(Self::Auto),
            None if text == "gpu" => Ok(Self::Gpu(0)),
            Some(("gpu", n)) => number(n).map(Self::Gpu),
            _ => Err("must be cpu, auto, gpu or gpu:N".into()),
        }
    }
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Auto => f.write_str("auto"),
            Self::Gpu(n) => write!(f, "gpu:{n}"),
        }
    }
}

/// A device as a list shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Found {
    /// What to ask for it by: `cpu`, `gpu:0`.
    pub device: String,
    /// Its own name, where it tells it.
    pub name: Option<String>,
    /// The feature that brings it; `cpu` for the CPU.
    pub backend: &'static str,
    /// Whether it is a driver that computes on the processor.
    pub software: bool,
    /// Bytes of its memory, where known; of the CPU, what this process may have.
    pub memory_bytes: Option<u64>,
    /// Why it does not work; `None` where it computes.
    pub problem: Option<String>,
}

impl Found {
    /// `gpu:0 (NVIDIA L4, vulkan)`.
    pub fn title(&self) -> String {
        format!("{} ({}, {})", self.device, self.name.as_deref().unwrap_or("unnamed"), self.backend)
    }
}

/// A device that was chosen.
#[derive(Debug, Clone)]
pub struct Chosen {
    /// For models and tensors.
    pub device: Device,
    /// What it is; nothing where the CPU was asked for.
    pub note: Option<String>,
}

/// The features among [`FEATURES`] that the program was built with.
pub fn compiled() -> Vec<&'static str> {
    backends().iter().map(|(feature, _)| *feature).collect()
}

/// Whether `device` is the CPU, with autodiff or without.
pub(crate) fn is_cpu(device: &Device) -> bool {
    *device == Device::flex()
}

/// The CPU, and every GPU that was found, each tried.
pub fn list() -> Vec<Found> {
    let cpu = Found {
        device: Choice::Cpu.to_string(),
        name: cpu(),
        backend: "cpu",
        software: false,
        memory_bytes: total_memory(),
        problem: None,
    };
    let gpus = gpus().into_iter().enumerate().map(|(index, (backend, device))| found(index, backend, &device));
    std::iter::once(cpu).chain(gpus).collect()
}

/// The device that `choice` names.
///
/// # Errors
/// [`Error::Device`] where a GPU is asked for by number and the program was built without, there is none of that number, or it does
/// not compute.
pub fn choose(choice: Choice) -> Result<Chosen> {
    let refuse = |problem: String| Err(Error::Device { asked: choice.to_string(), problem });
    let number = match choice {
        Choice::Cpu => return Ok(Chosen { device: Device::flex(), note: None }),
        Choice::Auto => return Ok(automatic()),
        Choice::Gpu(number) => number,
    };
    let gpus = gpus();
    let Some((backend, device)) = gpus.get(number) else { return refuse(absent(gpus.len())) };
    let found = found(number, backend, device);
    match &found.problem {
        Some(problem) => refuse(format!("{} does not work: {problem}; take another, or `cpu`", found.title())),
        None => Ok(Chosen { device: device.clone(), note: Some(found.title()) }),
    }
}

/// The first GPU that works, else the CPU, and why.
fn automatic() -> Chosen {
    let mut last =
        if compiled().is_empty() { "the program was built without GPUs".into() } else { "no GPU was found".into() };
    for (index, (backend, device)) in gpus().iter().enumerate() {
        let found = found(index, backend, device);
        match &found.problem {
            None if found.software => last = format!("{} runs on the processor", found.title()),
            None => return Chosen { device: device.clone(), note: Some(found.title()) },
            Some(problem) => last = format!("{} does not work: {problem}", found.title()),
        }
    }
    Chosen { device: Device::flex(), note: Some(format!("cpu ({last})")) }
}

/// Why there is no GPU of a number, and the remedy.
fn absent(found: usize) -> String {
    match (compiled().as_slice(), found) {
        ([], _) => format!(
            "the program was built for the CPU alone; build it with one of the features {}, or take `cpu`",
            FEATURES.join(", ")
        ),
        (built, 0) => format!(
            "no adapter was found ({}); install its driver (for vulkan and wgpu a Vulkan driver), or take `cpu`",
            built.join(", ")
        ),
        (_, 1) => "there is but `gpu:0`; `resolvent devices` tells what it is".into(),
        (_, found) => format!("there are `gpu:0` to `gpu:{}`; `resolvent devices` lists them", found - 1),
    }
}

/// Features and the devices that they bring.
fn backends() -> Vec<(&'static str, DeviceType)> {
    vec![
        #[cfg(feature = "cuda")]
        ("cuda", DeviceType::Cuda),
        #[cfg(feature = "rocm")]
        ("rocm", DeviceType::Rocm),
        #[cfg(feature = "metal")]
        ("metal", DeviceType::Metal),
        #[cfg(feature = "vulkan")]
        ("vulkan", DeviceType::Vulkan),
        #[cfg(feature = "wgpu")]
        ("wgpu", DeviceType::Wgpu),
    ]
}

/// Every GPU with the feature that brings it, drivers that run on the processor last. A card that two features reach is there twice.
fn gpus() -> Vec<(&'static str, Device)> {
    let of = |(feature, kind): (&'static str, DeviceType)| {
        let devices = quietly(|| Device::enumerate(kind).into_vec()).unwrap_or_default();
        devices.into_iter().map(move |device| (feature, device))
    };
    let mut all: Vec<_> = backends().into_iter().flat_map(of).collect();
    all.sort_by_key(|(_, device)| is_software(device));
    all
}

/// What `device`, the GPU `index`, says of itself, and whether it computes.
fn found(index: usize, backend: &'static str, device: &Device) -> Found {
    let (problem, (name, memory_bytes)) = match quietly(|| (try_out(device), about(device))) {
        Ok((tried, about)) => (tried.err(), about),
        Err(panicked) => (Some(panicked), (None, None)),
    };
    let software = is_software(device);
    Found { device: Choice::Gpu(index).to_string(), name, backend, software, memory_bytes, problem }
}

/// A sum whose result is known.
fn try_out(device: &Device) -> std::result::Result<(), String> {
    let sum = Tensor::<1>::from_floats([1.0, 2.0, 3.0], device).square().sum();
    let data = sum.try_into_data().map_err(|e| format!("it gives no result ({e})"))?;
    match data.iter::<f32>().next() {
        Some(14.0) => Ok(()),
        other => Err(format!("it computes 1 + 4 + 9 = {}", other.unwrap_or(f32::NAN))),
    }
}

/// What `work` gives, or the first line of its panic, which is not printed.
fn quietly<T>(work: impl FnOnce() -> T) -> std::result::Result<T, String> {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let done = panic::catch_unwind(AssertUnwindSafe(work));
    panic::set_hook(hook);
    done.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        text.and_then(|text| text.lines().next()).unwrap_or("its driver panicked").into()
    })
}

impl Environment {
    /// This machine and this program with models on `device`.
    pub fn on(device: &Device) -> Self {
        Self { device: title(device), ..Self::current() }
    }
}

/// What a report calls `device`; nothing for the CPU.
pub(crate) fn title(device: &Device) -> Option<String> {
    (!is_cpu(device)).then(|| about(device).0.unwrap_or_else(|| "unnamed".into()))
}

/// Name and bytes of memory, where the device tells them.
fn about(device: &Device) -> (Option<String>, Option<u64>) {
    #[cfg(any(feature = "cuda", feature = "rocm", feature = "metal", feature = "vulkan", feature = "wgpu"))]
    if let burn::backend::DispatchDevice::Cube(device) = device.as_dispatch() {
        let client = device.client();
        let (name, memory) = (client.properties().identity.name.clone(), client.properties().memory.max_memory());
        return (Some(name).filter(|name| !name.is_empty()), memory);
    }
    let _ = device;
    (None, None)
}

/// Whether `device` is an adapter that computes on the processor.
fn is_software(device: &Device) -> bool {
    let software: Vec<Device> = vec![
        #[cfg(feature = "vulkan")]
        Device::vulkan(burn::tensor::DeviceKind::Cpu),
        #[cfg(feature = "wgpu")]
        Device::wgpu(burn::tensor::DeviceKind::Cpu),
    ];
    software.contains(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_as_they_are_written() {
        for text in ["cpu", "auto", "gpu:0", "gpu:12"] {
            assert_eq!(text.parse::<Choice>().unwrap().to_string(), text);
        }
        assert_eq!("gpu".parse(), Ok(Choice::Gpu(0)));
        for text in ["", "cuda", "gpu:", "gpu:-1", "cpu:0", "GPU"] {
            assert!(text.parse::<Choice>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_cpu_is_always_there_and_asking_for_it_says_nothing() {
        let first = &list()[0];
        assert_eq!((first.device.as_str(), &first.problem), ("cpu", &None));
        let chosen = choose(Choice::Cpu).unwrap();
        assert!(is_cpu(&chosen.device) && is_cpu(&chosen.device.autodiff()) && chosen.note.is_none());
    }

    #[test]
    fn a_gpu_that_is_not_there_is_refused_with_the_remedy() {
        let error = choose(Choice::Gpu(999)).unwrap_err();
        let remedy = if compiled().is_empty() { "features cuda, rocm" } else { "gpu:999" };
        assert!(matches!(error, Error::Device { .. }) && error.to_string().contains(remedy), "{error}");
    }

    #[test]
    fn a_panic_of_a_driver_is_an_answer() {
        assert_eq!(quietly(|| panic!("no adapter\nbacktrace")), Err::<(), _>("no adapter".into()));
        assert_eq!(quietly(|| 7), Ok(7));
    }
}
