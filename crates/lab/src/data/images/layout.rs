//! What the names of the pictures say: split and class.

use std::{collections::BTreeSet, path::Path};

use crate::data::{Error, Result};

/// Names of folders that are splits, in lower case.
const TRAIN: [&str; 2] = ["train", "training"];
const TEST: [&str; 5] = ["test", "testing", "val", "valid", "validation"];

/// Where a picture belongs.
pub(super) struct Place {
    /// Whether it is for testing.
    pub test: bool,
    /// Its class.
    pub label: u32,
}

/// Where all pictures belong.
pub(super) struct Layout {
    /// Names of the classes, sorted.
    pub classes: Vec<String>,
    /// One per picture.
    pub places: Vec<Place>,
}

/// A name taken apart: what stands before split and class, the split's folder, the class.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Parts<'a> {
    root: Vec<&'a str>,
    split: Option<&'a str>,
    class: &'a str,
}

impl<'a> Parts<'a> {
    /// None if the file lies in no folder.
    fn new(name: &'a str) -> Option<Self> {
        let mut root: Vec<&str> = name.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
        root.pop()?;
        let class = root.pop()?;
        let split = root.pop_if(|last| is_any(last, &TRAIN) || is_any(last, &TEST));
        Some(Parts { root, split, class })
    }
}

fn is_any(name: &str, names: &[&str]) -> bool {
    names.contains(&&*name.to_lowercase())
}

impl Layout {
    /// Reads the names of the `pictures` of `path`; `others` are the names of files that are no pictures, which must not
    /// lie in a class folder.
    pub(super) fn new<'a>(path: &Path, pictures: impl Iterator<Item = &'a str>, others: &[String]) -> Result<Self> {
        let fail = |entry: &str, problem: String| Error::Entry { path: path.into(), entry: entry.into(), problem };
        let empty = |problem: String| Error::Empty { path: path.into(), problem };
        let mut parts: Vec<(&str, Parts)> = Vec::new();
        for name in pictures {
            let expected = "expected CLASS/PICTURE, or train/CLASS/PICTURE and test/CLASS/PICTURE";
            let part = Parts::new(name).ok_or_else(|| fail(name, format!("lies in no class folder; {expected}")))?;
            if let Some((first, other)) = parts.first()
                && (&other.root, other.split.is_some()) != (&part.root, part.split.is_some())
            {
                return Err(fail(name, format!("does not lie at the same depth as `{first}`; {expected}")));
            }
            parts.push((name, part));
        }
        let folders: BTreeSet<&Parts> = parts.iter().map(|(_, part)| part).collect();
        for name in others {
            if Parts::new(name).is_some_and(|part| folders.contains(&part)) {
                return Err(fail(name, "is no PNG or JPEG picture but lies in a class folder; move it away".into()));
            }
        }
        check_splits(path, &parts)?;
        let is_test = |part: &Parts| part.split.is_some_and(|split| is_any(split, &TEST));
        let train = parts.iter().filter(|(_, part)| !is_test(part)).map(|(_, part)| part.class);
        let classes: Vec<&str> = train.collect::<BTreeSet<_>>().into_iter().collect();
        match classes[..] {
            [] if parts.is_empty() => return Err(empty("holds no PNG or JPEG pictures".into())),
            [] => return Err(empty("holds no training pictures, only test pictures".into())),
            [class] => return Err(empty(format!("holds one class only, `{class}`; two are needed"))),
            _ => {}
        }
        let place = |(name, part): &(&str, Parts)| {
            let label = classes.binary_search(&part.class);
            let label = label.map_err(|_| fail(name, "is of a class that has no training pictures".into()))?;
            Ok(Place { test: is_test(part), label: label as u32 })
        };
        let places = parts.iter().map(place).collect::<Result<_>>()?;
        Ok(Layout { classes: classes.into_iter().map(String::from).collect(), places })
    }
}

/// At most one folder each for training and testing, lest a validation split be taken for a test split unnoticed.
fn check_splits(path: &Path, parts: &[(&str, Parts)]) -> Result<()> {
    for names in [&TRAIN[..], &TEST[..]] {
        let splits = parts.iter().filter_map(|(_, part)| part.split).filter(|split| is_any(split, names));
        let splits: Vec<&str> = splits.collect::<BTreeSet<_>>().into_iter().collect();
        if let [first, second, ..] = splits[..] {
            let problem = format!("holds both `{first}` and `{second}`; keep the one to use, move the other away");
            return Err(Error::Format { path: path.into(), problem });
        }
    }
    Ok(())
}
