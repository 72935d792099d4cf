//! Mechanisms with names.

use resolvent_kernels::Mechanism;

/// A mechanism with the name that it has in folders, tables and pictures.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// Part of a folder's name.
    pub name: String,
    /// The mechanism.
    pub mechanism: Mechanism,
}

impl From<Mechanism> for Candidate {
    /// Named by its id.
    fn from(mechanism: Mechanism) -> Self {
        Self { name: mechanism.id().into(), mechanism }
    }
}
