//! `resolvent completions`: completion scripts.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::{
    Error,
    args::{Cli, Global},
    error::Result,
    output,
};

/// Print a completion script for a shell
///
/// The script goes to standard output; where it belongs depends on the shell.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Completions {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub shell: Shell,
}

const EXAMPLES: &str = "\
Examples:
  resolvent completions bash > ~/.local/share/bash-completion/completions/resolvent
  resolvent completions zsh  > ~/.zfunc/_resolvent          (with ~/.zfunc in fpath)
  resolvent completions fish > ~/.config/fish/completions/resolvent.fish";

/// Prints the script.
pub fn run(args: &Completions, global: &Global) -> Result<()> {
    if global.json {
        return Err(Error::Option { option: "--json", problem: "says nothing of a script; leave it out" });
    }
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "resolvent", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}
