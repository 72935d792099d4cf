//! Errors of the kernels and of this crate as the exceptions of `resolvent.errors`.

use pyo3::{prelude::*, types::PyDict};
use resolvent_kernels::Error;

/// What an exception of `resolvent.errors` carries.
#[derive(Debug, Default)]
pub struct Failure {
    /// The class in `resolvent.errors`.
    pub class: &'static str,
    /// Which error it is, in one word.
    pub code: &'static str,
    /// The configuration's field.
    pub field: Option<String>,
    /// The tensor.
    pub tensor: Option<String>,
    /// How to mend the call.
    pub remedy: Option<String>,
    /// The whole message.
    pub message: String,
}

impl Failure {
    /// A tensor that does not fit the call.
    pub fn tensor(class: &'static str, code: &'static str, tensor: &str, problem: &str, remedy: &str) -> Self {
        let message = format!("tensor `{tensor}` {problem}; {remedy}");
        let (tensor, remedy) = (Some(tensor.to_owned()), Some(remedy.to_owned()));
        Self { class, code, tensor, remedy, message, field: None }
    }

    /// An argument that is no tensor.
    pub fn argument(field: &str, problem: &str, remedy: &str) -> Self {
        let message = format!("argument `{field}` {problem}; {remedy}");
        let (field, remedy) = (Some(field.to_owned()), Some(remedy.to_owned()));
        Self { class: "ConfigurationError", code: "argument", field, remedy, message, tensor: None }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        let error = error.cause().clone();
        let (class, code) = class_of(&error);
        let [field, tensor, remedy] = match error {
            Error::Config { field, problem } => [Some(field), None, Some(problem)],
            Error::OutOfRange { field, expected, .. } => {
                [Some(field.into()), None, Some(format!("must be {expected}"))]
            }
            Error::Length { tensor, remedy, .. } => [None, Some(tensor.into()), Some(remedy.into())],
            Error::Shape { left, remedy, .. } => [None, Some(left.into()), Some(remedy.into())],
            Error::Tensor { tensor, problem, .. } => [None, Some(tensor.into()), Some(problem.into())],
            Error::Unsupported { what, why, .. } => [Some(what.into()), None, Some(why.into())],
            Error::NonFinite { tensor, .. } => [None, Some(tensor.into()), Some("inputs must be finite".into())],
            Error::Range { tensor, remedy, .. } | Error::Close { tensor, remedy, .. } => {
                [None, Some(tensor.into()), Some(remedy.into())]
            }
            Error::Overflow { tensor, .. } => [None, Some(tensor.into()), Some("scale the inputs down".into())],
            Error::Index { tensor, limit, .. } => {
                [None, Some(tensor.into()), Some(format!("expected an index below {limit}"))]
            }
            Error::NotConverged { .. } => [Some("max_iter".into()), None, Some("raise `max_iter` or `tol`".into())],
            Error::Singular { .. } => [Some("ridge".into()), None, Some("raise `ridge`".into())],
            Error::Diverged { .. } => {
                [Some("inverse".into()), None, Some("use inverse = cholesky with a ridge".into())]
            }
            Error::Memory { .. } => [None, None, Some("pass fewer tokens, or settings that need less".into())],
            _ => [None, None, None],
        };
        Self { class, code, field, tensor, remedy, message }
    }
}

fn class_of(error: &Error) -> (&'static str, &'static str) {
    match error {
        Error::Config { .. } => ("ConfigurationError", "config"),
        Error::OutOfRange { .. } => ("ConfigurationError", "out-of-range"),
        Error::Length { .. } => ("TensorError", "length"),
        Error::Shape { .. } => ("TensorError", "shape"),
        Error::Tensor { .. } => ("TensorError", "tensor"),
        Error::Index { .. } => ("TensorError", "index"),
        Error::Unsupported { .. } => ("UnsupportedError", "unsupported"),
        Error::NonFinite { .. } => ("NumericalError", "non-finite"),
        Error::Range { .. } => ("NumericalError", "range"),
        Error::Close { .. } => ("NumericalError", "close"),
        Error::Overflow { .. } => ("NumericalError", "overflow"),
        Error::NotConverged { .. } => ("NumericalError", "not-converged"),
        Error::Singular { .. } => ("NumericalError", "singular"),
        Error::Diverged { .. } => ("NumericalError", "diverged"),
        Error::Memory { .. } => ("OutOfMemoryError", "memory"),
        _ => ("Error", "other"),
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        Python::attach(|py| exception(py, &failure).unwrap_or_else(|error| error))
    }
}

fn exception(py: Python<'_>, failure: &Failure) -> PyResult<PyErr> {
    let class = py.import("resolvent.errors")?.getattr(failure.class)?;
    let fields = PyDict::new(py);
    fields.set_item("code", failure.code)?;
    fields.set_item("field", &failure.field)?;
    fields.set_item("tensor", &failure.tensor)?;
    fields.set_item("remedy", &failure.remedy)?;
    Ok(PyErr::from_value(class.call((&failure.message,), Some(&fields))?))
}

/// A result of the kernels as one of Python.
pub fn python<T>(result: resolvent_kernels::Result<T>) -> PyResult<T> {
    result.map_err(|error| Failure::from(error).into())
}
