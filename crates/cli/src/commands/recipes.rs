//! `resolvent recipes`: the recipes that are built in.

use clap::{Args, builder::PossibleValuesParser};
use resolvent_lab::{
    Recipe,
    recipe::builtin::{names, text},
};
use serde_json::json;

use crate::{args::Global, error::Result, output};

/// List the built-in recipes, or print one
///
/// A recipe is everything that decides what a training run computes. Printed, it is the file to begin your own with; another recipe
/// builds on it with `extends = "NAME"`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Recipes {
    /// The recipe to print, as TOML [default: all are listed]
    #[arg(value_name = "NAME", value_parser = PossibleValuesParser::new(names()), hide_possible_values = true)]
    pub name: Option<String>,
}

const EXAMPLES: &str = "\
Examples:
  resolvent recipes                        names, and what they are for
  resolvent recipes fashion-mnist > mine.toml
  resolvent train --config mine.toml --set optimiser.lr=3e-4
  resolvent recipes --json                 every recipe with all its fields, for programs";

/// Runs the command.
pub fn run(args: &Recipes, global: &Global) -> Result<()> {
    match &args.name {
        Some(name) => output::result(global, &json!(Recipe::built_in(name)?), text(name).unwrap_or_default()),
        None => {
            let recipes = names().map(Recipe::built_in).collect::<std::result::Result<Vec<_>, _>>()?;
            let width = names().map(str::len).max().unwrap_or(0) + 2;
            let lines = recipes.iter().map(|recipe| format!("{:width$}{}\n", recipe.name, recipe.about));
            output::result(global, &json!(recipes), &lines.collect::<String>())
        }
    }
}
