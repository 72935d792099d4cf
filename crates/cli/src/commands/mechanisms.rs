//! `resolvent mechanisms`: the presets, and what may be composed.

use clap::Args;
use resolvent_kernels::{Error as KernelError, Mechanism};
use resolvent_lab::columns::{Align, Columns};
use serde_json::{Value, json};

use crate::{args::Global, error::Result, output};

/// List the mechanisms: presets with their four values, or every combination of values
///
/// A mechanism is a score (how two tokens relate), a structure (how the operator is held), a normalisation (what makes weights of
/// affinities) and a series (how many hops). A preset is four of them with a name; others are composed in a configuration file.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Mechanisms {
    /// Every score with every structure, normalisation and series: whether it runs, and if not, why
    #[arg(long)]
    pub matrix: bool,
}

const EXAMPLES: &str = "\
Examples:
  resolvent mechanisms                     the presets
  resolvent mechanisms --matrix            every combination of values
  resolvent mechanisms --matrix --json     the same for programs";

/// Runs the command.
pub fn run(args: &Mechanisms, global: &Global) -> Result<()> {
    let (json, text) = if args.matrix { matrix() } else { presets() };
    output::result(global, &json, &text)
}

/// The presets, as a document and as a table.
fn presets() -> (Value, String) {
    let presets = Mechanism::IDS.into_iter().filter_map(|id| Some((id, Mechanism::preset(id).ok()?)));
    let presets: Vec<_> = presets.collect();
    let documents = presets.iter().map(|(id, preset)| {
        let mut document = json!(preset.values());
        document.as_object_mut().map(|fields| fields.remove("mechanism"));
        document["id"] = json!(id);
        document["paper"] = json!(preset.paper());
        document
    });
    let headings = ["PRESET", "SCORE", "STRUCTURE", "NORMALISATION", "SERIES"];
    let mut table = Columns::new(headings.map(|heading| (Align::Left, heading)));
    for (id, preset) in &presets {
        let Mechanism { score, structure, normalisation, series, .. } = preset;
        table.row([*id, score.kind(), structure.kind(), normalisation.kind(), series.kind()].map(str::to_owned));
    }
    (Value::Array(documents.collect()), table.to_string())
}

/// Every combination of kinds, as a document and as a table.
fn matrix() -> (Value, String) {
    let headings = ["SCORE", "STRUCTURE", "NORMALISATION", "SERIES", ""];
    let mut table = Columns::new(headings.map(|heading| (Align::Left, heading)));
    let mut documents = Vec::new();
    let mut runs = 0;
    for kinds in Mechanism::kinds() {
        let refusal = match Mechanism::of_kinds(kinds).and_then(|values| values.refused()) {
            Ok(()) => None,
            Err(KernelError::Unsupported { what, why, .. }) => Some((what.to_owned(), why.to_owned())),
            Err(other) => Some((kinds.join(" x "), other.to_string())),
        };
        runs += usize::from(refusal.is_none());
        let [score, structure, normalisation, series] = kinds;
        let said = refusal.as_ref().map_or("runs".to_owned(), |(what, why)| format!("refused: {what}: {why}"));
        table.row([score, structure, normalisation, series, &said].map(str::to_owned));
        let mut document = json!({
            "score": score,
            "structure": structure,
            "normalisation": normalisation,
            "series": series,
            "runs": refusal.is_none(),
        });
        if let Some((what, why)) = refusal {
            (document["what"], document["why"]) = (json!(what), json!(why));
        }
        documents.push(document);
    }
    let text = format!("{table}{runs} of {} combinations run\n", documents.len());
    (Value::Array(documents), text)
}
