//! Authenticated encryption and key derivation: the only module that uses a cipher.
//!
//! Invariants:
//! - A [`SealKey`] is derived for one batch, segment or metadata commit from a fresh random salt. A
//!   nonce counts only within that key, and so never repeats.
//! - Key bytes are wiped when their owner is dropped and never printed.
//! - ChaCha20-Poly1305 (RFC 8439), AES-256-GCM (NIST SP 800-38D), HKDF-SHA-256 (RFC 5869).

use crate::error::{Error, ErrorKind, Result};
use aws_lc_rs::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::hkdf;
use std::fmt;
use zeroize::Zeroizing;

/// Length of every key in bytes. Source: RFC 8439 section 2.8 and AES-256.
pub const KEY_BYTES: usize = 32;
/// Bytes that sealing adds. Source: RFC 8439 section 2.8; GCM has the same length.
pub const TAG_BYTES: usize = 16;
/// Bytes of a salt of [`PoolKey::derive`].
pub const SALT_BYTES: usize = 16;

/// AEAD algorithm, as stored in headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Algorithm {
    /// RFC 8439. Fast without special instructions.
    #[default]
    ChaCha20Poly1305 = 1,
    /// NIST SP 800-38D. Faster where the CPU has AES instructions.
    Aes256Gcm = 2,
}

impl Algorithm {
    /// Returns the faster algorithm on this machine: AES if the processor has instructions for AES
    /// and for its authentication. Without them AES is several times slower than ChaCha20-Poly1305.
    #[must_use]
    pub fn of_this_cpu() -> Self {
        #[cfg(target_arch = "x86_64")]
        let has_aes = std::arch::is_x86_feature_detected!("aes")
            && std::arch::is_x86_feature_detected!("pclmulqdq");
        #[cfg(target_arch = "aarch64")]
        let has_aes = std::arch::is_aarch64_feature_detected!("aes")
            && std::arch::is_aarch64_feature_detected!("pmull");
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let has_aes = false;
        if has_aes { Algorithm::Aes256Gcm } else { Algorithm::ChaCha20Poly1305 }
    }

    /// Returns the algorithm named in a header, if this version knows it.
    #[must_use]
    pub fn from_u8(value: u8) -> Option<Self> {
        match value {
            1 => Some(Algorithm::ChaCha20Poly1305),
            2 => Some(Algorithm::Aes256Gcm),
            _ => None,
        }
    }

    fn implementation(self) -> &'static aead::Algorithm {
        match self {
            Algorithm::ChaCha20Poly1305 => &aead::CHACHA20_POLY1305,
            Algorithm::Aes256Gcm => &aead::AES_256_GCM,
        }
    }
}

/// A root key of a pool, from which every other key is derived.
#[derive(Clone)]
pub struct PoolKey(Zeroizing<[u8; KEY_BYTES]>);

impl PoolKey {
    /// Takes ownership of the bytes.
    #[must_use]
    pub fn new(bytes: [u8; KEY_BYTES]) -> Self {
        PoolKey(Zeroizing::new(bytes))
    }

    /// Returns the bytes, only for wrapping by another key.
    #[must_use]
    pub fn expose(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }

    /// Derives a key by HKDF-SHA-256. `salt` is random and fresh for each derived key; `purpose`
    /// separates the users of this function ("log batch", "segment", "metadata", …).
    #[must_use]
    pub fn derive(&self, algorithm: Algorithm, salt: &[u8], purpose: &str) -> SealKey {
        let prk = hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(&self.0[..]);
        let info = [purpose.as_bytes()];
        let okm =
            prk.expand(&info, algorithm.implementation()).expect("32 bytes is a legal length");
        SealKey { key: LessSafeKey::new(UnboundKey::from(okm)), algorithm }
    }

    /// Derives a number in the same way: the seed of a hash that cannot be computed without this
    /// key.
    #[must_use]
    pub fn derive_seed(&self, salt: &[u8], purpose: &str) -> u64 {
        let bytes = self.derive_secret(salt, purpose);
        u64::from_le_bytes(*bytes.first_chunk().expect("32 bytes"))
    }

    /// Derives 32 secret bytes in the same way, for a key of another kind.
    #[must_use]
    pub fn derive_secret(&self, salt: &[u8], purpose: &str) -> Zeroizing<[u8; KEY_BYTES]> {
        let prk = hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(&self.0[..]);
        let info = [purpose.as_bytes()];
        let okm = prk.expand(&info, hkdf::HKDF_SHA256).expect("32 bytes is a legal length");
        let mut bytes = Zeroizing::new([0; KEY_BYTES]);
        okm.fill(&mut bytes[..]).expect("as many bytes as were asked for");
        bytes
    }
}

impl fmt::Debug for PoolKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PoolKey(…)")
    }
}

/// A derived key. The caller must never use a nonce twice.
pub struct SealKey {
    key: LessSafeKey,
    algorithm: Algorithm,
}

impl fmt::Debug for SealKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SealKey({:?})", self.algorithm)
    }
}

impl SealKey {
    /// Uses a key directly, to wrap pool keys: `nonce` must then be 96 random bits.
    #[must_use]
    pub fn from_bytes(algorithm: Algorithm, bytes: &[u8; KEY_BYTES]) -> Self {
        let key = UnboundKey::new(algorithm.implementation(), bytes).expect("32 bytes fit both");
        SealKey { key: LessSafeKey::new(key), algorithm }
    }

    /// Encrypts `bytes` in place and returns the tag, which the caller stores.
    #[must_use]
    pub fn seal(&self, nonce: u64, associated: &[u8], bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        self.seal_with(nonce_of(nonce), associated, bytes)
    }

    /// Like [`SealKey::seal`], but with a full 96-bit nonce.
    #[must_use]
    pub fn seal_with(
        &self,
        nonce: [u8; 12],
        associated: &[u8],
        bytes: &mut [u8],
    ) -> [u8; TAG_BYTES] {
        let nonce = Nonce::assume_unique_for_key(nonce);
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(associated), bytes)
            .expect("a frame is far below the cipher's limit of 64 GiB");
        tag.as_ref().try_into().expect("both algorithms have 16-byte tags")
    }

    /// Decrypts `sealed` (ciphertext followed by its tag) in place and returns the plaintext.
    ///
    /// # Errors
    /// `Corrupt` if the bytes, the associated data, the nonce or the key differ. The contents of
    /// `sealed` are then undefined.
    pub fn open<'a>(
        &self,
        nonce: u64,
        associated: &[u8],
        sealed: &'a mut [u8],
    ) -> Result<&'a mut [u8]> {
        self.open_with(nonce_of(nonce), associated, sealed)
    }

    /// Like [`SealKey::open`], but with a full 96-bit nonce.
    ///
    /// # Errors
    /// Those of [`SealKey::open`].
    pub fn open_with<'a>(
        &self,
        nonce: [u8; 12],
        associated: &[u8],
        sealed: &'a mut [u8],
    ) -> Result<&'a mut [u8]> {
        let nonce = Nonce::assume_unique_for_key(nonce);
        self.key
            .open_in_place(nonce, Aad::from(associated), sealed)
            .map_err(|_| Error::new(ErrorKind::Corrupt, "open sealed bytes: authentication failed"))
    }
}

fn nonce_of(counter: u64) -> [u8; 12] {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&counter.to_le_bytes());
    nonce
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_data_opens_only_under_identical_inputs() {
        let pool_key = PoolKey::new([7; KEY_BYTES]);
        for algorithm in [Algorithm::ChaCha20Poly1305, Algorithm::Aes256Gcm] {
            let key = pool_key.derive(algorithm, &[1; SALT_BYTES], "segment");
            let mut sealed = b"hello".to_vec();
            let tag = key.seal(3, b"frame 3", &mut sealed);
            sealed.extend_from_slice(&tag);
            assert_eq!(key.open(3, b"frame 3", &mut sealed.clone()).unwrap(), b"hello");
            assert!(key.open(4, b"frame 3", &mut sealed.clone()).is_err());
            assert!(key.open(3, b"frame 4", &mut sealed.clone()).is_err());
            let other = pool_key.derive(algorithm, &[2; SALT_BYTES], "segment");
            assert!(other.open(3, b"frame 3", &mut sealed.clone()).is_err());
            let other = pool_key.derive(algorithm, &[1; SALT_BYTES], "log batch");
            assert!(other.open(3, b"frame 3", &mut sealed.clone()).is_err());
            for at in 0..sealed.len() {
                let mut flipped = sealed.clone();
                flipped[at] ^= 1;
                let error = key.open(3, b"frame 3", &mut flipped).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Corrupt);
            }
        }
    }

    #[test]
    fn keys_are_never_printed() {
        let key = PoolKey::new([0x5a; KEY_BYTES]);
        assert_eq!(format!("{key:?}"), "PoolKey(…)");
    }
}
