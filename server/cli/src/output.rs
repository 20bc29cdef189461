//! Standard output and standard error: results, errors, and the line that says that all is served.
//!
//! Invariant: a closed standard output or error never changes what a command does.

use crate::args::{Cli, Output};
use api::error::FailureDocument;
use api::pool::ReadyInfo;
use block::{Error, ErrorKind, Result};
use clap::Parser;
use serde::Serialize;
use std::io::Write;
use std::process::ExitCode;

/// Parses the arguments of this process. If they are wrong, or ask for help or the version, prints
/// that and returns the exit code.
///
/// # Errors
/// The exit code.
pub fn parse() -> Result<Cli, ExitCode> {
    Cli::try_parse().map_err(|error| misread(&error))
}

/// Prints the error of the command line, or the text that `--help` and `--version` ask for.
fn misread(error: &clap::Error) -> ExitCode {
    // Standard output or error may be closed; the exit code still tells the result.
    let _ = error.print();
    if error.use_stderr() && wants_json(std::env::args_os().skip(1)) {
        let text = error.render().to_string();
        let error = Error::new(ErrorKind::Invalid, text.trim());
        let _ = writeln!(std::io::stdout(), "{}", failure_json(&error));
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// Tells whether arguments that could not be parsed ask for JSON.
pub(crate) fn wants_json(arguments: impl Iterator<Item = std::ffi::OsString>) -> bool {
    let words: Vec<String> =
        arguments.map(|argument| argument.to_string_lossy().into_owned()).collect();
    let is_flag = |word: &str| matches!(word, "-o" | "--output");
    let is_complete = |word: &str| matches!(word, "-ojson" | "-o=json" | "--output=json");
    words.iter().any(|word| is_complete(word))
        || words.windows(2).any(|pair| is_flag(&pair[0]) && pair[1] == "json")
}

/// Prints why a command failed: a line on standard error, and with `-o json` a document on standard
/// output.
pub fn failure(output: Output, error: &Error) {
    // Standard error may be closed; the exit code still tells the result.
    let _ = writeln!(std::io::stderr(), "spindle: {}", error.chain());
    if output == Output::Json {
        let _ = writeln!(std::io::stdout(), "{}", failure_json(error));
    }
}

/// Returns the document about a failure, in one line.
pub(crate) fn failure_json(error: &Error) -> String {
    one_line(&FailureDocument { error: error.into() })
}

/// Reports on standard output that everything answers, and the endpoints. A supervisor can wait for
/// it.
pub fn announce(output: Output, endpoints: &[String]) {
    let text = announcement(output, endpoints);
    let mut out = std::io::stdout().lock();
    // The reader may be gone; the daemon serves all the same.
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// Returns the announcement. As text: one line for each endpoint, then `ready`. As JSON: one
/// document in one line.
pub(crate) fn announcement(output: Output, endpoints: &[String]) -> String {
    match output {
        Output::Text => {
            endpoints.iter().map(String::as_str).chain(["ready"]).collect::<Vec<_>>().join("\n")
        }
        Output::Json => one_line(&ReadyInfo { is_ready: true, endpoints: endpoints.to_vec() }),
    }
}

/// Prints a document in one line, in place of text that was printed step by step.
pub fn document(value: &impl Serialize) {
    let _ = writeln!(std::io::stdout(), "{}", one_line(value));
}

fn one_line(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default() // strings, numbers and lists always encode
}

/// Prints a result.
///
/// # Errors
/// `Io` if standard output cannot be written; none if its reader is gone.
pub fn emit<T: Serialize>(
    output: Output,
    value: &T,
    text: impl FnOnce(&T) -> String,
) -> Result<()> {
    let printed = rendered(output, value, text)?;
    let mut out = std::io::stdout().lock();
    match out.write_all(printed.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()), // `| head`
        outcome => outcome
            .map_err(|error| Error::with_source(ErrorKind::Io, "write to standard output", error)),
    }
}

/// Returns what [`emit`] prints.
pub(crate) fn rendered<T: Serialize>(
    output: Output,
    value: &T,
    text: impl FnOnce(&T) -> String,
) -> Result<String> {
    match output {
        Output::Text => Ok(text(value)),
        Output::Json => {
            let json = serde_json::to_string_pretty(value).map_err(|error| {
                Error::with_source(ErrorKind::Invalid, "encode the reply", error)
            })?;
            Ok(json + "\n")
        }
    }
}
