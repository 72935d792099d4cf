//! Weights in files.

use std::{collections::HashMap, path::Path};

use burn::store::{ModuleSnapshot, SafetensorsStore};

use crate::{Error, Result};

/// At most so many tensors are named in an error.
const NAMED: usize = 5;

/// Writes every parameter of `module` to a safetensors file, with `metadata` in its header. The file appears whole or not
/// at all; one that is already there is replaced.
///
/// # Errors
/// [`Error::Weights`] naming the file.
pub fn save_weights<M: ModuleSnapshot>(module: &M, path: &Path, metadata: &HashMap<String, String>) -> Result<()> {
    let store = SafetensorsStore::from_file(path).overwrite(true);
    let mut store = metadata.iter().fold(store, |store, (key, value)| store.metadata(key, value));
    module.save_into(&mut store).map_err(|e| weights_error(path, e.to_string()))
}

/// Reads the parameters of `module` from a safetensors file that holds exactly them: names and shapes. After an error
/// `module` is unchanged.
///
/// ```
/// use burn::tensor::Device;
/// use resolvent::{convert, models::VitConfig};
/// let device = Device::flex();
/// let config = VitConfig::preset("vit-tiny-28")?;
/// let file = tempfile::NamedTempFile::new().unwrap();
/// convert::save_weights(&config.init(&device), file.path(), &Default::default())?;
/// let mut model = config.init(&device);
/// convert::load_weights(&mut model, file.path())?;
/// # Ok::<(), resolvent::Error>(())
/// ```
///
/// # Errors
/// [`Error::Weights`] naming the file, and the tensors that are missing, unexpected or of another shape.
pub fn load_weights<M: ModuleSnapshot>(module: &mut M, path: &Path) -> Result<()> {
    let mut loaded = module.clone();
    let mut store = SafetensorsStore::from_file(path).allow_partial(true).validate(false);
    let result = loaded.load_from(&mut store).map_err(|e| weights_error(path, e.to_string()))?;
    let problems: Vec<String> = [
        list("missing", result.missing.into_iter().map(|(name, _)| name).collect()),
        list("unexpected", result.unused),
        list("unusable", result.errors.iter().map(ToString::to_string).collect()),
    ]
    .into_iter()
    .flatten()
    .collect();
    if !problems.is_empty() {
        let problem = format!(
            "does not fit the model: {}; load it with the configuration it was saved with",
            problems.join("; ")
        );
        return Err(weights_error(path, problem));
    }
    *module = loaded;
    Ok(())
}

fn list(what: &str, mut names: Vec<String>) -> Option<String> {
    let count = names.len();
    names.sort();
    names.truncate(NAMED);
    let rest = if count > NAMED { format!(" and {} more", count - NAMED) } else { String::new() };
    (count > 0).then(|| format!("{what} tensors: {}{rest}", names.join(", ")))
}

fn weights_error(path: &Path, problem: String) -> Error {
    Error::Weights { path: path.into(), problem }
}
