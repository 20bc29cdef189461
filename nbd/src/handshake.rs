//! Negotiation as a state machine: options in, actions out.
//!
//! Invariants:
//! - Pure: no I/O, no await. The driver looks up the exports and passes the answers back.
//! - Where TLS is required, every option but STARTTLS and ABORT is refused before TLS is in place.
//! - STARTTLS forgets everything negotiated before it (spec, "NBD_OPT_STARTTLS").
//! - A metadata context is selected only by the last SET_META_CONTEXT, only if that succeeded, and
//!   only for the export that it named.

use crate::tls::TlsMode;
use crate::wire::{
    self, CLIENT_FLAGS_BYTES, Dialect, EXPORT_NAME_PADDING_BYTES, InfoRequest, MetaRequest,
    OptionHeader, ReservationRequest, STRING_BYTES_MAX, handshake_flag, info, option, option_reply,
    put_option_reply, transmission_flag,
};
use block::{ErrorKind, Limits};

/// Largest option data that is read into memory. Chosen by hand: more than the longest name (4096
/// bytes) followed by a hundred requests or queries.
pub const OPTION_BYTES_MAX: u32 = 64 << 10;
/// Largest option data that is read and discarded; beyond it the connection is closed (spec,
/// "Option haggling": a server may disconnect instead of reading on). Chosen by hand.
pub const OPTION_SKIP_BYTES_MAX: u32 = 1 << 20;
/// Minimum block size: the device does the read-modify-write itself.
const BLOCK_BYTES_MIN: u32 = 1;

/// The driver's next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send these bytes and read the next option.
    Reply(Vec<u8>),
    /// Send these bytes and close.
    Close(Vec<u8>),
    /// Send these bytes, encrypt, and call [`Handshake::on_tls`].
    StartTls(Vec<u8>),
    /// Look up the exports to list and answer with [`Handshake::list`].
    List,
    /// Look up the export and answer with [`Handshake::described`].
    Describe(Lookup),
    /// Check whether the export exists and answer with [`Handshake::meta`].
    Meta(MetaLookup),
    /// Open the export; answer with [`Handshake::opened`] or [`Handshake::refused`].
    Open(Lookup),
    /// Record the identity of the client, or end its attachment; answer with
    /// [`Handshake::reserved`].
    Reservation(ReservationRequest),
}

/// An export that INFO, GO or EXPORT_NAME named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lookup {
    /// The name as the client wrote it.
    pub name: String,
    option: u32,
    wants_name: bool,
    wants_description: bool,
    wants_block_size: bool,
}

impl Lookup {
    /// Whether the client asked for the description.
    #[must_use]
    pub fn wants_description(&self) -> bool {
        self.wants_description
    }
}

/// An export whose metadata contexts the client asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaLookup {
    /// The name as the client wrote it.
    pub name: String,
    is_set: bool,
    is_match: bool,
}

/// The result of a negotiation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// The form of requests and replies.
    pub dialect: Dialect,
    /// `base:allocation` was selected, so the client may send BLOCK_STATUS.
    pub has_allocation: bool,
}

/// The decision about an option from its length, before its data is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Read the data and call [`Handshake::on_option`].
    Read,
    /// Read and discard the data, then send these bytes.
    Skip(Vec<u8>),
    /// Close the connection: the data is too long to read.
    Close,
}

/// One connection's negotiation.
#[derive(Clone, Debug)]
pub struct Handshake {
    tls: TlsMode,
    is_tls: bool,
    can_resize: bool,
    has_no_zeroes: bool,
    dialect: Dialect,
    /// The export whose `base:allocation` was selected.
    selected: Option<String>,
}

impl Handshake {
    /// Starts a negotiation. `tls` is the mode of this listener; `can_resize` offers the RESIZE
    /// command.
    #[must_use]
    pub fn new(tls: TlsMode, can_resize: bool) -> Self {
        Handshake {
            tls,
            is_tls: false,
            can_resize,
            has_no_zeroes: false,
            dialect: Dialect::Simple,
            selected: None,
        }
    }

    /// Returns the first bytes that the server sends.
    #[must_use]
    pub fn greeting(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(18);
        wire::put_greeting(&mut out);
        out
    }

    /// Records the client flags.
    ///
    /// # Errors
    /// Returns the flags if one is unknown; the connection must then be closed (spec, "Client
    /// flags").
    pub fn on_client_flags(&mut self, bytes: [u8; CLIENT_FLAGS_BYTES]) -> Result<(), u32> {
        let flags = u32::from_be_bytes(bytes);
        let known = u32::from(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        if flags & !known != 0 {
            return Err(flags);
        }
        self.has_no_zeroes = flags & u32::from(handshake_flag::NO_ZEROES) != 0;
        Ok(())
    }

    /// Records that the connection is encrypted, and forgets all earlier options.
    pub fn on_tls(&mut self) {
        self.is_tls = true;
        self.dialect = Dialect::Simple;
        self.selected = None;
    }

    /// Decides whether to read the data of an option.
    #[must_use]
    pub fn admit(&self, header: OptionHeader) -> Admission {
        if header.data_bytes <= OPTION_BYTES_MAX {
            return Admission::Read;
        }
        // EXPORT_NAME has no error reply.
        if header.data_bytes > OPTION_SKIP_BYTES_MAX || header.option == option::EXPORT_NAME {
            return Admission::Close;
        }
        let reply = if self.must_encrypt() {
            option_reply::ERR_TLS_REQD
        } else {
            option_reply::ERR_TOO_BIG
        };
        Admission::Skip(error(header.option, reply, "option data is too long"))
    }

    /// Processes a complete option.
    pub fn on_option(&mut self, option: u32, data: &[u8]) -> Action {
        if self.must_encrypt() && option != option::STARTTLS && option != option::ABORT {
            return match option {
                option::EXPORT_NAME => Action::Close(Vec::new()),
                _ => refuse(option, option_reply::ERR_TLS_REQD, "this server requires TLS"),
            };
        }
        match option {
            option::EXPORT_NAME => self.on_export_name(data),
            option::ABORT => Action::Close(ack(option)),
            option::LIST if !data.is_empty() => takes_no_data(option),
            option::LIST => Action::List,
            option::STARTTLS => self.on_starttls(data),
            option::INFO | option::GO => on_info(option, data),
            option::STRUCTURED_REPLY => self.on_structured_reply(data),
            option::EXTENDED_HEADERS => self.on_extended_headers(data),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.on_meta(option, data),
            option::RESERVATION => match ReservationRequest::decode(data) {
                Ok(reservation) => Action::Reservation(reservation),
                Err(_) => refuse(option, option_reply::ERR_INVALID, "malformed reservation"),
            },
            _ => refuse(option, option_reply::ERR_UNSUP, "unknown option"),
        }
    }

    fn must_encrypt(&self) -> bool {
        self.tls == TlsMode::Required && !self.is_tls
    }

    fn on_export_name(&mut self, data: &[u8]) -> Action {
        match name_of(data) {
            Ok(name) => Action::Open(Lookup {
                name,
                option: option::EXPORT_NAME,
                wants_name: false,
                wants_description: false,
                wants_block_size: false,
            }),
            Err(_) => Action::Close(Vec::new()),
        }
    }

    fn on_starttls(&mut self, data: &[u8]) -> Action {
        let option = option::STARTTLS;
        if !data.is_empty() {
            return takes_no_data(option);
        }
        if self.is_tls {
            return refuse(option, option_reply::ERR_INVALID, "TLS is in use already");
        }
        match self.tls {
            TlsMode::Off => refuse(option, option_reply::ERR_UNSUP, "TLS is not configured"),
            TlsMode::On | TlsMode::Required => Action::StartTls(ack(option)),
        }
    }

    fn on_structured_reply(&mut self, data: &[u8]) -> Action {
        let option = option::STRUCTURED_REPLY;
        match self.dialect {
            _ if !data.is_empty() => takes_no_data(option),
            Dialect::Simple => {
                self.dialect = Dialect::Structured;
                Action::Reply(ack(option))
            }
            Dialect::Structured => {
                refuse(option, option_reply::ERR_INVALID, "structured replies are on already")
            }
            Dialect::Extended => {
                let why = "extended headers are on, which include structured replies";
                refuse(option, option_reply::ERR_EXT_HEADER_REQD, why)
            }
        }
    }

    fn on_extended_headers(&mut self, data: &[u8]) -> Action {
        let option = option::EXTENDED_HEADERS;
        match self.dialect {
            _ if !data.is_empty() => takes_no_data(option),
            Dialect::Extended => {
                refuse(option, option_reply::ERR_INVALID, "extended headers are on already")
            }
            Dialect::Simple | Dialect::Structured => {
                self.dialect = Dialect::Extended;
                Action::Reply(ack(option))
            }
        }
    }

    fn on_meta(&mut self, option: u32, data: &[u8]) -> Action {
        let is_set = option == option::SET_META_CONTEXT;
        if is_set {
            self.selected = None;
        }
        if self.dialect == Dialect::Simple {
            return refuse(option, option_reply::ERR_INVALID, "negotiate structured replies first");
        }
        let Ok(request) = MetaRequest::decode(data) else {
            return refuse(option, option_reply::ERR_INVALID, "malformed metadata query");
        };
        let is_match = if is_set {
            request.names_allocation
        } else {
            !request.has_queries || request.names_allocation || request.names_base
        };
        match name_of(request.name) {
            Ok(name) => Action::Meta(MetaLookup { name, is_set, is_match }),
            Err(reply) => refuse(option, reply, "the name is too long or not UTF-8"),
        }
    }

    /// Answers LIST with (name, description) pairs.
    #[must_use]
    pub fn list<'a>(&self, exports: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<u8> {
        let mut out = Vec::new();
        for (name, description) in exports {
            let name_bytes = u32::try_from(name.len()).unwrap_or(u32::MAX).to_be_bytes();
            let parts = [&name_bytes[..], name.as_bytes(), description.as_bytes()];
            put_option_reply(&mut out, option::LIST, option_reply::SERVER, &parts);
        }
        put_option_reply(&mut out, option::LIST, option_reply::ACK, &[]);
        out
    }

    /// Answers INFO.
    #[must_use]
    pub fn described(&self, lookup: &Lookup, description: &str, limits: &Limits) -> Vec<u8> {
        let mut out = Vec::new();
        let option = lookup.option;
        let mut put = |kind: u16, parts: [&[u8]; 3]| {
            let parts = [&kind.to_be_bytes()[..], parts[0], parts[1], parts[2]];
            put_option_reply(&mut out, option, option_reply::INFO, &parts);
        };
        let flags = self.transmission_flags(limits).to_be_bytes();
        put(info::EXPORT, [&limits.size_bytes.to_be_bytes(), &flags, &[]]);
        if lookup.wants_name {
            put(info::NAME, [lookup.name.as_bytes(), &[], &[]]);
        }
        if lookup.wants_description && !description.is_empty() {
            put(info::DESCRIPTION, [description.as_bytes(), &[], &[]]);
        }
        if lookup.wants_block_size {
            let min = BLOCK_BYTES_MIN.to_be_bytes();
            let preferred = limits.preferred_block_bytes.max(512).to_be_bytes();
            let max = limits.payload_bytes_max.max(limits.preferred_block_bytes).to_be_bytes();
            put(info::BLOCK_SIZE, [&min, &preferred, &max]);
        }
        put_option_reply(&mut out, option, option_reply::ACK, &[]);
        out
    }

    /// Answers GO or EXPORT_NAME for an opened export; transmission starts after the reply.
    #[must_use]
    pub fn opened(&self, lookup: &Lookup, description: &str, limits: &Limits) -> (Vec<u8>, Terms) {
        let has_allocation = self.selected.as_deref() == Some(lookup.name.as_str());
        let terms = Terms { dialect: self.dialect, has_allocation };
        if lookup.option != option::EXPORT_NAME {
            return (self.described(lookup, description, limits), terms);
        }
        let mut out = Vec::with_capacity(10 + EXPORT_NAME_PADDING_BYTES);
        out.extend_from_slice(&limits.size_bytes.to_be_bytes());
        out.extend_from_slice(&self.transmission_flags(limits).to_be_bytes());
        if !self.has_no_zeroes {
            out.resize(out.len() + EXPORT_NAME_PADDING_BYTES, 0);
        }
        (out, terms)
    }

    /// Answers CLAIM.
    #[must_use]
    pub fn claimed(&self, outcome: Result<(), (ErrorKind, String)>) -> Vec<u8> {
        match outcome {
            Ok(()) => ack(option::RESERVATION),
            Err((kind, why)) => error(option::RESERVATION, lookup_error(kind), &why),
        }
    }

    /// Answers INFO, GO or EXPORT_NAME for an export that may not be opened.
    #[must_use]
    pub fn refused(&self, lookup: &Lookup, kind: ErrorKind, why: &str) -> Action {
        match lookup.option {
            option::EXPORT_NAME => Action::Close(Vec::new()),
            option => refuse(option, lookup_error(kind), why),
        }
    }

    /// Answers LIST_META_CONTEXT or SET_META_CONTEXT; `found` is the result of the lookup.
    pub fn meta(&mut self, lookup: &MetaLookup, found: Result<(), (ErrorKind, String)>) -> Vec<u8> {
        let option =
            if lookup.is_set { option::SET_META_CONTEXT } else { option::LIST_META_CONTEXT };
        if let Err((kind, why)) = found {
            return error(option, lookup_error(kind), &why);
        }
        let mut out = Vec::new();
        if lookup.is_match {
            // Spec, "NBD_REP_META_CONTEXT": the id has no meaning in the answer to LIST.
            let id = if lookup.is_set { wire::BASE_ALLOCATION_ID } else { 0 };
            let parts = [&id.to_be_bytes()[..], wire::BASE_ALLOCATION];
            put_option_reply(&mut out, option, option_reply::META_CONTEXT, &parts);
            if lookup.is_set {
                self.selected = Some(lookup.name.clone());
            }
        }
        put_option_reply(&mut out, option, option_reply::ACK, &[]);
        out
    }

    /// Returns the transmission flags that the server advertises for an export.
    #[must_use]
    pub fn transmission_flags(&self, limits: &Limits) -> u16 {
        use transmission_flag::*;
        let mut flags = HAS_FLAGS | SEND_CACHE;
        if limits.has_volatile_cache {
            flags |= SEND_FLUSH;
        }
        if limits.is_read_only {
            flags |= READ_ONLY;
        } else {
            flags |= SEND_TRIM | SEND_WRITE_ZEROES | SEND_FAST_ZERO;
            if limits.has_volatile_cache {
                flags |= SEND_FUA;
            }
            if self.can_resize {
                flags |= SEND_RESIZE;
            }
        }
        if limits.is_multi_conn {
            flags |= CAN_MULTI_CONN;
        }
        match self.dialect {
            Dialect::Simple => {}
            Dialect::Structured => flags |= SEND_DF,
            Dialect::Extended => flags |= SEND_DF | BLOCK_STATUS_PAYLOAD,
        }
        flags
    }
}

fn on_info(option: u32, data: &[u8]) -> Action {
    let Ok(request) = InfoRequest::decode(data) else {
        return refuse(option, option_reply::ERR_INVALID, "malformed request for information");
    };
    let name = match name_of(request.name) {
        Ok(name) => name,
        Err(reply) => return refuse(option, reply, "the name is too long or not UTF-8"),
    };
    let lookup = Lookup {
        name,
        option,
        wants_name: request.wants_name,
        wants_description: request.wants_description,
        wants_block_size: request.wants_block_size,
    };
    if option == option::GO { Action::Open(lookup) } else { Action::Describe(lookup) }
}

/// Checks a name: UTF-8 of at most 4096 bytes (spec, "Values").
fn name_of(bytes: &[u8]) -> Result<String, u32> {
    if bytes.len() > STRING_BYTES_MAX {
        return Err(option_reply::ERR_TOO_BIG);
    }
    let name = std::str::from_utf8(bytes).map_err(|_| option_reply::ERR_INVALID)?;
    if name.contains('\0') { Err(option_reply::ERR_INVALID) } else { Ok(name.to_owned()) }
}

fn lookup_error(kind: ErrorKind) -> u32 {
    match kind {
        ErrorKind::Denied | ErrorKind::Busy => option_reply::ERR_POLICY,
        ErrorKind::Fenced => option_reply::ERR_FENCED,
        ErrorKind::Unavailable => option_reply::ERR_SHUTDOWN,
        ErrorKind::Invalid
        | ErrorKind::Unsupported
        | ErrorKind::Full
        | ErrorKind::NotFound
        | ErrorKind::Unreadable
        | ErrorKind::Corrupt
        | ErrorKind::Io => option_reply::ERR_UNKNOWN,
    }
}

fn ack(option: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(20);
    put_option_reply(&mut out, option, option_reply::ACK, &[]);
    out
}

fn error(option: u32, reply: u32, why: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(20 + why.len());
    put_option_reply(&mut out, option, reply, &[why.as_bytes()]);
    out
}

fn refuse(option: u32, reply: u32, why: &str) -> Action {
    Action::Reply(error(option, reply, why))
}

fn takes_no_data(option: u32) -> Action {
    refuse(option, option_reply::ERR_INVALID, "this option takes no data")
}

#[cfg(test)]
mod tests;
