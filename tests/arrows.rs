//! The dependency arrows between the packages, their licences and sources, the names of modules, and
//! the log lines that the operator's guide explains.
//!
//! Invariants:
//! - The arrows are those of [`ARROWS`]: siblings never see each other.
//! - A new arrow is a decision, made by changing this file.
//! - No modules of a crate, with their folders, import each other in a circle.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// The packages on which each package of the workspace may depend, tests included. The tests of the
/// whole know only the binary.
const ARROWS: &[(&str, &[&str])] = &[
    ("block", &[]),
    ("nbd", &["block"]),
    ("ublk", &["block"]),
    ("wal", &["block"]),
    ("replication", &["block"]),
    // `erasure` only in its simulation.
    ("ensemble", &["block", "cluster", "erasure", "replication", "wal"]),
    ("tiering", &["block"]),
    ("erasure", &["block"]),
    ("datanode", &["block", "erasure", "tiering"]),
    ("cluster", &["block"]),
    ("control", &["block", "tiering"]),
    ("dnode", &["block", "cluster", "control", "erasure"]),
    ("engine", &["block", "control", "tiering", "wal"]),
    ("api", &["block"]),
    ("cli", &["api", "block"]),
    ("devices", &["block", "nbd", "ublk"]),
    ("config", &["block", "control", "devices", "engine", "erasure", "nbd", "tiering", "wal"]),
    (
        "server",
        &[
            "api",
            "block",
            "cli",
            "cluster",
            "config",
            "control",
            "datanode",
            "devices",
            "dnode",
            "engine",
            "ensemble",
            "nbd",
            "replication",
            "tiering",
            "wal",
        ],
    ),
    ("tests", &[]),
    ("benches", &["block", "engine", "erasure", "nbd", "server", "tiering", "ublk", "wal"]),
    (
        "fuzz",
        &[
            "api",
            "block",
            "cluster",
            "config",
            "control",
            "dnode",
            "engine",
            "erasure",
            "nbd",
            "replication",
            "tests",
            "tiering",
            "wal",
        ],
    ),
];

/// Licences that allow the binary to be given away under this project's own. Source: deny.toml.
const LICENCES: &[&str] = &[
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Names that say nothing about the purpose of a module.
const EMPTY_NAMES: &[&str] = &["utils", "util", "common", "helpers", "misc", "manager"];

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the workspace")
}

fn metadata() -> Value {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--locked"])
        .current_dir(workspace())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo prints JSON")
}

fn texts(value: &Value) -> impl Iterator<Item = &str> {
    value.as_array().expect("a list").iter().map(|item| item.as_str().expect("a text"))
}

fn packages(metadata: &Value) -> &Vec<Value> {
    metadata["packages"].as_array().expect("a list")
}

#[test]
fn dependencies_between_packages_are_those_of_the_design() {
    let metadata = metadata();
    let members: BTreeSet<&str> = texts(&metadata["workspace_members"]).collect();
    let name = |package: &Value| package["name"].as_str().expect("a name").to_owned();
    let ours: BTreeMap<String, &Value> = packages(&metadata)
        .iter()
        .filter(|package| members.contains(package["id"].as_str().expect("an id")))
        .map(|package| (name(package), package))
        .collect();
    for (package, value) in &ours {
        let arrow = ARROWS.iter().find(|(from, _)| from == package);
        let (_, allowed) = arrow.unwrap_or_else(|| panic!("{package} has no place in the design"));
        for dependency in value["dependencies"].as_array().expect("a list") {
            let to = name(dependency);
            let is_allowed = !ours.contains_key(&to) || allowed.contains(&to.as_str());
            assert!(is_allowed, "{package} -> {to} is not an arrow of the design");
        }
    }
    assert!(ours.contains_key("server") && ours.contains_key("block"), "{:?}", ours.keys());
}

/// The program that users get must not have them: only a command that names the features adds them.
#[test]
fn no_manifest_switches_fail_points_or_seeded_bugs_on() {
    const SWITCHES: [&str; 2] = ["failpoints", "seeded-bugs"];
    let metadata = metadata();
    for package in packages(&metadata).iter().filter(|package| package["source"].is_null()) {
        let name = package["name"].as_str().expect("a name");
        let features = package["features"].as_object().expect("an object");
        for (feature, enables) in features {
            let is_switch = SWITCHES.contains(&feature.as_str());
            let is_clean = |enabled: &str| !SWITCHES.iter().any(|switch| enabled.contains(switch));
            assert!(is_switch || texts(enables).all(is_clean), "{name}: feature {feature}");
        }
        for dependency in package["dependencies"].as_array().expect("an array") {
            for feature in texts(&dependency["features"]) {
                let to = &dependency["name"];
                assert!(!SWITCHES.contains(&feature), "{name} has {to} with feature {feature}");
            }
        }
    }
}

#[test]
fn every_dependency_comes_from_the_registry_under_a_permissive_licence() {
    let metadata = metadata();
    for package in packages(&metadata) {
        let name = format!("{} {}", package["name"], package["version"]);
        let Some(source) = package["source"].as_str() else { continue };
        assert!(source.starts_with("registry+"), "{name} comes from {source}");
        let Some(licence) = package["license"].as_str() else {
            assert!(package["license_file"].is_string(), "{name} names no licence");
            continue;
        };
        assert!(is_permissive(licence), "{name} is under {licence:?}");
    }
}

/// Whether some choice in an SPDX expression consists of allowed licences only. Precedence is as in
/// SPDX: AND binds stronger than OR; `/` is an old spelling of OR.
fn is_permissive(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ").replace("WITH LLVM-exception", "");
    let mut words = Vec::new();
    for word in expression.replace('(', " ( ").replace(')', " ) ").split_whitespace() {
        words.push(word.to_owned());
    }
    let mut words = words.into_iter().peekable();
    return any(&mut words);

    type Words = std::iter::Peekable<std::vec::IntoIter<String>>;
    fn any(words: &mut Words) -> bool {
        let mut is_allowed = all(words);
        while words.next_if(|word| word == "OR").is_some() {
            is_allowed |= all(words);
        }
        is_allowed
    }
    fn all(words: &mut Words) -> bool {
        let mut is_allowed = one(words);
        while words.next_if(|word| word == "AND").is_some() {
            is_allowed &= one(words);
        }
        is_allowed
    }
    fn one(words: &mut Words) -> bool {
        match words.next().as_deref() {
            Some("(") => {
                let is_allowed = any(words);
                words.next();
                is_allowed
            }
            Some(licence) => LICENCES.contains(&licence),
            None => false,
        }
    }
}

#[test]
fn licence_expressions_are_understood() {
    assert!(is_permissive("MIT OR GPL-3.0"));
    assert!(is_permissive("(MIT OR GPL-3.0) AND Unicode-3.0"));
    assert!(is_permissive("Apache-2.0 WITH LLVM-exception OR GPL-2.0"));
    assert!(!is_permissive("MIT AND GPL-3.0"));
    assert!(!is_permissive("AGPL-3.0"));
}

#[test]
fn no_module_has_a_name_that_says_nothing() {
    let mut found = Vec::new();
    let mut todo = vec![workspace().to_owned()];
    while let Some(dir) = todo.pop() {
        for entry in std::fs::read_dir(&dir).expect("a readable directory") {
            let path = entry.expect("a readable entry").path();
            let name = path.file_name().expect("it has a name").to_string_lossy().into_owned();
            if name.starts_with('.') || name == "target" {
                continue;
            }
            let stem = name.strip_suffix(".rs").unwrap_or(&name);
            if EMPTY_NAMES.contains(&stem) {
                found.push(path.clone());
            }
            if path.is_dir() {
                todo.push(path);
            }
        }
    }
    assert!(found.is_empty(), "say what they are for: {found:?}");
}

#[test]
fn every_source_file_opens_with_its_description() {
    let mut bad = Vec::new();
    let mut todo = vec![workspace().to_owned()];
    while let Some(dir) = todo.pop() {
        for entry in std::fs::read_dir(&dir).expect("a readable directory") {
            let path = entry.expect("a readable entry").path();
            let name = path.file_name().expect("it has a name").to_string_lossy().into_owned();
            if path.is_dir() && !name.starts_with('.') && name != "target" {
                todo.push(path);
            } else if name.ends_with(".rs") {
                let text = std::fs::read_to_string(&path).expect("a readable file");
                if !text.starts_with("//!") {
                    bad.push(path);
                }
            }
        }
    }
    assert!(bad.is_empty(), "no //! at the top of {bad:?}");
}

/// Returns the source of the packages that log, without tests, with each text in one line.
fn source_that_logs() -> String {
    let mut all = String::new();
    let metadata = metadata();
    let members: BTreeSet<&str> = texts(&metadata["workspace_members"]).collect();
    let mut todo: Vec<_> = packages(&metadata)
        .iter()
        .filter(|package| members.contains(package["id"].as_str().expect("an id")))
        .filter(|package| {
            !["tests", "benches"].contains(&package["name"].as_str().expect("a name"))
        })
        .map(|package| Path::new(package["manifest_path"].as_str().expect("a path")))
        .map(|manifest| manifest.with_file_name("src"))
        .collect();
    while let Some(path) = todo.pop() {
        let name = path.file_name().expect("it has a name").to_string_lossy().into_owned();
        if path.is_dir() && name != "tests" {
            let entries = std::fs::read_dir(&path).expect("a readable directory");
            todo.extend(entries.map(|entry| entry.expect("a readable entry").path()));
        } else if name.ends_with(".rs") && !["tests.rs", "testing.rs"].contains(&name.as_str()) {
            let text = std::fs::read_to_string(&path).expect("a readable file");
            for (index, part) in text.split("\\\n").enumerate() {
                all += if index == 0 { part } else { part.trim_start() };
            }
        }
    }
    all
}

/// Returns the texts of every call of a macro: the last quoted text before its bracket closes.
fn texts_of<'a>(source: &'a str, call: &str) -> Vec<&'a str> {
    let calls = source.split(call).skip(1);
    calls.filter_map(|rest| rest[..end_of_call(rest)?].rsplit('"').nth(1)).collect()
}

/// Returns the place where the bracket that is open at the beginning closes.
fn end_of_call(rest: &str) -> Option<usize> {
    let (mut open, mut is_text, mut is_escaped) = (1, false, false);
    for (at, byte) in rest.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => is_text = !is_text,
            b'(' if !is_text => open += 1,
            b')' if !is_text => open -= 1,
            _ => {}
        }
        if open == 0 {
            return Some(at);
        }
    }
    None
}

#[test]
fn the_guide_explains_the_log_lines_that_there_are() {
    let guide = std::fs::read_to_string(workspace().join("docs/operations.md"));
    let guide = guide.expect("a readable file");
    let section = guide.split("\n## ").find(|part| part.starts_with("Log lines to act on"));
    let rows = section.expect("the section is there").lines().filter_map(|line| {
        let mut cells = line.split('|').map(str::trim).skip(1);
        Some((cells.next()?, cells.next()?))
    });
    let explained: Vec<(&str, &str)> = rows
        .filter(|(level, _)| ["error", "warn"].contains(level))
        .flat_map(|(level, lines)| {
            lines.split('`').skip(1).step_by(2).map(move |line| (level, line))
        })
        .collect();
    let source = source_that_logs();
    let logged = |level: &str| texts_of(&source, &format!("tracing::{level}!("));
    for (level, line) in &explained {
        let is_logged = logged(level).iter().any(|text| text.contains(line));
        assert!(is_logged, "nothing logs {line:?} as {level}");
    }
    // An error needs a person, so the guide explains each.
    let errors = logged("error");
    assert!(errors.len() > 5, "{errors:?}");
    for error in errors {
        let is_explained = explained.iter().any(|(_, line)| error.contains(line));
        assert!(is_explained, "the guide does not say what to do about {error:?}");
    }
}

/// Modules at the top of a package, each with the others that its files name by `crate::`. Tests
/// are excluded.
type Imports = BTreeMap<String, BTreeSet<String>>;

fn imports_of(source: &Path) -> Imports {
    let mut imports = Imports::new();
    let mut todo = vec![source.to_owned()];
    while let Some(path) = todo.pop() {
        let name = path.file_name().expect("it has a name").to_string_lossy().into_owned();
        let is_test = ["test", "golden"].iter().any(|word| name.contains(word));
        if path.is_dir() {
            if path == source || !is_test {
                let entries = std::fs::read_dir(&path).expect("a readable directory");
                todo.extend(entries.map(|entry| entry.expect("a readable entry").path()));
            }
        } else if name.ends_with(".rs") && !is_test && name != "lib.rs" && name != "main.rs" {
            let inside = path.strip_prefix(source).expect("it is below");
            let first = inside.components().next().expect("it has a part");
            let module = first.as_os_str().to_string_lossy().trim_end_matches(".rs").to_owned();
            let text = std::fs::read_to_string(&path).expect("a readable file");
            imports.entry(module).or_default().extend(named_modules(&text));
        }
    }
    let known: BTreeSet<String> = imports.keys().cloned().collect();
    for (module, named) in &mut imports {
        named.retain(|other| other != module && known.contains(other));
    }
    imports
}

/// First words after `crate::` in a file's code, before its tests.
fn named_modules(text: &str) -> BTreeSet<String> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
    let code = lines.collect::<Vec<_>>().join("\n");
    let word = |text: &str| -> String {
        text.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect()
    };
    let mut named = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        match rest.strip_prefix('{') {
            Some(list) => {
                let list = list.split(';').next().unwrap_or_default();
                named.extend(list.split(',').map(|item| word(item.trim())));
            }
            None => {
                named.insert(word(rest));
            }
        }
    }
    named
}

/// Returns a module that imports itself through others, with the way, or `None`.
fn circle_in(imports: &Imports) -> Option<Vec<String>> {
    for start in imports.keys() {
        let mut from: BTreeMap<&str, &str> = BTreeMap::new();
        let mut todo = vec![start.as_str()];
        while let Some(module) = todo.pop() {
            for next in &imports[module] {
                if next == start {
                    let mut way = vec![start.clone(), module.to_owned()];
                    let mut at = module;
                    while let Some(before) = from.get(at) {
                        way.push((*before).to_owned());
                        at = before;
                    }
                    way.reverse();
                    return Some(way);
                }
                if !from.contains_key(next.as_str()) {
                    from.insert(next, module);
                    todo.push(next);
                }
            }
        }
    }
    None
}

#[test]
fn modules_do_not_import_each_other_in_circles() {
    let metadata = metadata();
    let members: BTreeSet<&str> = texts(&metadata["workspace_members"]).collect();
    let ours = packages(&metadata)
        .iter()
        .filter(|package| members.contains(package["id"].as_str().expect("an id")))
        .filter(|package| {
            !["tests", "benches"].contains(&package["name"].as_str().expect("a name"))
        });
    let mut module_count = 0;
    for package in ours {
        let manifest = Path::new(package["manifest_path"].as_str().expect("a path"));
        let imports = imports_of(&manifest.with_file_name("src"));
        module_count += imports.len();
        let circle = circle_in(&imports);
        assert!(circle.is_none(), "{}: {circle:?}", package["name"]);
    }
    assert!(module_count > 100, "only {module_count} modules were found");
}

#[test]
fn a_circle_of_imports_is_found() {
    let imports = |pairs: &[(&str, &str)]| {
        let mut imports = Imports::new();
        for (from, to) in pairs {
            imports.entry((*to).to_owned()).or_default();
            imports.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        }
        imports
    };
    assert_eq!(circle_in(&imports(&[("a", "b"), ("a", "c"), ("b", "c")])), None);
    let circle = circle_in(&imports(&[("x", "a"), ("a", "b"), ("b", "c"), ("c", "a")]));
    assert_eq!(circle.expect("there is one").len(), 4);
    let text = "use crate::one::Two;\nuse crate::{three, four::Five};\n// crate::six\nfn f() { crate::seven::g() }";
    let named = ["four", "one", "seven", "three"].map(str::to_owned);
    assert_eq!(named_modules(text), BTreeSet::from(named));
}
