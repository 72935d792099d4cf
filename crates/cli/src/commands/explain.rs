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
    progress::tell,
};
use resolvent_probe::{
    explain::{self, ExplainOptions, Explanation, MapRule, Query},
    report::{OVERLAYS, write_explanation, write_panel},
    subject::{Example, Material, Subject},
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
    let several = names.len() > 1;
    let mut all: Vec<(ExplainOptions, Subject, Vec<Example>)> = Vec::new();
    // A signal ends the reading at once; from here on files are written.
    for checkpoint in &args.checkpoint {
        let mut options = options(args, checkpoint, &device, global)?;
        let (subject, examples) = explain::load(&options)?;
        if let Some((first, _, shown)) = all.first() {
            same(first, shown, &options, &examples, checkpoint)?;
        }
        explain::check(&options, &subject, &examples)?;
        // The examples were taken from it: a large data set is not held for every model.
        options.material = Material::Texts(Vec::new());
        all.push((options, subject, examples));
    }
    folder(&args.out)?;
    let files = [explain::RESULTS, REPORT, OVERLAYS];
    let _claim = Claim::take(&args.out, &files, Contents::Explanation)?;
    let own = names.iter().filter(|_| several).map(|name| args.out.join(name));
    let _own =
        own.map(|own| Claim::take(&own, &files, Contents::Explanation)).collect::<resolvent_lab::Result<Vec<_>>>()?;
    let deferred = Deferred::begin();
    let mut found = Vec::new();
    for ((mut options, subject, examples), name) in all.into_iter().zip(names) {
        options.stop = deferred.stop();
        let Some(explanation) = explain::run(&options, &subject, &examples)? else {
            return Err(Error::Interrupted("nothing was written; run the command again".into()));
        };
        found.push((name, explanation));
    }
    let page = match &found[..] {
        [(_, only)] => write_explanation(&args.out, only)?,
        all => write_panel(&args.out, all)?,
    };
    if global.json {
        return output::file(&args.out.join(explain::RESULTS));
    }
    let table =
        |(name, e): &(String, Explanation)| if several { format!("{name}\n{}\n", e.table()) } else { e.table() };
    output::print(&format!("{}report: {}", found.iter().map(table).collect::<String>(), page.display()))
}

/// Checks that another model is shown what the first one is.
fn same(
    first: &ExplainOptions,
    shown: &[Example],
    other: &ExplainOptions,
    examples: &[Example],
    path: &Path,
) -> Result<()> {
    let names = |examples: &[Example]| examples.iter().map(|example| example.name().to_owned()).collect::<Vec<_>>();
    if first.data == other.data && names(shown) == names(examples) {
        return Ok(());
    }
    let (name, data, own) = (first.checkpoint.display(), &first.data, &other.data);
    let problem = format!(
        "would be shown {} examples of {own}, {name} {} of {data}; say what all are to be shown with --data, --input or --text, and how many with --examples",
        examples.len(),
        shown.len()
    );
    Err(Error::file(path, problem))
}

fn options(args: &Explain, checkpoint: &Path, device: &Device, global: &Global) -> Result<ExplainOptions> {
    let given = Given {
        data: args.data.as_ref(),
        input: args.input.as_deref(),
        texts: &args.text,
        boxes: args.boxes.as_deref(),
    };
    if args.show == 0 && args.query.is_some() {
        let problem = "says nothing with --show 0, which draws no example; leave one of them out";
        return Err(Error::Option { option: "--query", problem });
    }
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
        options.progress = Arc::new(|line| tell(line));
    }
    Ok(options)
}

/// What the models are called: their folders, of which no two have one name, and none that of a result.
fn names(checkpoints: &[PathBuf]) -> Result<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    for path in checkpoints {
        // Of `.` and `runs/a/..` too; a folder that is not there is told of where it is read.
        let whole = path.canonicalize().unwrap_or_else(|_| path.clone());
        let name = whole.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let problem = match &name[..] {
            _ if checkpoints.len() == 1 => None,
            "" => Some("has no name, by which the results of several models are told apart".to_owned()),
            explain::RESULTS | REPORT | OVERLAYS => Some("has the name of a result; rename it".into()),
            _ if names.contains(&name) => Some(format!(
                "is the second folder called `{name}`, and the results of each go to a folder of its name; rename one"
            )),
            _ => None,
        };
        if let Some(problem) = problem {
            return Err(Error::file(path, problem));
        }
        names.push(name);
    }
    Ok(names)
}
