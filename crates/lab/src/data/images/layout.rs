//! What the names of the pictures say: split and class.

use std::{collections::BTreeSet, path::Path};

use crate::data::{Error, Result};

/// Names of folders that are splits, in lower case.
const TRAIN: [&str; 2] = ["train", "training"];
const VALIDATION: [&str; 3] = ["val", "valid", "validation"];
const TEST: [&str; 2] = ["test", "testing"];

/// What a picture is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Train,
    Validation,
    Test,
}

/// Where a picture belongs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub part: Part,
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
        let split = root.pop_if(|last| part_of(last).is_some());
        Some(Parts { root, split, class })
    }

    fn part(&self) -> Part {
        self.split.and_then(part_of).unwrap_or(Part::Train)
    }
}

/// The part that a folder of this name holds.
fn part_of(name: &str) -> Option<Part> {
    let name = &*name.to_lowercase();
    let parts = [(&TRAIN[..], Part::Train), (&VALIDATION, Part::Validation), (&TEST, Part::Test)];
    parts.into_iter().find(|(names, _)| names.contains(&name)).map(|(_, part)| part)
}

/// What is wrong with a picture at another depth than the `first`.
fn at_odds(part: &Parts, first: &str, expected: &str) -> String {
    if part.split.is_none() && part_of(part.class).is_some() {
        return format!(
            "lies in `{}` without a folder of its class; move each picture into `{0}/CLASS/`, as the list of their classes says \
             (of ImageNet `ILSVRC2012_validation_ground_truth.txt`), or move the folder away",
            part.class
        );
    }
    format!("does not lie at the same depth as `{first}`; {expected}")
}

impl Layout {
    /// Reads the names of the `pictures` of `path`; `others` are the names of files that are no pictures, which must not
    /// lie in a class folder.
    pub(super) fn new<'a>(path: &Path, pictures: impl Iterator<Item = &'a str>, others: &[String]) -> Result<Self> {
        let fail = |entry: &str, problem: String| Error::Entry { path: path.into(), entry: entry.into(), problem };
        let mut parts: Vec<(&str, Parts)> = Vec::new();
        for name in pictures {
            let expected = "expected CLASS/PICTURE, or train/CLASS/PICTURE and test/CLASS/PICTURE";
            let part = Parts::new(name).ok_or_else(|| {
                let shard = others.iter().any(|other| other.ends_with(".cls"));
                let expected = if shard { "it seems to be a shard; name it as `webdataset:PATH`" } else { expected };
                fail(name, format!("lies in no class folder; {expected}"))
            })?;
            if let Some((first, other)) = parts.first()
                && (&other.root, other.split.is_some()) != (&part.root, part.split.is_some())
            {
                return Err(fail(name, at_odds(&part, first, expected)));
            }
            parts.push((name, part));
        }
        let folders: BTreeSet<&Parts> = parts.iter().map(|(_, part)| part).collect();
        for name in others {
            if Parts::new(name).is_some_and(|part| folders.contains(&part)) {
                return Err(fail(
                    name,
                    "is no PNG, JPEG or WebP picture but lies in a class folder; move it away".into(),
                ));
            }
        }
        check_splits(path, &parts)?;
        let train = parts.iter().filter(|(_, part)| part.part() == Part::Train).map(|(_, part)| part.class);
        let classes: Vec<&str> = train.collect::<BTreeSet<_>>().into_iter().collect();
        if parts.is_empty() {
            return Err(Error::Empty { path: path.into(), problem: "holds no PNG, JPEG or WebP pictures".into() });
        }
        check_classes(path, &classes)?;
        let place = |(name, part): &(&str, Parts)| {
            let label = classes.binary_search(&part.class);
            let label = label.map_err(|_| fail(name, "is of a class that has no training pictures".into()))?;
            Ok(Place { part: part.part(), label: label as u32 })
        };
        let places = parts.iter().map(place).collect::<Result<_>>()?;
        Ok(Layout { classes: classes.into_iter().map(String::from).collect(), places })
    }
}

/// Whether there are classes of training pictures to tell apart.
pub(super) fn check_classes(path: &Path, classes: &[impl std::fmt::Display]) -> Result<()> {
    let problem = match classes {
        [] => "holds no training pictures, only others".into(),
        [class] => format!("holds one class only, `{class}`; two are needed"),
        _ => return Ok(()),
    };
    Err(Error::Empty { path: path.into(), problem })
}

/// At most one folder for each part, lest one of them be left out unnoticed.
fn check_splits(path: &Path, parts: &[(&str, Parts)]) -> Result<()> {
    for wanted in [Part::Train, Part::Validation, Part::Test] {
        let splits = parts.iter().filter(|(_, part)| part.part() == wanted).filter_map(|(_, part)| part.split);
        let splits: Vec<&str> = splits.collect::<BTreeSet<_>>().into_iter().collect();
        if let [first, second, ..] = splits[..] {
            let problem = format!("holds both `{first}` and `{second}`; keep the one to use, move the other away");
            return Err(Error::Format { path: path.into(), problem });
        }
    }
    Ok(())
}
