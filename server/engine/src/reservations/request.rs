//! A client's request for a volume, as a front end has received it.

use std::sync::Arc;

/// The purpose of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// The first connection of an attachment. Earlier attachments of the same client end.
    Attach,
    /// A further connection of an attachment, or the replacement of a lost one.
    Go,
    /// The end of the attachment.
    Release,
}

/// Identifies a client across its connections, so that a volume can have a single writer, and so
/// that requests of a lost connection end before those of its replacement begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservationRequest {
    /// The purpose.
    pub intent: Intent,
    /// Other clients may also write to the volume.
    pub is_shared: bool,
    /// Index of the connection in the attachment: a new connection ends an older one with the same
    /// index.
    pub connection: u16,
    /// Id of the client's machine.
    pub client: [u8; 16],
    /// Id of that machine's current boot; it changes with each restart.
    pub boot: [u8; 16],
    /// Id of this attachment of the volume to that machine.
    pub attachment: [u8; 16],
    /// Name of the machine for people.
    pub label: String,
}

/// The connection by which a client has come.
#[derive(Clone, Debug)]
pub struct Connection<'a> {
    /// Tells whether the client is still there; absent for a connection within this process.
    pub line: Option<Arc<dyn block::Line>>,
    /// Names the client in messages.
    pub label: &'a str,
}
