//! The machine and the program that numbers were measured with.

use std::sync::OnceLock;

use resolvent_kernels::simd::Level;
use serde::{Deserialize, Serialize};

static COMMIT: OnceLock<&str> = OnceLock::new();

/// Names the commit that the program was built from; the first name stays.
pub fn built_from(commit: &'static str) {
    COMMIT.get_or_init(|| commit);
}

/// Where numbers come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    /// The processor's name, where the system tells it.
    pub cpu: Option<String>,
    /// Threads used.
    pub threads: usize,
    /// Instruction set of the kernels.
    pub level: String,
    /// Operating system and architecture.
    pub system: String,
    /// Version of this crate.
    pub version: String,
    /// Commit that the program was built from, where it has [named](built_from) it.
    pub commit: Option<String>,
}

impl Environment {
    /// This machine and this program.
    pub fn current() -> Self {
        let level = Level::selected().map_or_else(|e| e.to_string(), |level| level.name().into());
        Self {
            cpu: cpu(),
            threads: rayon::current_num_threads(),
            level,
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            version: env!("CARGO_PKG_VERSION").into(),
            commit: COMMIT.get().map(|&commit| commit.into()),
        }
    }

    /// Names and values for a reader.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = vec![
            ("Processor", self.cpu.clone().unwrap_or_else(|| "unknown".into())),
            ("Threads", self.threads.to_string()),
            ("Kernels", self.level.clone()),
            ("System", self.system.clone()),
            ("Resolvent", self.version.clone()),
        ];
        rows.extend(self.commit.clone().map(|commit| ("Commit", commit)));
        rows
    }
}

/// Bytes that the system could still give, where it tells.
pub fn available_memory() -> Option<u64> {
    meminfo("MemAvailable:")
}

/// Bytes of memory that this process could have at most, where the system tells: the machine's, or less where a control group
/// or a limit of the address space says so. Linux tells, others do not.
pub fn total_memory() -> Option<u64> {
    let number = |file| std::fs::read_to_string(file).ok()?.trim().parse().ok();
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let address_space = limits.lines().find_map(|line| line.strip_prefix("Max address space"));
    let soft = address_space.and_then(|line| line.split_whitespace().next()?.parse().ok());
    let groups = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"].map(number);
    meminfo("MemTotal:").into_iter().chain(groups.into_iter().flatten()).chain(soft).min()
}

fn meminfo(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
}

fn cpu() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, name)| name.trim().to_string())
}
