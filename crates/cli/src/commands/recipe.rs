//! What `train` and `compare` share: a recipe, and what the command line changes in it.

use std::{
    fs,
    path::{Path, PathBuf},
    str::FromStr,
};

use clap::Args;
use resolvent_kernels::Mechanism;
use resolvent_lab::{Recipe, data::DataSpec};

use crate::{Error, args::Global, error::Result};

/// The recipe, and changes to it.
#[derive(Debug, Args)]
#[command(next_help_heading = "Recipe")]
pub struct RecipeArgs {
    /// Recipe in TOML, as in `configs/` [default: built in]
    #[arg(long, value_name = "RECIPE.toml")]
    pub config: Option<PathBuf>,
    /// Data set: shapes[:SETTINGS], mnist:DIR, fashion-mnist:DIR, idx:IMAGES,LABELS, cifar10:DIR, images:PATH
    /// [default: the recipe's, else shapes]
    #[arg(long, value_name = "KIND:PATH")]
    pub data: Option<DataSpec>,
    /// Passes over the training pictures
    #[arg(long, value_name = "N")]
    pub epochs: Option<usize>,
    /// Most minutes per run; a schedule that does not fit is shortened as a whole
    #[arg(long, value_name = "MINUTES")]
    pub max_minutes: Option<f64>,
}

impl RecipeArgs {
    /// The recipe: that of `--config`, else `built_in`, with the changes asked for.
    pub fn recipe(&self, built_in: &str, global: &Global) -> Result<Recipe> {
        let mut recipe = match &self.config {
            Some(file) => Recipe::load(file)?,
            None => Recipe::from_toml(built_in, "the built-in recipe")?,
        };
        self.change(&mut recipe, global);
        recipe.validate()?;
        Ok(recipe)
    }

    /// Applies what the command line says to `recipe`.
    pub fn change(&self, recipe: &mut Recipe, global: &Global) {
        recipe.seed = global.seed.unwrap_or(recipe.seed);
        recipe.schedule.epochs = self.epochs.unwrap_or(recipe.schedule.epochs);
        recipe.schedule.max_minutes = self.max_minutes.or(recipe.schedule.max_minutes);
        if let Some(data) = &self.data {
            recipe.data = Some(data.to_string());
        }
    }
}

/// The data set that `recipe` names.
pub fn data(recipe: &Recipe) -> Result<DataSpec> {
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
}

impl FromStr for Attention {
    type Err = resolvent_kernels::Error;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        if text.ends_with(".json") { Ok(Self::File(text.into())) } else { Ok(Self::Preset(Box::new(Mechanism::preset(text)?))) }
    }
}

impl Attention {
    /// The mechanism, read and checked.
    pub fn mechanism(&self) -> Result<Mechanism> {
        match self {
            Self::Preset(mechanism) => Ok((**mechanism).clone()),
            Self::File(path) => read_mechanism(path),
        }
    }
}

/// Reads a mechanism's configuration.
pub fn read_mechanism(path: &Path) -> Result<Mechanism> {
    let text = fs::read_to_string(path).map_err(|e| Error::file(path, format!("cannot be read as text: {e}")))?;
    Mechanism::from_json(&text).map_err(Error::kernels(path))
}
