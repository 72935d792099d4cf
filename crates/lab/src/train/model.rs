//! The model of a recipe.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{Device, Tensor},
};
use resolvent::models::{Vit, VitConfig};

use crate::{Error, Recipe, Result, data::Dataset};

/// Seeds Burn's generator, which is one per process: who draws from it must be alone with it, and is for as long as the
/// guard lives.
pub(super) fn seed_generator(device: &Device, seed: u64) -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    let alone = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(seed);
    alone
}

/// The recipe's model for the pictures and classes of `dataset`, with the initial weights of the recipe's seed.
///
/// # Errors
/// [`Error::Unfit`] where the patches do not fit the pictures, [`Error::Model`] where the model is impossible.
pub fn build(recipe: &Recipe, dataset: &Dataset, device: &Device) -> Result<Vit> {
    let config = config(recipe, dataset)?;
    let _alone = seed_generator(device, recipe.seed);
    let model = config.try_init(device)?;
    // Parameters are drawn at their first use: use them now, in the order of the modules.
    model.visit(&mut Touch);
    Ok(model)
}

fn config(recipe: &Recipe, dataset: &Dataset) -> Result<VitConfig> {
    let (m, shape) = (&recipe.model, dataset.shape);
    if !shape.height.is_multiple_of(m.patch) || !shape.width.is_multiple_of(m.patch) {
        let (height, width, patch) = (shape.height, shape.width, m.patch);
        let problem = format!(
            "its pictures are {height} x {width}, which patches of {patch} do not divide; change `model.patch`"
        );
        return Err(Error::Unfit { name: dataset.name.clone(), problem });
    }
    let (image, classes) = ([shape.height, shape.width], dataset.classes.len());
    Ok(VitConfig {
        dim: m.dim,
        depth: m.depth,
        heads: m.heads,
        mlp_dim: m.mlp_dim,
        pool: m.pool,
        tied: m.tied,
        qkv_bias: m.qkv_bias,
        gamma_trainable: m.gamma_trainable,
        gamma_schedule: m.gamma_schedule,
        extra_proj: m.extra_proj,
        pre_logits: m.pre_logits,
        dropout: m.dropout,
        drop_path: m.drop_path,
        ..VitConfig::new(image, shape.channels, m.patch, classes, recipe.mechanism.clone())
    })
}

struct Touch;

impl ModuleVisitor for Touch {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        param.val();
    }
}

/// The decay of each block, as the mean over its heads; empty where it is not learned.
pub fn gammas(model: &Vit) -> Vec<f64> {
    let learned = model.blocks.iter().filter_map(|block| block.attention.gamma());
    learned.map(|gamma| f64::from(gamma.mean().into_scalar::<f32>())).collect()
}
