//! The program `resolvent`; everything is in the library beside it.

use std::process::ExitCode;

fn main() -> ExitCode {
    resolvent_cli::run(std::env::args_os())
}
