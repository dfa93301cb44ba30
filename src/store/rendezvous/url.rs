//! The URL of a rendezvous, taken apart as Python's urlparse and torch's query rules do. Plain data.

use crate::store::{Error, Result};

/// `scheme://host:port/path?name=value&name=value`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url {
    scheme: String,
    host: Option<String>,
    port: Option<String>,
    path: String,
    query: Vec<(String, Option<String>)>,
}

impl Url {
    /// Takes it apart.
    ///
    /// Errors: an IPv6 address whose bracket is not closed.
    pub fn parse(text: &str) -> Result<Url> {
        // As urlparse, which forgets these wherever they stand.
        let text: String = text.trim_matches(|c: char| c <= ' ').chars().filter(|c| !matches!(c, '\t' | '\r' | '\n')).collect();
        let (scheme, rest) = match text.split_once(':') {
            Some((scheme, rest)) if is_scheme(scheme) => (scheme.to_ascii_lowercase(), rest),
            _ => (String::new(), &text[..]),
        };
        let rest = rest.split('#').next().unwrap_or("");
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = match rest.strip_prefix("//") {
            Some(rest) => rest.split_at(rest.find('/').unwrap_or(rest.len())),
            None => ("", rest),
        };
        let place = authority.rsplit('@').next().unwrap_or("");
        let (host, port) = match place.strip_prefix('[') {
            Some(place) => {
                let (host, after) = place.split_once(']').ok_or_else(|| Error::Usage("Invalid IPv6 URL".into()))?;
                (host, after.strip_prefix(':'))
            }
            None => match place.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (place, None),
            },
        };
        let pairs = query.split('&').filter(|pair| !pair.is_empty());
        let mut url = Url {
            scheme,
            host: (!host.is_empty()).then(|| host.to_ascii_lowercase()),
            port: port.filter(|port| !port.is_empty()).map(str::to_owned),
            path: path.to_owned(),
            query: Vec::new(),
        };
        for pair in pairs {
            let mut parts = pair.split('=');
            let name = parts.next().unwrap_or("");
            url.put(name, parts.next().map(str::to_owned));
        }
        Ok(url)
    }

    /// In lower case; empty if there is none.
    pub fn scheme(&self) -> &str {
        &self.scheme
    }

    /// In lower case, without the brackets of an IPv6 address.
    pub fn host(&self) -> Option<&str> {
        self.host.as_deref()
    }

    /// Errors: text that is no port.
    pub fn port(&self) -> Result<Option<u16>> {
        let Some(port) = &self.port else { return Ok(None) };
        if !port.bytes().all(|b| b.is_ascii_digit()) {
            return Err(Error::Usage(format!("Port could not be cast to integer value as '{port}'")));
        }
        port.parse().map(Some).map_err(|_| Error::Usage("Port out of range 0-65535".into()))
    }

    /// As it stands there: nothing is decoded.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The value of a parameter, if it is there. Of several of one name the last counts.
    ///
    /// Errors: see [`Url::required`].
    pub fn query(&self, name: &str) -> Option<Result<&str>> {
        let (_, value) = self.query.iter().find(|(known, _)| known == name)?;
        Some(value.as_deref().ok_or_else(|| Error::Usage(format!("the parameter '{name}' of the URL has no value: expected {name}=..."))))
    }

    /// The value of a parameter that must be there.
    ///
    /// Errors: `missing` if it is not; a parameter without "=".
    pub fn required(&self, name: &str, missing: impl FnOnce() -> Error) -> Result<&str> {
        self.query(name).unwrap_or_else(|| Err(missing()))
    }

    /// Sets a parameter.
    pub fn set_query(&mut self, name: &str, value: &str) {
        self.put(name, Some(value.to_owned()));
    }

    fn put(&mut self, name: &str, value: Option<String>) {
        match self.query.iter_mut().find(|(known, _)| known == name) {
            Some((_, old)) => *old = value,
            None => self.query.push((name.to_owned(), value)),
        }
    }
}

impl std::fmt::Display for Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}://", self.scheme)?;
        match &self.host {
            Some(host) if host.contains(':') => write!(f, "[{host}]")?,
            Some(host) => f.write_str(host)?,
            None => {}
        }
        if let Some(port) = &self.port {
            write!(f, ":{port}")?;
        }
        f.write_str(&self.path)?;
        for (i, (name, value)) in self.query.iter().enumerate() {
            f.write_str(if i == 0 { "?" } else { "&" })?;
            f.write_str(name)?;
            if let Some(value) = value {
                write!(f, "={value}")?;
            }
        }
        Ok(())
    }
}

/// RFC 3986, section 3.1.
fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Python 3.11 said: scheme, host, port, path, query.
    #[test]
    fn parts_are_those_that_urlparse_gives() {
        type Parts = (&'static str, &'static str, Option<&'static str>, std::result::Result<Option<u16>, &'static str>, &'static str);
        let cases: &[(Parts, &[&str])] = &[
            (("tcp://Host:1/x?rank=0", "tcp", Some("host"), Ok(Some(1)), "/x"), &["rank"]),
            (("tcp://[::1]:29500?a=b", "tcp", Some("::1"), Ok(Some(29500)), ""), &["a"]),
            (("tcp://u:p@h:3", "tcp", Some("h"), Ok(Some(3)), ""), &[]),
            (("tcp://h:", "tcp", Some("h"), Ok(None), ""), &[]),
            (("tcp://:12", "tcp", None, Ok(Some(12)), ""), &[]),
            (("tcp://h:99999", "tcp", Some("h"), Err("Port out of range 0-65535"), ""), &[]),
            (("tcp://h:+1", "tcp", Some("h"), Err("Port could not be cast to integer value as '+1'"), ""), &[]),
            (("tcp://h: 1", "tcp", Some("h"), Err("Port could not be cast to integer value as ' 1'"), ""), &[]),
            (("tcp://h\t:1", "tcp", Some("h"), Ok(Some(1)), ""), &[]),
            (("FILE:///a/b%20c?rank=0#f", "file", None, Ok(None), "/a/b%20c"), &["rank"]),
            (("file:///p;x?y=1", "file", None, Ok(None), "/p;x"), &["y"]),
            (("file://?rank=0", "file", None, Ok(None), ""), &["rank"]),
            (("env:", "env", None, Ok(None), ""), &[]),
            (("env://?rank=0?x&&b", "env", None, Ok(None), ""), &["rank", "b"]),
            (("tcp:h:1", "tcp", None, Ok(None), "h:1"), &[]),
            (("://x", "", None, Ok(None), "://x"), &[]),
            (("1a://x", "", None, Ok(None), "1a://x"), &[]),
            (("x", "", None, Ok(None), "x"), &[]),
            (("", "", None, Ok(None), ""), &[]),
        ];
        for ((text, scheme, host, port, path), names) in cases {
            let url = Url::parse(text).unwrap();
            assert_eq!((url.scheme(), url.host(), url.path()), (*scheme, *host, *path), "{text}");
            assert_eq!(url.port().map_err(|e| e.to_string()), port.map_err(str::to_owned), "{text}");
            assert_eq!(url.query.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), *names, "{text}");
        }
        assert_eq!(Url::parse("tcp://[::1").unwrap_err().to_string(), "Invalid IPv6 URL");
    }

    #[test]
    fn parameters_end_at_the_second_equals_sign_and_the_last_counts() {
        let mut url = Url::parse("x://h:1/p?rank=0=5&b=1&b=2&c").unwrap();
        assert_eq!(url.query("rank").unwrap().unwrap(), "0");
        assert_eq!(url.query("b").unwrap().unwrap(), "2");
        assert!(url.query("c").unwrap().is_err() && url.query("d").is_none());
        url.set_query("b", "3");
        url.set_query("d", "");
        assert_eq!(url.to_string(), "x://h:1/p?rank=0&b=3&c&d=");
        assert_eq!(Url::parse("tcp://[::1]:2").unwrap().to_string(), "tcp://[::1]:2");
    }
}
