//! The optimiser of a recipe: a rule by `kind`, with the fields of that kind.

use serde::{Deserialize, Deserializer, Serialize};

use super::{Check, check, section::by_kind, share};

/// How parameters follow their gradients. Biases, norms, the class token, positions and gamma do not decay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Moments {
    /// Decay of the two moments. Default [0.9, 0.999], in [0, 1).
    pub betas: [f64; 2],
    /// Added to the root of the second moment. Default 1e-8, > 0.
    pub eps: f64,
}

/// What gradient descent remembers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Momentum {
    /// Decay of the sum of gradients; 0: none is kept. Default 0.9, in [0, 1).
    pub momentum: f64,
    /// Step from where the momentum leads. Default false; needs momentum.
    pub nesterov: bool,
}

/// What Lion remembers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lion {
    /// Share of the momentum in the direction, and decay of the momentum. Default [0.9, 0.99], in [0, 1).
    pub betas: [f64; 2],
}

/// What Muon remembers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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

/// Every kind with its defaults, the default first.
fn kinds() -> [OptimiserRecipe; 5] {
    let (betas, eps) = ([0.9, 0.999], 1e-8);
    let moments = Moments { betas, eps };
    let muon = Muon { momentum: 0.95, nesterov: true, ns_steps: 5, betas, eps };
    [
        (Rule::Adamw(moments.clone()), 1e-3, 0.05),
        (Rule::Adam(moments), 1e-3, 0.0),
        (Rule::Sgd(Momentum { momentum: 0.9, nesterov: false }), 0.1, 5e-4),
        (Rule::Lion(Lion { betas: [0.9, 0.99] }), 1e-4, 0.5),
        (Rule::Muon(muon), 1e-3, 0.05),
    ]
    .map(|(rule, lr, weight_decay)| OptimiserRecipe { rule, lr, weight_decay, clip_norm: 1.0, layer_decay: 1.0 })
}

/// Of a recipe, with the defaults of its kind.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<OptimiserRecipe, D::Error> {
    by_kind(d, "optimiser", &kinds(), &[])
}

impl Default for OptimiserRecipe {
    fn default() -> Self {
        let [adamw, ..] = kinds();
        adamw
    }
}

impl OptimiserRecipe {
    /// The name of the rule.
    pub const fn kind(&self) -> &'static str {
        match self.rule {
            Rule::Adamw(_) => "adamw",
            Rule::Adam(_) => "adam",
            Rule::Sgd(_) => "sgd",
            Rule::Lion(_) => "lion",
            Rule::Muon(_) => "muon",
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
        for kind in kinds() {
            let read = read(&format!("kind = '{}'\nclip_norm = 2", kind.kind())).unwrap();
            assert_eq!(read, OptimiserRecipe { clip_norm: 2.0, ..kind });
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
