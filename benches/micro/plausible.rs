//! Data and addresses for the benches: repeatable, and no easier than real ones.

/// A small generator with a fixed seed, so that two runs measure the same.
pub struct Rng(pub u64);

impl Rng {
    /// Returns the next number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

/// Makes rows of text with counters and some noise, like a heap page: zstd level 1 reduces them to
/// a third.
pub fn plausible(bytes: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut out = Vec::with_capacity(bytes + 64);
    while out.len() < bytes {
        let row =
            format!("{:08}|{:06}|customer-{:05}|", out.len(), rng.below(1 << 20), rng.below(9973));
        out.extend_from_slice(row.as_bytes());
        out.extend_from_slice(&rng.below(u64::MAX).to_le_bytes());
        out.extend_from_slice(&[0; 20]);
    }
    out.truncate(bytes);
    out
}
