//! Names of several files at once: `train-{000..012}.tar`.

use std::path::{Path, PathBuf};

use crate::{
    data::{Error, Result},
    source,
};

/// Most files that a pattern may stand for.
const MOST: usize = 1 << 17;

/// The files that `pattern` stands for, in its order: each `{FIRST..LAST}` is every number between, with leading zeros as the first
/// has them. A folder stands for the tar archives in it.
pub(super) fn files(pattern: &str) -> Result<Vec<PathBuf>> {
    if Path::new(pattern).is_dir() {
        return archives(Path::new(pattern));
    }
    let mut names = vec![String::new()];
    let mut rest = pattern;
    while let Some((before, range)) = rest.split_once('{') {
        let numbers = range.split_once('}').and_then(|(range, after)| Some((numbers(range)?, after)));
        let expected = "`{FIRST..LAST}`, two numbers of which the first is not larger, at most 131072 files in all";
        let fail = || Error::Setting { field: "webdataset", got: format!("`{pattern}`"), expected };
        let (numbers, after) = numbers.ok_or_else(fail)?;
        if numbers.len().saturating_mul(names.len()) > MOST {
            return Err(fail());
        }
        let with =
            |name: &String| -> Vec<String> { numbers.iter().map(|number| format!("{name}{before}{number}")).collect() };
        names = names.iter().flat_map(with).collect();
        rest = after;
    }
    Ok(names.into_iter().map(|name| PathBuf::from(name + rest)).collect())
}

/// `000..012` as its numbers.
fn numbers(range: &str) -> Option<Vec<String>> {
    let (first, last) = range.split_once("..")?;
    let (from, to): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
    let width = first.len();
    (from <= to && ((to - from) as usize) < MOST)
        .then(|| (from..=to).map(|number| format!("{number:0width$}")).collect())
}

fn archives(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = source::entries(folder)?;
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    files.retain(|path| [".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.zst"].iter().any(|end| name(path).ends_with(end)));
    if files.is_empty() {
        return Err(Error::Empty { path: folder.into(), problem: "holds no .tar archive".into() });
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_counted_with_their_zeros() {
        let names = |pattern| -> Vec<String> {
            files(pattern).unwrap().iter().map(|path| path.display().to_string()).collect()
        };
        assert_eq!(names("a-{08..11}.tar"), ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]);
        assert_eq!(names("{1..2}/{0..1}"), ["1/0", "1/1", "2/0", "2/1"]);
        assert_eq!(names("plain.tar"), ["plain.tar"]);
        for wrong in ["{1}", "{2..1}", "{1..2", "{a..b}", "{0..4294967295}", "{1..1000}{1..1000}", "{-1..2}"] {
            assert!(files(wrong).is_err(), "{wrong}");
        }
    }
}
