//! The shortest paths between pairs of tokens that are asked for, and the hops between all.

use resolvent_graph::{DENSE_MAX, LinearOperator, UNREACHABLE};
use resolvent_kernels::Shape;
use resolvent_lab::{Error, Result};
use serde::Serialize;

use super::{
    Analysis, AnalyzeOptions, GraphReport, HeadResult, Layer,
    graph::{note, remark},
    stored::Stored,
};

/// Most tokens of a graph whose matrix of hops is told.
pub const HOP_MATRIX_MAX: usize = 256;
/// Most tokens of one that is drawn.
const HOP_MATRIX_DRAWN: usize = 24;
/// Paths that are printed; all are in the results.
const PRINTED: usize = 24;

/// The shortest path from one token to another, by edges as long as one over their weights. "Fractional neural attention for efficient
/// multiscale sequence processing", fig. 5d.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PathReport {
    /// Where it starts: the token that attends.
    pub from: usize,
    /// Where it ends.
    pub to: usize,
    /// Its edges; absent where no path leads there.
    pub hops: Option<usize>,
    /// The sum of one over its edges' weights; absent without a path, and where f64 does not hold it.
    pub length: Option<f64>,
    /// The tokens that it goes through, both ends included; empty without a path.
    pub tokens: Vec<usize>,
    /// The weight of each edge, from one token to the next.
    pub weights: Vec<f64>,
    /// The tokens' words, where they are known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub words: Vec<String>,
}

impl PathReport {
    /// The tokens with their words, one after the other.
    pub fn names(&self) -> Vec<String> {
        let name = |(at, token): (usize, &usize)| match self.words.get(at) {
            Some(word) => format!("{token} ({word})"),
            None => token.to_string(),
        };
        self.tokens.iter().enumerate().map(name).collect()
    }
}

/// Refuses pairs that no layer has, and layers whose graphs are not looked at whole.
pub(super) fn check<'a>(options: &AnalyzeOptions, mut layers: impl Iterator<Item = &'a Layer>) -> Result<()> {
    let refuse =
        |field: &str, problem: String| Err(Error::Recipe { file: options.called(), field: field.into(), problem });
    for (at, pair @ [from, to]) in options.paths.iter().enumerate() {
        if from == to {
            return refuse("path", format!("goes from token {from} to itself; name two tokens"));
        }
        if options.paths[..at].contains(pair) {
            return refuse("path", format!("asks for {from},{to} twice"));
        }
    }
    if options.paths.is_empty() && !options.hop_matrix {
        return Ok(());
    }
    let (field, most) = if options.hop_matrix { ("hop-matrix", HOP_MATRIX_MAX) } else { ("path", DENSE_MAX) };
    let wrong = |layer: &Layer| {
        let Shape { seq_q: tokens, seq_kv: keys, .. } = layer.shape;
        let far = options.paths.as_flattened().iter().find(|&&token| token >= tokens);
        match far {
            _ if tokens != keys => {
                Some((field, "has other tokens for keys than for queries, which are no graph".into()))
            }
            Some(far) => Some(("path", format!("has no token {far}: it has {tokens}, from 0 to {}", tokens - 1))),
            // A mask may leave few enough.
            None if tokens > most && !layer.masked() => {
                Some((field, format!("has {tokens} tokens, and this is told of {most} at most")))
            }
            None => None,
        }
    };
    match layers.find_map(|layer| Some((&layer.name, wrong(layer)?))) {
        Some((name, (field, wrong))) => {
            refuse(field, format!("is not for layer `{name}`, which {wrong}; choose others with --layers"))
        }
        None => Ok(()),
    }
}

/// Adds to `report` the paths and the hops that `options` ask for. The tokens of the graph are called `words`, where these are known.
pub(super) fn add(
    options: &AnalyzeOptions,
    words: &[String],
    stored: &Stored,
    report: &mut GraphReport,
    notes: &mut Vec<String>,
) {
    let n = stored.weights.len();
    let there = |pair: &&[usize; 2]| pair.iter().all(|&token| token < n);
    let (there, beyond): (Vec<&[usize; 2]>, Vec<_>) = options.paths.iter().partition(there);
    for [from, to] in beyond {
        remark(notes, format!("the sequence has {n} tokens: no path from {from} to {to}"));
    }
    let whole = options.hop_matrix && n <= HOP_MATRIX_MAX;
    if options.hop_matrix && !whole {
        remark(notes, format!("more than {HOP_MATRIX_MAX} tokens: no matrix of hops"));
    }
    let mut sources: Vec<usize> = if whole { (0..n).collect() } else { there.iter().map(|pair| pair[0]).collect() };
    sources.sort_unstable();
    sources.dedup();
    if sources.is_empty() {
        return;
    }
    let Some(paths) = note(notes, stored.paths(sources)) else { return };
    if whole {
        let hops = |&hops: &u32| (hops != UNREACHABLE).then_some(hops);
        report.hop_matrix = paths.hops.chunks(n).map(|row| row.iter().map(hops).collect()).collect();
    }
    let one = |&[from, to]: &[usize; 2]| {
        let tokens = paths.route(from, to).unwrap_or_default();
        PathReport {
            from,
            to,
            hops: tokens.len().checked_sub(1),
            length: paths.length(from, to).filter(|length| length.is_finite()),
            weights: tokens.windows(2).map(|edge| stored.weights.row(edge[0])[edge[1]]).collect(),
            words: tokens.iter().filter_map(|&token| words.get(token).cloned()).collect(),
            tokens,
        }
    };
    report.paths = there.into_iter().map(one).collect();
}

/// Drops a matrix that is not drawn: of another than the first head of a layer's first sequence, or of many tokens.
pub(super) fn keep_drawn(head: &mut HeadResult) {
    let first = head.head == 0 && head.sequence == 0;
    if let Some(graph) = head.graph.as_mut().filter(|graph| !first || graph.hop_matrix.len() > HOP_MATRIX_DRAWN) {
        graph.hop_matrix = Vec::new();
    }
}

impl HeadResult {
    /// The paths that were asked for and that its graph is there for.
    pub fn paths(&self) -> &[PathReport] {
        self.graph.as_ref().map_or(&[], |graph| &graph.paths)
    }
}

impl Analysis {
    /// The paths as lines of text; empty where none were asked for.
    pub(super) fn paths_table(&self) -> String {
        let of_head = |head: &HeadResult| head.paths().iter().map(|path| line(head, path)).collect::<Vec<_>>();
        let lines: Vec<String> = self.listed.iter().flat_map(of_head).take(PRINTED + 1).collect();
        if lines.is_empty() {
            return String::new();
        }
        let shown = lines[..lines.len().min(PRINTED)].join("\n");
        let more = if lines.len() > PRINTED { "and more, in results.json\n" } else { "" };
        format!("\nshortest paths, an edge being as long as one over its weight:\n{shown}\n{more}")
    }
}

fn line(head: &HeadResult, path: &PathReport) -> String {
    let place = format!("{:<16} {}, sequence {}, head {}", head.name, head.layer, head.sequence, head.head);
    let Some(hops) = path.hops else { return format!("{place}: no path from {} to {}", path.from, path.to) };
    let length = path.length.map_or_else(|| "beyond f64".into(), |length| format!("{length:.4}"));
    let edges = if hops == 1 { "hop" } else { "hops" };
    format!("{place}: {}: {hops} {edges}, length {length}", path.names().join(" -> "))
}
