//! Golden tests: the request, the text and the JSON of every command.
//!
//! Invariants:
//! - Every command of the grammar has a file in `testdata/`, and every file belongs to a command.
//! - The replies are fixed, so a file changes only with the grammar, with a type of `api` or with a
//!   printer.
//!
//! `GOLDEN=print cargo test --release -p cli --lib golden -- --nocapture` prints the files as they
//! would be; `GOLDEN=write` writes them, for a look at the difference.

mod data;
mod doctor;
mod members;
mod nodes;
mod samples;

use crate::args::{AttachPlan, Cli, Command, Output};
use crate::output::{announcement, failure_json, rendered};
use crate::print;
use api::copy::CopyRequest;
use api::key::{KeyRequest, NewKey, Secret};
use api::pool::PoolRequest;
use api::{Reply, Request};
use block::{Error, ErrorKind};
use clap::{CommandFactory, Parser};
use samples::moment;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// One call of a command.
struct Case {
    line: &'static str,
    request: Option<Request>,
    text: String,
    json: String,
}

fn parse(line: &str) -> Cli {
    let words = line.split(' ').map(|word| word.replace('+', " "));
    Cli::try_parse_from(words).unwrap_or_else(|error| panic!("{line}: {error}"))
}

/// A call that prints `value`, and sends what its arguments say.
fn case<T: Serialize>(line: &'static str, value: &T, text: impl Fn(&T) -> String) -> Case {
    let cli = parse(line);
    let mut request = match &cli.command {
        Command::Attach(args) => match args.plan().unwrap() {
            AttachPlan::Volume(name) => Some(args.request(name)),
            AttachPlan::List => Some(crate::args::AttachArgs::list_request()),
            AttachPlan::Remote { .. }
            | AttachPlan::ListRemote
            | AttachPlan::CleanUp
            | AttachPlan::CleanUpDevice(_) => None,
        },
        Command::Detach(args) => Some(args.request(args.target.clone())),
        Command::Stop(_) => Some(Request::Pool(PoolRequest::Stop {})),
        Command::Fsck(args) if args.copy.is_none() => Some(Request::Pool(PoolRequest::Fsck {})),
        command => command.request().unwrap().map(|(_, request)| request),
    };
    if let Some(Request::Copy(CopyRequest::Add { copy })) = &mut request {
        copy.created_at = moment(0);
    }
    let text_of = |output| rendered(output, value, &text).unwrap();
    Case { line, request, text: text_of(Output::Text), json: text_of(Output::Json) }
}

fn reply(line: &'static str, reply: Reply) -> Case {
    case(line, &reply, print::reply)
}

fn done(line: &'static str, message: &str) -> Case {
    reply(line, Reply::Done { message: message.to_owned() })
}

/// A call that serves until it is stopped.
fn serving(line: &'static str, endpoints: &[&str]) -> Case {
    let endpoints: Vec<String> = endpoints.iter().map(|&endpoint| endpoint.to_owned()).collect();
    let text_of = |output| announcement(output, &endpoints) + "\n";
    parse(line);
    Case { line, request: None, text: text_of(Output::Text), json: text_of(Output::Json) }
}

fn content(cases: &[Case]) -> String {
    let mut content = String::new();
    for (index, case) in cases.iter().enumerate() {
        let Case { line, request, text, json } = case;
        let gap = if index == 0 { "" } else { "\n" };
        let _ = writeln!(content, "{gap}$ {line}");
        if let Some(request) = request {
            let json = serde_json::to_string(request).unwrap();
            let back: Request = serde_json::from_str(&json).unwrap();
            assert_eq!(back, *request, "{line}");
            let _ = writeln!(content, "-- request\n{json}");
        }
        let _ = write!(content, "-- text\n{text}-- json\n{json}");
    }
    content
}

fn testdata() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata")
}

/// Compares with the file of a command, or prints or writes it.
fn check(name: &str, content: &str) -> Result<(), String> {
    let path = testdata().join(format!("{name}.txt"));
    match std::env::var("GOLDEN").as_deref() {
        Ok("print") => println!("==> {name}.txt\n{content}"),
        Ok("write") => std::fs::write(&path, content).unwrap(),
        _ => {
            let golden = std::fs::read_to_string(&path).unwrap_or_default();
            if golden != content {
                return Err(format!("{name}.txt differs; it would be:\n{content}"));
            }
        }
    }
    Ok(())
}

/// Names of all commands of the grammar: the words joined by hyphens.
fn command_names() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut todo: Vec<(Vec<String>, clap::Command)> = vec![(Vec::new(), Cli::command())];
    while let Some((words, command)) = todo.pop() {
        if !command.has_subcommands() {
            names.insert(words.join("-"));
        }
        for sub in command.get_subcommands() {
            let words = [&words[..], &[sub.get_name().to_owned()]].concat();
            todo.push((words, sub.clone()));
        }
    }
    names
}

/// All cases by the name of the command.
fn all() -> Vec<(&'static str, Vec<Case>)> {
    let mut all = samples::about_volumes();
    all.extend(samples::about_snapshots());
    all.extend(samples::about_copies());
    all.extend(samples::about_pools());
    all.extend(members::about_members());
    all.extend(data::about_data());
    all.extend(doctor::about_doctor());
    all.extend(samples::about_devices());
    all.extend(nodes::about_nodes());
    all.extend(samples::about_the_program());
    all
}

#[test]
fn golden_output_of_every_command() {
    let wrong: Vec<String> =
        all().iter().filter_map(|(name, cases)| check(name, &content(cases)).err()).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn golden_files_are_there_for_every_command_and_for_nothing_else() {
    let commands = command_names();
    let tested: BTreeSet<String> = all().iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(tested, commands, "commands with cases are those of the grammar");
    let files = std::fs::read_dir(testdata()).unwrap();
    let files: BTreeSet<String> = files
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
        .filter(|name| name != "errors" && name != "key-rotate-requests")
        .collect();
    assert_eq!(files, commands, "files are those of the commands");
}

#[test]
fn golden_errors() {
    let mut content = String::new();
    for (kind, message) in [
        (ErrorKind::NotFound, "show volume db: there is none; `spindle volume list` shows all"),
        (ErrorKind::Unsupported, "the daemon speaks version 2 of the admin protocol"),
    ] {
        let _ = writeln!(content, "{}", failure_json(&Error::new(kind, message)));
    }
    check("errors", &content).unwrap();
}

#[test]
fn golden_requests_to_rotate_the_key() {
    let secret = Secret::new("correct horse".to_owned());
    let command = vec!["kms".to_owned(), "--unwrap".to_owned()];
    let mut content = String::new();
    for new in [
        None,
        Some(NewKey::File { path: "/k".into() }),
        Some(NewKey::Passphrase { secret }),
        Some(NewKey::Command { command }),
    ] {
        let request = Request::Key(KeyRequest::Rotate { new });
        let _ = writeln!(content, "{}", serde_json::to_string(&request).unwrap());
    }
    check("key-rotate-requests", &content).unwrap();
}
