//! `resolvent explain`: what a trained classifier or language model looks at.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};

use clap::{Args, ValueEnum};
use resolvent_lab::{
    data::DataSpec,
    device::Device,
    folder::{Claim, Contents, REPORT},
};
use resolvent_probe::{
    explain::{self, ExplainOptions, Explanation, MapRule, Query},
    report::{OVERLAYS, write_explanation, write_panel},
};

use super::{compare::command_line, devices::DeviceArg, material::Given};
use crate::{Error, args::Global, destination::folder, error::Result, interrupt::Deferred, output};

/// Show what a trained model looks at, and whether a classifier's answers rest on it
///
/// Draws the attention of every layer and head over pictures or texts, for every mechanism. Takes away what the maps find
/// important, most or least first, and watches the answer (MoRF, LeRF); where boxes of objects are known, tells how well the
/// maps find them (ROC, average precision). Random maps and equal weights stand beside. Of a language model it draws what the
/// last token looks at, whose successor is said, and what every token looks at. Ends in a table, results.json, report.html and
/// overlays/.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Explain {
    /// Folder of a run (its best checkpoint where it stopped early, else its newest) or of one checkpoint; of several, given one after the
    /// other, maps stand side by side, and each has a folder of its name in that of the results
    #[arg(long, value_name = "DIR", default_value = "runs/train")]
    checkpoint: Vec<PathBuf>,
    /// Data set whose test part is shown [default: the one trained on]
    #[arg(long, value_name = "KIND:PATH", conflicts_with_all = ["input", "text"])]
    data: Option<DataSpec>,
    /// PNG, JPEG or WebP picture, folder of pictures, or, for a model of texts, file of texts, one a line
    #[arg(long, value_name = "PATH", conflicts_with = "text")]
    input: Option<PathBuf>,
    /// A text; may be given several times
    #[arg(long, value_name = "TEXT")]
    text: Vec<String>,
    /// Boxes of objects in Pascal VOC's XML: the picture's file, or a folder with NAME.xml for each NAME.jpg
    #[arg(long, value_name = "PATH", requires = "input", conflicts_with_all = ["data", "text"])]
    boxes: Option<PathBuf>,
    /// Examples at most, evenly spread over what there is [default: 100 pictures, 20 texts, of --text all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    examples: Option<u32>,
    /// Examples whose maps are drawn
    #[arg(long, value_name = "N", default_value_t = 6)]
    show: usize,
    /// Layer whose map is scored, such as `blocks.3` [default: the last with at least 16 places]
    #[arg(long, value_name = "NAME")]
    layer: Option<String>,
    /// How heads make one map: `equal-heads`, each over its sum, or `paper`, as they are ("Infinite Self-Attention")
    #[arg(long, value_name = "RULE", value_enum, default_value_t = Rule::EqualHeads)]
    map_rule: Rule,
    /// Draw what one place itself looks at too: ROW,COLUMN on the scored layer's grid of a picture, the number of a token of a text;
    /// counted from 1
    #[arg(long, value_name = "ROW,COL", value_parser = Query::from_str)]
    query: Option<Query>,
    /// Score the map through all layers too (attention rollout)
    #[arg(long)]
    rollout: bool,
    /// Folder of the results
    #[arg(long, value_name = "DIR", default_value = "runs/explain")]
    out: PathBuf,
    #[command(flatten)]
    device: DeviceArg,
}

/// [`MapRule`] on the command line.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Rule {
    EqualHeads,
    Paper,
}

impl From<Rule> for MapRule {
    fn from(rule: Rule) -> Self {
        match rule {
            Rule::EqualHeads => Self::EqualHeads,
            Rule::Paper => Self::Paper,
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  resolvent explain                                           the run in runs/train on its test part
  resolvent explain --checkpoint runs/shapes --examples 200 --rollout
  resolvent explain --checkpoint runs/cars --input photos/images --boxes photos/annotations
  resolvent explain --checkpoint runs/infsa --checkpoint runs/softmax --data shapes        two models side by side
  resolvent explain --checkpoint runs/imdb --text 'A film that I would see again.'
  resolvent explain --checkpoint runs/books --text 'It was' --query 2       a language model, and what its second token looks at";

/// Runs the command.
pub fn run(args: &Explain, global: &Global) -> Result<()> {
    let device = args.device.choose(global)?;
    let names = names(&args.checkpoint)?;
    let all = args.checkpoint.iter().map(|checkpoint| options(args, checkpoint, &device, global));
    let mut all = all.collect::<Result<Vec<_>>>()?;
    // A signal ends the reading at once; from here on files are written.
    let loaded = all.iter().map(explain::load).collect::<resolvent_lab::Result<Vec<_>>>()?;
    folder(&args.out)?;
    let _claim = Claim::take(&args.out, &[explain::RESULTS, REPORT, OVERLAYS], Contents::Explanation)?;
    let deferred = Deferred::begin();
    let mut found = Vec::new();
    for ((options, (subject, examples)), name) in all.iter_mut().zip(&loaded).zip(names) {
        options.stop = deferred.stop();
        let Some(explanation) = explain::run(options, subject, examples)? else {
            return Err(Error::Interrupted("nothing was written; run the command again".into()));
        };
        found.push((name, explanation));
    }
    let page = match &found[..] {
        [(_, only)] => write_explanation(&args.out, only)?,
        several => write_panel(&args.out, several)?,
    };
    if global.json {
        return output::file(&args.out.join(explain::RESULTS));
    }
    let several = found.len() > 1;
    let table =
        |(name, e): &(String, Explanation)| if several { format!("{name}\n{}\n", e.table()) } else { e.table() };
    output::print(&format!("{}report: {}", found.iter().map(table).collect::<String>(), page.display()))
}

fn options(args: &Explain, checkpoint: &Path, device: &Device, global: &Global) -> Result<ExplainOptions> {
    let given = Given {
        data: args.data.as_ref(),
        input: args.input.as_deref(),
        texts: &args.text,
        boxes: args.boxes.as_deref(),
    };
    let (material, data) = given.material(checkpoint, global)?;
    let mut options = ExplainOptions {
        examples: args.examples.map(|n| n as usize).or((!args.text.is_empty()).then_some(args.text.len())),
        shown: args.show,
        layer: args.layer.clone(),
        map_rule: args.map_rule.into(),
        query: args.query,
        rollout: args.rollout,
        seed: global.seed.unwrap_or(0),
        device: device.clone(),
        commands: vec![command_line()],
        ..ExplainOptions::new(checkpoint, material, data)
    };
    if !global.quiet {
        options.progress = Arc::new(|line| eprintln!("{line}"));
    }
    Ok(options)
}

/// What the models are called: their folders, of which no two have one name.
fn names(checkpoints: &[PathBuf]) -> Result<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    for path in checkpoints {
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        if names.contains(&name) {
            return Err(Error::file(
                path,
                format!(
                    "is the second folder called `{name}`, and the results of each go to a folder of its name; rename one"
                ),
            ));
        }
        names.push(name);
    }
    Ok(names)
}
