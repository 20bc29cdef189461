//! The commands that rehearse failures: requests to the daemon of the pool, one after the other.
//!
//! Invariants:
//! - A rehearsal needs every member, and begins only while all of them take part.
//! - The pool is moved on only once every member has nearly everything that was acknowledged.
//! - A rehearsal that fails says which move failed.

use super::{Failure, load_pool, move_to, usage};
use api::drill::{DrillInfo, DrillMove};
use api::member::MembersInfo;
use api::pool::PoolRequest;
use api::{Reply, Request};
use block::env::{Clock, SystemClock};
use block::{Error, ErrorKind, Result};
use cli::args::{Cli, DrillCommand, FailOverArgs};
use cli::{output, print};
use config::Config;
use std::time::Duration;

/// Longest wait for members between two moves. Chosen by hand: an old owner closes its pool, and catches
/// up.
const CALM_MAX: Duration = Duration::from_secs(60);
/// Acknowledged batches that a member may lack between two moves: clients go on writing. Chosen by hand.
const BEHIND_MAX: u64 = 64;
/// Pause between two looks at the members. Chosen by hand.
const LOOK_PAUSE: Duration = Duration::from_millis(100);

pub(super) async fn run(cli: &Cli, command: &DrillCommand) -> Result<(), Failure> {
    match command {
        DrillCommand::FailOver(args) => fail_over(cli, args).await,
    }
}

async fn fail_over(cli: &Cli, args: &FailOverArgs) -> Result<(), Failure> {
    let config = load_pool(&args.pool)?;
    if let Some(path) = &args.report
        && path.exists()
    {
        return Err(usage(format!("--report {}: the file exists", path.display())));
    }
    let members = calm_members(&config).await?;
    let Some(owner) = members.members.iter().find(|member| member.is_owner) else {
        let what = "rehearse a fail-over: no member of the pool's log owns the pool";
        return Err(Error::new(ErrorKind::Unavailable, what).into());
    };
    let owner = owner.node.clone();
    let others: Vec<String> =
        members.members.into_iter().filter(|one| !one.is_owner).map(|one| one.node).collect();
    if others.is_empty() {
        let what = "rehearse a fail-over: the pool's log has one member; add nodes with `spindle pool members add`";
        return Err(Error::new(ErrorKind::Invalid, what).into());
    }
    let mut moves = Vec::new();
    for other in (0..args.rounds).flat_map(|_| &others) {
        for (from, to) in [(&owner, other), (other, &owner)] {
            calm_members(&config).await?;
            let pause_ms = move_to(&config, to).await.map_err(|error| {
                error.context(format!(
                    "rehearse a fail-over: move {} of the pool, from node {from} to node {to}; `spindle pool members list` \
                     shows who owns it",
                    moves.len() + 1
                ))
            })?;
            moves.push(DrillMove { from: from.clone(), to: to.clone(), pause_ms });
        }
    }
    let detection = config.settings().log.detection.duration();
    let detection_ms = u64::try_from(detection.as_millis()).unwrap_or(u64::MAX);
    let info = DrillInfo::new(owner, moves, detection_ms);
    if let Some(path) = &args.report {
        let text = serde_json::to_string_pretty(&info)
            .map_err(|error| Error::with_source(ErrorKind::Invalid, "encode the report", error))?;
        std::fs::write(path, text + "\n").map_err(|error| {
            Error::with_source(ErrorKind::Io, format!("write {}", path.display()), error)
        })?;
    }
    Ok(output::emit(cli.output, &info, print::drill)?)
}

/// Waits until every member takes part and has nearly everything that was acknowledged, and returns them.
async fn calm_members(config: &Config) -> Result<MembersInfo> {
    let begun = SystemClock.now();
    loop {
        let asked = cli::client::call(config.dir(), &Request::Pool(PoolRequest::Members {})).await;
        let why = match asked {
            Ok(Some(Reply::Members(info))) => {
                let away =
                    info.members.iter().find(|one| !one.is_connected || one.behind > BEHIND_MAX);
                match (away, info.away.first()) {
                    (None, None) => return Ok(info),
                    (None, Some(node)) => {
                        format!("node {node} was left out of the write log, and is not back yet")
                    }
                    (Some(one), _) => {
                        let error = one.error.clone();
                        let why =
                            error.unwrap_or_else(|| format!("it lacks {} batches", one.behind));
                        format!("node {} does not take part in the write log: {why}", one.node)
                    }
                }
            }
            Ok(Some(_)) => "the daemon's reply is not understood".to_owned(),
            // While it changes its role, it has no socket for a moment.
            Ok(None) => format!("no daemon runs on {}", config.dir().display()),
            Err(error) if error.kind() == ErrorKind::Invalid => return Err(error),
            Err(error) => error.chain(),
        };
        if SystemClock.since(begun) > CALM_MAX {
            let what = format!("rehearse a fail-over: {why}");
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        tokio::time::sleep(LOOK_PAUSE).await;
    }
}
