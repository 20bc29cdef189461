//! Refusals of a store, in words for people.
//!
//! Invariants:
//! - Of an XML body only its code and message are shown: the rest may contain keys.
//! - The result is one line without control characters, whatever the store has sent.

/// An answer that has a known cause, independent of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The credentials were valid and have expired.
    Expired,
    /// The clocks of the store and of this machine differ by too much.
    ClockDiffers,
    /// The bucket requires a checksum with each write.
    ChecksumWanted,
}

impl Answer {
    /// Finds a known answer in the text of an error.
    #[must_use]
    pub fn find(text: &str) -> Option<Answer> {
        let has = |parts: &[&str]| parts.iter().any(|part| text.contains(part));
        if has(&[
            "RequestTimeTooSkewed",
            "Request date header too old",
            "Signature not yet current",
        ]) {
            return Some(Answer::ClockDiffers);
        }
        let expired = [
            "ExpiredToken",
            "TokenRefreshRequired",
            "The provided token has expired",
            "Signature not valid in the specified time frame",
            "Signature expired",
        ];
        if has(&expired) {
            return Some(Answer::Expired);
        }
        let is_locked = text.contains("Object Lock") || text.contains("ObjectLock");
        (is_locked && has(&["Content-MD5", "x-amz-checksum", "checksum"]))
            .then_some(Answer::ChecksumWanted)
    }

    /// Returns the meaning of the answer and the remedy, as a sentence without a full stop.
    #[must_use]
    pub fn advice(self) -> &'static str {
        match self {
            Answer::Expired => {
                "the credentials have expired: set new credentials (for S3 AWS_ACCESS_KEY_ID, \
                 AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, for Azure a new SAS token) and restart the daemon"
            }
            Answer::ClockDiffers => {
                "the clock of this machine and that of the store differ by more than the store allows: \
                 set the clock of this machine, and keep it by NTP"
            }
            Answer::ChecksumWanted => {
                "the bucket has Object Lock, which wants a checksum with each write: set \
                 AWS_CHECKSUM_ALGORITHM=SHA256 and restart the daemon"
            }
        }
    }
}

/// Returns whether an error is a legitimate answer rather than a failure.
pub(crate) fn is_answer(error: &object_store::Error) -> bool {
    matches!(
        error,
        object_store::Error::NotFound { .. }
            | object_store::Error::AlreadyExists { .. }
            | object_store::Error::Precondition { .. }
            | object_store::Error::NotModified { .. }
    )
}

/// Reduces a store's answer to one line; of an XML body only its code and message.
#[must_use]
pub fn one_line(text: &str) -> String {
    let between = |open: &str, close: &str| {
        text.split_once(open).and_then(|(_, rest)| rest.split_once(close)).map(|(inner, _)| inner)
    };
    let head = text.split("<?xml").next().unwrap_or(text);
    let head = head.split("<Error").next().unwrap_or(head);
    let parts = [
        Some(head.to_owned()),
        between("<Code>", "</Code>").map(decoded),
        between("<Message>", "</Message>").map(decoded),
    ];
    let line = parts.into_iter().flatten().collect::<Vec<_>>().join(" ");
    let shown = |letter: char| if letter.is_control() { ' ' } else { letter };
    let line: String = line.chars().map(shown).collect();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Length of the longest recognized entity, in bytes: `&#x10ffff;`.
const ENTITY_BYTES_MAX: usize = 10;

/// Returns the text of an XML element with its entities decoded. Text that is not an entity is
/// kept.
fn decoded(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('&') {
        plain.push_str(before);
        let end = after.bytes().take(ENTITY_BYTES_MAX).position(|byte| byte == b';');
        match end.and_then(|end| Some((letter_of(&after[..end])?, &after[end + 1..]))) {
            Some((letter, behind)) => {
                plain.push(letter);
                rest = behind;
            }
            None => {
                plain.push('&');
                rest = after;
            }
        }
    }
    plain.push_str(rest);
    plain
}

fn letter_of(entity: &str) -> Option<char> {
    match entity {
        "lt" => Some('<'),
        "gt" => Some('>'),
        "amp" => Some('&'),
        "quot" => Some('"'),
        "apos" => Some('\''),
        _ => {
            let number = entity.strip_prefix('#')?;
            let number = match number.strip_prefix(['x', 'X']) {
                Some(digits) => u32::from_str_radix(digits, 16),
                None => number.parse(),
            };
            number.ok().and_then(char::from_u32)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xml_becomes_a_sentence_without_entities() {
        let xml = "status 403:\n<?xml version=\"1.0\"?>\n<Error><Code>NoWay</Code>\
                   <Message>Not for &quot;you&quot; &lt;&amp;lt;&#39;&#x41;&#10;&unknown; &.</Message>\
                   <AWSAccessKeyId>SECRET</AWSAccessKeyId></Error>";
        assert_eq!(one_line(xml), "status 403: NoWay Not for \"you\" <&lt;'A &unknown; &.");
        assert_eq!(one_line("plain  text\n"), "plain text");
        assert_eq!(one_line("<Error><Code>A&#27;[31m\u{7}</Code></Error>"), "A [31m");
        assert_eq!(one_line("<Error><Message>&#xffffffff; &é;&</Message>"), "&#xffffffff; &é;&");
    }

    #[test]
    fn answers_with_a_cause_of_their_own_are_known() {
        let s3 = |code: &str, message: &str| {
            format!("<Error><Code>{code}</Code><Message>{message}</Message></Error>")
        };
        let expired = s3("ExpiredToken", "The provided token has expired.");
        assert_eq!(Answer::find(&expired), Some(Answer::Expired));
        let skewed = s3("RequestTimeTooSkewed", "The difference between the request time and the");
        assert_eq!(Answer::find(&skewed), Some(Answer::ClockDiffers));
        let locked = s3(
            "InvalidRequest",
            "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with Object Lock parameters",
        );
        assert_eq!(Answer::find(&locked), Some(Answer::ChecksumWanted));
        assert_eq!(Answer::find(&s3("AccessDenied", "Object Lock forbids it")), None);
        assert!(Answer::Expired.advice().contains("new credentials"));
        assert!(Answer::ClockDiffers.advice().contains("clock"));
        assert!(Answer::ChecksumWanted.advice().contains("AWS_CHECKSUM_ALGORITHM"));
    }
}
