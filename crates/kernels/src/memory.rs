//! Memory that a call needs is asked for before it is taken: an allocation that fails ends the process.

use std::{fs, hint::black_box, path::Path};

use crate::{Error, Result};

/// Bytes from which on it is asked for.
const LEAST: u64 = 1 << 28;

/// Whether the system gives `bytes`: whether it has them, where it tells, and reserves them in one piece. `op` names what needs them. Whoever
/// allocates what a call needs beside its tensors (`stats`, gradients of parameters) may ask here first.
///
/// # Errors
/// [`Error::Memory`].
pub fn check_memory(op: &'static str, bytes: u64) -> Result<()> {
    let reserves = |bytes| black_box(&mut Vec::<u8>::new()).try_reserve_exact(bytes).is_ok();
    if bytes < LEAST || free().is_none_or(|free| bytes <= free) && usize::try_from(bytes).is_ok_and(reserves) {
        return Ok(());
    }
    Err(Error::Memory { op, bytes })
}

/// Bytes that the process could still have. Linux tells; it reserves more than that if asked.
fn free() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of_group = left_to_groups(&groups, Path::new("/sys/fs/cgroup"));
    free_on_machine().into_iter().chain(of_group).min()
}

/// What the limits of the process's control groups leave, as in a container: `groups` is what Linux tells of them, `root` the folder where
/// they are. Cached files, which go when memory is needed, are free.
fn left_to_groups(groups: &str, root: &Path) -> Option<u64> {
    let left = |folder: &Path, [most, used]: [&str; 2]| -> Option<u64> {
        let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
        let number = |text: &str| text.trim().parse::<u64>().ok();
        let cached = |line: &str| line.strip_prefix("inactive_file ").and_then(number);
        let cached = read("memory.stat").and_then(|text| text.lines().find_map(cached)).unwrap_or(0);
        let used = number(&read(used)?)?.saturating_sub(cached);
        // The word `max` is no number: there is no limit.
        Some(number(&read(most)?)?.saturating_sub(used))
    };
    let of_line = |line: &str| -> Option<u64> {
        let [_, controllers, path] = line.splitn(3, ':').collect::<Vec<_>>()[..] else { return None };
        let (root, names) = match controllers {
            "" => (root.to_path_buf(), ["memory.max", "memory.current"]),
            names if names.split(',').any(|name| name == "memory") => {
                (root.join("memory"), ["memory.limit_in_bytes", "memory.usage_in_bytes"])
            }
            _ => return None,
        };
        // A group has no more than those that it is in.
        let path = Path::new(path.trim_start_matches('/'));
        path.ancestors().filter_map(|path| left(&root.join(path), names)).min()
    };
    groups.lines().filter_map(of_line).min()
}

/// Bytes that the machine could still give, its swap among them.
fn free_on_machine() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kilobytes = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').trim().strip_suffix("kB")?.trim().parse().ok()
    };
    let swap = kilobytes("SwapFree").unwrap_or(0);
    kilobytes("MemAvailable").map(|available| available.saturating_add(swap).saturating_mul(1024))
}

/// Bytes of `len` numbers of `size` bytes.
pub(crate) const fn bytes(len: usize, size: usize) -> u64 {
    (len as u64).saturating_mul(size as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_limit_what_is_free() {
        let root = std::env::temp_dir().join(format!("resolvent-groups-{}", std::process::id()));
        let write = |group: &str, name: &str, text: &str| {
            fs::create_dir_all(root.join(group)).unwrap();
            fs::write(root.join(group).join(name), text).unwrap();
        };
        write("a/b", "memory.max", "max\n");
        write("a/b", "memory.current", "100\n");
        write("a", "memory.max", "1000\n");
        write("a", "memory.current", "700\n");
        write("a", "memory.stat", "anon 500\ninactive_file 150\n");
        write("memory/c", "memory.limit_in_bytes", "500\n");
        write("memory/c", "memory.usage_in_bytes", "600\n");
        let left = |groups: &str| left_to_groups(groups, &root);
        assert_eq!(left("0::/a/b\n"), Some(450));
        assert_eq!(left("0::/a\n"), Some(450));
        assert_eq!(left("5:cpu,memory:/c\n0::/a\n"), Some(0));
        for none in ["", "0::/\n", "0::/elsewhere\n", "4:cpu:/a\n", "what else"] {
            assert_eq!(left(none), None, "{none:?}");
        }
        fs::remove_dir_all(&root).unwrap();
    }
}
