//! Documentation of every option: type and unit, range, default, and purpose.
//!
//! Invariants:
//! - There is one row per option, in the order of the file. The example file is made from these
//!   rows, and the tests compare them with the defaults of [`super::Settings`] and with
//!   docs/operations.md.

use std::fmt::Write;

/// Documentation of one option.
#[derive(Clone, Copy, Debug)]
pub struct OptionDoc {
    /// Dotted key.
    pub key: &'static str,
    /// Type and unit.
    pub kind: &'static str,
    /// Allowed values.
    pub range: &'static str,
    /// Default as TOML, or a sentence in parentheses if it depends on other options.
    pub default: &'static str,
    /// A value for the example file, if there is no fixed default.
    pub example: &'static str,
    /// Purpose.
    pub about: &'static str,
}

const fn row(
    key: &'static str,
    kind: &'static str,
    range: &'static str,
    default: &'static str,
    example: &'static str,
    about: &'static str,
) -> OptionDoc {
    OptionDoc { key, kind, range, default, example, about }
}

/// Every option.
pub const OPTIONS: &[OptionDoc] = &[
    row(
        "dir",
        "path",
        "a local directory",
        "(none: required)",
        "\"/var/lib/spindle\"",
        "Directory of the write log, the read cache, the node's identity and the admin socket. On a \
         disk whose fsync is honest.",
    ),
    row(
        "store",
        "URL or path",
        "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///path or a directory",
        "(DIR/store)",
        "\"s3://my-bucket/spindle\"",
        "Where the data goes. Credentials come from the environment or the machine's identity, \
         never from here.",
    ),
    row(
        "name",
        "text",
        "1 to 63 of A-Z a-z 0-9 . _ -",
        "\"main\"",
        "",
        "Name of the pool, for people.",
    ),
    row(
        "memory",
        "bytes",
        "from about 630MiB",
        "\"1GiB\"",
        "",
        "Memory of the whole process. It is divided over the caches and buffers.",
    ),
    row(
        "lock_memory",
        "true or false",
        "",
        "false",
        "",
        "Keeps the process in memory where the machine swaps. Memory that was used once is not given \
         back then.",
    ),
    row(
        "deleted_retention",
        "duration",
        "0s to 3650d",
        "\"7d\"",
        "",
        "How long a removed volume or pool can be restored.",
    ),
    row(
        "log.size",
        "bytes",
        "16MiB to 1TiB, a multiple of log.file_size, 4 to 65536 files",
        "\"2GiB\"",
        "",
        "Size of the write log. It absorbs bursts and times without the store. An existing log \
         keeps its size.",
    ),
    row(
        "log.file_size",
        "bytes",
        "1MiB to 256MiB, a multiple of 4096",
        "\"64MiB\"",
        "",
        "Size of one file of the log.",
    ),
    row(
        "log.io",
        "choice",
        "auto, buffered, direct",
        "\"auto\"",
        "",
        "How log files are written. auto is what measured faster in general, buffered.",
    ),
    row(
        "log.detection",
        "duration",
        "200ms to 60s",
        "\"1s\"",
        "",
        "Silence of the pool's owner after which another node takes the pool over. Set it to the same on all nodes.",
    ),
    row(
        "data.scheme",
        "text",
        "1+1, 2+1, 4+2, 8+2, 14+2, 16+2 or 21+3",
        "(none: segments are objects of the store)",
        "\"1+1\"",
        "Erasure code of the segments: fragments of data, and of parity, which is also the number of data stores that \
         may be lost. Changing it affects new segments.",
    ),
    row(
        "data.group",
        "text",
        "1 to 63 of A-Z a-z 0-9 . _ -",
        "(none)",
        "\"nvme\"",
        "Media group: all drives of data nodes in this group are data stores of the pool, beside `data.stores`. Set it \
         to the same on every node that may own the pool.",
    ),
    row(
        "data.tiers",
        "text",
        "data-stores, both or object-store",
        "\"data-stores\"",
        "",
        "Where segments are: in the data stores; also copied to the store, and only there once they are cold; or only in \
         the store. It may change at any start, and a job moves what is elsewhere.",
    ),
    row(
        "data.cold_after",
        "duration",
        "10s to 365d",
        "\"7d\"",
        "",
        "With tiers \"both\", a segment that was not read for this long is dropped from the data stores, and earlier \
         while they have little room. Time without a daemon does not count.",
    ),
    row(
        "data.free_min",
        "number",
        "0 to 90",
        "20",
        "",
        "With tiers \"both\", hundredths of the data stores below which segments are dropped before they are cold. 0: \
         never.",
    ),
    row(
        "data.lost_after",
        "duration",
        "1s to 30d",
        "\"15m\"",
        "",
        "Time after which a data store that is away counts as lost: its fragments are made anew on others.",
    ),
    row(
        "data.stores.url",
        "URL or path",
        "as for `store`, and a directory must exist; or spindle://NODE/DRIVE",
        "(required)",
        "\"/mnt/nvme0/spindle\"",
        "A data store, which holds fragments of segments: a directory on a drive, a bucket, or a drive of a data \
         node. Without other settings, its URL alone may stand in the list.",
    ),
    row(
        "data.stores.domain",
        "text",
        "",
        "(the URL; of a drive of a data node, the node)",
        "\"drive 0\"",
        "Failure domain: what fails together with this store, such as a drive, a machine or a provider. No two \
         fragments of a segment are in one.",
    ),
    row(
        "data.stores.env_prefix",
        "text",
        "",
        "(none)",
        "\"NVME0_\"",
        "The store's settings and credentials are in variables that begin with this: NVME0_AWS_ACCESS_KEY_ID and so on.",
    ),
    row(
        "data.stores.weight",
        "number",
        "1 to 1000",
        "(1)",
        "1",
        "Share of new fragments, relative to the other stores: twice the weight for a drive of twice the size.",
    ),
    row(
        "cache.dir",
        "path",
        "a local directory",
        "(DIR/cache)",
        "\"/mnt/nvme/spindle-cache\"",
        "Directory of the read cache. Its contents may be lost at any time.",
    ),
    row(
        "cache.size",
        "bytes",
        "0 for none, or 64MiB to 1PiB",
        "\"10GiB\"",
        "",
        "Size of the read cache. Its index takes about a 400th of it from memory, at most an eighth of memory.",
    ),
    row(
        "memory_cache.size",
        "bytes",
        "0 for none, up to memory",
        "(a share of memory)",
        "\"256MiB\"",
        "Memory for decrypted data. A database caches better: 0 is a good choice below one.",
    ),
    row(
        "destage.max_age",
        "duration",
        "1s to 1h",
        "\"30s\"",
        "",
        "Oldest age of data that only this machine has, while the store answers.",
    ),
    row(
        "destage.segment_size",
        "bytes",
        "1MiB to 256MiB",
        "\"32MiB\"",
        "",
        "Size of the objects that hold the data.",
    ),
    row(
        "destage.compression_level",
        "number",
        "-7 to 19",
        "1",
        "",
        "zstd level. Higher is smaller and slower. While three eighths of the log are in use it is at most -1.",
    ),
    row(
        "reclaim.space_percent",
        "number",
        "105 to 1000",
        "130",
        "",
        "Segments are rewritten while the store holds more than this part of the live data, in percent. \
         Less takes less space and writes more: 130 costs up to 1.5 bytes more for each one written.",
    ),
    row(
        "reclaim.rate",
        "bytes a second",
        "1MiB to 1TiB",
        "\"200MiB\"",
        "",
        "What reclaim reads and writes at most.",
    ),
    row(
        "encryption.cipher",
        "choice",
        "auto, chacha20-poly1305, aes-256-gcm",
        "\"auto\"",
        "",
        "Cipher of new data; auto: AES where the processor has instructions for it. Data that exists keeps its own.",
    ),
    row(
        "nbd.listen",
        "list of host:port",
        "port 0 picks a free one",
        "([\"127.0.0.1:10809\"], when nbd.unix is not set either)",
        "[\"127.0.0.1:10809\"]",
        "Addresses of the NBD server.",
    ),
    row(
        "nbd.unix",
        "path",
        "at most 107 bytes",
        "(DIR/nbd.sock, when nbd.listen is not set either)",
        "\"/run/spindle/nbd.sock\"",
        "Unix socket of the NBD server.",
    ),
    row(
        "nbd.allow_plain_remote",
        "true or false",
        "",
        "false",
        "",
        "Serve other machines without TLS: anybody who reaches the port reads and writes.",
    ),
    row(
        "nbd.allow_resize",
        "true or false",
        "",
        "false",
        "",
        "Let a client that may write to a volume grow it (RESIZE, an extension of the protocol).",
    ),
    row(
        "nbd.connection_count_max",
        "number",
        "1 to 65536",
        "256",
        "",
        "Connections at a time; further ones are refused.",
    ),
    row(
        "nbd.payload_memory",
        "bytes",
        "from 64MiB",
        "(a share of memory)",
        "\"128MiB\"",
        "Memory for requests in flight, over all connections.",
    ),
    row(
        "nbd.tls.cert",
        "path",
        "PEM",
        "(none: no TLS)",
        "\"/etc/spindle/server.crt\"",
        "Certificate chain of the server.",
    ),
    row(
        "nbd.tls.key",
        "path",
        "PEM",
        "(required with nbd.tls.cert)",
        "\"/etc/spindle/server.key\"",
        "Private key of the server.",
    ),
    row(
        "nbd.tls.client_ca",
        "path",
        "PEM",
        "(none: clients need no certificate)",
        "\"/etc/spindle/clients.crt\"",
        "Authority that must have signed a client's certificate.",
    ),
    row(
        "nbd.tls.clients",
        "table: client name -> list of exports",
        "\"*\" for all exports",
        "(every verified client opens everything)",
        "{ \"db1.example\" = [\"db\"], \"backup\" = [\"*\"] }",
        "Which client may open which exports.",
    ),
    row(
        "keys.source",
        "choice",
        "file, passphrase, command, recovery",
        "\"file\"",
        "",
        "What opens the pool.",
    ),
    row(
        "keys.file",
        "path",
        "",
        "(DIR/spindle.key)",
        "\"/etc/spindle/main.key\"",
        "Key file. Made with mode 0600 on the first use of a pool; keep a copy elsewhere.",
    ),
    row(
        "keys.passphrase_file",
        "path",
        "",
        "(none)",
        "\"/run/credentials/spindle/passphrase\"",
        "File whose first line is the passphrase.",
    ),
    row(
        "keys.passphrase_env",
        "text",
        "",
        "(none)",
        "\"SPINDLE_PASSPHRASE\"",
        "Environment variable that holds the passphrase.",
    ),
    row(
        "keys.passphrase_fd",
        "number",
        "",
        "(none)",
        "3",
        "Open file descriptor that gives the passphrase.",
    ),
    row(
        "keys.command",
        "list: program and arguments",
        "",
        "(none)",
        "[\"/usr/local/bin/kms-unwrap\", \"spindle\"]",
        "Program whose first line of output is the secret.",
    ),
    row(
        "keys.recovery_file",
        "path",
        "",
        "(none)",
        "\"/media/safe/recovery.txt\"",
        "File with a key that `spindle key backup` printed.",
    ),
    row(
        "dnode.group",
        "text",
        "1 to 63 of A-Z a-z 0-9 . _ -",
        "(none)",
        "\"nvme\"",
        "Media group of the node's drives. Pools with this `data.group` have them as data stores.",
    ),
    row(
        "dnode.domain",
        "text",
        "1 to 63 of A-Z a-z 0-9 . _ -",
        "(the node)",
        "\"rack-a\"",
        "Failure domain of the node's drives in such pools: what fails together with them, such as a rack.",
    ),
    row(
        "dnode.drives.dir",
        "path",
        "an empty directory, at first",
        "(required)",
        "\"/mnt/nvme0\"",
        "A drive of a data node (`spindle dnode`). Without other settings, its directory alone may stand in the list.",
    ),
    row(
        "dnode.drives.name",
        "text",
        "1 to 63 of A-Z a-z 0-9 . _ -",
        "(the last part of the directory)",
        "\"nvme0\"",
        "Name of the drive in the URLs of pools. A new disk in the place of a dead one needs another name.",
    ),
    row(
        "dnode.drives.capacity",
        "bytes",
        "",
        "(what the file system has)",
        "\"3TiB\"",
        "Most bytes to store on the drive. The last hundredth of a file system always stays free.",
    ),
    row(
        "dnode.drives.group",
        "text",
        "1 to 63 of A-Z a-z 0-9 . _ -",
        "(dnode.group)",
        "\"hdd\"",
        "Media group of the drive.",
    ),
    row(
        "dnode.drives.domain",
        "text",
        "1 to 63 of A-Z a-z 0-9 . _ -",
        "(dnode.domain)",
        "\"rack-a\"",
        "Failure domain of the drive.",
    ),
    row(
        "volumes.name",
        "text",
        "1 to 63 of A-Z a-z 0-9 . _ -",
        "(required)",
        "\"db\"",
        "Volume that is made when it is missing; also its export's name.",
    ),
    row(
        "volumes.size",
        "bytes",
        "a multiple of 512, up to 1PiB",
        "(required)",
        "\"100GiB\"",
        "Size. An existing volume that is smaller grows; none shrinks.",
    ),
    row(
        "volumes.durability",
        "choice",
        "auto, flush, write, store",
        "(as the volume is; auto for a new one)",
        "\"auto\"",
        "What an answered write has survived. flush: a crash of the daemon, and a flush a loss of \
         power. write: every write also a loss of power. store: a flush waits for the store. auto: \
         for each connection, write when its client is on another machine, else flush.",
    ),
    row(
        "volumes.read_only",
        "true or false",
        "",
        "(as the volume is; false for a new one)",
        "false",
        "Refuse writes.",
    ),
    row(
        "volumes.dedicated_key",
        "true or false",
        "",
        "false",
        "false",
        "One that is made gets a dedicated key, which `spindle volume rm --erase` destroys. A volume that is there \
         stays as it is.",
    ),
    row(
        "volumes.dedup",
        "true or false",
        "",
        "(as the volume is; false for a new one)",
        "false",
        "Look for blocks that are stored already, of this volume and of others of the pool that have this, and do not \
         store them again.",
    ),
];

/// Sections of which a file may have several.
pub(crate) const LISTS: &[&str] = &["volumes", "data.stores", "dnode.drives"];

/// A commented `spindle.toml` with every option and its default.
#[must_use]
pub fn example() -> String {
    let mut text = String::from(
        "# spindle.toml: every option, with its default where it has one.\n\
         # Sizes are binary multiples: 512, 64KiB, 1G, 1.5T. Durations: 500ms, 30s, 5m, 2h, 7d.\n",
    );
    let mut section = "";
    for option in OPTIONS {
        let (prefix, key) = option.key.rsplit_once('.').unwrap_or(("", option.key));
        if prefix != section {
            section = prefix;
            let is_list = LISTS.contains(&prefix);
            let heading = if is_list { format!("[[{prefix}]]") } else { format!("[{prefix}]") };
            // Written to a string: it cannot fail.
            let _ = write!(text, "\n# {heading}\n");
        }
        let has_default = !option.default.starts_with('(');
        let value = if has_default { option.default } else { option.example };
        for line in wrap(option.about, 96) {
            let _ = write!(text, "\n## {line}");
        }
        let range = if option.range.is_empty() { "" } else { ": " };
        let _ = write!(text, "\n## {}{range}{}.", option.kind, option.range);
        if !has_default {
            let _ = write!(text, " Default {}.", option.default);
        }
        let _ = write!(text, "\n# {key} = {value}\n");
    }
    text
}

fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let Some(line) = lines.last_mut() else { break };
        if line.is_empty() {
            line.push_str(word);
        } else if line.len() + word.len() < width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}
