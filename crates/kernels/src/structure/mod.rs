//! How the operator is held: each folder streams it without ever storing it.

pub(crate) mod clustered;
pub(crate) mod dense;
pub(crate) mod features;
pub(crate) mod nystrom;
pub(crate) mod pooled;
pub(crate) mod projected;
