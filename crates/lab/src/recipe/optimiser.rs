//! The optimiser of a recipe: a rule by `kind`, with the fields of that kind.

use serde::{Deserialize, Serialize};

use super::{Check, check, share};

/// How parameters follow their gradients. Biases, norms, the class token, positions and gamma do not decay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Fields")]
pub struct OptimiserRecipe {
    /// The rule. Default `adamw`.
    #[serde(flatten)]
    pub rule: Rule,
    /// Learning rate at the end of the warm-up. Default by kind: `adamw`, `adam` and `muon` 1e-3, `sgd` 0.1, `lion` 1e-4; > 0.
    pub lr: f64,
    /// Weight decay, times the learning rate per step. Default by kind: `adamw` and `muon` 0.05, `adam` 0, `sgd` 5e-4, `lion` 0.5; >= 0.
    /// With `adam` and `sgd` it is added to the gradient, with the others it acts on the weights beside it.
    pub weight_decay: f64,
    /// Largest norm of the gradient of all parameters together; 0 switches clipping off. Default 1.
    pub clip_norm: f64,
    /// Factor of the learning rate from each layer to the one below: of `depth` blocks, block `l` (from 1) learns with
    /// `layer_decay^(depth + 1 - l)` times the rate, the embeddings with `layer_decay^(depth + 1)` times, the head with the rate itself.
    /// Default 1, in (0, 1].
    pub layer_decay: f64,
}

/// A rule, by `kind`, with its own fields.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Rule {
    /// "Decoupled Weight Decay Regularization".
    Adamw(Moments),
    /// "Adam: A Method for Stochastic Optimization"; the decay is a part of the gradient.
    Adam(Moments),
    /// Stochastic gradient descent with momentum.
    Sgd(Momentum),
    /// "Symbolic Discovery of Optimization Algorithms": the sign of the momentum.
    Lion(Lion),
    /// "Muon is Scalable for LLM Training": the momentum of the blocks' matrices is made orthogonal, with the update's size matched to
    /// AdamW's; every other parameter follows AdamW.
    Muon(Muon),
}

/// What Adam and AdamW remember.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Moments {
    /// Decay of the two moments. Default [0.9, 0.999], in [0, 1).
    pub betas: [f64; 2],
    /// Added to the root of the second moment. Default 1e-8, > 0.
    pub eps: f64,
}

/// What gradient descent remembers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Momentum {
    /// Decay of the sum of gradients; 0: none is kept. Default 0.9, in [0, 1).
    pub momentum: f64,
    /// Step from where the momentum leads. Default false; needs momentum.
    pub nesterov: bool,
}

/// What Lion remembers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Lion {
    /// Share of the momentum in the direction, and decay of the momentum. Default [0.9, 0.99], in [0, 1).
    pub betas: [f64; 2],
}

/// What Muon remembers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Muon {
    /// Decay of the sum of gradients of the blocks' matrices. Default 0.95, in [0, 1).
    pub momentum: f64,
    /// Step from where the momentum leads. Default true; needs momentum.
    pub nesterov: bool,
    /// Newton-Schulz iterations of a step. Default 5, 1 to 20.
    pub ns_steps: usize,
    /// Of AdamW, for the other parameters. Default [0.9, 0.999], in [0, 1).
    pub betas: [f64; 2],
    /// Of AdamW, for the other parameters. Default 1e-8, > 0.
    pub eps: f64,
}

/// The kinds by name, and every field of any of them, as a recipe may give it.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Fields {
    kind: Kind,
    lr: Option<f64>,
    weight_decay: Option<f64>,
    clip_norm: Option<f64>,
    layer_decay: Option<f64>,
    betas: Option<[f64; 2]>,
    eps: Option<f64>,
    momentum: Option<f64>,
    nesterov: Option<bool>,
    ns_steps: Option<usize>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    #[default]
    Adamw,
    Adam,
    Sgd,
    Lion,
    Muon,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Adamw, Self::Adam, Self::Sgd, Self::Lion, Self::Muon];

    const fn name(self) -> &'static str {
        match self {
            Self::Adamw => "adamw",
            Self::Adam => "adam",
            Self::Sgd => "sgd",
            Self::Lion => "lion",
            Self::Muon => "muon",
        }
    }

    /// The fields that not every kind has.
    const fn fields(self) -> &'static [&'static str] {
        match self {
            Self::Adamw | Self::Adam => &["betas", "eps"],
            Self::Sgd => &["momentum", "nesterov"],
            Self::Lion => &["betas"],
            Self::Muon => &["momentum", "nesterov", "ns_steps", "betas", "eps"],
        }
    }

    /// Learning rate and weight decay where none is named.
    const fn defaults(self) -> (f64, f64) {
        match self {
            Self::Adamw | Self::Muon => (1e-3, 0.05),
            Self::Adam => (1e-3, 0.0),
            Self::Sgd => (0.1, 5e-4),
            Self::Lion => (1e-4, 0.5),
        }
    }
}

/// What is said of a `field` that the kind `named` has not, while others have.
pub(super) fn foreign(field: &str, named: &str, own: &[&str], others: &[&str]) -> String {
    let others = others.iter().map(|kind| format!("`{kind}`")).collect::<Vec<_>>().join(", ");
    let own = if own.is_empty() { "none" } else { &own.join(", ") };
    format!("`{field}` is no field of the kind `{named}`, whose own fields are: {own}; it is one of {others}")
}

impl TryFrom<Fields> for OptimiserRecipe {
    type Error = String;

    fn try_from(given: Fields) -> Result<Self, String> {
        let kind = given.kind;
        let named = [
            ("betas", given.betas.is_some()),
            ("eps", given.eps.is_some()),
            ("momentum", given.momentum.is_some()),
            ("nesterov", given.nesterov.is_some()),
            ("ns_steps", given.ns_steps.is_some()),
        ];
        if let Some((field, _)) = named.iter().find(|(field, given)| *given && !kind.fields().contains(field)) {
            let others = Kind::ALL.iter().filter(|kind| kind.fields().contains(field)).map(|kind| kind.name());
            return Err(foreign(field, kind.name(), kind.fields(), &others.collect::<Vec<_>>()));
        }
        let betas = given.betas.unwrap_or([0.9, if kind == Kind::Lion { 0.99 } else { 0.999 }]);
        let eps = given.eps.unwrap_or(1e-8);
        let rule = match kind {
            Kind::Adamw => Rule::Adamw(Moments { betas, eps }),
            Kind::Adam => Rule::Adam(Moments { betas, eps }),
            Kind::Sgd => Rule::Sgd(Momentum {
                momentum: given.momentum.unwrap_or(0.9),
                nesterov: given.nesterov.unwrap_or(false),
            }),
            Kind::Lion => Rule::Lion(Lion { betas }),
            Kind::Muon => Rule::Muon(Muon {
                momentum: given.momentum.unwrap_or(0.95),
                nesterov: given.nesterov.unwrap_or(true),
                ns_steps: given.ns_steps.unwrap_or(5),
                betas,
                eps,
            }),
        };
        let (lr, weight_decay) = kind.defaults();
        Ok(Self {
            rule,
            lr: given.lr.unwrap_or(lr),
            weight_decay: given.weight_decay.unwrap_or(weight_decay),
            clip_norm: given.clip_norm.unwrap_or(1.0),
            layer_decay: given.layer_decay.unwrap_or(1.0),
        })
    }
}

impl Default for OptimiserRecipe {
    fn default() -> Self {
        let rule = Rule::Adamw(Moments { betas: [0.9, 0.999], eps: 1e-8 });
        Self { rule, lr: 1e-3, weight_decay: 0.05, clip_norm: 1.0, layer_decay: 1.0 }
    }
}

impl OptimiserRecipe {
    /// The name of the rule.
    pub const fn kind(&self) -> &'static str {
        match self.rule {
            Rule::Adamw(_) => Kind::Adamw.name(),
            Rule::Adam(_) => Kind::Adam.name(),
            Rule::Sgd(_) => Kind::Sgd.name(),
            Rule::Lion(_) => Kind::Lion.name(),
            Rule::Muon(_) => Kind::Muon.name(),
        }
    }

    pub(super) fn checks(&self) -> Vec<Check> {
        let positive = |x: f64| x.is_finite() && x > 0.0;
        let betas = |b: [f64; 2]| check("optimiser.betas", b, b.iter().all(|b| share(*b)), "two numbers in [0, 1)");
        let eps = |x: f64| check("optimiser.eps", x, positive(x), "finite and > 0");
        let momentum = |x: f64| check("optimiser.momentum", x, share(x), "in [0, 1)");
        let nesterov =
            |on: bool, x: f64| check("optimiser.nesterov", on, !on || x > 0.0, "false without `optimiser.momentum`");
        let mut checks = vec![
            check("optimiser.lr", self.lr, positive(self.lr), "finite and > 0"),
            check(
                "optimiser.weight_decay",
                self.weight_decay,
                self.weight_decay.is_finite() && self.weight_decay >= 0.0,
                "finite and >= 0",
            ),
            check(
                "optimiser.clip_norm",
                self.clip_norm,
                self.clip_norm.is_finite() && self.clip_norm >= 0.0,
                "finite and >= 0",
            ),
            check(
                "optimiser.layer_decay",
                self.layer_decay,
                self.layer_decay > 0.0 && self.layer_decay <= 1.0,
                "in (0, 1]",
            ),
        ];
        match &self.rule {
            Rule::Adamw(m) | Rule::Adam(m) => checks.extend([betas(m.betas), eps(m.eps)]),
            Rule::Sgd(m) => checks.extend([momentum(m.momentum), nesterov(m.nesterov, m.momentum)]),
            Rule::Lion(m) => checks.push(betas(m.betas)),
            Rule::Muon(m) => {
                let steps = check("optimiser.ns_steps", m.ns_steps, (1..=20).contains(&m.ns_steps), "1 to 20");
                checks.extend([
                    momentum(m.momentum),
                    nesterov(m.nesterov, m.momentum),
                    steps,
                    betas(m.betas),
                    eps(m.eps),
                ]);
            }
        }
        checks
    }
}

#[cfg(test)]
mod tests {
    use super::super::Recipe;
    use super::*;

    fn read(text: &str) -> Result<OptimiserRecipe, String> {
        let recipe = Recipe::from_toml(&format!("[optimiser]\n{text}"), "r").map_err(|e| e.to_string())?;
        assert_eq!(Recipe::from_toml(&recipe.to_toml().unwrap(), "again").unwrap(), recipe);
        Ok(recipe.optimiser)
    }

    #[test]
    fn every_kind_has_fields_and_defaults_of_its_own() {
        assert_eq!(read("").unwrap(), OptimiserRecipe::default());
        assert_eq!(read("kind = 'adamw'").unwrap(), OptimiserRecipe::default());
        for kind in Kind::ALL {
            let read = read(&format!("kind = '{}'\nclip_norm = 2", kind.name())).unwrap();
            assert_eq!(
                (read.kind(), read.clip_norm, (read.lr, read.weight_decay)),
                (kind.name(), 2.0, kind.defaults())
            );
        }
        assert_eq!(read("kind = 'lion'").unwrap().rule, Rule::Lion(Lion { betas: [0.9, 0.99] }));
        let sgd = Rule::Sgd(Momentum { momentum: 0.8, nesterov: true });
        assert_eq!(read("kind = 'sgd'\nmomentum = 0.8\nnesterov = true").unwrap().rule, sgd);
    }

    #[test]
    fn fields_of_other_kinds_and_values_out_of_range_are_refused() {
        for (text, parts) in [
            ("momentum = 0.9", &["optimiser", "`momentum`", "`adamw`", "`sgd`, `muon`"][..]),
            ("kind = 'sgd'\nbetas = [0.9, 0.99]", &["`betas`", "`sgd`", "momentum, nesterov"]),
            ("kind = 'lion'\neps = 1e-8", &["`eps`", "`lion`"]),
            ("kind = 'lino'", &["optimiser.kind", "lino", "`lion`"]),
            ("kind = 'sgd'\nmomentum = 1", &["optimiser.momentum", "[0, 1)"]),
            ("kind = 'sgd'\nmomentum = 0\nnesterov = true", &["optimiser.nesterov", "optimiser.momentum"]),
            ("kind = 'muon'\nns_steps = 0", &["optimiser.ns_steps", "1 to 20"]),
            ("layer_decay = 0", &["optimiser.layer_decay", "(0, 1]"]),
            ("lr = '1'", &["optimiser.lr", "expected f64"]),
        ] {
            let message = read(text).unwrap_err();
            parts.iter().for_each(|part| assert!(message.contains(part), "{message} lacks {part}"));
        }
    }
}
