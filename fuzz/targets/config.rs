//! The configuration file.
//!
//! Invariant: the effective configuration of a file is itself a valid file, with the same effect.

use crate::{LARGE, dir_in_memory, no_repair, write};
use ::config::{Config, options};
use fuzz::{Outcome, Target};

#[test]
fn config_file() {
    let dir = dir_in_memory();
    let path = dir.path().join("spindle.toml");
    let load = |bytes: &[u8]| {
        write(path.clone(), bytes);
        Config::load(Some(&path), &[])
    };
    let decode = |input: &[u8]| match load(input) {
        Ok(config) => {
            let text = toml::to_string(config.settings()).expect("settings are a table");
            let again = load(text.as_bytes()).map_err(|error| format!("{}\n{text}", error.chain()));
            let again = again.unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(again.settings(), config.settings());
            assert!(!config.rows().is_empty());
            let _ = config.pool(std::sync::Arc::new(engine::data_stores::NoDataStores));
            Outcome::Accepted
        }
        Err(error) => Outcome::Refused(error.chain()),
    };
    let example = options::example();
    // Every option of the example that is only shown, in force.
    let shown: String = example
        .lines()
        .map(|line| line.strip_prefix("# ").filter(|rest| rest.contains(" = ")).unwrap_or(line))
        .map(|line| format!("{line}\n"))
        .collect();
    let small = "dir = \"/d\"\n\n[[volume]]\nname = \"db\"\nsize = \"10G\"\ndurability = \"flush\"\n\n\
                 [log]\nsize = \"2G\"\n\n[nbd]\nlisten = [\"127.0.0.1:10809\"]\n";
    Target {
        name: "config_file",
        inputs: vec![
            example.into_bytes(),
            shown.into_bytes(),
            small.as_bytes().to_vec(),
            b"dir = \"/d\"\n".to_vec(),
        ],
        repair: &no_repair,
        decode: &decode,
        execution_count: 6000,
        input_bytes_max: 16 << 10,
        allocation: LARGE,
    }
    .check();
}
