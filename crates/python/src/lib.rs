//! The extension module under the Python package `resolvent`: mechanisms, tensors through DLPack, calls without the
//! interpreter lock. The package's Python files are the public surface.

mod call;
mod dlpack;
mod error;
mod mechanism;
mod past;
mod run;
mod threads;

use pyo3::prelude::*;
use resolvent_kernels::Mechanism;

/// Ids of the presets, each with a sentence on what it is.
#[pyfunction]
fn presets() -> Vec<(&'static str, &'static str)> {
    Mechanism::IDS.into_iter().map(|id| (id, Mechanism::summary(id).unwrap_or_default())).collect()
}

#[pymodule]
fn _resolvent(module: &Bound<'_, PyModule>) -> PyResult<()> {
    threads::remember_importer();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<mechanism::Core>()?;
    module.add_class::<call::Call>()?;
    module.add_class::<call::Clusters>()?;
    module.add_class::<past::Past>()?;
    module.add_function(wrap_pyfunction!(presets, module)?)?;
    module.add_function(wrap_pyfunction!(threads::available, module)?)?;
    module.add_function(wrap_pyfunction!(threads::release, module)?)?;
    module.add_function(wrap_pyfunction!(threads::after_fork, module)?)
}
