//! Energy that the processor has used, where the machine tells: on Linux by RAPL, the counters of its packages.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{Error, Result};

/// Where Linux has the counters.
const FOLDER: &str = "/sys/class/powercap";

/// The counters of all packages of the processor. What else the machine uses, memory and fans, they do not know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnergyMeter {
    packages: Vec<Package>,
}

/// The counter of a package, in microjoules.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Package {
    file: PathBuf,
    /// Where it begins at 0 again.
    range: u64,
}

/// What the counters stood at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading(Vec<u64>);

impl EnergyMeter {
    /// This machine's.
    ///
    /// # Errors
    /// [`Error::Recipe`] of the field `joules` where it tells none, or not to this user.
    pub fn find() -> Result<Self> {
        Self::within(Path::new(FOLDER))
    }

    /// That of the packages whose counters lie in `folder`.
    fn within(folder: &Path) -> Result<Self> {
        let entries = fs::read_dir(folder).map(|entries| entries.flatten().map(|entry| entry.path()).collect());
        let mut zones: Vec<PathBuf> = entries.unwrap_or_default();
        zones.sort();
        // Zones within a package, and those by which the same package is told of once more (`intel-rapl-mmio`), are left out.
        let whole = |zone: &PathBuf| {
            let name = zone.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let numbered = name.strip_prefix("intel-rapl:").is_some_and(|number| number.parse::<usize>().is_ok());
            numbered && fs::read_to_string(zone.join("name")).is_ok_and(|name| name.starts_with("package"))
        };
        let counter = |zone: PathBuf| {
            let (file, most) = (zone.join("energy_uj"), zone.join("max_energy_range_uj"));
            let range = number(&most).map_err(|why| refused(&format!("{}: {why}", most.display())))?;
            Ok(Package { file, range })
        };
        let packages = zones.into_iter().filter(whole).map(counter).collect::<Result<Vec<_>>>()?;
        let meter = Self { packages };
        if meter.packages.is_empty() {
            return Err(refused(&format!("no package of the processor has a counter in {}", folder.display())));
        }
        meter.read().map(|_| meter)
    }

    /// The counters now.
    ///
    /// # Errors
    /// [`Error::Recipe`] of the field `joules` where one cannot be read.
    pub fn read(&self) -> Result<Reading> {
        let read = |package: &Package| {
            number(&package.file).map_err(|why| refused(&format!("{}: {why}", package.file.display())))
        };
        self.packages.iter().map(read).collect::<Result<_>>().map(Reading)
    }

    /// Joules since an earlier reading, less than a counter's range ago: some minutes of work.
    ///
    /// # Errors
    /// As [`EnergyMeter::read`].
    pub fn since(&self, earlier: &Reading) -> Result<f64> {
        let used = |((package, now), before): ((&Package, u64), &u64)| {
            if now >= *before { now - before } else { (package.range - before).saturating_add(now) }
        };
        let now = self.read()?.0;
        Ok(self.packages.iter().zip(now).zip(&earlier.0).map(used).sum::<u64>() as f64 / 1e6)
    }
}

/// The number in a file, or what is wrong.
fn number(file: &Path) -> std::result::Result<u64, String> {
    let text = fs::read_to_string(file).map_err(|e| e.to_string())?;
    text.trim().parse().map_err(|_| format!("`{}` is no number", text.trim()))
}

fn refused(why: &str) -> Error {
    let problem = format!("cannot be told on this machine: {why}");
    Error::Recipe { file: "benchmark".into(), field: "joules".into(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two packages, of which one counter begins anew, and a core, which is a part of one.
    #[test]
    fn packages_are_added_and_counters_begin_anew() {
        let folder = tempfile::tempdir().unwrap();
        let zone = |name: &str, of: &str, microjoules: u64| {
            let path = folder.path().join(name);
            fs::create_dir_all(&path).unwrap();
            let files = [
                ("name", of.to_owned()),
                ("energy_uj", microjoules.to_string()),
                ("max_energy_range_uj", "10000000".into()),
            ];
            files.into_iter().for_each(|(file, text)| fs::write(path.join(file), text + "\n").unwrap());
        };
        let none = EnergyMeter::within(folder.path()).unwrap_err().to_string();
        assert!(none.contains("`joules` cannot be told"), "{none}");
        zone("intel-rapl:0", "package-0", 1_000_000);
        zone("intel-rapl:0:0", "core", 500_000);
        zone("intel-rapl:1", "package-1", 9_500_000);
        zone("intel-rapl-mmio:0", "package-0", 1_000_000);
        let meter = EnergyMeter::within(folder.path()).unwrap();
        let before = meter.read().unwrap();
        zone("intel-rapl:0", "package-0", 3_500_000);
        zone("intel-rapl:0:0", "core", 9_500_000);
        zone("intel-rapl:1", "package-1", 250_000);
        zone("intel-rapl-mmio:0", "package-0", 3_500_000);
        assert_eq!(meter.since(&before).unwrap(), 2.5 + 0.75);
        fs::write(folder.path().join("intel-rapl:1/energy_uj"), "?").unwrap();
        assert!(meter.since(&before).unwrap_err().to_string().contains("`?` is no number"));
    }
}
