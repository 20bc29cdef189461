//! CLAIM, an option of this server beyond the specification: it identifies a client across
//! connections.

use super::{Fields, STRING_BYTES_MAX, WireError};

/// The purpose of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// The first connection of an attachment. Earlier attachments of the same client end.
    Attach,
    /// A further connection of an attachment, or the replacement of a lost one.
    Go,
    /// The end of the attachment.
    Release,
}

/// Longest label in bytes. Chosen by hand: a host name (RFC 1035).
pub const LABEL_BYTES_MAX: usize = 255;
const RESERVATION_VERSION: u16 = 1;
const RESERVATION_IS_SHARED: u16 = 1;

/// Data of CLAIM. It identifies the client across connections, so that a volume can have a single
/// writer, and so that requests of a lost connection end before those of its replacement begin. All
/// integers are big-endian: version (u16, 1), intent (u16: 0, 1, 2 in the order of [`Intent`]),
/// flags (u16, 1: shared), connection (u16), client, boot, attachment (16 bytes each), label and
/// export name (each a u32 length and UTF-8). The answer is ACK or an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservationRequest {
    /// The purpose of the reservation.
    pub intent: Intent,
    /// Other clients may also write to the volume.
    pub is_shared: bool,
    /// The index of the connection in the attachment: a new connection ends an older one with the
    /// same index.
    pub connection: u16,
    /// The id of the client's machine.
    pub client: [u8; 16],
    /// The id of that machine's current boot; it changes with each restart.
    pub boot: [u8; 16],
    /// The id of this attachment of the volume to that machine.
    pub attachment: [u8; 16],
    /// The machine's name for people, at most [`LABEL_BYTES_MAX`] bytes.
    pub label: String,
    /// Name of the export.
    pub export: String,
}

impl ReservationRequest {
    /// Decodes the data of a CLAIM option.
    ///
    /// # Errors
    /// The data is malformed or of a later version.
    pub fn decode(data: &[u8]) -> Result<Self, WireError> {
        let mut fields = Fields::new(data);
        if fields.u16()? != RESERVATION_VERSION {
            return Err(WireError::Length);
        }
        let intent = match fields.u16()? {
            0 => Intent::Attach,
            1 => Intent::Go,
            2 => Intent::Release,
            _ => return Err(WireError::Length),
        };
        let (flags, connection) = (fields.u16()?, fields.u16()?);
        let (client, boot, attachment) = (fields.array()?, fields.array()?, fields.array()?);
        let mut text = |bytes_max: usize| {
            let text = std::str::from_utf8(fields.string()?).map_err(|_| WireError::Length)?;
            (text.len() <= bytes_max).then(|| text.to_owned()).ok_or(WireError::Length)
        };
        let (label, export) = (text(LABEL_BYTES_MAX)?, text(STRING_BYTES_MAX)?);
        fields.end()?;
        let is_shared = flags & RESERVATION_IS_SHARED != 0;
        Ok(ReservationRequest {
            intent,
            is_shared,
            connection,
            client,
            boot,
            attachment,
            label,
            export,
        })
    }

    /// Encodes the data of the option.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let intent: u16 = match self.intent {
            Intent::Attach => 0,
            Intent::Go => 1,
            Intent::Release => 2,
        };
        let flags = if self.is_shared { RESERVATION_IS_SHARED } else { 0 };
        let mut out = Vec::new();
        for field in [RESERVATION_VERSION, intent, flags, self.connection] {
            out.extend_from_slice(&field.to_be_bytes());
        }
        out.extend_from_slice(&self.client);
        out.extend_from_slice(&self.boot);
        out.extend_from_slice(&self.attachment);
        for text in [&self.label, &self.export] {
            let length = u32::try_from(text.len()).expect("names are short");
            out.extend_from_slice(&length.to_be_bytes());
            out.extend_from_slice(text.as_bytes());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::indexing_slicing, clippy::unwrap_used)] // a test that panics has found something

    use super::*;
    use proptest::prelude::*;

    fn request() -> ReservationRequest {
        ReservationRequest {
            intent: Intent::Go,
            is_shared: true,
            connection: 3,
            client: [1; 16],
            boot: [3; 16],
            attachment: [2; 16],
            label: "db1".to_owned(),
            export: "pg".to_owned(),
        }
    }

    #[test]
    fn the_bytes_of_a_reservation() {
        let parts: [&[u8]; 7] = [
            &[0, 1, 0, 1, 0, 1, 0, 3],
            &[1; 16],
            &[3; 16],
            &[2; 16],
            &[0, 0, 0, 3, b'd', b'b', b'1'],
            &[0, 0, 0, 2],
            b"pg",
        ];
        let bytes = parts.concat();
        assert_eq!(request().encode(), bytes);
        assert_eq!(ReservationRequest::decode(&bytes).unwrap(), request());
    }

    #[test]
    fn malformed_reservations_are_refused() {
        let good = request().encode();
        for length in 0..good.len() {
            assert!(ReservationRequest::decode(&good[..length]).is_err(), "{length} bytes");
        }
        let more = [&good[..], &[0]].concat();
        assert!(ReservationRequest::decode(&more).is_err(), "a byte too many");
        for (index, byte) in [(1, 2), (3, 3), (60, 0xff)] {
            let mut bad = good.clone();
            bad[index] = byte;
            assert!(ReservationRequest::decode(&bad).is_err(), "byte {index} is {byte}");
        }
        let long = ReservationRequest { label: "x".repeat(256), ..request() };
        assert!(ReservationRequest::decode(&long.encode()).is_err(), "a label that is too long");
    }

    proptest! {
        #[test]
        fn bytes_that_make_no_sense_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = ReservationRequest::decode(&bytes);
        }
    }
}
