//! Recipes as documents: where they are read from, what one takes over from another, and single fields that are set.

use std::{
    borrow::Cow,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use toml::{Table, Value};

use super::{
    Recipe, builtin,
    fit::{self, FIT},
    names::{suggestion, unknown},
    setting::{SETTINGS, Setting, check_distinct, spelt_out},
};
use crate::{Error, Result, data, source::Document};

/// The field that names the recipe which another builds on.
const EXTENDS: &str = "extends";

/// Where a recipe is read from.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    BuiltIn(&'static str),
    File(PathBuf),
}

impl Place {
    /// What `name`, given in `folder`, stands for: a file where it ends in `.toml` or has a separator, else a built-in recipe.
    fn of(name: &str, folder: &Path) -> Option<Self> {
        let file = name.ends_with(".toml") || name.contains(['/', '\\']);
        let built_in = || builtin::names().find(|own| *own == name).map(Self::BuiltIn);
        if file { Some(Self::File(folder.join(name))) } else { built_in() }
    }

    fn name(&self) -> String {
        match self {
            Self::BuiltIn(name) => format!("configs/{name}.toml"),
            Self::File(path) => path.display().to_string(),
        }
    }

    /// The document.
    fn text(&self) -> data::Result<Cow<'static, str>> {
        match self {
            Self::BuiltIn(name) => Ok(builtin::text(name).unwrap_or_default().into()),
            Self::File(path) => Ok(Document::read(path)?.to_string().into()),
        }
    }

    /// The recipe that `text` is; `below` are those that build on it.
    fn parse(&self, text: &str, below: &[Self]) -> Result<Recipe> {
        let below = [below, std::slice::from_ref(self)].concat();
        let folder = match self {
            Self::BuiltIn(_) => None,
            Self::File(path) => path.parent(),
        };
        read(text, &self.name(), folder, &below)
    }

    /// Whether both are the same, however the paths are written.
    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::File(a), Self::File(b)) => {
                a == b || a.canonicalize().is_ok_and(|a| b.canonicalize().is_ok_and(|b| a == b))
            }
            _ => self == other,
        }
    }
}

impl Recipe {
    /// The built-in recipe of this name, or the one in the file of this name, which ends in `.toml` or has a separator.
    ///
    /// # Errors
    /// As [`Recipe::load`]; [`Error::Recipe`] for a name of neither.
    pub fn named(name: &str) -> Result<Self> {
        match Place::of(name, Path::new("")) {
            Some(place) => place.parse(&place.text()?, &[]),
            None => Err(invalid("recipe", name, unknown(name))),
        }
    }

    /// The built-in recipe `name`.
    ///
    /// # Errors
    /// [`Error::Recipe`] for a name that there is not.
    pub fn built_in(name: &str) -> Result<Self> {
        let place = builtin::names().find(|own| *own == name).map(Place::BuiltIn);
        let place = place.ok_or_else(|| invalid("recipe", name, unknown(name)))?;
        place.parse(&place.text()?, &[])
    }

    /// Reads and checks the recipe in `file`, with what it extends: a built-in recipe, or a file named from its folder, as its tokenizer
    /// is.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::Recipe`].
    pub fn load(file: &Path) -> Result<Self> {
        let place = Place::File(file.into());
        place.parse(&place.text()?, &[])
    }

    /// Reads and checks a recipe's text; `file` is named in errors. Files that it names are found from the working directory.
    ///
    /// # Errors
    /// [`Error::Recipe`].
    pub fn from_toml(text: &str, file: &str) -> Result<Self> {
        read(text, file, None, &[])
    }

    /// The recipe with some fields set. A value is read as TOML, or as text where the field is one or TOML is something else; `none`
    /// removes a limit or another field that may be absent. Where a `kind` or a mechanism is set, the fields of the former
    /// go with it, as in a recipe that extends another.
    ///
    /// # Errors
    /// [`Error::Recipe`] naming the field, what is expected, and names like it; for a field that is set twice, whose values would be no more
    /// meant one than the other.
    pub fn with(&self, settings: &[Setting]) -> Result<Self> {
        if settings.is_empty() {
            return Ok(self.clone());
        }
        let settings = &spelt_out(settings)[..];
        check_distinct(settings)?;
        let base = self.table()?;
        let is_text = |setting: &Setting| find(&base, &setting.key).is_some_and(Value::is_str);
        let attempt = |texts: bool| {
            let mut recipe = base.clone();
            let mut over = Table::new();
            for setting in settings.iter().filter(|setting| !setting.is_none()) {
                let literal = texts && is_text(setting);
                let value = if literal { Value::String(setting.value.clone()) } else { setting.parsed() };
                insert(&mut over, &setting.key, value);
            }
            fit::embed(&mut over, Path::new(""), SETTINGS)?;
            merge(&mut recipe, over);
            settings.iter().filter(|setting| setting.is_none()).for_each(|setting| remove(&mut recipe, &setting.key));
            deserialise(recipe, SETTINGS).map_err(|e| named_by(e, settings))
        };
        let mut recipe = attempt(false).or_else(|error| attempt(true).map_err(|_| error))?;
        recipe.find_files_from(Path::new(""));
        recipe.validate()?;
        Ok(recipe)
    }

    /// Files that are named by relative paths are those in `folder`, wherever the recipe is written to and read again.
    fn find_files_from(&mut self, folder: &Path) {
        if let Some(file) = &mut self.text.tokenizer {
            // A working directory that is gone leaves the path as it is, and the file is not found.
            *file = std::path::absolute(folder.join(&*file)).unwrap_or_else(|_| file.clone());
        }
    }

    /// The recipe as a document, with every field written out.
    pub(super) fn table(&self) -> Result<Table> {
        Table::try_from(self).map_err(|e| invalid("recipe", ".", format!("cannot be written as TOML: {e}")))
    }
}

/// Reads `text` of the recipe `file`, whose paths begin in `folder`, where it is a file; `below` are those that build on it, and it itself.
fn read(text: &str, file: &str, folder: Option<&Path>, below: &[Place]) -> Result<Recipe> {
    let syntax = |e: toml::de::Error| {
        let line = e.span().map_or(0, |span| text[..span.start].matches('\n').count() + 1);
        not_valid(file, &format!("line {line}"), e.message())
    };
    let document = toml::Deserializer::parse(text).map_err(syntax)?;
    let mut document = Table::deserialize(document).map_err(syntax)?;
    fit::embed(&mut document, folder.unwrap_or(Path::new("")), file)?;
    let mut recipe = match document.remove(EXTENDS) {
        None => deserialise(document, file)?,
        Some(Value::String(name)) => {
            let refuse = |problem: String| invalid(file, EXTENDS, format!("names `{name}`, {problem}"));
            let place = Place::of(&name, folder.unwrap_or(Path::new("")));
            let place = place.ok_or_else(|| refuse(format!("which {}", unknown(&name))))?;
            if below.iter().any(|recipe| recipe.is(&place)) {
                return Err(refuse("which builds on this recipe itself; name another".into()));
            }
            let text = place.text().map_err(|e| refuse(format!("which cannot be read: {e}")))?;
            let mut base = place.parse(&text, below)?.table()?;
            merge(&mut base, document);
            deserialise(base, file)?
        }
        Some(other) => {
            let problem = format!("is {other}, must be the name of a built-in recipe or a file");
            return Err(invalid(file, EXTENDS, problem));
        }
    };
    if let Some(folder) = folder {
        recipe.find_files_from(folder);
    }
    recipe.validate_as(file)?;
    Ok(recipe)
}

/// `over` laid over the recipe `base`. A fit is one whole.
fn merge(base: &mut Table, over: Table) {
    for (section, value) in over {
        match (base.get_mut(&section), value) {
            (Some(Value::Table(base)), Value::Table(over)) if section != FIT => merge_section(&section, base, over, 1),
            (_, value) => drop(base.insert(section, value)),
        }
    }
}

/// A table laid over another of the same name. One of another `kind` or `mechanism` begins anew, but for what all kinds share; within
/// a mechanism, so does one that names its kind at all.
fn merge_section(section: &str, base: &mut Table, over: Table, depth: usize) {
    let tag = ["kind", "mechanism"].into_iter().find(|tag| over.contains_key(*tag));
    if tag.is_some_and(|tag| depth > 1 || over.get(tag) != base.get(tag)) {
        base.retain(|field, _| shared(section).contains(&field));
    }
    for (field, value) in over {
        let base = if section == "mechanism" && depth == 1 { part_with(base, &field) } else { &mut *base };
        match (base.get_mut(&field), value) {
            (Some(Value::Table(base)), Value::Table(over)) => merge_section(&field, base, over, depth + 1),
            (_, value) => drop(base.insert(field, value)),
        }
    }
}

/// Where a mechanism has `field`, which may stand beside its name as well as in its score or structure.
fn part_with<'a>(mechanism: &'a mut Table, field: &str) -> &'a mut Table {
    let has = |part: &&str| mechanism.get(*part).and_then(Value::as_table).is_some_and(|part| part.contains_key(field));
    let part = ["score", "structure"].into_iter().find(has).filter(|_| !mechanism.contains_key(field));
    match part {
        Some(part) => mechanism.get_mut(part).and_then(Value::as_table_mut).expect("found above"),
        None => mechanism,
    }
}

/// The fields of a section that mean the same whatever its kind.
fn shared(section: &str) -> &'static [&'static str] {
    match section {
        "optimiser" => &["clip_norm", "layer_decay"],
        "schedule" => &["epochs", "batch_size", "accumulate", "warmup_epochs", "max_steps", "max_minutes"],
        _ => &[],
    }
}

fn find<'a>(table: &'a Table, key: &str) -> Option<&'a Value> {
    let (first, rest) = key.split_once('.').map_or((key, None), |(first, rest)| (first, Some(rest)));
    match (table.get(first), rest) {
        (Some(Value::Table(table)), Some(rest)) => find(table, rest),
        (value, None) => value,
        _ => None,
    }
}

/// Puts a value where no other is on the way: see [`check_distinct`].
fn insert(table: &mut Table, key: &str, value: Value) {
    match key.split_once('.') {
        None => drop(table.insert(key.into(), value)),
        Some((first, rest)) => {
            if let Value::Table(table) = table.entry(first).or_insert_with(|| Value::Table(Table::new())) {
                insert(table, rest, value);
            }
        }
    }
}

fn remove(table: &mut Table, key: &str) {
    match key.split_once('.') {
        None => drop(table.remove(key)),
        Some((first, rest)) => {
            if let Some(Value::Table(table)) = table.get_mut(first) {
                remove(table, rest);
            }
        }
    }
}

fn deserialise(document: Table, file: &str) -> Result<Recipe> {
    serde_path_to_error::deserialize(Value::Table(document))
        .map_err(|e| not_valid(file, &e.path().to_string(), e.inner().message()))
}

pub(super) fn invalid(file: &str, field: &str, problem: String) -> Error {
    Error::Recipe { file: file.into(), field: field.into(), problem }
}

fn not_valid(file: &str, field: &str, message: &str) -> Error {
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    let suggestion = suggestion(&message).unwrap_or_default();
    invalid(file, field, format!("is not valid: {message}{suggestion}"))
}

/// The error of a document with the field as the setting that it is about calls it.
fn named_by(error: Error, settings: &[Setting]) -> Error {
    let Error::Recipe { file, field, problem } = error else { return error };
    let about = |setting: &&Setting| {
        let names = setting.key.split('.').chain([setting.key()]);
        let told = names.into_iter().any(|name| problem.contains(&format!("`{name}`")));
        setting.key == field || (setting.key.starts_with(field.trim_matches('.')) && told)
    };
    let field = settings.iter().find(about).map_or(field, |setting| setting.key.clone());
    Error::Recipe { file, field, problem }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use resolvent::Precision;

    use super::*;
    use crate::recipe::{Decay, ModelRecipe, Rule};

    fn with(settings: &[&str]) -> Result<Recipe> {
        let base = "mechanism = { mechanism = 'infsa', gamma = 0.9 }\n[optimiser]\nlr = 2e-3\nclip_norm = 3\n[schedule]\nmax_minutes = 2";
        let settings = settings.iter().map(|text| text.parse()).collect::<Result<Vec<_>>>()?;
        Recipe::from_toml(base, "base").unwrap().with(&settings)
    }

    #[test]
    fn settings_are_typed_by_their_fields() {
        let set = with(&["optimiser.lr=3e-4", "schedule.epochs=3", "name=7", "model.tied=true", "seed = 4"]).unwrap();
        assert_eq!((set.optimiser.lr, set.schedule.epochs, set.name.as_str(), set.seed), (3e-4, 3, "7", 4));
        let ModelRecipe::Vit(model) = &set.model else { panic!() };
        assert_eq!(model.tied, Some(true));
        assert_eq!((set.optimiser.clip_norm, set.mechanism.gamma()), (3.0, Some(0.9)), "what is not set stays");
        assert_eq!(with(&["precision=bf16"]).unwrap().precision, Precision::Bf16);
        let set = with(&["mechanism.gamma=0.5", "schedule.max_minutes=none"]).unwrap();
        assert_eq!((set.mechanism.gamma(), set.schedule.max_minutes), (Some(0.5), None));
        assert_eq!(with(&["mechanism=linear-infsa"]).unwrap().mechanism.id(), "linear-infsa");
        assert_eq!(with(&["mechanism.mechanism=linear-infsa"]).unwrap().mechanism.id(), "linear-infsa");
        let routed = with(&["mechanism.routes=2", "mechanism=routed"]).unwrap().mechanism;
        assert_eq!(serde_json::to_value(&routed).unwrap().pointer("/structure/routes"), Some(&2.into()), "{routed:?}");
        let codebook = with(&["model.codebook={every = 5, decay = 0.5}"]).unwrap();
        assert_eq!(codebook.model.clustering(), Some("model.codebook"));
    }

    /// A preset that is written out value by value has its fields where they stand there.
    #[test]
    fn fields_of_compositions_are_set_by_themselves() {
        let base = |mechanism: &str| Recipe::from_toml(&format!("mechanism = {mechanism}"), "base").unwrap();
        let json = |recipe: &Recipe| serde_json::to_value(&recipe.mechanism).unwrap();
        for (mechanism, setting, at, expected) in [
            ("'routed'", "mechanism.routes=2", "/structure/routes", "2"),
            ("{ mechanism = 'routed', clusters = 8 }", "mechanism.clusters=12", "/structure/clusters", "12"),
            ("'local'", "mechanism.window=4", "/structure/window", "4"),
            ("{ mechanism = 'cosine', scale = 3 }", "mechanism.scale=7.0", "/score/scale", "7.0"),
        ] {
            let set = base(mechanism).with(&[setting.parse().unwrap()]).unwrap();
            assert_eq!(json(&set).pointer(at).map(ToString::to_string).as_deref(), Some(expected), "{setting}");
        }
    }

    #[test]
    fn another_kind_begins_anew_in_any_order() {
        for settings in
            [["optimiser.kind=sgd", "optimiser.momentum=0.8"], ["optimiser.momentum=0.8", "optimiser.kind=sgd"]]
        {
            let optimiser = with(&settings).unwrap().optimiser;
            assert!(matches!(&optimiser.rule, Rule::Sgd(sgd) if sgd.momentum == 0.8));
            assert_eq!((optimiser.lr, optimiser.clip_norm), (0.1, 3.0));
        }
        let set = with(&["model.preset=soft-tiny", "model.kind=pyramid", "schedule.kind=constant"]).unwrap();
        assert!(matches!(set.model, ModelRecipe::Pyramid(_)));
        assert_eq!((set.schedule.decay, set.schedule.max_minutes), (Decay::Constant, Some(2.0)));
    }

    #[test]
    fn errors_name_the_field_the_type_and_names_alike() {
        for (settings, parts) in [
            (&["optimiser.lrr=1"][..], &["--set", "`optimiser.lrr`", "did you mean `lr`?"][..]),
            (&["lr=1"], &["--set", "`lr`", "did you mean `optimiser.lr`?"]),
            (&["optimizer.lr=1"], &["`optimizer.lr`", "did you mean `optimiser`?"]),
            (&["schedule.epochs=1.5"], &["`schedule.epochs`", "expected usize"]),
            (&["schedule.epochs=many"], &["`schedule.epochs`", "expected usize"]),
            (&["schedule.epochs=none"], &["`schedule.epochs`", "expected usize"]),
            (&["optimiser.lr=-1"], &["`optimiser.lr`", "finite and > 0"]),
            (&["optimiser.kind=muno"], &["`optimiser.kind`", "did you mean `muon`?"]),
            (&["optimiser.momentum=0.9"], &["`optimiser.momentum`", "`adamw`", "`sgd`"]),
            (&["model.dimm=8"], &["`model.dimm`", "did you mean `dim`?"]),
            (&["model.dim=x"], &["`model.dim`", "expected usize"]),
            (&["mechanism.gama=1"], &["mechanism", "gama"]),
            (&["mechanism=softmacs"], &["`mechanism`", "softmacs"]),
            (&["optimiser=3", "optimiser.lr=1"], &["`optimiser`", "`lr`"]),
            (&["optimiser.lr=1", "optimiser=3"], &["`optimiser`", "`lr`"]),
            (&["optimiser.lr=1", "seed=3", "optimiser.lr=1"], &["--set", "`optimiser.lr`", "twice"]),
            (&["schedule.max_minutes=none", "schedule.max_minutes=3"], &["`schedule.max_minutes`", "twice"]),
            (&["optimiser"], &["`optimiser`", "optimiser.lr=3e-4"]),
            (&["optimiser..lr=1"], &["optimiser.lr=3e-4"]),
        ] {
            let message = with(settings).unwrap_err().to_string();
            parts.iter().for_each(|part| assert!(message.contains(part), "{settings:?}: `{message}` lacks `{part}`"));
        }
    }

    #[test]
    fn recipes_extend_others() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        fs::create_dir(folder.path().join("more")).unwrap();
        write("a.toml", "extends = 'shapes'\nname = 'a'\n[model]\ndim = 32");
        write("more/b.toml", "extends = '../a.toml'\n[optimiser]\nkind = 'lion'\n[schedule]\nepochs = 3");
        let (base, b) =
            (Recipe::built_in("shapes").unwrap(), Recipe::load(&folder.path().join("more/b.toml")).unwrap());
        let (ModelRecipe::Vit(own), ModelRecipe::Vit(model)) = (&base.model, &b.model) else { panic!() };
        assert_eq!((model.dim, model.depth, b.name.as_str()), (32, own.depth, "a"));
        assert_eq!((b.optimiser.kind(), b.optimiser.lr, b.schedule.epochs), ("lion", 1e-4, 3));
        assert_eq!((b.schedule.batch_size, &b.augment), (base.schedule.batch_size, &base.augment));
        assert_eq!(Recipe::from_toml("extends = 'shapes'", "text").unwrap(), base);

        write("self.toml", "extends = './self.toml'");
        write("one.toml", "extends = 'two.toml'");
        write("two.toml", "extends = 'more/../one.toml'");
        write("none.toml", "extends = 'shaeps'");
        write("number.toml", "extends = 3");
        write("missing.toml", "extends = 'no.toml'");
        write("upper.toml", "extends = 'missing.toml'");
        write("field.toml", "extends = 'shapes'\n[model]\nkind = 'text'\npatch = 4");
        for (name, parts) in [
            ("self", &["self.toml", "`extends`", "itself"][..]),
            ("one", &["two.toml", "`extends`", "itself"]),
            ("none", &["none.toml", "`extends`", "did you mean `shapes`?"]),
            ("number", &["number.toml", "`extends`", "is 3"]),
            ("missing", &["missing.toml: `extends`", "no.toml", "not found"]),
            ("upper", &["missing.toml: `extends`", "no.toml", "not found"]),
            ("field", &["field.toml", "`patch`"]),
        ] {
            let message = Recipe::load(&folder.path().join(format!("{name}.toml"))).unwrap_err().to_string();
            parts.iter().for_each(|part| assert!(message.contains(part), "{name}: `{message}` lacks `{part}`"));
        }
        // A tokenizer is found beside the recipe that names it.
        write("more/words.toml", "[text]\ntokenizer = 'words.json'");
        write("more/own.toml", "extends = '../a.toml'\n[text]\ntokenizer = '../own.json'");
        write("above.toml", "extends = 'more/words.toml'");
        let tokenizer = |name: &str| Recipe::load(&folder.path().join(name)).unwrap().text.tokenizer.unwrap();
        for name in ["more/words.toml", "above.toml"] {
            assert_eq!(tokenizer(name), folder.path().join("more/words.json"));
        }
        assert_eq!(tokenizer("more/own.toml"), folder.path().join("more/../own.json"));
        let written = Recipe::load(&folder.path().join("above.toml")).unwrap().to_toml().unwrap();
        write("written.toml", &written);
        assert_eq!(tokenizer("written.toml"), folder.path().join("more/words.json"), "wherever it is written to");

        let message = Recipe::named("imbd").unwrap_err().to_string();
        assert!(message.contains("did you mean `imdb`?") && message.contains(".toml"), "{message}");
    }
}
