//! The machine and the program that numbers were measured with.

use std::{fmt, sync::OnceLock};

use resolvent_kernels::simd::Level;
use serde::{Deserialize, Serialize};

use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

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
    /// The GPU that models ran on; none where they ran on the processor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
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
            device: None,
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
        rows.extend(self.device.clone().map(|device| ("GPU", device)));
        rows.extend(self.commit.clone().map(|commit| ("Commit", commit)));
        rows
    }
}

/// Share of the cores that other programs may keep busy before times are worth little.
const BUSY: f64 = 0.25;

/// How busy a machine is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Threads that ran or waited for a core, on average over the last minute.
    pub average: f64,
    /// Cores.
    pub cores: usize,
}

impl Load {
    /// This machine's; none where the system does not tell (on Linux, `/proc/loadavg` does).
    pub fn current() -> Option<Self> {
        let told = std::fs::read_to_string("/proc/loadavg").ok()?;
        Some(Self { average: average_of(&told)?, cores: std::thread::available_parallelism().ok()?.get() })
    }

    /// Whether more than a quarter of the cores was busy.
    pub fn is_busy(&self) -> bool {
        self.average > BUSY * self.cores as f64
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { average, cores } = self;
        write!(f, "the load average of the last minute is {average:.1} on {cores} cores")?;
        let busy = ": the machine was busy when this began, and its times may be far off (what has just ended counts for a minute)";
        if self.is_busy() { f.write_str(busy) } else { Ok(()) }
    }
}

/// The first number of `/proc/loadavg`.
fn average_of(told: &str) -> Option<f64> {
    told.split_whitespace().next()?.parse().ok().filter(|average: &f64| average.is_finite())
}

/// Bytes that the system could still give, where it tells; on Linux not more than the process's control group may still take, or its
/// limit of the address space leaves.
pub fn available_memory() -> Option<u64> {
    let system = memory();
    let group = system.cgroup_limits().map(|limits| limits.free_memory);
    let space = address_space().map(|limit| limit.saturating_sub(address_space_used().unwrap_or(0)).max(1));
    let bytes = [group, space].into_iter().flatten().fold(system.available_memory(), u64::min);
    Some(bytes).filter(|&bytes| bytes > 0)
}

/// Words such as `its tensors take 12.0 GB, 8.0 GB are free`, where `needed` bytes are more than three quarters of the free memory; `takes`
/// is what they begin with. `None` where the bytes are fewer, or the system does not tell what is free.
pub fn beyond_memory(takes: &str, needed: u64) -> Option<String> {
    let free = available_memory().filter(|&free| needed > free / 4 * 3)?;
    let [needed, free] = [needed, free].map(|bytes| format!("{:.1} GB", bytes as f64 / 1e9));
    Some(format!("{takes} {needed}, {free} are free"))
}

/// Bytes of memory that this process could have at most, where the system tells: the machine's, or on Linux less where a
/// control group or a limit of the address space says so.
pub fn total_memory() -> Option<u64> {
    let system = memory();
    let group = system.cgroup_limits().map(|limits| limits.total_memory);
    let bytes = [group, address_space()].into_iter().flatten().fold(system.total_memory(), u64::min);
    Some(bytes).filter(|&bytes| bytes > 0)
}

fn memory() -> System {
    System::new_with_specifics(RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram()))
}

/// The limit of the address space (`ulimit -v`); there is none but on Linux, or where it is not set.
fn address_space() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Bytes of the address space that are in use.
fn address_space_used() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

pub(crate) fn cpu() -> Option<String> {
    let system = System::new_with_specifics(RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing()));
    Some(system.cpus().first()?.brand().trim().to_string()).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_cores_is_busy() {
        assert_eq!(average_of("0.57 1.23 2.00 3/158 22849\n"), Some(0.57));
        assert!(["", "nan 1 2", "x"].iter().all(|told| average_of(told).is_none()));
        let load = |average| Load { average, cores: 2 };
        assert!(!load(0.5).is_busy() && load(0.57).is_busy());
        assert!(load(0.57).to_string().contains("0.6 on 2 cores: the machine was busy"));
        assert!(!load(0.5).to_string().contains("busy"));
    }
}
