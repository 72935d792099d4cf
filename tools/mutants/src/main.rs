//! Mutation testing of `resolvent-kernels` and `resolvent-layers`: does any test notice when an operator, a constant or a statement is changed?
//!
//! All sampled mutants are compiled at once, each behind a switch that the environment sets, so that a package is
//! compiled once and not once per mutant. See `docs/testing.md`.

mod build;
mod explained;
mod find;
mod operators;
mod options;
mod run;
mod sample;
mod switch;

use std::{path::Path, process::ExitCode};

use crate::{build::Build, explained::Explained, find::Mutant, options::Options, run::Verdict};

type Error = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    match Options::from_args().and_then(|options| mutate(&options)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn mutate(options: &Options) -> Result<ExitCode, Error> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).canonicalize()?;
    let package = &options.package;
    let all = find::in_folder(&root.join("crates").join(package).join("src"), options.only.as_deref())?;
    let list = format!("tools/mutants/equivalent/{package}.txt");
    let explained = Explained::read(&root.join(&list))?;
    let stale = explained.unmatched(&all);
    if options.only.is_none() && !stale.is_empty() {
        return Err(format!("{list} explains what is no mutant (any more):\n{}", stale.trim_end()).into());
    }
    println!("{} mutants in {} files", all.len(), sample::files(&all));
    let chosen = match &options.again {
        Some(named) => all.into_iter().filter(|mutant| named.contains(&mutant.to_string())).collect(),
        None => sample::spread(all, options.sample, options.seed),
    };
    if options.list {
        chosen.iter().for_each(|mutant| println!("{mutant}"));
        return Ok(ExitCode::SUCCESS);
    }
    let Build { mutants, binaries, programs, uncompiled } = build::build(&root, package, chosen)?;
    println!("{} compiled, {uncompiled} did not", mutants.len());
    let verdicts = run::judge(&mutants, &explained, &binaries, options);
    std::fs::remove_dir_all(programs)?;
    let verdicts = verdicts?;
    Ok(report(&mutants, &verdicts, options.min))
}

/// Prints the survivors and the score.
fn report(mutants: &[Mutant], verdicts: &[Verdict], min: f64) -> ExitCode {
    let count = |wanted: fn(&Verdict) -> bool| verdicts.iter().filter(|verdict| wanted(verdict)).count();
    let killed = count(|v| matches!(v, Verdict::Killed { .. }));
    let explained = count(|v| matches!(v, Verdict::Explained(_)));
    let survivors = mutants.iter().zip(verdicts).filter(|(_, v)| matches!(v, Verdict::Survived { .. }));
    println!("\nSurvivors:");
    survivors.for_each(|(mutant, verdict)| println!("  {mutant}  ({verdict})"));
    let judged = verdicts.len() - explained;
    let score = 100.0 * killed as f64 / judged.max(1) as f64;
    println!(
        "\n{killed} of {judged} mutants killed ({score:.1} %), {} by no test reached, {explained} more explained as equivalent",
        count(|v| matches!(v, Verdict::Survived { tests: 0 }))
    );
    if score < min {
        println!("fewer than {min} %");
        return ExitCode::from(1);
    }
    ExitCode::SUCCESS
}
