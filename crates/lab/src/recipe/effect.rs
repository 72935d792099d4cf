//! Fields that are set and change nothing.

use serde_json::Value;

use super::{ModelRecipe, Recipe};
use crate::data::TextRecipe;

impl Recipe {
    /// The fields that are not as they are by default, but of which neither the model nor its mechanisms make use, each with why.
    pub fn without_effect(&self) -> Vec<(String, String)> {
        let mechanisms: Vec<_> = self.mechanisms().collect();
        let parameters: Vec<_> = mechanisms.iter().flat_map(|m| m.parameters()).map(|p| p.name()).collect();
        let name = self.attention_name();
        let lacks = |parameter: &str| format!("is for mechanisms with {parameter}: {name} makes no use of it");
        let mut found = Vec::new();
        if let Some(field) = self.model.clustering()
            && !mechanisms.iter().any(|mechanism| mechanism.clustering().is_some())
        {
            found.push((field.to_owned(), lacks("clusters")));
        }
        let own = matches!(self.model, ModelRecipe::Own(_));
        let fields = self.model.written().map(|(_, fields)| fields).unwrap_or_default();
        for (field, value) in fields.iter().filter(|_| !own) {
            // The decay alone is learned where nothing is said.
            let (parameter, plain) = match field.strip_suffix("_trainable") {
                Some(parameter) => (parameter, Value::Bool(parameter == "gamma")),
                None if field == "gamma_schedule" => ("gamma", Value::from("constant")),
                None => continue,
            };
            if *value != plain && !parameters.contains(&parameter) {
                found.push((format!("model.{field}"), lacks(parameter)));
            }
        }
        let pictures = matches!(self.model, ModelRecipe::Vit(_) | ModelRecipe::Pyramid(_));
        if pictures && self.text != TextRecipe::default() {
            found.push(("text".into(), "is for models of text: one of pictures makes no use of it".into()));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> Vec<String> {
        let recipe = Recipe::from_toml(text, "r").unwrap();
        recipe.without_effect().into_iter().map(|(field, _)| field).collect()
    }

    #[test]
    fn what_changes_nothing_is_found() {
        for (text, expected) in [
            ("mechanism = 'softmax'\n[model]\ngamma_schedule = 'power'", "model.gamma_schedule"),
            ("mechanism = 'softmax'\n[model]\ngamma_trainable = false", "model.gamma_trainable"),
            ("mechanism = 'softmax'\n[model]\nkind = 'text'\nalpha_trainable = true", "model.alpha_trainable"),
            ("mechanism = 'softmax'\n[model]\nkind = 'pyramid'\nlambda_trainable = true", "model.lambda_trainable"),
            ("mechanism = 'softmax'\n[model]\nplan_layers = 2", "model.plan_layers"),
            ("[text]\nmax_tokens = 5", "text"),
        ] {
            assert_eq!(fields(text), [expected], "{text}");
        }
        for text in [
            "",
            "mechanism = 'infsa'\n[model]\ngamma_schedule = 'power'\ngamma_trainable = false",
            "mechanism = 'fna'\n[model]\nkind = 'text'\nalpha_trainable = true\nkappa_trainable = true\n[text]\nmax_tokens = 5",
            "mechanism = 'laplacian'\n[model]\nkind = 'pyramid'\nlambda_trainable = true",
            "mechanism = 'ssa'\n[model]\nplan_layers = 2",
        ] {
            assert_eq!(fields(text), [""; 0], "{text}");
        }
    }

    /// No recipe of the program's own says what has no effect.
    #[test]
    fn the_built_in_recipes_say_nothing_in_vain() {
        for builtin in super::super::builtin::names() {
            let recipe = Recipe::built_in(builtin).unwrap();
            assert_eq!(recipe.without_effect(), Vec::new(), "{builtin}");
        }
    }
}
