//! The numbers of a graph, each with its name. Thirteen are always there.

use super::GraphReport;

/// How a number is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// With so many decimals.
    Decimals(usize),
    /// As a share of a hundred.
    Percent,
    /// With three digits that matter.
    Digits,
}

/// One number of a graph.
#[derive(Debug, Clone, Copy)]
pub struct Quantity {
    /// Its name, as the heading of a column.
    pub name: &'static str,
    /// How it is shown.
    pub format: Format,
    /// Whether only [`AnalyzeOptions::full`](super::AnalyzeOptions::full) computes or shows it.
    pub full: bool,
    /// Where it stands.
    pub of: fn(&GraphReport) -> Option<f64>,
}

const fn quantity(name: &'static str, format: Format, of: fn(&GraphReport) -> Option<f64>) -> Quantity {
    Quantity { name, format, full: false, of }
}

/// One that is only there with `--full`.
const fn more(name: &'static str, format: Format, of: fn(&GraphReport) -> Option<f64>) -> Quantity {
    Quantity { full: true, ..quantity(name, format, of) }
}

/// Tokens that a row attends to.
pub const ROWS: Quantity = quantity("Rows", Format::Decimals(1), |g| g.perplexity);
/// How many directions the graph has.
pub const DIRECTIONS: Quantity = quantity("Directions", Format::Decimals(1), |g| g.effective_rank);
/// The spectral gap.
pub const GAP: Quantity = quantity("Gap", Format::Decimals(4), |g| g.gap);
/// Mean hops along strong edges.
pub const HOPS: Quantity = quantity("Hops", Format::Decimals(2), |g| Some(g.hops.as_ref()?.mean));
/// The largest row sum.
pub const LARGEST_ROW: Quantity = quantity("Largest row sum", Format::Digits, |g| Some(g.row_sums[2]));
/// The share of negative weight.
pub const NEGATIVE: Quantity = quantity("Negative", Format::Percent, |g| g.negative);
/// Rank correlation of the tokens' importance with softmax's.
pub const IMPORTANCE: Quantity = quantity("Importance", Format::Decimals(2), |g| g.centrality?.spearman);
/// Sines between the leading eigenvectors' span and softmax's.
pub const SUBSPACE: Quantity = quantity("Subspace, sine", Format::Decimals(3), |g| Some(g.subspace?.sine));

/// All numbers of a graph, in the order of the report's columns: the thirteen that tell most, and those that are only there in full.
pub const QUANTITIES: [Quantity; 45] = {
    use Format::{Decimals, Digits, Percent};
    [
        ROWS,
        DIRECTIONS,
        GAP,
        quantity("Gap of the weights", Decimals(4), |g| g.walk_gap),
        quantity("Cut", Decimals(4), |g| g.cheeger),
        HOPS,
        more("Most hops", Decimals(0), |g| Some(f64::from(g.hops.as_ref()?.max))),
        more("Unreachable pairs", Decimals(0), |g| Some(g.hops.as_ref()?.unreachable as f64)),
        more("Least row sum", Digits, |g| Some(g.row_sums[0])),
        more("Mean row sum", Digits, |g| Some(g.row_sums[1])),
        LARGEST_ROW,
        NEGATIVE,
        more("Asymmetry", Decimals(3), |g| g.asymmetry),
        more("Degree ratio", Digits, |g| g.degree_ratio),
        more("Mixing, at least", Digits, |g| Some(g.mixing?[0])),
        more("Mixing, at most", Digits, |g| Some(g.mixing?[1])),
        more("Mixing time", Decimals(0), |g| Some(g.full.as_ref()?.mixing_time? as f64)),
        IMPORTANCE,
        more("Importance, cosine", Decimals(3), |g| Some(g.centrality?.cosine)),
        SUBSPACE,
        more("of directions", Decimals(0), |g| Some(g.subspace?.directions as f64)),
        more("Singular directions", Decimals(1), |g| Some(g.full.as_ref()?.effective_rank)),
        more("Clusters", Decimals(0), |g| Some(g.clusters.as_ref()?.clusters as f64)),
        quantity("Leaves clusters", Percent, |g| Some(g.clusters.as_ref()?.eps_cluster)),
        more("Worst row leaves", Percent, |g| Some(g.clusters.as_ref()?.row_leak)),
        more("Two-stage distortion", Digits, |g| g.distortion),
        more("Coupling", Decimals(3), |g| Some(g.clusters.as_ref()?.coupling)),
        more("Dominant, cosine", Decimals(3), |g| Some(g.dominant.as_ref()?.weights.cosine)),
        more("Katz, in and out", Decimals(2), |g| g.walks.as_ref()?.katz_in_out.spearman),
        more("Katz, softmax's importance", Decimals(2), |g| g.walks.as_ref()?.katz_softmax?.spearman),
        more("Walks' decay", Digits, |g| Some(g.walks.as_ref()?.decay)),
        more("Least absorption", Decimals(3), |g| Some(g.walks.as_ref()?.absorption[0])),
        more("Mean absorption", Decimals(3), |g| Some(g.walks.as_ref()?.absorption[1])),
        more("Largest absorption", Decimals(3), |g| Some(g.walks.as_ref()?.absorption[2])),
        more("Diffusion, 1 step", Digits, |g| Some(g.diffusion?[0])),
        more("Diffusion, 2 steps", Digits, |g| Some(g.diffusion?[1])),
        more("Diffusion, 4 steps", Digits, |g| Some(g.diffusion?[2])),
        more("Landmarks", Decimals(0), |g| Some(g.landmarks.as_ref()?.landmarks as f64)),
        more("Condition", Digits, |g| Some(g.landmarks.as_ref()?.condition)),
        quantity("Nyström error", Percent, |g| Some(g.landmarks.as_ref()?.error)),
        more("Landmarks that count", Decimals(1), |g| Some(g.landmarks.as_ref()?.effective_rank)),
        more("Newton residual", Digits, |g| g.landmarks.as_ref()?.newton_residual),
        quantity("Matched kappa", Digits, |g| g.matched_kappa),
        more("Dominant, next over first", Decimals(3), |g| g.dominant.as_ref()?.subdominant_ratio),
        more("Dominant, last change", Digits, |g| Some(g.dominant.as_ref()?.change)),
    ]
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thirteen_are_always_there() {
        assert_eq!(QUANTITIES.iter().filter(|quantity| !quantity.full).count(), 13);
    }
}
