//! The HTTP proxy through which a store's client sends its requests, if there is one.
//!
//! The client reads proxies from the environment on its own. This module finds the proxy that it
//! uses, so that errors can name it, and makes `NO_PROXY=*` apply to numeric addresses, too.
//!
//! Invariants:
//! - No text here holds the user name or password of a proxy.

use super::settings::host_of;
use super::{Location, variable};
use object_store::ClientConfigKey;
use std::net::IpAddr;

/// Exceptions for the client that cover every address. Its `*` covers only names.
const EVERYWHERE: &str = "*,0.0.0.0/0,::/0";
/// A proxy that is never used: exceptions count only if one is set.
const NOWHERE: &str = "http://proxy.invalid";

/// Reports whether `NO_PROXY` of the process excepts everything. The client applies that only to
/// names.
fn is_no_proxy_wanted() -> bool {
    Proxies::from_environment(|name| std::env::var(name).ok()).is_none_wanted()
}

/// Proxy on the way to a store, for messages.
pub(super) fn proxy_of(
    location: &Location,
    settings: Option<&[(String, String)]>,
) -> Option<String> {
    let (own, endpoints): (_, &[&str]) = match location {
        Location::Directory(_) => return None,
        Location::S3 { .. } => {
            ("AWS_PROXY_URL", &["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
        }
        Location::Gcs { .. } => ("GOOGLE_PROXY_URL", &["GOOGLE_BASE_URL"]),
        Location::Azure { .. } => {
            ("AZURE_PROXY_URL", &["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"])
        }
    };
    if let Some(proxy) = variable(settings, own) {
        return Some(described(own, &proxy));
    }
    let named = endpoints.iter().find_map(|name| variable(settings, name));
    let endpoint = named.unwrap_or_else(|| match location {
        Location::Gcs { .. } => "https://storage.googleapis.com".to_owned(),
        Location::Azure { .. } => {
            let account = variable(settings, "AZURE_STORAGE_ACCOUNT_NAME").unwrap_or_default();
            format!("https://{account}.blob.core.windows.net")
        }
        _ => {
            let region = ["AWS_REGION", "AWS_DEFAULT_REGION"];
            let region = region.into_iter().find_map(|name| variable(settings, name));
            format!("https://s3.{}.amazonaws.com", region.as_deref().unwrap_or("us-east-1"))
        }
    });
    Proxies::from_environment(|name| std::env::var(name).ok()).on_the_way_to(&endpoint)
}

/// Settings that disable proxies, if the environment asks for that and the store has no proxy of
/// its own.
pub(super) fn no_proxy(own: Option<&str>) -> Vec<(ClientConfigKey, String)> {
    match own.is_none() && is_no_proxy_wanted() {
        true => vec![
            (ClientConfigKey::ProxyUrl, NOWHERE.to_owned()),
            (ClientConfigKey::ProxyExcludes, EVERYWHERE.to_owned()),
        ],
        false => Vec::new(),
    }
}

/// Proxy settings of the environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Proxies {
    /// Variable and value of the proxy for addresses with TLS, and for those without.
    tls: Option<(String, String)>,
    plain: Option<(String, String)>,
    exceptions: Vec<String>,
}

impl Proxies {
    /// Reads the environment by the rules of the client. Source: hyper-util 0.1
    /// `client/proxy/matcher.rs`: names in upper case first, and no proxy at all under CGI.
    fn from_environment(variable: impl Fn(&str) -> Option<String>) -> Proxies {
        if variable("REQUEST_METHOD").is_some() {
            return Proxies::default();
        }
        let first = |names: [&str; 2]| {
            let found = names.into_iter().find_map(|name| Some((name.to_owned(), variable(name)?)));
            found.filter(|(_, value)| !value.is_empty())
        };
        let all = first(["ALL_PROXY", "all_proxy"]);
        let exceptions = first(["NO_PROXY", "no_proxy"]).map(|(_, value)| value);
        let exceptions = exceptions.unwrap_or_default();
        Proxies {
            tls: first(["HTTPS_PROXY", "https_proxy"]).or_else(|| all.clone()),
            plain: first(["HTTP_PROXY", "http_proxy"]).or(all),
            exceptions: exceptions
                .split(',')
                .map(|part| part.trim().to_owned())
                .filter(|part| !part.is_empty())
                .collect(),
        }
    }

    /// Reports whether nothing goes through a proxy.
    fn is_none_wanted(&self) -> bool {
        self.exceptions.iter().any(|part| part == "*")
    }

    /// Proxy on the way to an address, for messages: its variable and its address.
    fn on_the_way_to(&self, address: &str) -> Option<String> {
        let proxy = if address.starts_with("http://") { &self.plain } else { &self.tls };
        let (variable, value) = proxy.as_ref()?;
        let host = host_of(address);
        let is_excepted = self.exceptions.iter().any(|part| excepts(part, host));
        (!is_excepted).then(|| described(variable, value))
    }
}

/// Text that describes a proxy.
fn described(variable: &str, value: &str) -> String {
    let (scheme, rest) = value.split_once("://").unwrap_or(("http", value));
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let authority = authority.rsplit_once('@').map_or(authority, |(_, place)| place);
    format!("{scheme}://{authority} ({variable} in the environment)")
}

/// Reports whether a part of `NO_PROXY` covers a host: `*`, a name with all its subdomains, an
/// address, or a network.
fn excepts(part: &str, host: &str) -> bool {
    if part == "*" {
        return true;
    }
    if let Ok(address) = host.parse::<IpAddr>() {
        return match part.split_once('/') {
            None => part.parse() == Ok(address),
            Some((network, bits)) => match (network.parse::<IpAddr>(), bits.parse::<u32>()) {
                (Ok(network), Ok(bits)) => is_in(address, network, bits),
                _ => false,
            },
        };
    }
    let (name, host) = (part.trim_start_matches('.').to_lowercase(), host.to_lowercase());
    !name.is_empty() && (host == name || host.ends_with(&format!(".{name}")))
}

/// Reports whether an address shares the first `bits` with a network.
fn is_in(address: IpAddr, network: IpAddr, bits: u32) -> bool {
    let (address, network, width) = match (address, network) {
        (IpAddr::V4(address), IpAddr::V4(network)) => {
            (u128::from(address.to_bits()), u128::from(network.to_bits()), 32)
        }
        (IpAddr::V6(address), IpAddr::V6(network)) => (address.to_bits(), network.to_bits(), 128),
        _ => return false,
    };
    let Some(ignored) = u32::checked_sub(width, bits) else { return false };
    let cut = |bits: u128| bits.checked_shr(ignored).unwrap_or(0);
    cut(address) == cut(network)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxies(variables: &[(&str, &str)]) -> Proxies {
        Proxies::from_environment(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_proxy_on_the_way_is_named_without_its_password() {
        let both = proxies(&[
            ("https_proxy", "http://user:hunter2@proxy:3128/"),
            ("ALL_PROXY", "socks5://other:1080"),
            ("NO_PROXY", "10.0.0.0/8, .internal,[x,2001:db8::/32"),
        ]);
        let far = both.on_the_way_to("https://s3.example").expect("there is one");
        assert_eq!(far, "http://proxy:3128 (https_proxy in the environment)");
        let plain = both.on_the_way_to("http://s3.example").expect("there is one");
        assert_eq!(plain, "socks5://other:1080 (ALL_PROXY in the environment)");
        for near in [
            "http://10.1.2.3:9000",
            "https://minio.internal",
            "https://internal",
            "https://[2001:db8::7]:443",
        ] {
            assert_eq!(both.on_the_way_to(near), None, "{near}");
        }
        for other in ["http://11.0.0.1", "https://notinternal", "https://[2001:db9::7]"] {
            assert!(both.on_the_way_to(other).is_some(), "{other}");
        }
        assert!(!both.is_none_wanted());
    }

    #[test]
    fn a_star_excepts_every_address() {
        let none = proxies(&[("HTTPS_PROXY", "proxy:1"), ("no_proxy", "a, *")]);
        assert!(none.is_none_wanted());
        assert_eq!(none.on_the_way_to("https://127.0.0.1"), None);
        assert_eq!(none.on_the_way_to("https://s3.example"), None);
        assert_eq!(proxies(&[]).on_the_way_to("https://s3.example"), None);
        let cgi = proxies(&[("HTTP_PROXY", "proxy:1"), ("REQUEST_METHOD", "GET")]);
        assert_eq!(cgi.on_the_way_to("http://s3.example"), None);
        let first = proxies(&[("HTTPS_PROXY", ""), ("https_proxy", "proxy:1")]);
        assert_eq!(first.on_the_way_to("https://s3.example"), None, "the first one counts");
    }
}
