//! The pages of analyses, fits and explanations, drawn from what these hand over.

mod analysis;
mod diffusion;
mod distances;
mod explanation;
mod files;
mod fit;
mod panel;
mod paths;
mod summary;

pub use analysis::analysis_page;
pub use explanation::explanation_page;
pub use files::{OVERLAYS, write_analysis, write_explanation, write_fit, write_panel};
pub use fit::fit_page;
pub use panel::panel_page;
