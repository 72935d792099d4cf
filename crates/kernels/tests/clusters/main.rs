//! Clustered graphs: how they are planned, attended along, and what a plan certifies.

#[path = "../support/mod.rs"]
mod support;
#[path = "../support/threads.rs"]
mod threads;

mod attention;
mod certificate;
mod golden;
mod outliers;
mod plans;
mod routed;
mod sharpness;
