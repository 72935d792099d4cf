//! A fit in a recipe: mechanisms of layers and heads in place of its own, which is softmax.

use std::path::Path;

use resolvent::attention::MultiHeadAttention;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _, ser::Error as _};
use serde_json::Value;
use toml::Table;

use super::{ModelRecipe, Recipe, document::invalid, mechanism};
use crate::{Result, fit::FitFile};

/// The field that holds it.
pub(crate) const FIT: &str = "fit";

/// The tables of a fit; its mechanisms are written as a recipe's own is.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<Option<FitFile>, D::Error> {
    let mut value = Value::deserialize(d)?;
    mechanism::understand(&mut value);
    FitFile::from_value(value).map(Some).map_err(D::Error::custom)
}

/// Its tables.
pub(super) fn serialize<S: Serializer>(fit: &Option<FitFile>, s: S) -> std::result::Result<S::Ok, S::Error> {
    spelt(fit).map_err(S::Error::custom)?.serialize(s)
}

/// A fit without null, which TOML has not.
fn spelt(fit: &Option<FitFile>) -> serde_json::Result<Value> {
    let mut value = serde_json::to_value(fit)?;
    mechanism::spell(&mut value);
    Ok(value)
}

/// Puts what the file of a fit holds in the place of its name, which is found from `folder`: runs keep what they were trained with,
/// whatever becomes of the file. `recipe` is named in errors.
pub(super) fn embed(document: &mut Table, folder: &Path, recipe: &str) -> Result<()> {
    let Some(toml::Value::String(name)) = document.get(FIT) else { return Ok(()) };
    let fit = FitFile::read(&folder.join(name))?;
    let unwritten = |why: String| invalid(recipe, FIT, format!("cannot be written as TOML: {why}"));
    let value = spelt(&Some(fit)).map_err(|e| unwritten(e.to_string()))?;
    let table = Table::try_from(value).map_err(|e| unwritten(e.to_string()))?;
    document.insert(FIT.into(), table.into());
    Ok(())
}

impl Recipe {
    /// Why the fit, if there is one, is not for such a model.
    pub(super) fn check_fit(&self) -> std::result::Result<(), String> {
        let Some(fit) = &self.fit else { return Ok(()) };
        if self.mechanism.id() != "softmax" {
            return Err(format!("stands for softmax, and `mechanism` is {}", self.mechanism.id()));
        }
        let causal = matches!(self.model, ModelRecipe::Language(_));
        if fit.causal != causal {
            let see = |causal: bool| if causal { "see earlier ones only" } else { "see all" };
            return Err(format!("is of tokens that {}, those of the model {}", see(fit.causal), see(causal)));
        }
        Ok(())
    }

    /// Gives the heads of a model's `layers` their mechanisms, where there is a fit.
    ///
    /// # Errors
    /// [`crate::Error::Recipe`] naming what of the fit is not of the model.
    pub(crate) fn give_heads(&self, layers: Vec<(String, &mut MultiHeadAttention)>) -> Result<()> {
        let Some(fit) = &self.fit else { return Ok(()) };
        let given = self.check_fit().and_then(|()| fit.apply(layers));
        given.map_err(|problem| invalid("recipe", FIT, problem))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const FILE: &str = r#"{"fit": 1, "measure": "cosine", "target": 0.99, "cost": "time", "budget": null, "causal": false, "layers": [
        {"name": "blocks.0", "heads": 2, "groups": [
            {"heads": [1], "mechanism": {"mechanism": "ssa", "balance": null}}, {"heads": [0], "mechanism": {"mechanism": "softmax"}}]}]}"#;

    #[test]
    fn a_recipe_holds_what_the_file_held() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("fit.json", FILE);
        write("base.toml", "fit = 'fit.json'");
        write("above.toml", "extends = 'base.toml'\n[schedule]\nepochs = 3");
        let recipe = Recipe::load(&folder.path().join("above.toml")).unwrap();
        assert_eq!(recipe.fit, Some(FitFile::parse(FILE).unwrap()));
        assert_eq!((recipe.attention_name(), recipe.mechanisms().count()), ("fit", 3));

        let again = Recipe::from_toml(&recipe.to_toml().unwrap(), "again").unwrap();
        assert_eq!(again, recipe);
        let without = recipe.with(&["fit=none".parse().unwrap()]).unwrap();
        assert_eq!((without.attention_name(), without.fit), ("softmax", None));

        let one = FILE.replace("blocks.0", "blocks.1").replace("null, \"causal", "0.5, \"causal");
        write("one.json", &one);
        let set = format!("fit={}", folder.path().join("one.json").display()).parse().unwrap();
        assert_eq!(recipe.with(&[set]).unwrap().fit, Some(FitFile::parse(&one).unwrap()), "one whole, not both");
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("fit.json"), FILE).unwrap();
        fs::write(folder.path().join("bad.json"), FILE.replace("[1]", "[0]")).unwrap();
        for (text, expected) in [
            ("fit = 'fit.json'\nmechanism = 'infsa'", "stands for softmax, and `mechanism` is infsa"),
            ("fit = 'fit.json'\n[model]\nkind = 'language'", "is of tokens that see all"),
            ("fit = 'bad.json'", "it is there twice"),
            ("fit = 'none.json'", "none.json"),
            ("fit = 3", "fit"),
        ] {
            let file = folder.path().join("recipe.toml");
            fs::write(&file, text).unwrap();
            let message = Recipe::load(&file).unwrap_err().to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }
}
