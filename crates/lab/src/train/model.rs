//! The model of a recipe.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, ParameterValue},
    tensor::{Bool, Device, Int, Tensor},
};

use super::{Task, TaskData};
use crate::{Error, Recipe, Result, device::is_cpu, environment::beyond_memory};

/// Seeds Burn's generator, which is one per process: who draws from it must be alone with it, and is for as long as the
/// guard lives.
pub(super) fn seed_generator(device: &Device, seed: u64) -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    let alone = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(seed);
    alone
}

/// The recipe's model for `data`, with the initial weights of the recipe's seed.
///
/// # Errors
/// [`crate::Error::Unfit`] where the model does not fit the data, [`crate::Error::Model`] where it is impossible.
pub fn build<D: TaskData>(recipe: &Recipe, data: &D, device: &Device) -> Result<<D::Task as Task>::Model> {
    build_for(&data.task(recipe)?, recipe, device)
}

/// The recipe's model for `task`, with the initial weights of the recipe's seed.
pub(crate) fn build_for<T: Task>(task: &T, recipe: &Recipe, device: &Device) -> Result<T::Model> {
    drawn::<T>(recipe, device, |device| task.model(recipe, device))
}

/// Checks that the recipe's model for `task` can be built, without drawing its weights.
///
/// # Errors
/// As [`build`].
pub(crate) fn check_model<T: Task>(task: &T, recipe: &Recipe) -> Result<()> {
    let device = Device::flex();
    let _alone = seed_generator(&device, recipe.seed);
    let mut model = task.model(recipe, &device)?;
    check_memory(&model)?;
    recipe.give_heads(T::attentions(&mut model))
}

/// The model of `recipe` that `init` makes, whose initial weights are those of the recipe's seed: drawn on the CPU, so that they are the same
/// on every device.
pub(crate) fn drawn<T: Task>(
    recipe: &Recipe,
    device: &Device,
    init: impl FnOnce(&Device) -> Result<T::Model>,
) -> Result<T::Model> {
    let cpu = if device.is_autodiff() { Device::flex().autodiff() } else { Device::flex() };
    let _alone = seed_generator(&cpu, recipe.seed);
    let mut model = init(&cpu)?;
    check_memory(&model)?;
    // Parameters are drawn at their first use: use them now, in the order of the modules.
    model.visit(&mut Touch);
    recipe.give_heads(T::attentions(&mut model))?;
    let model = model.map(&mut Numbered::default());
    Ok(if is_cpu(device) { model } else { model.fork(device) })
}

/// The device of `model`, for what it is shown.
pub fn device_of<M: Module>(model: &M) -> Device {
    model.devices().into_iter().next().unwrap_or_else(Device::flex).without_autodiff()
}

/// Weights that the machine cannot hold are refused before they are drawn: an allocation that fails ends the process.
fn check_memory<M: Module>(model: &M) -> Result<()> {
    struct Count(u64);
    impl ModuleVisitor for Count {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let shape = param.lazy_shape();
            let elements = shape.iter().fold(1_u64, |product, &extent| product.saturating_mul(extent as u64));
            self.0 = self.0.saturating_add(elements);
        }
    }
    let mut count = Count(0);
    model.visit(&mut count);
    match beyond_memory("has weights of", count.0.saturating_mul(size_of::<f32>() as u64)) {
        Some(why) => Err(Error::Recipe {
            file: "recipe".into(),
            field: "model".into(),
            problem: format!("{why}; make it smaller"),
        }),
        None => Ok(()),
    }
}

struct Touch;

impl ModuleVisitor for Touch {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        param.val();
    }
}

/// Numbers the parameters in the order of the modules: Burn draws their ids, and a run of the same recipe is to write the same bytes. One that
/// is in several places stays one.
#[derive(Default)]
struct Numbered(HashMap<ParamId, ParamId>);

impl Numbered {
    fn number<T: ParameterValue>(&mut self, param: Param<T>) -> Param<T> {
        let (id, value, mapper) = param.consume();
        let next = ParamId::from(self.0.len() as u64 + 1);
        Param::from_mapped_value(*self.0.entry(id).or_insert(next), value, mapper)
    }
}

impl ModuleMapper for Numbered {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.number(param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.number(param)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        self.number(param)
    }
}

/// Numbers that `model`, on a device with autodiff, learns: without what norms remember of the batches they saw.
pub(super) fn learned_parameters<M: Module>(model: &M) -> usize {
    struct Learned(usize);
    impl ModuleVisitor for Learned {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let tensor = param.val();
            self.0 += if tensor.is_require_grad() { tensor.shape().num_elements() } else { 0 };
        }
    }
    let mut learned = Learned(0);
    model.visit(&mut learned);
    learned.0
}
