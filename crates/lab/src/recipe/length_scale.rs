//! The length scale of distance kernels where none is named. "Fractional neural attention for efficient multiscale sequence
//! processing" has one rule for texts and another for pictures and translations.

use resolvent_kernels::{
    Mechanism,
    mechanism::{Kappa, KappaRule, Manifold},
};

use super::{Layer, ModelRecipe, Recipe};

/// `mechanism` with its length scale by `rule`, where it measures distances on the plane and names no length scale.
pub fn with_length_scale(mut mechanism: Mechanism, rule: KappaRule) -> Mechanism {
    if let Some((kappa @ None, Manifold::Euclidean)) = mechanism.length_scale_mut() {
        *kappa = Some(Kappa::Rule(rule));
    }
    mechanism
}

/// The name of a rule in recipes.
pub const fn rule_name(rule: KappaRule) -> &'static str {
    match rule {
        KappaRule::Text => "text",
        KappaRule::Vision => "vision",
        KappaRule::Sphere => "sphere",
    }
}

/// The rule that gives `mechanism` its length scale, where it has been named.
pub fn length_scale_rule(mechanism: &Mechanism) -> Option<KappaRule> {
    match mechanism.clone().length_scale_mut() {
        Some((Some(Kappa::Rule(rule)), _)) => Some(*rule),
        _ => None,
    }
}

impl Recipe {
    /// The recipe with [`with_length_scale`] in every place that has a mechanism.
    pub(crate) fn with_length_scale(&self, rule: KappaRule) -> Self {
        let mut recipe = self.clone();
        let others: Vec<&mut Mechanism> = match &mut recipe.model {
            ModelRecipe::Text(m) => m.decoder.iter_mut().chain(&mut m.cross).map(AsMut::as_mut).collect(),
            ModelRecipe::Language(m) => m.layers.iter_mut().filter_map(other).collect(),
            ModelRecipe::Pyramid(m) => {
                m.stages.iter_mut().flat_map(|stages| stages.iter_mut()).filter_map(|s| s.mechanism.as_mut()).collect()
            }
            ModelRecipe::Vit(_) | ModelRecipe::Own(_) => Vec::new(),
        };
        for mechanism in others.into_iter().chain([&mut recipe.mechanism]) {
            *mechanism = with_length_scale(mechanism.clone(), rule);
        }
        recipe
    }
}

fn other(layer: &mut Layer) -> Option<&mut Mechanism> {
    match layer {
        Layer::Own => None,
        Layer::Other(mechanism) => Some(mechanism),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Mechanism {
        Mechanism::from_json(json).unwrap()
    }

    #[test]
    fn a_rule_is_taken_where_none_is_named() {
        let plain = with_length_scale(read(r#"{"mechanism": "fna"}"#), KappaRule::Vision);
        assert_eq!(plain, read(r#"{"mechanism": "fna", "kappa": "vision"}"#));
        assert_eq!(length_scale_rule(&plain), Some(KappaRule::Vision));
        let composed = r#"{"mechanism": "composed", "score": {"kind": "student"}, "structure": {"kind": "dense"}}"#;
        assert_eq!(length_scale_rule(&with_length_scale(read(composed), KappaRule::Vision)), Some(KappaRule::Vision));
        for kept in [
            r#"{"mechanism": "fna", "kappa": "text"}"#,
            r#"{"mechanism": "fna", "kappa": 3.0}"#,
            r#"{"mechanism": "fna", "manifold": "sphere"}"#,
            r#"{"mechanism": "softmax"}"#,
        ] {
            assert_eq!(with_length_scale(read(kept), KappaRule::Vision), read(kept));
        }
    }

    #[test]
    fn every_mechanism_of_a_recipe_is_given_one() {
        let stage = "{ dim = 16, depth = 1, heads = 1, mlp_ratio = 2, ratio = 1";
        let stages = format!(
            "[{stage}, mechanism = {{ mechanism = 'fna' }} }}, {stage} }}, {stage}, mechanism = {{ mechanism = 'fna' }} }}, {stage} }}]"
        );
        let pyramid = format!("mechanism = 'fna'\n[model]\nkind = 'pyramid'\nstages = {stages}");
        for text in [
            &pyramid[..],
            "mechanism = 'fna'\n[model]\nkind = 'text'\ndecoder = 'fna'\ncross = 'fna'",
            "mechanism = 'fna'\n[model]\nkind = 'language'\nlayers = ['own', 'fna']",
        ] {
            let recipe = Recipe::from_toml(text, "test").unwrap().with_length_scale(KappaRule::Vision);
            let rules: Vec<_> = recipe.mechanisms().map(|m| length_scale_rule(&m)).collect();
            assert_eq!(rules, vec![Some(KappaRule::Vision); 3], "{text}");
        }
    }
}
