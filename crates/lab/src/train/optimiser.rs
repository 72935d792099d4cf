//! Burn's optimisers by the recipe, each with groups of parameters, and the learning rate of each layer.

use burn::{
    lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler},
    module::{Module, ModuleVisitor, Param, ParamGroup},
    optim::{
        AdamConfig, AdamW, AdamWConfig, AdjustLrFn, LionConfig, ModuleOptimizer, MuonConfig, Optimizer, SgdConfig,
        decay::WeightDecayConfig, momentum::MomentumConfig,
    },
    tensor::Tensor,
};

use crate::recipe::{Moments, Muon, OptimiserRecipe, Rule};

/// The recipe's optimiser over `model`: weight matrices and kernels decay; biases, norms, the class token, positions and gamma do not.
pub fn optimiser<M: Module>(recipe: &OptimiserRecipe, model: &M) -> ModuleOptimizer {
    let decay = recipe.weight_decay as f32;
    let penalty = |decay: f32| (decay > 0.0).then(|| WeightDecayConfig::new(decay));
    match &recipe.rule {
        Rule::Adamw(moments) => grouped(model, decay, |decay| adamw(moments, decay)),
        Rule::Adam(Moments { betas, eps }) => grouped(model, decay, |decay| {
            AdamConfig::new()
                .with_beta_1(betas[0] as f32)
                .with_beta_2(betas[1] as f32)
                .with_epsilon(*eps as f32)
                .with_weight_decay(penalty(decay))
                .build()
        }),
        Rule::Sgd(sgd) => grouped(model, decay, |decay| {
            let momentum = (sgd.momentum > 0.0).then(|| momentum(sgd.momentum, sgd.nesterov));
            SgdConfig::new().with_momentum(momentum).with_weight_decay(penalty(decay)).build()
        }),
        Rule::Lion(lion) => grouped(model, decay, |decay| {
            let [beta_1, beta_2] = lion.betas.map(|beta| beta as f32);
            LionConfig::new().with_beta_1(beta_1).with_beta_2(beta_2).with_weight_decay(decay).build()
        }),
        Rule::Muon(Muon { momentum: share, nesterov, ns_steps, betas, eps }) => {
            let muon = MuonConfig::new()
                .with_momentum(momentum(*share, *nesterov))
                .with_ns_steps(*ns_steps)
                .with_weight_decay(penalty(decay))
                // One learning rate is for these matrices and for what follows AdamW.
                .with_adjust_lr_fn(AdjustLrFn::MatchRmsAdamW);
            let moments = Moments { betas: *betas, eps: *eps };
            let rest = grouped(model, decay, |decay| adamw(&moments, decay));
            rest.with_group(ParamGroup::from_paths(block_matrices(model)), muon.build(), None)
        }
    }
}

fn adamw(Moments { betas, eps }: &Moments, weight_decay: f32) -> AdamW {
    AdamWConfig::new()
        .with_beta_1(betas[0] as f32)
        .with_beta_2(betas[1] as f32)
        .with_epsilon(*eps as f32)
        .with_weight_decay(weight_decay)
        .build()
}

/// Without the dampening that Burn has by default and others do not.
fn momentum(momentum: f64, nesterov: bool) -> MomentumConfig {
    MomentumConfig { momentum, dampening: 0.0, nesterov }
}

/// Two groups: what decays, by `decay`, and what does not.
fn grouped<M: Module, O: Optimizer>(model: &M, decay: f32, rule: impl Fn(f32) -> O) -> ModuleOptimizer {
    let decayed = ParamGroup::from_paths(decayed_parameters(model));
    ModuleOptimizer::from(rule(0.0)).with_group(decayed, rule(decay), None)
}

/// Paths of the parameters that decay: those called a `weight` (of a layer, of a filter) with at least two axes.
pub fn decayed_parameters<M: Module>(model: &M) -> Vec<String> {
    let decays = |(path, axes): (String, usize)| {
        let last = path.rsplit('.').next().unwrap_or_default();
        (axes >= 2 && last.ends_with("weight")).then_some(path)
    };
    parameters(model).into_iter().filter_map(decays).collect()
}

/// Paths of the matrices of the blocks, which Muon is for; embeddings and heads are not.
fn block_matrices<M: Module>(model: &M) -> Vec<String> {
    let matrix = |(path, axes): (String, usize)| {
        let last = path.rsplit('.').next().unwrap_or_default();
        (axes == 2 && last.ends_with("weight") && block(&path).is_some()).then_some(path)
    };
    parameters(model).into_iter().filter_map(matrix).collect()
}

/// Path and number of axes of every float parameter.
fn parameters<M: Module>(model: &M) -> Vec<(String, usize)> {
    #[derive(Default)]
    struct Paths {
        path: Vec<String>,
        found: Vec<(String, usize)>,
    }
    impl ModuleVisitor for Paths {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.into());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
            self.found.push((self.path.join("."), D));
        }
    }
    let mut paths = Paths::default();
    model.visit(&mut paths);
    paths.found
}

/// Stage (0 where there are none) and number of the block that a parameter is in, from 0.
fn block(path: &str) -> Option<(usize, usize)> {
    let number = |of: &str| {
        let mut names = path.split('.').skip_while(|name| *name != of);
        names.nth(1).and_then(|number| number.parse::<usize>().ok())
    };
    Some((number("stages").unwrap_or(0), number("blocks")?))
}

/// The learning rates of the layers of a model: [`OptimiserRecipe::layer_decay`].
#[derive(Debug)]
pub struct LayerRates {
    /// Parameters with the factor of their rate, where it is not 1.
    groups: Vec<(ParamGroup, f64)>,
}

impl LayerRates {
    /// Those of `model`. Blocks are counted through all stages; encoder and decoder of a translator each count their own.
    pub fn new<M: Module>(decay: f64, model: &M) -> Self {
        let paths = parameters(model);
        let mut blocks: Vec<_> = paths.iter().filter_map(|(path, _)| block(path)).collect();
        blocks.sort_unstable();
        blocks.dedup();
        let mut layers = vec![Vec::new(); blocks.len() + 1];
        for (path, _) in paths {
            if let Some(layer) = layer(&path, &blocks) {
                layers[layer].push(path);
            }
        }
        let factor = |layer: usize| decay.powi((blocks.len() + 1 - layer) as i32);
        let groups = layers.into_iter().enumerate().filter(|(_, paths)| decay < 1.0 && !paths.is_empty());
        Self { groups: groups.map(|(layer, paths)| (ParamGroup::from_paths(paths), factor(layer))).collect() }
    }

    /// The rates where that of the head is `rate`.
    pub fn at(&self, rate: f64) -> ModuleLearningRate {
        if self.groups.is_empty() {
            return rate.into();
        }
        let base = ModuleLrScheduler::new(rate);
        let with =
            |all: ModuleLrScheduler, (group, factor): &(ParamGroup, f64)| all.with_group(group.clone(), rate * factor);
        self.groups.iter().fold(base, with).step()
    }
}

/// The layer of a parameter: 0 the embeddings, then the blocks; none for what comes after them (the last norm, the head).
fn layer(path: &str, blocks: &[(usize, usize)]) -> Option<usize> {
    if let Some(own) = block(path) {
        return blocks.iter().position(|block| *block == own).map(|position| position + 1);
    }
    // What enters a stage goes with its first block, what enters the model with the embeddings.
    let stage = path.split('.').skip_while(|name| *name != "stages").nth(1).and_then(|stage| stage.parse().ok());
    if let Some(stage) = stage {
        let first = blocks.iter().position(|block| *block == (stage, 0));
        return first.map(|position| if position == 0 { 0 } else { position + 1 });
    }
    let above = ["norm", "head", "pre_logits"];
    (!path.split('.').any(|name| above.contains(&name))).then_some(0)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use resolvent::{
        Mechanism,
        models::{PyramidConfig, VitConfig},
    };

    use super::*;

    fn rates<M: Module>(model: &M, decay: f64) -> Vec<(String, f64)> {
        let rates = LayerRates::new(decay, model).at(2.0);
        let id = burn::module::ParamId::new();
        parameters(model)
            .into_iter()
            .map(|(path, _)| {
                let rate = rates.lr_from_param(id, Some(&path));
                (path, rate)
            })
            .collect()
    }

    #[test]
    fn layers_learn_at_rates_of_their_own() {
        let mechanism = Mechanism::preset("softmax").unwrap();
        let config = VitConfig { dim: 8, depth: 2, heads: 2, mlp_dim: 8, ..VitConfig::new([8, 8], 1, 4, 3, mechanism) };
        let model = config.try_init(&Device::flex()).unwrap();
        assert!(rates(&model, 1.0).iter().all(|(_, rate)| *rate == 2.0));
        for (path, rate) in rates(&model, 0.5) {
            let expected = match path.split('.').collect::<Vec<_>>()[..] {
                ["blocks", "0", ..] => 0.5,
                ["blocks", "1", ..] => 1.0,
                ["norm" | "head", ..] => 2.0,
                _ => 0.25,
            };
            assert_eq!(rate, expected, "{path}");
        }
    }

    #[test]
    fn blocks_of_a_pyramid_are_counted_through_its_stages() {
        let config = PyramidConfig::preset("soft-mini").unwrap().for_pictures([32, 32], 3, 4);
        let depth: usize = config.stages.iter().map(|stage| stage.depth).sum();
        let rates = rates(&config.try_init(&Device::flex()).unwrap(), 0.5);
        let of = |start: &str| rates.iter().find(|(path, _)| path.starts_with(start)).unwrap().1;
        let layer = |number: usize| 2.0 * 0.5_f64.powi((depth + 1 - number) as i32);
        let first = config.stages[0].depth;
        assert_eq!((of("stages.0.embedding"), of("stages.0.blocks.0"), of("head")), (layer(0), layer(1), 2.0));
        assert_eq!((of("stages.1.embedding"), of("stages.1.blocks.0")), (layer(first + 1), layer(first + 1)));
    }

    #[test]
    fn muon_is_for_the_matrices_of_blocks() {
        let mechanism = Mechanism::preset("infsa").unwrap();
        let config = VitConfig { dim: 8, depth: 1, heads: 2, mlp_dim: 8, ..VitConfig::new([8, 8], 1, 4, 3, mechanism) };
        let mut matrices = block_matrices(&config.try_init(&Device::flex()).unwrap());
        matrices.sort();
        let of_block = ["attention.output", "attention.projection", "mlp_in", "mlp_out"];
        assert_eq!(matrices, of_block.map(|layer| format!("blocks.0.{layer}.weight")));
    }
}
