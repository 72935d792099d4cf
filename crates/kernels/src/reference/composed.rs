//! Any composition of four values.

use super::{HeadForward, HeadGradients, head::Head, matrix::Matrix};
use crate::{Error, Result, mechanism::Composed};

pub(super) fn forward(_: &Head, _: &Composed) -> Result<HeadForward> {
    Err(Error::Unsupported { mechanism: "composed", what: "composition", why: "being written" })
}

pub(super) fn backward(_: &Head, _: &Composed, _: &Matrix) -> Result<HeadGradients> {
    Err(Error::Unsupported { mechanism: "composed", what: "composition", why: "being written" })
}
