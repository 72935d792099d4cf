//! The optimiser's moments, which Burn keeps by the numbers of the parameters.

use std::collections::BTreeMap;

use burn::{
    module::Module,
    optim::OptimizerRecord,
    store::{
        ModuleSnapshot,
        burn_pack::{Error as PackError, Reader, Writer},
    },
};

use super::{Checkpoint, parts};
use crate::{Error, Result};

/// The moments in `checkpoint` for the parameters of `model`. Records name a parameter by its number, and tell its path: where a number is
/// another now, as in checkpoints whose numbers Burn drew, the path counts.
///
/// # Errors
/// [`Error::Damaged`] when they are missing, damaged or of another model.
pub(crate) fn moments<M: Module>(checkpoint: &Checkpoint, model: &M) -> Result<OptimizerRecord> {
    let damaged = |problem: String| Error::damaged(&checkpoint.path.join(parts::OPTIMISER), problem);
    let unreadable = |e: PackError| damaged(format!("does not hold moments ({e}); use another checkpoint"));
    let reader = Reader::from_bytes(checkpoint.read(parts::OPTIMISER)?).map_err(unreadable)?;
    let numbers: BTreeMap<_, _> =
        model.collect(None, None, false).into_iter().map(|tensor| (tensor.name, tensor.param_id)).collect();
    let mut renumbered = BTreeMap::new();
    for (number, path) in reader.metadata() {
        let now = numbers.get(path).copied().flatten().ok_or_else(|| {
            damaged(format!("has moments of `{path}`, which the model does not have; use the recipe it was made with"))
        })?;
        renumbered.insert(number.clone(), (now, path.clone()));
    }
    let parameter = |name: &str| {
        let (number, field) = name.split_once('.')?;
        renumbered.get(number).map(|(now, _)| (*now, format!("{now}.{field}")))
    };
    let stray = |name: &str| damaged(format!("has `{name}` of no parameter; use another checkpoint"));
    let mut scalars = BTreeMap::new();
    for (name, value) in reader.scalars() {
        let (_, name) = parameter(name).ok_or_else(|| stray(name))?;
        scalars.insert(name, *value);
    }
    let mut tensors = reader.into_tensors().map_err(unreadable)?;
    for tensor in &mut tensors {
        let (number, name) = parameter(&tensor.name).ok_or_else(|| stray(&tensor.name))?;
        (tensor.param_id, tensor.name) = (Some(number), name);
    }
    let writer = scalars.iter().fold(Writer::new(tensors), |writer, (name, value)| writer.with_scalar(name, *value));
    let paths = renumbered.values();
    let writer = paths.fold(writer, |writer, (now, path)| writer.with_metadata(&now.to_string(), path));
    let bytes = writer.into_bytes().map_err(unreadable)?;
    OptimizerRecord::from_bytes(bytes).map_err(|e| damaged(e.to_string()))
}
