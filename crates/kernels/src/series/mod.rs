//! How many hops.
pub(crate) mod resolvent;
