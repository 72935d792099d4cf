//! Shards of pictures with their classes beside them, as WebDataset packs them: `key.jpg` and `key.cls` in tar archives.

use std::{
    collections::HashMap,
    fmt,
    path::{Path, PathBuf},
};

use rayon::prelude::*;

use super::{
    Loading, Sizing,
    entries::{Entry, Kind, Location, PICTURES, Search, is_ignored},
    layout::{self, Layout, Part, Place},
    pattern,
};
use crate::{
    budget::{Held, Passing, TREE},
    data::{
        Error, PictureDataset, Result,
        reading::{Counter, Tell},
        settings::settings,
        text::sorted_classes,
    },
};

/// Which file beside a picture says its class, as an integer or a name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum LabelFile {
    /// `key.cls`.
    #[default]
    Cls,
    /// `key.txt`.
    Txt,
    /// The field of this name in `key.json`.
    Json(String),
}

/// Which shards to use; a pattern is a file, a folder of tar archives or `train-{000..012}.tar`.
#[derive(Debug, Clone, PartialEq)]
pub struct WebDataset {
    /// What is learnt from.
    pub train: String,
    /// What is watched after each epoch.
    pub validation: Option<String>,
    /// What is tested on; without it a fifth of every class of the training shards is held out.
    pub test: Option<String>,
    /// Where the classes stand.
    pub label: LabelFile,
    /// How pictures become one size.
    pub sizing: Sizing,
}

impl WebDataset {
    /// Reads `TRAIN[,[VALIDATION,]TEST][?size=PIXELS&crop=SHARE&label=FILE]`.
    pub(in crate::data) fn parse(rest: &str) -> Result<Self> {
        let (patterns, named) = rest.rsplit_once('?').unwrap_or((rest, ""));
        let fail = |got: &str, expected| Error::Setting { field: "webdataset", got: format!("`{got}`"), expected };
        let (mut label, mut sizing) = (LabelFile::default(), Sizing::default());
        for (name, value) in settings("webdataset", named, '&')? {
            match (name, value.split_once(':')) {
                ("label", None) if value == "cls" => label = LabelFile::Cls,
                ("label", None) if value == "txt" => label = LabelFile::Txt,
                ("label", Some(("json", field))) if !field.is_empty() => label = LabelFile::Json(field.into()),
                _ => match sizing.set(name, value) {
                    Some(set) => set?,
                    None => {
                        return Err(fail(named, "`size=PIXELS`, `crop=SHARE` and `label=cls`, `txt` or `json:FIELD`"));
                    }
                },
            }
        }
        let owned = |pattern: &str| Some(pattern.to_owned());
        let (train, validation, test) = match patterns.split(',').collect::<Vec<_>>()[..] {
            [train] if !train.is_empty() => (train, None, None),
            [train, test] if ![train, test].contains(&"") => (train, None, owned(test)),
            [train, validation, test] if ![train, validation, test].contains(&"") => {
                (train, owned(validation), owned(test))
            }
            _ => return Err(fail(patterns, "`TRAIN`, `TRAIN,TEST` or `TRAIN,VALIDATION,TEST`")),
        };
        Ok(Self { train: train.into(), validation, test, label, sizing })
    }

    /// Reads where the pictures lie and what their classes are.
    pub(in crate::data) fn load(&self, holdout: f64, held: &Held, tell: Tell<'_>) -> Result<PictureDataset> {
        let counter = Counter::new(tell, "files found in shards", None);
        let (mut entries, mut labels, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        let patterns = [
            (Part::Train, Some(&self.train)),
            (Part::Validation, self.validation.as_ref()),
            (Part::Test, self.test.as_ref()),
        ];
        let mut root = PathBuf::new();
        for (part, pattern) in patterns.into_iter().filter_map(|(part, pattern)| Some((part, pattern?))) {
            let shards = pattern::files(pattern)?;
            if part == Part::Train {
                root = shards[0].parent().unwrap_or(Path::new("")).into();
            }
            let read: Vec<_> =
                shards.par_iter().map(|shard| self.shard(shard, held, &counter)).collect::<Result<_>>()?;
            for (entry, label) in read.into_iter().flatten() {
                entries.push(entry);
                labels.push(label);
                parts.push(part);
            }
        }
        let layout = layout(&root, &entries, &labels, &parts)?;
        Loading { name: "webdataset", root: &root, sizing: self.sizing, holdout, held, tell }.dataset(entries, layout)
    }

    /// The pictures of one shard with their classes.
    fn shard(&self, path: &Path, held: &Held, counter: &Counter<'_>) -> Result<Vec<(Entry, String)>> {
        let kind = |name: &str| match split_name(name).1.to_lowercase().as_str() {
            _ if is_ignored(name) => Kind::Ignored,
            ending if PICTURES.contains(&ending) => Kind::Picture,
            ending if ending == self.label.ending() => Kind::Label,
            _ => Kind::Ignored,
        };
        let found = Search { path, kind: &kind, held, found: counter }.run()?;
        let empty = |problem: String| Err(Error::Empty { path: path.into(), problem });
        let (ending, remedy) =
            (self.label.ending(), "`?label=cls`, `txt` or `json:FIELD` names the file that says the class");
        if found.pictures.is_empty() {
            return empty("is a shard without PNG, JPEG or WebP pictures; leave it out".into());
        }
        if found.labels.is_empty() {
            return empty(format!("is a shard without classes: no picture has a .{ending} file beside it; {remedy}"));
        }
        let mut labels: HashMap<&str, &Entry> =
            found.labels.iter().map(|entry| (split_name(&entry.name).0, entry)).collect();
        let shard = path.file_name().unwrap_or_default().to_string_lossy();
        let mut samples = Vec::with_capacity(found.pictures.len());
        let mut last = String::new();
        for mut entry in found.pictures {
            let fail = |problem| Err(Error::Entry { path: path.into(), entry: entry.name.to_string(), problem });
            let key = split_name(&entry.name).0;
            if key == last {
                return fail(format!("has the key `{key}` of another picture; give each picture a key of its own"));
            }
            let Some(label) = labels.remove(key) else {
                return fail(format!("has no `{key}.{ending}` beside it; {remedy}"));
            };
            let _tree = match self.label {
                LabelFile::Json(_) => Some(Passing::take(path, TREE.saturating_mul(label.length))?),
                LabelFile::Cls | LabelFile::Txt => None,
            };
            let label = self.label.class(label).map_err(|problem| Error::Entry {
                path: path.into(),
                entry: label.name.to_string(),
                problem,
            })?;
            last = key.to_owned();
            entry.name = format!("{shard}/{}", entry.name).into();
            samples.push((entry, label));
        }
        match labels.into_values().min_by_key(|entry| &entry.name) {
            Some(alone) => {
                let problem =
                    "has no PNG, JPEG or WebP picture beside it; convert the picture, or leave both out".into();
                Err(Error::Entry { path: path.into(), entry: alone.name.to_string(), problem })
            }
            None => Ok(samples),
        }
    }
}

/// A name as its key, up to the first point behind the folders, and what follows.
fn split_name(name: &str) -> (&str, &str) {
    let file = name.rfind('/').map_or(0, |slash| slash + 1);
    match name[file..].find('.') {
        Some(point) => (&name[..file + point], &name[file + point + 1..]),
        None => (name, ""),
    }
}

impl LabelFile {
    fn ending(&self) -> &'static str {
        match self {
            LabelFile::Cls => "cls",
            LabelFile::Txt => "txt",
            LabelFile::Json(_) => "json",
        }
    }

    /// The class that `entry`, which is in memory, says.
    fn class(&self, entry: &Entry) -> std::result::Result<String, String> {
        let Location::Memory(bytes) = &entry.location else {
            return Err("cannot be read; pack the shard again".into());
        };
        let text = std::str::from_utf8(bytes).map_err(|_| "is not UTF-8; write the class as a number or a name")?;
        let class = match self {
            LabelFile::Json(field) => {
                let json: serde_json::Value = serde_json::from_str(text).map_err(|e| format!("is not JSON: {e}"))?;
                match json.get(field) {
                    Some(serde_json::Value::String(name)) => name.trim().to_owned(),
                    Some(serde_json::Value::Number(number)) => number.to_string(),
                    _ => return Err(format!("has no name or number `{field}`; name another as `?label=json:FIELD`")),
                }
            }
            _ => text.trim().to_owned(),
        };
        let valid = !class.is_empty() && !class.contains('\n');
        if valid { Ok(class) } else { Err("says no class; write it as a number or a name in one line".into()) }
    }
}

/// The classes of the training pictures in order, and each picture's.
fn layout(root: &Path, entries: &[Entry], labels: &[String], parts: &[Part]) -> Result<Layout> {
    let train = labels.iter().zip(parts).filter(|(_, part)| **part == Part::Train);
    let classes = sorted_classes(train.map(|(label, _)| label.as_str()));
    layout::check_classes(root, &classes)?;
    let known: HashMap<&str, u32> = classes.iter().map(String::as_str).zip(0..).collect();
    let places = entries.iter().zip(labels).zip(parts).map(|((entry, label), &part)| match known.get(label.as_str()) {
        Some(&label) => Ok(Place { part, label }),
        None => Err(entry.error(root, format!("is of the class `{label}`, which no training picture has"))),
    });
    let places = places.collect::<Result<_>>()?;
    Ok(Layout { classes, places })
}

impl fmt::Display for WebDataset {
    /// The text that parses to this value, without the kind.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let patterns = [Some(&self.train), self.validation.as_ref(), self.test.as_ref()];
        let patterns: Vec<&str> = patterns.into_iter().flatten().map(String::as_str).collect();
        let label = match &self.label {
            LabelFile::Cls => None,
            LabelFile::Txt => Some("label=txt".to_owned()),
            LabelFile::Json(field) => Some(format!("label=json:{field}")),
        };
        let settings: Vec<String> = self.sizing.text().chain(label).collect();
        let mark = if settings.is_empty() { "" } else { "?" };
        write!(f, "{}{mark}{}", patterns.join(","), settings.join("&"))
    }
}
