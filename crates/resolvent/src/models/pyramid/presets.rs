//! The published pyramids, and small ones for small pictures.

use super::{EmbeddingKind, Positions, PyramidConfig, StageConfig};
use crate::{
    Error, Mechanism, Precision, Result, Strategy,
    attention::ValueConv,
    mechanism::{Laplacian, Soft, WeightScale},
    models::{NormOrder, Pool},
};

/// Sides of the filters over the values in the first three stages of SOFT.
const SOFT_FILTERS: [usize; 3] = [9, 5, 3];

impl PyramidConfig {
    /// Names that [`PyramidConfig::preset`] knows.
    pub const PRESETS: [&'static str; 16] = [
        "soft-tiny",
        "soft-tiny-t1",
        "soft-small",
        "soft-medium",
        "soft-large",
        "soft-code-small",
        "soft-code-medium",
        "soft-code-large",
        "soft-code-huge",
        "soft-mini",
        "laplacian-tiny",
        "laplacian-small",
        "laplacian-medium",
        "laplacian-large",
        "laplacian-huge",
        "laplacian-mini",
    ];

    /// A model by name, for pictures of 224 x 224 x 3 in 1000 classes unless it is a `mini`.
    ///
    /// - `soft-tiny` and `soft-code-*`: SOFT as its authors' code builds it. Post-norm, with softmax in the last stage.
    /// - `soft-tiny-t1`, `soft-small`, `soft-medium`, `soft-large`: "Softmax-free Linear Transformers", table 1. Pre-norm, with
    ///   the Gaussian kernel itself in the last stage.
    /// - `laplacian-*`: "LaplacianFormer", table 1. The paper prints no widths and depths: these are fitted to its parameters
    ///   and operations.
    /// - `soft-mini`, `laplacian-mini`: fewer than a million parameters, two pixels per token, for 32 x 32 x 3 in 10 classes;
    ///   [`PyramidConfig::for_pictures`] fits them to others.
    ///
    /// # Errors
    /// [`Error::Field`] listing the names.
    pub fn preset(name: &str) -> Result<Self> {
        let [narrow, wide] = [[64, 128, 320, 512], [96, 192, 384, 768]];
        Ok(match name {
            "soft-tiny" => soft_code(narrow, [1, 2, 3, 2]),
            "soft-code-small" => soft_code(narrow, [1, 3, 7, 4]),
            "soft-code-medium" => soft_code([64, 128, 288, 512], [1, 3, 29, 5]),
            "soft-code-large" => soft_code(narrow, [1, 3, 40, 5]),
            "soft-code-huge" => soft_code([64, 128, 352, 512], [1, 5, 49, 5]),
            "soft-tiny-t1" => soft(narrow, [2, 2, 5, 2]),
            "soft-small" => soft(wide, [2, 2, 5, 2]),
            "soft-medium" => soft(wide, [2, 2, 18, 2]),
            "soft-large" => soft([128, 256, 512, 1024], [2, 2, 18, 2]),
            "soft-mini" => soft_mini(),
            "laplacian-tiny" => laplacian([1, 2, 3, 2]),
            "laplacian-small" => laplacian([2, 3, 11, 3]),
            "laplacian-medium" => laplacian([2, 3, 20, 6]),
            "laplacian-large" => laplacian([3, 2, 34, 6]),
            "laplacian-huge" => laplacian([3, 8, 45, 6]),
            "laplacian-mini" => laplacian_mini(),
            _ => {
                let expected = "one of `PyramidConfig::PRESETS`: soft-mini, soft-tiny, soft-tiny-t1, soft-small, \
                                soft-medium, soft-large, soft-code-small, soft-code-medium, soft-code-large, \
                                soft-code-huge, laplacian-mini, laplacian-tiny, laplacian-small, laplacian-medium, \
                                laplacian-large, laplacian-huge";
                return Err(Error::Field { field: "preset", got: format!("`{name}`"), expected });
            }
        })
    }
}

/// What the families share.
fn pyramid(mechanism: Mechanism, embedding: EmbeddingKind, stages: [StageConfig; 4]) -> PyramidConfig {
    PyramidConfig {
        image: [224, 224],
        channels: 3,
        classes: 1000,
        mechanism,
        landmark_count: None,
        embedding,
        stride: 4,
        stages,
        positions: Positions::Learned,
        pool: Pool::Mean,
        tied: None,
        gamma_trainable: true,
        lambda_trainable: false,
        scale_trainable: false,
        dropout: 0.0,
        weight_dropout: 0.0,
        drop_path: 0.0,
        precision: Precision::Full,
        strategy: Strategy::Auto,
    }
}

/// Four stages with heads of 32 channels.
fn stages(widths: [usize; 4], depths: [usize; 4], ratios: [usize; 4]) -> [StageConfig; 4] {
    std::array::from_fn(|i| StageConfig {
        dim: widths[i],
        heads: widths[i] / 32,
        depth: depths[i],
        mlp_ratio: 4,
        ratio: ratios[i],
        value_conv: ValueConv::None,
        norm: NormOrder::Pre,
        mechanism: None,
    })
}

/// SOFT as in its table 1.
fn soft(widths: [usize; 4], depths: [usize; 4]) -> PyramidConfig {
    let mut stages = stages(widths, depths, [8, 4, 2, 1]);
    for (stage, side) in stages.iter_mut().zip(SOFT_FILTERS) {
        stage.value_conv = ValueConv::PerHead { side };
    }
    let mechanism = Mechanism::from(Soft::default().official(8));
    let base = pyramid(mechanism, EmbeddingKind::Convolutions { stem: 64 }, stages);
    PyramidConfig { pool: Pool::Cls, ..base }
}

/// SOFT as in its authors' code.
fn soft_code(widths: [usize; 4], depths: [usize; 4]) -> PyramidConfig {
    let mut base = soft(widths, depths);
    base.stages[..3].iter_mut().for_each(|stage| stage.norm = NormOrder::Post);
    base.stages[3].mechanism = Some(Mechanism::softmax());
    PyramidConfig { embedding: EmbeddingKind::Convolutions { stem: 32 }, ..base }
}

/// SOFT++ for small pictures.
fn soft_mini() -> PyramidConfig {
    let mut base = soft([32, 64, 96, 128], [1, 1, 2, 1]);
    for (stage, (ratio, side)) in base.stages.iter_mut().zip([(4, 5), (2, 3), (1, 3)]) {
        (stage.ratio, stage.value_conv) = (ratio, ValueConv::PerHead { side });
    }
    let base = base.for_pictures([32, 32], 3, 10);
    let mechanism = Mechanism::from(Soft::plus().robust());
    PyramidConfig { mechanism, embedding: EmbeddingKind::Convolutions { stem: 16 }, stride: 2, ..base }
}

/// LaplacianFormer: depths that give the paper's parameters and operations.
fn laplacian(depths: [usize; 4]) -> PyramidConfig {
    let mut stages = stages([64, 128, 320, 512], depths, [8, 4, 2, 1]);
    for (stage, mlp_ratio) in stages.iter_mut().zip([8, 8, 4, 4]) {
        (stage.mlp_ratio, stage.value_conv) = (mlp_ratio, ValueConv::PerChannel { side: 3 });
    }
    let mechanism = Laplacian::default().with_weight_scale(WeightScale::InvN).into();
    let base = pyramid(mechanism, EmbeddingKind::Patches, stages);
    PyramidConfig { positions: Positions::Rotary, ..base }
}

/// LaplacianFormer for small pictures.
fn laplacian_mini() -> PyramidConfig {
    let mut base = laplacian([1, 1, 2, 1]);
    for (stage, (dim, ratio)) in base.stages.iter_mut().zip([(32, 4), (64, 2), (96, 1), (128, 1)]) {
        (stage.dim, stage.heads, stage.ratio, stage.mlp_ratio) = (dim, dim / 32, ratio, 4);
    }
    PyramidConfig { stride: 2, ..base.for_pictures([32, 32], 3, 10) }
}
