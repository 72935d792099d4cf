//! Models built from the attention module.

mod block;
mod config;
mod drop_path;
mod vit;

pub use block::Block;
pub use config::{Pool, VitConfig};
pub use drop_path::DropPath;
pub use vit::Vit;
