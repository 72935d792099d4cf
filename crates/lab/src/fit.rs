//! A mechanism for every head of a model: the file that a fit leaves, and how a model takes it in place of softmax.

use std::{collections::BTreeMap, path::Path};

use resolvent::attention::{HeadGroup, MultiHeadAttention};
use resolvent_kernels::Mechanism;
use serde::{Deserialize, Serialize};

use crate::{Error, Result, named};

/// The file of a fit in its folder.
pub const FIT: &str = "fit.json";

named! {
    /// What the target of a fit is of.
    pub enum Measure {
        /// The mean over tokens of the cosine between a head's output and softmax's; at least the target.
        Cosine = "cosine",
        /// The length of the difference of both over that of softmax's output; at most the target.
        Error = "error",
    }
}

named! {
    /// What a fit saves.
    pub enum Cost {
        /// Seconds of the forward pass, on this machine and by its threads, plans made anew.
        Time = "time",
        /// Products, sums and exponentials, as [`resolvent_kernels::Plan`] counts them: the same on every machine.
        Operations = "operations",
    }
}

impl Measure {
    /// How far an output may be where `target` is to be reached; 0 is softmax's own output.
    pub const fn limit(self, target: f64) -> f64 {
        match self {
            Self::Cosine => 1.0 - target,
            Self::Error => target,
        }
    }

    /// The measure of an output that is so far.
    pub const fn of_distance(self, distance: f64) -> f64 {
        self.limit(distance)
    }
}

/// The mechanisms of one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FittedLayer {
    /// As the dump called it.
    pub name: String,
    /// Its heads.
    pub heads: usize,
    /// Its heads by mechanism: every head is in one of them.
    pub groups: Vec<HeadGroup>,
}

/// A mechanism for every head of every layer of a model: `fit.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FitFile {
    /// The version of the format, 1.
    pub fit: u32,
    /// What the target is of: `cosine` or `error`.
    pub measure: Measure,
    /// What every head was to reach.
    pub target: f64,
    /// What was to be saved: `time` or `operations`.
    pub cost: Cost,
    /// The share of dense softmax's cost that all heads together could take; none, where there was no limit.
    pub budget: Option<f64>,
    /// Whether tokens saw themselves and earlier ones only.
    pub causal: bool,
    /// Layer by layer.
    pub layers: Vec<FittedLayer>,
}

impl FitFile {
    /// The version of the format.
    pub const VERSION: u32 = 1;

    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Damaged`] naming the field, for what is no fit, of another version, or leaves a head without a mechanism or
    /// gives it two.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io(path, "cannot be read"))?;
        Self::parse(&text).map_err(|problem| Error::damaged(path, problem))
    }

    /// Whether `text` is JSON that says of itself that it is a fit.
    pub fn is_one(text: &str) -> bool {
        serde_json::from_str::<serde_json::Value>(text).is_ok_and(|value| value.get("fit").is_some())
    }

    /// Reads and checks what a file holds.
    ///
    /// # Errors
    /// The field and what is wrong with it.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        Self::from_value(serde_json::from_str(text).map_err(|e| format!("is no JSON: {e}"))?)
    }

    /// Checks what a document holds.
    pub(crate) fn from_value(value: serde_json::Value) -> std::result::Result<Self, String> {
        let version = &value["fit"];
        if *version != Self::VERSION {
            return Err(format!("`fit` is {version}; this program reads version {}", Self::VERSION));
        }
        let found: Self = serde_json::from_value(value).map_err(|e| e.to_string())?;
        found.layers.iter().try_for_each(FittedLayer::check)?;
        let twice = |(n, layer): (usize, &FittedLayer)| found.layers[..n].iter().any(|other| other.name == layer.name);
        match found.layers.iter().enumerate().find(|&layer| twice(layer)) {
            Some((_, layer)) => Err(format!("layer `{}` stands there twice", layer.name)),
            None => Ok(found),
        }
    }

    /// How many heads have which mechanism: `routed 20, softmax 4`.
    pub fn heads(&self) -> String {
        let mut counts = BTreeMap::new();
        for group in self.layers.iter().flat_map(|layer| &layer.groups) {
            *counts.entry(group.mechanism.id()).or_insert(0) += group.heads.len();
        }
        counts.iter().map(|(id, heads)| format!("{id} {heads}")).collect::<Vec<_>>().join(", ")
    }

    /// The layer called `name`; where none is named, the only one.
    ///
    /// # Errors
    /// The names that there are, in words.
    pub fn layer(&self, name: Option<&str>) -> std::result::Result<&FittedLayer, String> {
        let names = || self.layers.iter().map(|layer| layer.name.as_str()).collect::<Vec<_>>().join(", ");
        match (name, &self.layers[..]) {
            (None, [only]) => Ok(only),
            (None, _) => Err(format!("holds several layers; name one of {}", names())),
            (Some(name), layers) => layers
                .iter()
                .find(|layer| layer.name == name)
                .ok_or_else(|| format!("holds no layer `{name}`; it has {}", names())),
        }
    }

    /// Gives the heads of `layers`, a model's, their mechanisms.
    ///
    /// # Errors
    /// What of the fit is not of the model, in words.
    pub(crate) fn apply(&self, mut layers: Vec<(String, &mut MultiHeadAttention)>) -> std::result::Result<(), String> {
        for fitted in &self.layers {
            let there = layers.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
            let Some((_, layer)) = layers.iter_mut().find(|(name, _)| *name == fitted.name) else {
                return Err(format!("has a layer `{}`, the model has {there}", fitted.name));
            };
            if layer.n_heads != fitted.heads {
                return Err(format!(
                    "has a layer `{}` of {} heads, the model one of {}",
                    fitted.name, fitted.heads, layer.n_heads
                ));
            }
            **layer = layer.clone().with_head_groups(fitted.groups.clone()).map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}

impl FittedLayer {
    /// Groups the heads by the mechanisms that `of` gives them.
    pub fn group(name: &str, heads: usize, of: impl Fn(usize) -> Mechanism) -> Self {
        let mut groups: Vec<HeadGroup> = Vec::new();
        for head in 0..heads {
            let mechanism = of(head);
            match groups.iter_mut().find(|group| group.mechanism == mechanism) {
                Some(group) => group.heads.push(head),
                None => groups.push(HeadGroup { heads: vec![head], mechanism }),
            }
        }
        Self { name: name.to_owned(), heads, groups }
    }

    /// Whether every head has one mechanism.
    fn check(&self) -> std::result::Result<(), String> {
        let told = HeadGroup::check(&self.groups, self.heads);
        told.map_err(|problem| format!("layer `{}`, {problem}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(groups: &str) -> String {
        format!(
            r#"{{"fit": 1, "measure": "cosine", "target": 0.99, "cost": "time", "budget": null, "causal": false, "more": 1,
                "layers": [{{"name": "a", "heads": 3, "groups": {groups}}}, {{"name": "b", "heads": 0, "groups": []}}]}}"#
        )
    }

    #[test]
    fn heads_have_one_mechanism_each() {
        let good = text(
            r#"[{"heads": [0, 2], "mechanism": {"mechanism": "uniform"}}, {"heads": [1], "mechanism": {"mechanism": "softmax"}}]"#,
        );
        assert!(FitFile::is_one(&good) && !FitFile::is_one(r#"{"mechanism": "ssa"}"#) && !FitFile::is_one("["));
        let fit = FitFile::parse(&good).unwrap();
        let again = FitFile::parse(&serde_json::to_string(&fit).unwrap()).unwrap();
        assert_eq!(again, fit);
        let by_head = |head: usize| fit.layers[0].groups.iter().find(|group| group.heads.contains(&head)).unwrap();
        assert_eq!(FittedLayer::group("a", 3, |head| by_head(head).mechanism.clone()), fit.layers[0]);
        assert_eq!(fit.layer(Some("a")), Ok(&fit.layers[0]));
        assert!(fit.layer(None).unwrap_err().contains("name one of a, b"));
        assert!(fit.layer(Some("c")).unwrap_err().contains("no layer `c`"));
        for (groups, told) in [
            (
                r#"[{"heads": [0, 1, 1, 2], "mechanism": {"mechanism": "softmax"}}]"#,
                "entry 2 of `groups[].heads` is 1: it is there twice",
            ),
            (r#"[{"heads": [0, 1, 3], "mechanism": {"mechanism": "softmax"}}]"#, "is 3: there are fewer"),
            (r#"[{"heads": [0, 2], "mechanism": {"mechanism": "softmax"}}]"#, "head 1 has no mechanism"),
            (r#"[{"heads": [0, 1, 2], "mechanism": {"mechanism": "softmaxx"}}]"#, "softmaxx"),
            (r#"[{"heads": [0, 1, 2], "mechanism": {"mechanism": "softmax", "bias": "alibi"}}]"#, "single heads"),
        ] {
            let problem = FitFile::parse(&text(groups)).unwrap_err();
            assert!(problem.contains(told), "{problem}");
        }
        let other = good.replace(r#""fit": 1"#, r#""fit": 2"#);
        assert!(FitFile::parse(&other).unwrap_err().contains("reads version 1"));
        let twice = good.replace(r#""name": "b""#, r#""name": "a""#);
        assert!(FitFile::parse(&twice).unwrap_err().contains("layer `a` stands there twice"));
    }
}
