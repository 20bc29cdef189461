//! Settings of a store's client from the environment, checked before a client is built.
//!
//! The client panics or fails with unclear messages if an address has no scheme or a key has a line
//! break in it. Therefore every variable that it would read is checked once, up front.
//!
//! Invariants:
//! - An error names the variable and never repeats its value, which may hold a password.

use super::Location;
use block::{Error, ErrorKind, Result};

/// Variables of one family of stores, grouped by the kind of their values. Names are in lower case,
/// as the client compares them. Source: object_store 0.14, `from_str` of the keys of each builder.
struct Family {
    /// Prefix of the names of all variables.
    start: &'static str,
    /// Addresses of servers.
    addresses: &'static [&'static str],
    /// Values that go into headers of requests or into their addresses.
    words: &'static [&'static str],
    /// Variables that should hold the credentials.
    credentials: &'static str,
}

const S3: Family = Family {
    start: "AWS_",
    addresses: &[
        "aws_endpoint_url",
        "aws_endpoint",
        "aws_endpoint_url_s3",
        "aws_endpoint_url_sts",
        "aws_metadata_endpoint",
        "aws_container_credentials_full_uri",
    ],
    words: &[
        "aws_access_key_id",
        "aws_secret_access_key",
        "aws_session_token",
        "aws_token",
        "aws_region",
        "aws_default_region",
        "aws_role_arn",
        "aws_checksum_algorithm",
    ],
    credentials: "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
};

const GCS: Family = Family {
    start: "GOOGLE_",
    addresses: &["google_base_url"],
    words: &["google_bearer_token"],
    credentials: "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_BEARER_TOKEN",
};

const AZURE: Family = Family {
    start: "AZURE_",
    addresses: &[
        "azure_storage_endpoint",
        "azure_endpoint",
        "azure_msi_endpoint",
        "azure_identity_endpoint",
        "azure_storage_authority_host",
        "azure_authority_host",
    ],
    words: &[
        "azure_storage_account_name",
        "azure_storage_account_key",
        "azure_storage_access_key",
        "azure_storage_master_key",
        "azure_storage_sas_key",
        "azure_storage_sas_token",
        "azure_storage_token",
        "azure_storage_client_id",
        "azure_client_id",
        "azure_storage_client_secret",
        "azure_client_secret",
        "azure_storage_tenant_id",
        "azure_tenant_id",
    ],
    credentials: "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
};

/// Refuses variables that would make the client of a store fail. `prefix` precedes the names that
/// the user has set.
///
/// # Errors
/// `Invalid`, with the variable and the problem.
pub(super) fn check(
    location: &Location,
    variables: &[(String, String)],
    prefix: &str,
) -> Result<()> {
    let family = match location {
        Location::Directory(_) => return Ok(()),
        Location::S3 { .. } => S3,
        Location::Gcs { .. } => GCS,
        Location::Azure { .. } => AZURE,
    };
    let its = variables.iter().filter(|(name, _)| name.starts_with(family.start));
    for (name, value) in its {
        let lower = name.to_ascii_lowercase();
        let wrong = match lower.as_str() {
            known if family.addresses.contains(&known) => {
                wrong_address(value).map(|why| address_advice(why, &family))
            }
            known if family.words.contains(&known) => wrong_word(value).map(str::to_owned),
            _ => None,
        };
        if let Some(wrong) = wrong {
            let what = format!("environment variable {prefix}{name}: {wrong}");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
    }
    Ok(())
}

fn address_advice(why: &str, family: &Family) -> String {
    match why {
        HOLDS_CREDENTIALS => {
            format!("{why}; take them out, credentials belong in {}", family.credentials)
        }
        _ => format!("{why}; write https://HOST[:PORT], or unset it"),
    }
}

const HOLDS_CREDENTIALS: &str = "the address holds a user name or password";

/// Describes the problem with the address of a server, if any.
fn wrong_address(value: &str) -> Option<&'static str> {
    if value.is_empty() {
        return Some("it is empty");
    }
    if value.chars().any(char::is_whitespace) {
        return Some("the address has a blank or line break in it");
    }
    let Some(rest) = value.strip_prefix("https://").or_else(|| value.strip_prefix("http://"))
    else {
        return Some("the address does not begin with https:// or http://");
    };
    if !value.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"<>\\^`{|}".contains(&byte)) {
        return Some("the address has a character that addresses do not have");
    }
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if authority.contains('@') {
        return Some(HOLDS_CREDENTIALS);
    }
    if rest.contains(['?', '#']) {
        return Some("the address has parameters");
    }
    let (host, port) = match authority.strip_prefix('[') {
        Some(v6) => match v6.split_once(']') {
            Some((host, "")) => (host, None),
            Some((host, port)) => match port.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None => return Some("the address has no port behind its bracket"),
            },
            None => return Some("the address lacks a bracket"),
        },
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    if host.is_empty() {
        return Some("the address names no host");
    }
    match port.map(str::parse::<u16>) {
        None => None,
        Some(Ok(port)) if port != 0 => None,
        Some(_) => Some("the port of the address is not a number from 1 to 65535"),
    }
}

/// Describes the problem with a value that is used unchanged in a request, if any.
fn wrong_word(value: &str) -> Option<&'static str> {
    if value.trim() != value {
        return Some("it begins or ends with a blank or line break; set it without that");
    }
    let is_plain = value.chars().all(|letter| letter.is_ascii() && !letter.is_ascii_control());
    (!is_plain).then_some("it has a line break or a letter that is not ASCII; set it without that")
}

/// Host of an address, without a port.
pub(super) fn host_of(address: &str) -> &str {
    let rest = address.split_once("://").map_or(address, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    match authority.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_one(name: &str, value: &str) -> Result<()> {
        let bucket = || "bucket".to_owned();
        let location = match name {
            name if name.starts_with("AWS") => {
                Location::S3 { bucket: bucket(), prefix: String::new() }
            }
            name if name.starts_with("GOOGLE") => {
                Location::Gcs { bucket: bucket(), prefix: String::new() }
            }
            _ => Location::Azure { container: bucket(), prefix: String::new() },
        };
        check(&location, &[(name.to_owned(), value.to_owned())], "DR_")
    }

    #[test]
    fn unusable_addresses_are_refused_by_variable_name() {
        let addresses = [S3, GCS, AZURE].map(|family| family.addresses);
        for name in addresses.concat() {
            let name = name.to_ascii_uppercase();
            for wrong in [
                "",
                " ",
                "127.0.0.1:9000",
                "localhost",
                " http://127.0.0.1:9",
                "http://127.0.0.1:9\n",
                "http://127.0.0.1:9 /x",
                "HTTP://127.0.0.1:9",
                "ftp://host",
                "https://",
                "https:///bucket",
                "https://:9000",
                "https://host:",
                "https://host:0",
                "https://host:65536",
                "https://host:x",
                "https://[::1",
                "https://[::1]9000",
                "https://höst",
                "https://host\"",
                "https://host/?a=b",
                "https://host#x",
            ] {
                let error = check_one(&name, wrong).expect_err(wrong);
                assert_eq!(error.kind(), ErrorKind::Invalid, "{name}={wrong:?}");
                let text = error.chain();
                assert!(text.contains(&format!("environment variable DR_{name}: ")), "{text}");
                assert!(text.contains("https://HOST"), "{text}");
            }
            for right in [
                "https://s3.eu-central-1.amazonaws.com",
                "http://127.0.0.1:9000/",
                "https://[2001:db8::1]:443/base",
                "http://minio_1:9000/dev/account",
            ] {
                check_one(&name, right).unwrap_or_else(|error| panic!("{}", error.chain()));
            }
        }
    }

    #[test]
    fn an_address_with_a_password_is_refused_and_not_repeated() {
        for wrong in ["http://user:hunter2@127.0.0.1:9000", "https://hunter2@[::1]/x?y"] {
            for name in ["AWS_ENDPOINT_URL", "GOOGLE_BASE_URL", "AZURE_ENDPOINT"] {
                let text = check_one(name, wrong).expect_err(wrong).chain();
                assert!(text.contains("password") && text.contains("credentials"), "{text}");
                assert!(!text.contains("hunter2"), "{text}");
            }
        }
    }

    #[test]
    fn keys_with_blanks_or_line_breaks_are_refused_and_not_repeated() {
        for name in ["AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY"] {
            for wrong in ["hunter2\n", " hunter2", "hunter2\nx", "hunter2é", "hunter2\u{7f}x"] {
                let text = check_one(name, wrong).expect_err(wrong).chain();
                assert!(text.contains(name) && !text.contains("hunter2"), "{text}");
            }
            check_one(name, "hunter2/+=").unwrap();
        }
        check_one("AWS_SOMETHING_ELSE", " x ").unwrap();
        check_one("GOOGLE_SERVICE_ACCOUNT_KEY", "{\n}").unwrap();
    }

    #[test]
    fn hosts_are_found_in_addresses() {
        for (address, host) in [
            ("https://a.example:443/x", "a.example"),
            ("http://[::1]:9000", "::1"),
            ("https://u:p@b/c", "b"),
            ("c:1", "c"),
        ] {
            assert_eq!(host_of(address), host);
        }
    }
}
