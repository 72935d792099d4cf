//! What `train` and `compare` share: a recipe, and what the command line changes in it.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
};

use clap::Args;
use resolvent_kernels::Mechanism;
use resolvent_lab::{
    Recipe,
    analyze::FitFile,
    compare::Candidate,
    data::{Data, DataSpec, PictureShape, Source, TextSpec},
    recipe::{ModelRecipe, with_landmarks_for, with_settings_of},
    source::Document,
};

use crate::{Error, args::Global, error::Result};

/// The recipe, and changes to it.
#[derive(Debug, Args)]
#[command(next_help_heading = "Recipe")]
pub struct RecipeArgs {
    /// Recipe in TOML [default: that of configs/ for the data, or configs/pictures.toml or text.toml for other files; they are built in]
    #[arg(long, value_name = "RECIPE.toml")]
    pub config: Option<PathBuf>,
    /// Data set. Pictures: shapes[:SETTINGS], mnist:DIR, fashion-mnist:DIR, idx:IMAGES,LABELS, cifar10:DIR,
    /// images:PATH[?size=PIXELS], webdataset:TRAIN[,TEST]; texts: listops[:SETTINGS], imdb:PATH, text:PATH[?text=COLUMN&label=COLUMN];
    /// translations: multi30k:DIR, pairs:DIR?from=LANGUAGE&to=LANGUAGE, pairs:SOURCE,TARGET;
    /// plain text: corpus:PATH, corpus:TRAIN[,VALIDATION],TEST
    /// [default: the recipe's, else shapes]
    #[arg(long, value_name = "KIND:PATH")]
    pub data: Option<Source>,
    /// Passes over the training examples; a recipe's own limit of minutes, meant for its own number of them, is then none
    #[arg(long, value_name = "N")]
    pub epochs: Option<usize>,
    /// Most steps per run, whatever the number of epochs; the warm-up shrinks with them
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_steps: Option<u32>,
    /// Most minutes per run; a schedule that does not fit is shortened as a whole
    #[arg(long, value_name = "MINUTES")]
    pub max_minutes: Option<f64>,
}

/// The recipes that need no file.
const SHAPES: &str = include_str!("../../configs/shapes.toml");
const PICTURES: &str = include_str!("../../configs/pictures.toml");
const FASHION_MNIST: &str = include_str!("../../configs/fashion-mnist.toml");
const CIFAR10: &str = include_str!("../../configs/cifar10.toml");
const LISTOPS: &str = include_str!("../../configs/listops.toml");
const IMDB: &str = include_str!("../../configs/imdb.toml");
const MULTI30K: &str = include_str!("../../configs/multi30k-small.toml");
const LANGUAGE: &str = include_str!("../../configs/language.toml");
const TEXT: &str = include_str!("../../configs/text.toml");

impl RecipeArgs {
    /// The recipe to begin with: that of `--config`, else a built-in one.
    pub fn base(&self) -> Result<Recipe> {
        if let Some(file) = &self.config {
            return Ok(Recipe::load(file)?);
        }
        let (text, name) = match &self.data {
            None | Some(Source::Pictures(DataSpec::Shapes(_))) => (SHAPES, "shapes"),
            Some(Source::Pictures(DataSpec::FashionMnist(_))) => (FASHION_MNIST, "fashion-mnist"),
            Some(Source::Pictures(DataSpec::Cifar10(_))) => (CIFAR10, "cifar10"),
            Some(Source::Pictures(_)) => (PICTURES, "pictures"),
            Some(Source::Texts(TextSpec::Listops(_))) => (LISTOPS, "listops"),
            Some(Source::Texts(TextSpec::Imdb(_))) => (IMDB, "imdb"),
            Some(Source::Texts(_)) => (TEXT, "text"),
            Some(Source::Pairs(_)) => (MULTI30K, "multi30k-small"),
            Some(Source::Corpus(_)) => (LANGUAGE, "language"),
        };
        Ok(Recipe::from_toml(text, &format!("configs/{name}.toml"))?)
    }

    /// `recipe` with the changes asked for, for a run that was `begun` with another, where one is continued.
    pub fn change(&self, mut recipe: Recipe, begun: Option<&Recipe>, global: &Global) -> Result<Recipe> {
        recipe.seed = global.seed.unwrap_or(recipe.seed);
        if let Some(epochs) = self.epochs {
            recipe.schedule.epochs = epochs;
            // A recipe's warm-up and limit of minutes are meant for its own length.
            let own = recipe.schedule.max_minutes.take();
            // A run that began with the limit goes on with it: it is what its steps were planned for.
            if own.is_some() && begun.is_some_and(|begun| begun.schedule.max_minutes == own) {
                recipe.schedule.max_minutes = own;
            } else if own.is_some() && self.max_minutes.is_none() {
                tracing::debug!("the recipe's `max_minutes` is left out: --epochs asks for its own length");
            }
            recipe.schedule.warmup_epochs = recipe.schedule.warmup_epochs.min(epochs as f64 / 4.0);
        }
        recipe.schedule.max_steps = self.max_steps.map(|steps| steps as usize).or(recipe.schedule.max_steps);
        recipe.schedule.max_minutes = self.max_minutes.or(recipe.schedule.max_minutes);
        recipe.data = self.data.as_ref().map(Source::to_string).or(recipe.data);
        recipe.validate()?;
        caution(&recipe.mechanism);
        Ok(recipe)
    }
}

/// The data set that `recipe` names.
pub fn data(recipe: &Recipe) -> Result<Source> {
    let spec = recipe.data.as_deref().unwrap_or("shapes");
    Ok(spec.parse().map_err(resolvent_lab::Error::from)?)
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
    pub fn fit(&self) -> Result<Option<FitFile>> {
        let Self::File(path) = self else { return Ok(None) };
        let text = Document::read(path)?;
        let fit = FitFile::is_one(&text).then(|| FitFile::parse(&text));
        fit.transpose().map_err(|problem| Error::file(path, problem))
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
