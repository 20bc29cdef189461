//! Seeded bugs: switches for wrong behaviour, with which tests show that they notice it.
//!
//! A package lists its bugs once, with [`seeded_bugs!`](crate::seeded_bugs!), in a module of its
//! own. The environment variable `SPINDLE_SEEDED_BUGS` names the bugs to switch on, separated by
//! commas. A switch with a text reads `NAME=TEXT`.
//!
//! Invariants:
//! - Without the calling package's feature `seeded-bugs` (or a build of its tests) every switch is a
//!   constant "off", and the binary contains neither the names nor that of the variable.
//! - The variable is read once, at the first question.
//!
//! It does not report a name that no package knows, because each package reads only its own.

/// Whether the list `names` contains `name`. For the code that [`seeded_bugs!`](crate::seeded_bugs!)
/// makes.
#[must_use]
pub fn is_named(names: &str, name: &str) -> bool {
    names.split(',').any(|one| one == name)
}

/// Returns the text that the list `names` gives to `name`, of the first `name=TEXT` in it. For the
/// code that [`seeded_bugs!`](crate::seeded_bugs!) makes.
#[must_use]
pub fn text_of<'a>(names: &'a str, name: &str) -> Option<&'a str> {
    names.split(',').find_map(|one| one.strip_prefix(name)?.strip_prefix('='))
}

/// Declares the seeded bugs of the calling package: the struct `SeededBugs` with a field for each,
/// and the function `seeded_bugs()`, which returns the ones that are switched on.
///
/// An entry is a documented field and the name that switches it on. The field is a `bool`, or an
/// `Option<&'static str>` where `= text` follows the name. The package declares the feature
/// `seeded-bugs`; without it `seeded_bugs()` is a `const fn`, so that the branches disappear.
///
/// ```text
/// block::seeded_bugs! {
///     /// A trim is answered but not logged.
///     trim_lost: "trim-lost",
///     /// Jobs whose names begin with this text panic.
///     panicking_job: "panicking-job" = text,
/// }
/// ```
#[macro_export]
macro_rules! seeded_bugs {
    (@type) => { bool };
    (@type text) => { ::core::option::Option<&'static str> };
    (@off) => { false };
    (@off text) => { ::core::option::Option::None };
    (@read $names:ident, $name:literal) => { $crate::seeded_bugs::is_named($names, $name) };
    (@read $names:ident, $name:literal, text) => { $crate::seeded_bugs::text_of($names, $name) };
    ($($(#[$doc:meta])* $field:ident: $name:literal $(= $kind:ident)?,)+) => {
        /// The seeded bugs that are switched on.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub(crate) struct SeededBugs {
            $($(#[$doc])* pub(crate) $field: $crate::seeded_bugs!(@type $($kind)?),)+
        }

        /// Returns the bugs that the environment variable `SPINDLE_SEEDED_BUGS` named, separated by
        /// commas, at the first call.
        #[cfg(any(test, feature = "seeded-bugs"))]
        pub(crate) fn seeded_bugs() -> SeededBugs {
            static SEEDED_BUGS: ::std::sync::OnceLock<SeededBugs> = ::std::sync::OnceLock::new();
            *SEEDED_BUGS.get_or_init(|| {
                let names: &'static str =
                    ::std::env::var("SPINDLE_SEEDED_BUGS").unwrap_or_default().leak();
                SeededBugs {
                    $($field: $crate::seeded_bugs!(@read names, $name $(, $kind)?),)+
                }
            })
        }

        /// Returns no bugs.
        #[cfg(not(any(test, feature = "seeded-bugs")))]
        pub(crate) const fn seeded_bugs() -> SeededBugs {
            SeededBugs { $($field: $crate::seeded_bugs!(@off $($kind)?),)+ }
        }
    };
}

/// Declares the test `seeded_bugs_are_found` of the calling package. An entry is a bug, and the path of a test that must
/// fail with it. The test runs these tests in processes of their own: once without a bug, and once with each.
#[macro_export]
macro_rules! seeded_bugs_found_by {
    ($($bug:literal: $test:literal,)+) => {
        /// Each bug, with a test that must fail.
        const FOUND_BY: &[(&str, &str)] = &[$(($bug, $test)),+];

        fn is_passed(bug: &str, test: &str) -> bool {
            let mut command =
                ::std::process::Command::new(::std::env::current_exe().expect("it has a path"));
            command.args(["--exact", test]).env("SPINDLE_SEEDED_BUGS", bug);
            let output = command.stderr(::std::process::Stdio::null()).output().expect("it runs");
            let text = ::std::string::String::from_utf8_lossy(&output.stdout);
            assert!(text.contains("running 1 test"), "there is no test {test}: {text}");
            output.status.success()
        }

        #[test]
        fn seeded_bugs_are_found() {
            let tests: ::std::collections::BTreeSet<&str> =
                FOUND_BY.iter().map(|(_, test)| *test).collect();
            for test in tests {
                assert!(is_passed("", test), "{test} fails without a bug");
            }
            ::std::thread::scope(|scope| {
                for (bug, test) in FOUND_BY {
                    scope.spawn(move || {
                        assert!(!is_passed(bug, test), "{test} does not find {bug}");
                    });
                }
            });
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_is_on_when_its_whole_name_is_listed() {
        assert!(is_named("a-bug,b-bug", "b-bug") && is_named("a-bug", "a-bug"));
        assert!(!is_named("", "a-bug") && !is_named("a-bug-too,b-bug=", "a-bug"));
    }

    #[test]
    fn a_text_follows_its_name() {
        assert_eq!(text_of("a-bug,job=scrub,job=other", "job"), Some("scrub"));
        assert_eq!(text_of("job=", "job"), Some(""));
        assert_eq!(text_of("job,jobs=scrub", "job"), None);
    }
}
