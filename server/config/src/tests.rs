//! Tests of the effective configuration.

use super::options::{OPTIONS, example};
use super::*;

fn flag(key: &'static str, value: &str) -> Override {
    Override { key, flag: "--test", value: toml::Value::String(value.to_owned()) }
}

fn load(text: &str, overrides: &[Override]) -> Result<Config> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("spindle.toml");
    std::fs::write(&path, text).unwrap();
    Config::load(Some(&path), overrides)
}

fn refused(text: &str) -> String {
    load(&format!("dir = \"/d\"\n{text}"), &[]).unwrap_err().to_string()
}

#[test]
fn directory_is_the_only_required_setting() {
    let config = Config::load(None, &[flag("dir", "/d")]).unwrap();
    assert_eq!(config.dir(), Path::new("/d"));
    assert_eq!(config.store_url(), "/d/store");
    assert_eq!(config.cache_dir(), Some(Path::new("/d/cache")));
    assert_eq!(config.key_source(), KeySource::File("/d/spindle.key".into()));
    assert_eq!(config.settings().nbd.listen.as_deref(), Some(&["127.0.0.1:10809".to_owned()][..]));
    let error = Config::load(None, &[]).unwrap_err().to_string();
    assert!(error.contains("--dir"), "{error}");
}

#[test]
fn flags_win_over_the_file_and_the_file_over_defaults() {
    let text = "dir = \"/file\"\nmemory = \"2G\"\n[log]\nsize = \"4G\"\n\
                [[volumes]]\nname = \"a\"\nsize = \"1G\"\nread_only = true\n";
    let volume = toml::toml! { name = "a"
    size = "2G" };
    let volumes = Override {
        key: "volumes",
        flag: "--volume",
        value: toml::Value::Array(vec![toml::Value::Table(volume)]),
    };
    let config = load(text, &[flag("dir", "/flag"), flag("log.io", "direct"), volumes]).unwrap();
    let settings = config.settings();
    assert_eq!(config.dir(), Path::new("/flag"));
    assert_eq!(settings.memory, ByteSize(2 << 30));
    assert_eq!((settings.log.size, settings.log.io), (ByteSize(4 << 30), LogIo::Direct));
    assert_eq!(settings.volumes.len(), 1);
    assert_eq!(settings.volumes[0].size, ByteSize(2 << 30));
    assert_eq!(settings.volumes[0].read_only, Some(true));
    assert_eq!(settings.volumes[0].durability, None, "unset stays unset");
    let origin = |key: &str| {
        config.rows().into_iter().find(|row| row.0 == key).map(|row| row.2.to_string()).unwrap()
    };
    assert!(origin("memory").ends_with("spindle.toml"));
    assert_eq!(origin("dir"), "flag --test");
    assert_eq!(origin("volumes"), "flag --volume");
    assert_eq!(origin("cache.size"), "default");
}

#[test]
fn key_flag_replaces_the_key_settings_of_the_file() {
    let text = "dir = \"/d\"\n[keys]\nsource = \"passphrase\"\npassphrase_file = \"/p\"\n";
    let config = load(text, &[]).unwrap();
    assert_eq!(config.key_source(), KeySource::PassphraseFile("/p".into()));
    let flags = [flag("keys.source", "passphrase"), flag("keys.passphrase_env", "P")];
    let config = load(text, &flags).unwrap();
    assert_eq!(config.key_source(), KeySource::PassphraseEnv("P".to_owned()));
}

#[test]
fn values_out_of_range_name_the_option_and_the_range() {
    for (text, word) in [
        ("memory = \"64MiB\"", "at least"),
        ("name = \"a b\"", "pool name"),
        ("[log]\nsize = \"100MiB\"", "multiple of log.file_size"),
        ("[log]\nsize = \"1K\"", "must be from 16MiB to 1TiB"),
        ("[log]\nsize = \"1TiB\"\nfile_size = \"1MiB\"", "1048576 files; at most 65536"),
        ("[log]\nsize = \"4GiB\"\nfile_size = \"512MiB\"", "log.file_size 512MiB"),
        ("[nbd]\nconnection_count_max = 65536", "nbd.connection_count_max 65536"),
        ("[cache]\nsize = \"1M\"", "cache.size"),
        ("[destage]\nmax_age = \"0s\"", "from 1s to 1h"),
        ("[destage]\ncompression_level = 99", "-7 to 19"),
        ("[reclaim]\nspace_percent = 100", "from 105 to 1000"),
        ("[reclaim]\nrate = \"1KiB\"", "from 1MiB to 1TiB a second"),
        ("[nbd]\nconnection_count_max = 0", "1 to 65536"),
        ("[nbd]\nlisten = [\"localhost\"]", "HOST:PORT"),
        ("[nbd]\nlisten = [\"0.0.0.0:10809\"]", "allow_plain_remote"),
        ("[nbd]\nlisten = [\"db.example:10809\"]", "allow_plain_remote"),
        ("[nbd.tls]\ncert = \"c\"\nkey = \"k\"\nclients = { a = [\"*\"] }", "client_ca"),
        ("[data]\nscheme = \"3+1\"", "it is none of 1+1, 2+1, 4+2"),
        ("[data]\nstores = [\"/a\"]", "needs data.scheme"),
        ("[data]\nscheme = \"1+1\"\nstores = [\"/a\", \"/a\"]", "/a is named twice"),
        (
            "[data]\nscheme = \"2+1\"\nstores = [\"/a\", \"/b\"]",
            "3 failure domains, and data.stores has 2",
        ),
        (
            "[data]\nscheme = \"1+1\"\nstores = [{ url = \"/a\", domain = \"x\" }, { url = \"/b\", domain = \"x\" }]",
            "2 failure domains, and data.stores has 1",
        ),
        ("[data]\nscheme = \"1+1\"\nstores = [\"/a\", \"ftp://b\"]", "data.stores"),
        (
            "[data]\nscheme = \"1+1\"\nstores = [\"spindle://a/x\", \"spindle://a/y\"]",
            "2 failure domains, and data.stores has 1",
        ),
        (
            "[data]\nscheme = \"1+1\"\nstores = [\"/a\", \"spindle://b/c/d\"]",
            "spindle://NODE/DRIVE",
        ),
        (
            "[data]\nscheme = \"1+1\"\nstores = [\"/a\", {url = \"spindle://b\", env_prefix = \"X\"}]",
            "needs no env_prefix",
        ),
        ("[dnode]\ndrives = [\"/a/x\", \"/b/x\"]", "two drives are called x"),
        ("[dnode]\ndrives = [\"/a\", \"/a/x\"]", "one within the other"),
        ("[dnode]\ndrives = [\"/\"]", "give it a `name`"),
        ("[dnode]\ndrives = [{dir = \"/a\", capacity = 0}]", "could store nothing"),
        (
            "[data]\nscheme = \"1+1\"\nstores = [\"/a\", { url = \"/b\", weight = 0 }]",
            "from 1 to 1000",
        ),
        ("[data]\nscheme = \"1+1\"\nstores = [\"/a\", { uri = \"/b\" }]", "did you mean `url`?"),
        ("[data]\ngroup = \"nvme\"", "needs data.scheme"),
        ("[data]\nscheme = \"1+1\"\ngroup = \"n/v\"", "data.group: media group name"),
        ("[dnode]\ngroup = \"\"", "dnode.group: media group name"),
        ("[dnode]\ndomain = \"rack a\"", "dnode.domain: failure domain name"),
        ("[dnode]\ndrives = [{dir = \"/a\", group = \"a b\"}]", "dnode.drives.group"),
        ("[dnode]\ndrives = [{dir = \"/a\", domain = \"\"}]", "dnode.drives.domain"),
        ("[log]\ndetection = \"100ms\"", "from 200ms to 60s"),
        ("[log]\ndetection = \"61s\"", "from 200ms to 60s"),
        ("[keys]\nsource = \"passphrase\"", "exactly one of"),
        ("[keys]\nsource = \"command\"", "keys.command"),
        ("[keys]\nsource = \"recovery\"", "keys.recovery_file"),
        ("[[volumes]]\nname = \"a/b\"\nsize = \"1G\"", "volume name"),
        ("[[volumes]]\nname = \"a\"\nsize = \"2P\"", "up to 1PiB"),
        ("[[volumes]]\nname = \"a\"\nsize = 1000", "multiple of 512"),
        (
            "[[volumes]]\nname = \"a\"\nsize = \"1G\"\n[[volumes]]\nname = \"a\"\nsize = \"1G\"",
            "twice",
        ),
    ] {
        let error = refused(text);
        assert!(error.contains(word), "{text}: {error}");
    }
}

#[test]
fn drive_has_the_group_and_the_domain_of_its_node_unless_it_has_its_own() {
    let text = "dir = \"/d\"\n[dnode]\ngroup = \"nvme\"\ndomain = \"rack-a\"\n\
                drives = [\"/a\", {dir = \"/b\", group = \"hdd\", domain = \"rack-b\"}]\n";
    let config = load(text, &[]).unwrap();
    let dnode = &config.settings().dnode;
    let labels: Vec<_> =
        dnode.drives.iter().map(|drive| (dnode.group_of(drive), dnode.domain_of(drive))).collect();
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(labels, [(some("nvme"), some("rack-a")), (some("hdd"), some("rack-b"))]);
}

#[test]
fn media_group_stands_beside_stores_or_alone() {
    for stores in ["", "stores = [\"/a\"]\n"] {
        let text = format!("dir = \"/d\"\n[data]\nscheme = \"2+1\"\ngroup = \"nvme\"\n{stores}");
        let config = load(&text, &[]).unwrap();
        assert_eq!(config.settings().data.group.as_deref(), Some("nvme"));
    }
}

#[test]
fn impossible_store_is_a_configuration_error() {
    for url in ["", "s3://", "ftp://host/dir", "file://dir", "s3://key:secret@bucket/p"] {
        let flags = [flag("dir", "/d"), flag("store", url)];
        let error = Config::load(None, &flags).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{url:?}: {error}");
        assert!(error.to_string().contains("store"), "{url:?}: {error}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
    for url in ["/var/store", "store", "file:///var/store", "s3://bucket", "gs://b/p", "az://c/p/q"]
    {
        Config::load(None, &[flag("dir", "/d"), flag("store", url)]).unwrap();
    }
}

#[test]
fn every_option_is_documented_and_every_documented_option_exists() {
    let mut settings = Settings {
        dir: Some("/d".into()),
        store: Some("/s".into()),
        volumes: vec![VolumeSettings {
            name: "a".to_owned(),
            size: ByteSize(1 << 30),
            durability: Some(Durability::Auto),
            read_only: Some(false),
            dedicated_key: Some(false),
            dedup: Some(false),
        }],
        ..Settings::default()
    };
    settings.data = DataSettings {
        scheme: Some("1+1".to_owned()),
        group: Some("g".to_owned()),
        stores: vec![DataStoreSettings {
            url: "/s".to_owned(),
            domain: Some("d".to_owned()),
            env_prefix: Some("P_".to_owned()),
            weight: Some(2),
        }],
        ..DataSettings::default()
    };
    settings.dnode.group = Some("g".to_owned());
    settings.dnode.domain = Some("d".to_owned());
    settings.dnode.drives = vec![DriveSettings {
        dir: "/d".into(),
        name: Some("d".to_owned()),
        capacity: Some(ByteSize(1)),
        group: Some("g".to_owned()),
        domain: Some("d".to_owned()),
    }];
    settings.cache.dir = Some("/c".into());
    settings.memory_cache.size = Some(ByteSize(0));
    settings.nbd.listen = Some(Vec::new());
    settings.nbd.unix = Some("/u".into());
    settings.nbd.payload_memory = Some(ByteSize(0));
    settings.nbd.tls = Some(TlsSettings {
        cert: "/c".into(),
        key: "/k".into(),
        client_ca: Some("/a".into()),
        clients: [("c".to_owned(), vec!["*".to_owned()])].into(),
    });
    settings.keys = KeySettings {
        source: KeyKind::File,
        file: Some("/k".into()),
        passphrase_file: Some("/p".into()),
        passphrase_env: Some("P".to_owned()),
        passphrase_fd: Some(3),
        command: Some(Vec::new()),
        recovery_file: Some("/r".into()),
    };
    let table = toml::Table::try_from(&settings).unwrap();
    let is_list = |key: &String| options::LISTS.contains(&key.as_str());
    let mut real: Vec<String> = flatten(&table).into_keys().filter(|key| !is_list(key)).collect();
    let lists = [
        ("volumes", &table["volumes"]),
        ("data.stores", &table["data"]["stores"]),
        ("dnode.drives", &table["dnode"]["drives"]),
    ];
    for (list, value) in lists {
        let keys = value[0].as_table().unwrap().keys();
        real.extend(keys.map(|key| format!("{list}.{key}")));
    }
    real.sort();
    let mut documented: Vec<&str> = OPTIONS.iter().map(|option| option.key).collect();
    documented.sort_unstable();
    assert_eq!(real, documented);
}

#[test]
fn the_documented_defaults_are_the_defaults() {
    let table = toml::Table::try_from(Settings::default()).unwrap();
    let values = flatten(&table);
    let is_in_list = |key: &str| options::LISTS.iter().any(|list| key.starts_with(list));
    for option in OPTIONS.iter().filter(|option| !is_in_list(option.key)) {
        let real = values.get(option.key).map(ToString::to_string);
        let documented = Some(option.default.to_owned()).filter(|text| !text.starts_with('('));
        assert_eq!(real, documented, "{}", option.key);
    }
}

#[test]
fn the_example_file_is_valid_with_and_without_its_comments() {
    let text = example();
    assert_eq!(toml::from_str::<Settings>(&text).unwrap(), Settings::default());
    let all: String = text
        .lines()
        .filter(|line| !line.starts_with("##"))
        .map(|line| format!("{}\n", line.strip_prefix("# ").unwrap_or(line)))
        .skip(2)
        .collect();
    let settings: Settings = toml::from_str(&all).unwrap_or_else(|error| panic!("{error}\n{all}"));
    let lengths = (settings.volumes.len(), settings.data.stores.len(), settings.dnode.drives.len());
    assert_eq!(lengths, (1, 1, 1));
    assert_eq!(settings.memory, Settings::default().memory);
}

#[test]
fn the_operators_manual_names_every_option() {
    let manual = include_str!("../../../docs/operations.md");
    for option in OPTIONS {
        assert!(manual.contains(&format!("`{}`", option.key)), "{}", option.key);
    }
}
