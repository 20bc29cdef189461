//! Tests of the command line.

use crate::args::{Cli, Command};
use crate::output::wants_json;
use api::Request;
use api::volume::{RemoveMode, VolumeRequest};
use clap::{CommandFactory, Parser};

fn parse(line: &str) -> Cli {
    Cli::try_parse_from(line.split(' ')).unwrap_or_else(|error| panic!("{line}: {error}"))
}

#[test]
fn the_grammar_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn the_documented_command_lines_parse() {
    for line in [
        "spindle serve --dir /d",
        "spindle serve --dir /d --store s3://b/p --nbd 127.0.0.1:0 --nbd-unix /d/s --volume a=1G --volume b=2T -c spindle.toml --take-over",
        "spindle demo",
        "spindle demo --nodes 3 --exit -o json",
        "spindle demo --dnodes 6 --scheme 4+2 --exit -o json",
        "spindle volume create db 100G --dir /d -o json",
        "spindle volume list --dir /d -o json",
        "spindle -o json volume show db --dir /d",
        "spindle volume resize db 200G --dir /d",
        "spindle volume set db --durability store --dir /d -o json",
        "spindle volume set db --read-only false --durability auto --dir /d",
        "spindle volume rm db --dir /d --now",
        "spindle volume restore db --dir /d",
        "spindle pool rm --dir /d -o json",
        "spindle pool restore --dir /d --store s3://b/p",
        "spindle pool purge --dir /d --now",
        "spindle status --dir /d -o json",
        "spindle fsck --dir /d --store /s",
        "spindle fsck --dir /d --repair-counts",
        "spindle key backup --dir /d",
        "spindle key rotate --dir /d --new-passphrase-env P",
        "spindle key rotate --dir /d --new-command kms --unwrap -x",
        "spindle node init --dir /d --address 10.0.0.1:7400 --name n1",
        "spindle node join - --dir /d --address 10.0.0.1:7400 --address [fd00::1]:7400",
        "spindle node join - --without-key --dir /d --address 10.0.0.1:7400",
        "spindle dnode --dir /d --drive /mnt/a --drive /mnt/b",
        "spindle dnode --dir /d --drive /mnt/a --group nvme --domain rack-a",
        "spindle node list --dir /d -o json",
        "spindle node remove n2 --dir /d",
        "spindle config show --dir /d --memory 2G",
        "spindle config example",
        "spindle version",
    ] {
        parse(line);
    }
    for line in [
        "spindle",
        "spindle demo --nodes 0",
        "spindle demo --nodes 2",
        "spindle demo --nodes 4",
        "spindle demo --nodes 3 --dnodes 6",
        "spindle demo --scheme 4+2",
        "spindle demo --dnodes 1",
        "spindle serve --volume db",
        "spindle serve --volume a/b=1G",
        "spindle serve --memory 1GB",
        "spindle volume create db",
        "spindle volume create db 100X --dir /d",
        "spindle volume set db --dir /d",
        "spindle volume set db --read-only maybe --dir /d",
        "spindle pool rm --dir /d --now",
        "spindle status --dir /d -o yaml",
        "spindle status --key-file /k --passphrase-file /p",
        "spindle status --passphrase hunter2",
        "spindle key rotate --new-key-file /a --new-passphrase-env P",
        "spindle node init --dir /d",
        "spindle node join --dir /d --address h:1",
        "spindle node remove --dir /d",
    ] {
        let error = Cli::try_parse_from(line.split(' ')).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{line}");
    }
}

#[test]
fn parsed_token_is_not_in_debug_texts() {
    let cli = parse("spindle node join spindlehunter2 --address h:1");
    assert!(!format!("{cli:?}").contains("hunter2"));
}

#[test]
fn unparsable_command_line_still_selects_json() {
    let wants = |line: &str| wants_json(line.split(' ').map(Into::into));
    for line in ["status -o json", "-ojson stats", "volume --output=json", "--output json x"] {
        assert!(wants(line), "{line}");
    }
    for line in ["status", "status -o yaml", "status -o text json", "volume create json"] {
        assert!(!wants(line), "{line}");
    }
}

#[test]
fn the_operators_manual_names_every_command_and_flag() {
    let manual = include_str!("../../../docs/operations.md");
    let mut commands = vec![(String::from("spindle"), Cli::command())];
    while let Some((path, command)) = commands.pop() {
        assert!(manual.contains(&path), "{path}");
        for flag in command.get_arguments().filter_map(|argument| argument.get_long()) {
            if !matches!(flag, "help" | "version") {
                assert!(manual.contains(&format!("`--{flag}")), "{path} --{flag}");
            }
        }
        for sub in command.get_subcommands() {
            commands.push((format!("{path} {}", sub.get_name()), sub.clone()));
        }
    }
}

#[test]
fn removal_modes_are_those_of_the_flags() {
    for (flags, mode) in
        [("", RemoveMode::Restorable), (" --now", RemoveMode::Now), (" --erase", RemoveMode::Erase)]
    {
        let cli = parse(&format!("spindle volume rm db --dir /d{flags}"));
        let (_, request) = cli.command.request().unwrap().expect("it is a request");
        let wanted = VolumeRequest::Remove { name: "db".to_owned(), mode };
        assert_eq!(request, Request::Volume(wanted));
    }
}

#[test]
fn arguments_that_no_daemon_accepts_are_refused() {
    for line in [
        "clone db@a b --ttl 0s",
        "scrub start --every 0s",
        "scrub start --rate 1",
        "copy add /c --rate 1",
        "copy add /c --env-prefix A-B",
    ] {
        let cli = parse(&format!("spindle {line} --dir /d"));
        let error = cli.command.request().unwrap_err();
        assert_eq!(error.kind(), block::ErrorKind::Invalid, "{line}");
    }
    for line in ["nbd://h/db", "nbd://h/db --nbd --connections 2", "db --nbd --lock-memory"] {
        let cli = parse(&format!("spindle attach {line}"));
        let Command::Attach(args) = &cli.command else { panic!("not attach") };
        assert_eq!(args.plan().unwrap_err().kind(), block::ErrorKind::Invalid, "{line}");
    }
}

#[test]
fn the_exit_codes_of_the_help_are_those_of_the_manual() {
    let help = Cli::command().render_long_help().to_string();
    let codes = help.split("Exit codes: ").nth(1).expect("the help names them");
    let codes = codes.split("Environment").next().unwrap_or_default().replace('\n', " ");
    let manual = include_str!("../../../docs/operations.md");
    for code in 0..=5 {
        let row = manual.lines().find(|line| line.starts_with(&format!("| {code} | ")));
        let row = row.unwrap_or_else(|| panic!("the manual has no exit code {code}"));
        assert!(codes.contains(&format!("{code} ")), "the help has no exit code {code}");
        // An exit code of only some commands is documented with their names in both places.
        if code == 4 {
            assert!(row.contains("attach") && codes.contains("4 attach of a URI"), "{codes}");
        }
    }
}
