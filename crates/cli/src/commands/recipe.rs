//! What `train` and `compare` share: a recipe, and what the command line changes in it.

use std::{
    ffi::OsStr,
    fmt::Display,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    str::FromStr,
};

use clap::{
    Arg, Args,
    builder::{PossibleValue, TypedValueParser, ValueParserFactory},
};
use resolvent_kernels::Mechanism;
use resolvent_lab::{
    Recipe,
    candidate::Candidate,
    data::{self, Data, DataSpec, MatchSpec, PictureShape, PictureSpec, TextSpec},
    exchange::ModelAttention,
    fit::FitFile,
    progress,
    recipe::{ModelRecipe, ScheduleRecipe, Setting, with_landmarks_for, with_settings_of},
    source::Document,
};

use super::train::observer;
use crate::{Error, args::Global, error::Result};

/// The recipe, and changes to it.
#[derive(Debug, Args)]
#[command(next_help_heading = "Recipe")]
pub struct RecipeArgs {
    /// Recipe: a built-in one by its name (`resolvent recipes` lists them) or a file in TOML, which may extend another [default: the
    /// built-in one for the data, or pictures or text for other files]
    #[arg(long, value_name = "NAME|FILE.toml")]
    pub config: Option<String>,
    /// Set a field of the recipe, by its dotted name, such as optimiser.lr=3e-4; may be repeated. `none` removes a limit
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<Setting>,
    /// Data set. Pictures: shapes[:SETTINGS], pathfinder[:SETTINGS], mnist:DIR, fashion-mnist:DIR, idx:IMAGES,LABELS, cifar10:DIR,
    /// images:PATH[?size=PIXELS], webdataset:TRAIN[,[VALIDATION,]TEST]; texts: listops[:SETTINGS], imdb:PATH, text:PATH[?text=COLUMN&label=COLUMN];
    /// pairs of documents: documents[:SETTINGS], retrieval:DIR[?bytes=BYTES];
    /// translations: multi30k:DIR, pairs:DIR?from=LANGUAGE&to=LANGUAGE, pairs:SOURCE,TARGET;
    /// plain text: corpus:PATH, corpus:TRAIN[,VALIDATION],TEST; associative recall: mqar[:SETTINGS]
    /// [default: the recipe's, else shapes for a model of pictures]
    #[arg(long, value_name = "KIND:PATH")]
    pub data: Option<DataSpec>,
    /// Passes over the training examples; a recipe's own limit of minutes, meant for its own number of them, is then none
    #[arg(long, value_name = "N")]
    pub epochs: Option<usize>,
    /// Most steps per run, whatever the number of epochs, or `none`; the warm-up shrinks with them
    #[arg(long, value_name = "N|none", value_parser = Limit::<NonZeroUsize>::from_str, allow_negative_numbers = true)]
    pub max_steps: Option<Limit<NonZeroUsize>>,
    /// Most minutes per run, or `none`; a schedule that does not fit is shortened as a whole
    #[arg(long, value_name = "MINUTES|none", value_parser = Limit::<f64>::from_str, allow_negative_numbers = true)]
    pub max_minutes: Option<Limit<f64>>,
}

/// A limit on a run, or none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limit<T>(Option<T>);

impl<T: FromStr<Err: Display>> FromStr for Limit<T> {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.parse() {
            _ if text == "none" => Ok(Self(None)),
            Ok(limit) => Ok(Self(Some(limit))),
            Err(e) => Err(format!("{e}; give a number, or none")),
        }
    }
}

impl RecipeArgs {
    /// The recipe to begin with: that of `--config`, else the built-in one for the data.
    pub fn base(&self) -> Result<Recipe> {
        if let Some(name) = &self.config {
            return Ok(Recipe::named(name)?);
        }
        let name = match &self.data {
            None | Some(DataSpec::Pictures(PictureSpec::Shapes(_))) => "shapes",
            Some(DataSpec::Pictures(PictureSpec::FashionMnist(_))) => "fashion-mnist",
            Some(DataSpec::Pictures(PictureSpec::Cifar10(_))) => "cifar10",
            Some(DataSpec::Pictures(_)) => "pictures",
            Some(DataSpec::Texts(TextSpec::Listops(_))) => "listops",
            Some(DataSpec::Texts(TextSpec::Imdb(_))) => "imdb",
            Some(DataSpec::Texts(_)) => "text",
            Some(DataSpec::Matches(MatchSpec::Documents(_))) => "lra-retrieval-small",
            Some(DataSpec::Matches(MatchSpec::Retrieval { .. })) => "lra-retrieval",
            Some(DataSpec::Pairs(_)) => "multi30k-small",
            Some(DataSpec::Corpus(_)) => "language",
            Some(DataSpec::Recall(_)) => "mqar",
        };
        Ok(Recipe::built_in(name)?)
    }

    /// `recipe` with the changes asked for, for a run that was `begun` with another, where one is continued: first the schedule takes
    /// the epochs asked for, then come the fields that are set, last what else has an argument of its own.
    pub fn change(&self, mut recipe: Recipe, begun: Option<&Recipe>, global: &Global) -> Result<Recipe> {
        if let Some(epochs) = self.epochs {
            recipe.schedule = self.of_epochs(epochs, recipe.schedule, begun.map(|begun| &begun.schedule));
        }
        // What is set is meant for the run as long as it is asked for.
        recipe = recipe.with(&self.set)?;
        recipe.seed = global.seed.unwrap_or(recipe.seed);
        recipe.schedule.epochs = self.epochs.unwrap_or(recipe.schedule.epochs);
        if let Some(Limit(limit)) = self.max_steps {
            recipe.schedule.max_steps = limit.map(NonZeroUsize::get);
        }
        if let Some(Limit(limit)) = self.max_minutes {
            recipe.schedule.max_minutes = limit;
        }
        recipe.data = self.data.as_ref().map(DataSpec::to_string).or(recipe.data);
        recipe.validate()?;
        caution(&recipe.mechanism);
        Ok(recipe)
    }

    /// `schedule` for so many epochs. A recipe's warm-up, milestones and limit of minutes are meant for its own length; a run that goes
    /// on keeps them, but for the limit where it is extended.
    fn of_epochs(&self, epochs: usize, schedule: ScheduleRecipe, begun: Option<&ScheduleRecipe>) -> ScheduleRecipe {
        let limit = schedule.max_minutes;
        let kept = begun.is_some_and(|begun| begun.max_minutes == limit && begun.epochs == epochs);
        if limit.is_some() && !kept && self.max_minutes.is_none() {
            tracing::debug!("the recipe's `max_minutes` is left out: --epochs asks for its own length");
        }
        let max_minutes = limit.filter(|_| kept);
        match begun {
            Some(begun) if begun.epochs < epochs => ScheduleRecipe { epochs, max_minutes, ..schedule },
            _ => ScheduleRecipe { max_minutes, ..schedule.of_epochs(epochs) },
        }
    }
}

/// The data set that `recipe` names; generated pictures for a model of pictures that names none.
pub fn data(recipe: &Recipe) -> Result<DataSpec> {
    let invalid = |problem| resolvent_lab::Error::Recipe { file: "recipe".into(), field: "data".into(), problem };
    let missing = |example: &str| {
        invalid(format!("is missing, and the model is one of text; name it, such as `--data {example}`"))
    };
    let spec = match (&recipe.data, &recipe.model) {
        (Some(spec), _) => spec,
        (None, ModelRecipe::Text(_)) => return Err(missing("text:PATH").into()),
        (None, ModelRecipe::Language(_)) => return Err(missing("corpus:PATH").into()),
        (None, _) => "shapes",
    };
    Ok(spec.parse().map_err(|e: data::Error| invalid(format!("is not valid: {e}")))?)
}

/// The data set that `source` names; how far its reading has come is told on standard error.
pub fn load(source: &DataSpec, global: &Global) -> Result<Data> {
    Ok(progress::load(source, &*observer(global)).map_err(resolvent_lab::Error::from)?)
}

/// A mechanism on the command line.
#[derive(Debug, Clone)]
pub enum Attention {
    /// An id, with the defaults.
    Preset(Box<Mechanism>),
    /// A configuration file.
    File(PathBuf),
    /// Every preset.
    All,
}

impl FromStr for Attention {
    type Err = resolvent_kernels::Error;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        if text == "all" {
            Ok(Self::All)
        } else if text.ends_with(".json") {
            Ok(Self::File(text.into()))
        } else {
            Ok(Self::Preset(Box::new(Mechanism::preset(text)?)))
        }
    }
}

/// Reads a mechanism, and tells the ids to whoever completes a command line.
#[derive(Debug, Clone)]
pub struct AttentionParser;

impl ValueParserFactory for Attention {
    type Parser = AttentionParser;

    fn value_parser() -> AttentionParser {
        AttentionParser
    }
}

impl TypedValueParser for AttentionParser {
    type Value = Attention;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> std::result::Result<Attention, clap::Error> {
        Attention::from_str.parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(Mechanism::IDS.into_iter().map(PossibleValue::new)))
    }
}

impl Attention {
    /// The mechanism, read and checked. The id of `own`, a recipe's mechanism, stands for its settings.
    pub fn mechanism(&self, own: Option<&Mechanism>) -> Result<Mechanism> {
        match self {
            Self::Preset(mechanism) => Ok(with_settings_of(own, (**mechanism).clone())),
            Self::File(path) => read_mechanism(path),
            Self::All => {
                let problem = "`all` stands alone, and where several mechanisms can be named".into();
                let error = resolvent_kernels::Error::Config { field: "mechanism".into(), problem };
                Err(resolvent_lab::Error::from(error).into())
            }
        }
    }
}

impl Attention {
    /// The fit, where the file is one.
    fn fit(&self) -> Result<Option<FitFile>> {
        let Self::File(path) = self else { return Ok(None) };
        let text = Document::read(path)?;
        let fit = FitFile::is_one(&text).then(|| FitFile::parse(&text));
        fit.transpose().map_err(|problem| Error::file(path, problem))
    }

    /// What takes the place of the attention of a model that was trained by `recipe`, whose tokens lie on `grid`, where they have one.
    pub fn replacement(&self, recipe: &Recipe, grid: Option<[usize; 2]>) -> Result<ModelAttention> {
        Ok(match self.fit()? {
            Some(fit) => ModelAttention::Fit(fit),
            None => ModelAttention::Mechanism(self.suited(self.mechanism(Some(&recipe.mechanism))?, grid)),
        })
    }

    /// `mechanism`, if it was named by its id, with landmarks that suit `grid`: [`with_landmarks_for`].
    pub fn suited(&self, mechanism: Mechanism, grid: Option<[usize; 2]>) -> Mechanism {
        match (self, grid) {
            (Self::Preset(_) | Self::All, Some(grid)) => with_landmarks_for(mechanism, grid),
            _ => mechanism,
        }
    }
}

/// The mechanisms that are asked for; `all` stands for every preset. See [`Attention::mechanism`].
pub fn mechanisms(asked: &[Attention], own: Option<&Mechanism>) -> Result<Vec<Mechanism>> {
    let preset = |id: &&str| Ok(with_settings_of(own, Mechanism::preset(id).map_err(resolvent_lab::Error::from)?));
    match asked {
        [Attention::All] => Mechanism::IDS.iter().map(preset).collect(),
        _ => asked.iter().map(|attention| attention.mechanism(own)).collect(),
    }
}

/// The grid of the tokens that `model` makes of the pictures of `data`, where there is one.
pub fn grid(model: &ModelRecipe, data: &Data) -> Option<[usize; 2]> {
    let Data::Pictures(pictures) = data else { return None };
    let PictureShape { height, width, .. } = pictures.train.shape();
    model.grid([height, width])
}

/// [`mechanisms`] with their names: ids, with landmarks that suit `grid`, and those of files without their ending.
pub fn candidates(asked: &[Attention], own: Option<&Mechanism>, grid: Option<[usize; 2]>) -> Result<Vec<Candidate>> {
    let candidate = |(n, mechanism): (usize, Mechanism)| match asked.get(n).unwrap_or(&Attention::All) {
        Attention::File(path) => {
            Candidate { name: path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), mechanism }
        }
        named => Candidate::from(named.suited(mechanism, grid)),
    };
    Ok(mechanisms(asked, own)?.into_iter().enumerate().map(candidate).collect())
}

/// Reads a mechanism's configuration.
pub fn read_mechanism(path: &Path) -> Result<Mechanism> {
    let text = Document::read(path)?;
    if FitFile::is_one(&text) {
        return Err(Error::file(
            path,
            "is a fit, which gives heads mechanisms of their own; one mechanism is asked for here",
        ));
    }
    let mechanism = Mechanism::from_json(&text).map_err(Error::kernels(path))?;
    caution(&mechanism);
    Ok(mechanism)
}

/// Says what is likely a mistake.
fn caution(mechanism: &Mechanism) {
    if let Some(caution) = mechanism.caution() {
        tracing::warn!("{}: {caution}", mechanism.id());
    }
}
