//! The options of the daemon, and the commands that show its configuration.

use super::PoolArgs;
use super::settings::{Setting, Settings};
use block::quantities::ByteSize;
use clap::{Args, Subcommand};
use std::path::PathBuf;
use toml::Value;

/// Options of the daemon.
#[derive(Clone, Debug, Default, Args)]
pub struct ServeArgs {
    /// The pool.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// Address of the NBD server, HOST:PORT; port 0 picks a free one; may be repeated
    #[arg(long, value_name = "ADDR")]
    pub nbd: Vec<String>,
    /// Unix socket of the NBD server
    #[arg(long, value_name = "PATH")]
    pub nbd_unix: Option<PathBuf>,
    /// Create this volume if it is missing, and export it; may be repeated
    #[arg(long, value_name = "NAME=SIZE", value_parser = parse_volume)]
    pub volume: Vec<(String, ByteSize)>,
    /// Take the pool from the node that has it open; clients of that node get errors
    #[arg(long)]
    pub take_over: bool,
    /// Serve other machines without TLS
    #[arg(long)]
    pub allow_plain_remote: bool,
    /// Memory of the whole process, like 1G
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Memory for decrypted data, 0 for none
    #[arg(long, value_name = "SIZE")]
    pub memory_cache: Option<ByteSize>,
    /// Size of a new write log
    #[arg(long, value_name = "SIZE")]
    pub log_size: Option<ByteSize>,
    /// Method of writing log files: auto, buffered, direct
    #[arg(long, value_name = "MODE")]
    pub log_io: Option<String>,
    /// Directory of the read cache; DIR/cache by default
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Size of the read cache, 0 for none
    #[arg(long, value_name = "SIZE")]
    pub cache_size: Option<ByteSize>,
    /// Maximum age of data that only this machine has, like 30s
    #[arg(long, value_name = "DURATION")]
    pub max_age: Option<String>,
}

fn parse_volume(text: &str) -> Result<(String, ByteSize), String> {
    let (name, size) =
        text.split_once('=').ok_or_else(|| "write NAME=SIZE, like db=100G".to_owned())?;
    block::quantities::check_name("volume", name)?;
    Ok((name.to_owned(), size.parse()?))
}

impl ServeArgs {
    /// Returns the path of the configuration file, if one is given.
    #[must_use]
    pub fn config_path(&self) -> Option<PathBuf> {
        self.pool.config.clone()
    }

    /// Returns the settings that these flags set.
    #[must_use]
    pub fn settings(&self) -> Vec<Setting> {
        let mut set = Settings(self.pool.settings());
        let listen: Vec<Value> = self.nbd.iter().cloned().map(Value::String).collect();
        set.value("nbd.listen", "--nbd", (!listen.is_empty()).then_some(Value::Array(listen)));
        set.path("nbd.unix", "--nbd-unix", self.nbd_unix.as_deref());
        let allow = self.allow_plain_remote.then_some(Value::Boolean(true));
        set.value("nbd.allow_plain_remote", "--allow-plain-remote", allow);
        set.size("memory", "--memory", self.memory);
        set.size("memory_cache.size", "--memory-cache", self.memory_cache);
        set.size("log.size", "--log-size", self.log_size);
        set.text("log.io", "--log-io", self.log_io.as_deref());
        set.path("cache.dir", "--cache-dir", self.cache_dir.as_deref());
        set.size("cache.size", "--cache-size", self.cache_size);
        set.text("destage.max_age", "--max-age", self.max_age.as_deref());
        let volumes: Vec<Value> = self
            .volume
            .iter()
            .map(|(name, size)| {
                let mut volume = toml::Table::new();
                volume.insert("name".to_owned(), Value::String(name.clone()));
                volume.insert("size".to_owned(), Value::String(size.to_string()));
                Value::Table(volume)
            })
            .collect();
        set.value("volumes", "--volume", (!volumes.is_empty()).then_some(Value::Array(volumes)));
        set.0
    }
}

/// Commands about the configuration.
#[derive(Clone, Debug, Subcommand)]
pub enum ConfigCommand {
    /// Print the effective configuration and the source of each value
    Show(Box<ServeArgs>),
    /// Print a commented spindle.toml
    Example,
}

/// Options of the demonstration.
#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// Directory of the pool; by default a new one below the temporary directory
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Number of nodes, 1 or 3; with 3 the node that owns the pool is killed, and another one serves it
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse_node_count)]
    pub nodes: u64,
    /// Number of data nodes; some are killed, everything is read back without them, and a spare one is filled
    #[arg(long, value_name = "N", conflicts_with = "nodes", value_parser = parse_dnode_count)]
    pub dnodes: Option<usize>,
    /// Erasure code over the data nodes: fragments of data, and of parity
    #[arg(long, value_name = "K+M", default_value = "4+2", requires = "dnodes")]
    pub scheme: String,
    /// End after the measurements instead of serving
    #[arg(long)]
    pub exit: bool,
}

fn parse_dnode_count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 2..=32) => Ok(count),
        _ => Err("write a number from 2 to 32".to_owned()),
    }
}

fn parse_node_count(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(count @ (1 | 3)) => Ok(count),
        Ok(2) => Err("a log on 2 machines survives the loss of neither; write 1 or 3".to_owned()),
        _ => Err("write 1 or 3".to_owned()),
    }
}
