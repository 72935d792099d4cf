//! Help, completions, and wrong usage.

mod support;

use std::process::{Command, Stdio};

use support::{Outcome, Sandbox, resolvent};

const COMMANDS: [&str; 9] =
    ["attend", "train", "eval", "compare", "mechanisms", "devices", "recipes", "report", "completions"];

#[test]
fn every_command_explains_itself_with_examples() {
    let sandbox = Sandbox::new();
    let overview = sandbox.run(&["--help"]).success().stdout;
    for command in COMMANDS {
        assert!(overview.contains(&format!("\n  {command}  ")), "{overview}");
        let help = sandbox.run(&[command, "--help"]).success().stdout;
        let (_, examples) = help.split_once("Examples:\n").unwrap_or_else(|| panic!("{command} has no examples"));
        assert!(examples.contains(&format!("resolvent {command}")), "{examples}");
        for line in examples.lines() {
            assert!(line.len() <= 100, "wraps: {line}");
        }
        for option in ["--json", "--threads", "--seed"] {
            assert!(help.contains(option), "{command} {option}");
        }
        assert_eq!(sandbox.run(&["help", command]).success().stdout, help);
    }
}

#[test]
fn wrong_usage_exits_with_2() {
    let sandbox = Sandbox::new();
    let attend = ["attend", "--config", "m", "--input", "i", "--output", "o"];
    let cases: [(&[&str], &str); 13] = [
        (&["predict"], "predict"),
        (&["attend"], "--config"),
        (&["attend", "--config", "m", "--input", "i"], "--output"),
        (&["attend", "--config", "m", "--input", "i", "--output", ""], "--output"),
        (&[&attend[..], &["--fast"]].concat(), "--fast"),
        (&[&attend[..], &["--plan"]].concat(), "--plan"),
        (&[&attend[..], &["extra"]].concat(), "extra"),
        (&[&attend[..], &["--threads", "0"]].concat(), "--threads"),
        (&[&attend[..], &["--threads", "-1"]].concat(), "-1"),
        (&[&attend[..], &["--threads", "many"]].concat(), "many"),
        (&[&attend[..], &["--seed", "1.5"]].concat(), "1.5"),
        (&[&attend[..], &["--quiet", "--verbose"]].concat(), "--quiet"),
        (&["completions", "tcsh"], "tcsh"),
    ];
    for (args, says) in cases {
        let outcome = sandbox.run(args);
        outcome.failure(2);
        assert!(outcome.stderr.contains(says), "{args:?}: {}", outcome.stderr);
        assert!(outcome.stdout.is_empty() && sandbox.snapshot().is_empty());
    }
    let bare = sandbox.run(&[]);
    assert_eq!(bare.code, Some(2));
    assert!(bare.stderr.contains("Usage: resolvent"), "{}", bare.stderr);
}

#[test]
fn completions_name_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let script = Sandbox::new().run(&["completions", shell]).success().stdout;
        for command in COMMANDS {
            assert!(script.contains(command), "{shell}: {command}");
        }
        for option in ["reference", "threads", "resume", "infsa-resolvent", "fashion-mnist"] {
            assert!(script.contains(option), "{shell}: {option}");
        }
    }
}

/// The shell itself reads the script of its completions.
fn completions_parse(shell: &str) {
    let sandbox = Sandbox::new();
    let file = sandbox.write("script", sandbox.run(&["completions", shell]).success().stdout);
    Outcome::of(Command::new(shell).arg("-n").arg(file)).success();
}

#[test]
fn bash_reads_its_completions() {
    completions_parse("bash");
}

#[test]
#[ignore = "needs zsh"]
fn zsh_reads_its_completions() {
    completions_parse("zsh");
}

#[test]
#[ignore = "needs fish"]
fn fish_reads_its_completions() {
    completions_parse("fish");
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    for args in [&["--help"][..], &["completions", "bash"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let outcome = Outcome::of(resolvent().args(args).stdout(writer).stderr(Stdio::piped()));
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    }
}
