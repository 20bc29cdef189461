//! Schemes: into how many data fragments a segment is cut, and how many parity fragments it gets.

use block::{Error, ErrorKind, Result};
use std::fmt;
use std::str::FromStr;

/// Numbers of data and parity fragments of a segment: k and m of the literature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Scheme {
    data: u8,
    parity: u8,
}

/// Most fragments that a segment has: those of 21+3.
pub const FRAGMENTS_MAX: usize = 24;

impl Scheme {
    /// All schemes. A list and not a range, so that each one is tested with every pattern of losses.
    pub const ALL: [Scheme; 7] = [
        Scheme { data: 1, parity: 1 },
        Scheme { data: 2, parity: 1 },
        Scheme { data: 4, parity: 2 },
        Scheme { data: 8, parity: 2 },
        Scheme { data: 14, parity: 2 },
        Scheme { data: 16, parity: 2 },
        Scheme { data: 21, parity: 3 },
    ];

    /// Returns the scheme with these numbers; `None` if it is none of [`Scheme::ALL`] nor one of copies
    /// ([`Scheme::whole`]).
    #[must_use]
    pub fn new(data: u8, parity: u8) -> Option<Scheme> {
        let copies = (1..=3).map(Scheme::whole);
        let mut all = Scheme::ALL.into_iter().chain(copies);
        all.find(|scheme| (scheme.data, scheme.parity) == (data, parity))
    }

    /// The scheme of a segment that is too small to be cut: it is stored whole, once more than `losses` of
    /// it are survived. Panics for other numbers than 1, 2 and 3.
    #[must_use]
    pub fn whole(losses: usize) -> Scheme {
        assert!((1..=3).contains(&losses), "a scheme survives 1 to 3 losses");
        Scheme { data: 1, parity: losses as u8 }
    }

    /// Number of data fragments, 1..=21.
    #[must_use]
    pub fn data(self) -> usize {
        usize::from(self.data)
    }

    /// Number of parity fragments, which is that of the losses that a segment survives, 1..=3.
    #[must_use]
    pub fn parity(self) -> usize {
        usize::from(self.parity)
    }

    /// Number of all fragments: data fragments have the indexes from 0 on, parity fragments those behind.
    #[must_use]
    pub fn fragments(self) -> usize {
        self.data() + self.parity()
    }

    /// The fewest fragments with which a segment is written while stores fail: those that it needs, and one more so that it
    /// survives a further loss, unless the scheme has a single parity fragment.
    #[must_use]
    pub fn written_min(self) -> usize {
        self.data() + (self.parity() - 1).min(1)
    }

    /// The codec of the scheme.
    #[must_use]
    pub fn codec(self) -> CodecId {
        match self.data {
            1 => CodecId::Whole,
            _ => CodecId::ReedSolomon16,
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.data, self.parity)
    }
}

impl FromStr for Scheme {
    type Err = Error;

    /// Parses `k+m`.
    ///
    /// # Errors
    /// `Invalid`, with the list of all.
    fn from_str(text: &str) -> Result<Scheme> {
        let parsed = Scheme::ALL.into_iter().find(|scheme| scheme.to_string() == text);
        parsed.ok_or_else(|| {
            let all = Scheme::ALL.map(|scheme| scheme.to_string()).join(", ");
            Error::new(ErrorKind::Invalid, format!("read scheme {text}: it is none of {all}"))
        })
    }
}

/// How the fragments of a segment are made, as records and fragments store it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CodecId {
    /// Each fragment is the whole image.
    Whole = 1,
    /// A Reed-Solomon code over GF(2^16), as crate reed-solomon-simd 3 defines it, which takes
    /// field, basis and order of the symbols from Leopard-RS (<https://github.com/catid/leopard>). Golden bytes:
    /// testdata/parity.hex.
    ReedSolomon16 = 2,
}

impl CodecId {
    /// Returns the codec with this number; `None` for one of a later version.
    #[must_use]
    pub fn from_number(number: u8) -> Option<CodecId> {
        match number {
            1 => Some(CodecId::Whole),
            2 => Some(CodecId::ReedSolomon16),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemes_are_read_as_they_are_written() {
        for scheme in Scheme::ALL {
            assert_eq!(scheme.to_string().parse::<Scheme>().unwrap(), scheme);
            assert!(scheme.fragments() <= FRAGMENTS_MAX);
            assert_eq!(CodecId::from_number(scheme.codec() as u8), Some(scheme.codec()));
        }
        for wrong in ["", "4", "4+", "+2", "4+3", "04+2x", "300+2", "4-2"] {
            let error = wrong.parse::<Scheme>().unwrap_err();
            assert!(error.chain().contains("1+1, 2+1, 4+2"), "{}", error.chain());
        }
        assert_eq!([0, 3].map(CodecId::from_number), [None; 2]);
        for losses in 1..=3 {
            let whole = Scheme::whole(losses);
            assert_eq!(Scheme::new(1, losses as u8), Some(whole));
            assert_eq!((whole.codec(), whole.fragments()), (CodecId::Whole, losses + 1));
        }
        assert_eq!(Scheme::new(1, 4), None);
        assert_eq!(Scheme::new(4, 1), None);
    }
}
