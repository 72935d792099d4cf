//! Mutants that change nothing a test could see, each with the reason: a file of `equivalent/` for each package.
//!
//! Entries are separated by empty lines. The first line names the file below the package's `src`, the second repeats the
//! line of source, the third tells the change, as it is printed; the rest is the reason. A `#` begins a comment.

use std::{fs, path::Path};

use crate::{Error, find::Mutant};

pub struct Explained(Vec<Entry>);

struct Entry {
    file: String,
    line: String,
    change: String,
    reason: String,
}

impl Entry {
    fn is(&self, mutant: &Mutant) -> bool {
        self.file == mutant.file && self.line == mutant.source && self.change == mutant.change()
    }
}

impl Explained {
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let text = text.lines().filter(|line| !line.starts_with('#')).map(str::trim).collect::<Vec<_>>();
        let entries = text.split(|line| line.is_empty()).filter(|entry| !entry.is_empty());
        let parsed = entries.map(|entry| match entry {
            [file, line, change, reason @ ..] if !reason.is_empty() => Ok(Entry {
                file: (*file).into(),
                line: (*line).into(),
                change: (*change).into(),
                reason: reason.join(" "),
            }),
            _ => Err(format!("{}: an entry needs file, line, change and reason: {entry:?}", path.display()).into()),
        });
        parsed.collect::<Result<_, Error>>().map(Self)
    }

    /// Why `mutant` cannot be noticed, where that is known.
    pub fn reason(&self, mutant: &Mutant) -> Option<&str> {
        self.0.iter().find(|entry| entry.is(mutant)).map(|entry| entry.reason.as_str())
    }

    /// The entries that are about none of the mutants, one a line.
    pub fn unmatched(&self, mutants: &[Mutant]) -> String {
        let stale = self.0.iter().filter(|entry| !mutants.iter().any(|mutant| entry.is(mutant)));
        stale.map(|entry| format!("{}: {}: {}\n", entry.file, entry.line, entry.change)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::Explained;
    use crate::find;

    /// An entry whose line of source has changed would stop the next run.
    #[test]
    fn every_entry_explains_a_mutant() {
        let tool = Path::new(env!("CARGO_MANIFEST_DIR"));
        for package in ["kernels", "layers"] {
            let all = find::in_folder(&tool.join("../../crates").join(package).join("src"), None).unwrap();
            let explained = Explained::read(&tool.join("equivalent").join(package).with_extension("txt")).unwrap();
            assert_eq!(explained.unmatched(&all), "", "of {package}");
        }
    }
}
