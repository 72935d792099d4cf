//! Burn's AdamW with two groups of parameters.

use burn::{
    module::{Module, ModuleVisitor, Param, ParamGroup},
    optim::{AdamWConfig, ModuleOptimizer},
    tensor::Tensor,
};

use crate::recipe::OptimiserRecipe;

/// AdamW over `model`: weight matrices and kernels decay; biases, norms, the class token, positions and gamma do not.
pub fn adamw<M: Module>(recipe: &OptimiserRecipe, model: &M) -> ModuleOptimizer {
    let config = |weight_decay| {
        AdamWConfig::new()
            .with_beta_1(recipe.betas[0] as f32)
            .with_beta_2(recipe.betas[1] as f32)
            .with_epsilon(recipe.eps as f32)
            .with_weight_decay(weight_decay)
            .build()
    };
    let decayed = decayed_parameters(model);
    ModuleOptimizer::from(config(0.0)).with_group(
        ParamGroup::from_paths(decayed),
        config(recipe.weight_decay as f32),
        None,
    )
}

/// Paths of the parameters that decay: those called a `weight` (of a layer, of a filter) with at least two axes.
pub fn decayed_parameters<M: Module>(model: &M) -> Vec<String> {
    #[derive(Default)]
    struct Paths {
        path: Vec<String>,
        decayed: Vec<String>,
    }
    impl ModuleVisitor for Paths {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.into());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
            if D >= 2 && self.path.last().is_some_and(|name| name.ends_with("weight")) {
                self.decayed.push(self.path.join("."));
            }
        }
    }
    let mut paths = Paths::default();
    model.visit(&mut paths);
    paths.decayed
}
