//! Layers: generations of a volume's map.
//!
//! Invariants:
//! - The first layer of a volume has the volume's id as its number and no parent.
//! - Layer numbers are never reused, and a layer's parent never changes.
//!
//! A layer with a parent shows the parent's blocks where it has no run of its own, up to the LSN at
//! which it was taken; the lookup asks [`LayerRecord::parent`]. No operation makes such a layer in
//! this version, and a record that names a parent is refused rather than read wrongly.

use super::keys::{corrupt, layer_key};
use block::units::{array_at, u64_at};
use block::{Error, ErrorKind, Result, VolumeId};

const LAYER_VERSION: u8 = 1;
const LAYER_BYTES: usize = 1 + 4 + 8;

/// Number of a layer within its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerId(pub u64);

impl LayerId {
    /// The first layer of a volume.
    #[must_use]
    pub fn of_volume(volume: VolumeId) -> LayerId {
        LayerId(volume.0.into())
    }
}

impl std::fmt::Display for LayerId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// What is stored of a layer; written with the first page or range of the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerRecord {
    /// The volume that the layer was made for.
    pub volume: VolumeId,
    /// Where blocks come from that the layer does not assign.
    pub parent: Option<LayerId>,
}

impl LayerRecord {
    /// The stored form. Byte table: docs/format-map.md#layer-record.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(LAYER_BYTES);
        bytes.push(LAYER_VERSION);
        bytes.extend_from_slice(&self.volume.0.to_le_bytes());
        bytes.extend_from_slice(&self.parent.map_or(0, |parent| parent.0).to_le_bytes());
        bytes
    }

    /// Reads the stored form.
    ///
    /// # Errors
    /// `Corrupt`, or `Unsupported` for a layer that this version cannot read.
    pub fn decode(layer: LayerId, bytes: &[u8]) -> Result<LayerRecord> {
        if bytes.first() != Some(&LAYER_VERSION) || bytes.len() != LAYER_BYTES {
            return Err(corrupt(&layer_key(layer), "not a layer record"));
        }
        let volume = array_at(bytes, 1).map_or(0, u32::from_le_bytes);
        let parent = u64_at(bytes, 5).unwrap_or(0);
        if parent != 0 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("open layer {layer}: it has a parent, which this version cannot read"),
            ));
        }
        Ok(LayerRecord { volume: VolumeId(volume), parent: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_record_reads_back_and_a_parent_is_refused() {
        let record = LayerRecord { volume: VolumeId(9), parent: None };
        let mut bytes = record.encode();
        assert_eq!(LayerRecord::decode(LayerId(9), &bytes).unwrap(), record);
        bytes[5] = 1;
        assert_eq!(
            LayerRecord::decode(LayerId(9), &bytes).unwrap_err().kind(),
            ErrorKind::Unsupported
        );
        assert_eq!(
            LayerRecord::decode(LayerId(9), &bytes[1..]).unwrap_err().kind(),
            ErrorKind::Corrupt
        );
    }
}
