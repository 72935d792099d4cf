//! The four values: what there is to compose, what is refused, and how it is read and written.

#[path = "../support/mod.rs"]
mod support;

mod configuration;
mod configuration_errors;
mod custom_score;
mod edges;
mod engine;
mod features;
mod landmark_count;
mod nystrom;
mod presets;
mod product;
mod projected;
mod reference;
mod support_matrix;
