//! The ublk driver's interface: numbers and byte layouts, with plain encoders and decoders.
//!
//! Invariants:
//! - No I/O and no pointers: bytes in, bytes out, so that every layout is tested without a kernel.
//! - The source of every number is the kernel's `include/uapi/linux/ublk_cmd.h`. The names are
//!   those of the header without their prefix. Integers are in the machine's byte order.

/// Encodes a command like the kernel's `_IOR` and `_IOWR` (`asm-generic/ioctl.h`).
const fn ioctl(direction: u32, number: u32, argument_bytes: u32) -> u32 {
    (direction << 30) | (argument_bytes << 16) | ((b'u' as u32) << 8) | number
}
const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// Bytes of `struct ublksrv_ctrl_cmd`.
const CONTROL_BYTES: usize = 32;
/// Bytes of `struct ublksrv_ctrl_dev_info`.
pub(crate) const INFO_BYTES: usize = 64;
/// Bytes of `struct ublksrv_io_cmd`.
pub(crate) const IO_COMMAND_BYTES: usize = 16;
/// Bytes of `struct ublksrv_io_desc`.
pub(crate) const IO_DESC_BYTES: usize = 24;
/// Bytes of the parts of `struct ublk_params` that this program sets: length, types, basic,
/// discard. The kernel accepts parameters shorter than its own.
pub(crate) const PARAMS_BYTES: usize = 8 + 32 + 20;

/// Commands to `/dev/ublk-control`.
pub(crate) mod command {
    use super::{CONTROL_BYTES, READ, READ_WRITE, ioctl};

    const fn read(number: u32) -> u32 {
        ioctl(READ, number, CONTROL_BYTES as u32)
    }
    const fn change(number: u32) -> u32 {
        ioctl(READ_WRITE, number, CONTROL_BYTES as u32)
    }
    pub(crate) const ADD_DEV: u32 = change(0x04);
    pub(crate) const START_DEV: u32 = change(0x06);
    pub(crate) const STOP_DEV: u32 = change(0x07);
    pub(crate) const SET_PARAMS: u32 = change(0x08);
    pub(crate) const START_USER_RECOVERY: u32 = change(0x10);
    pub(crate) const END_USER_RECOVERY: u32 = change(0x11);
    pub(crate) const GET_DEV_INFO2: u32 = read(0x12);
    pub(crate) const GET_FEATURES: u32 = read(0x13);
    pub(crate) const DEL_DEV_ASYNC: u32 = read(0x14);
    pub(crate) const UPDATE_SIZE: u32 = change(0x15);
}

/// Commands to `/dev/ublkcN`.
pub(crate) mod io_command {
    use super::{IO_COMMAND_BYTES, READ_WRITE, ioctl};

    pub(crate) const FETCH_REQ: u32 = ioctl(READ_WRITE, 0x20, IO_COMMAND_BYTES as u32);
    pub(crate) const COMMIT_AND_FETCH_REQ: u32 = ioctl(READ_WRITE, 0x21, IO_COMMAND_BYTES as u32);
}

/// Features of the driver and flags of a device.
pub mod feature {
    /// The device outlives its server.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// Requests in flight at the end of a server are given to the next one.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands are encoded like ioctls.
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// Payloads are copied by reads and writes of `/dev/ublkcN`.
    pub const USER_COPY: u64 = 1 << 7;
    /// The size of a device can change while it is in use.
    pub const UPDATE_SIZE: u64 = 1 << 10;
}

/// States of a device.
pub(crate) mod state {
    pub(crate) const DEAD: u16 = 0;
    pub(crate) const LIVE: u16 = 1;
    pub(crate) const QUIESCED: u16 = 2;
    pub(crate) const FAIL_IO: u16 = 3;
}

/// Attributes of `struct ublk_param_basic`.
pub(crate) mod attribute {
    pub(crate) const READ_ONLY: u32 = 1 << 0;
    pub(crate) const VOLATILE_CACHE: u32 = 1 << 2;
    pub(crate) const FUA: u32 = 1 << 3;
}

/// Types of parameters present in `struct ublk_params`.
const PARAM_TYPE_BASIC: u32 = 1 << 0;
const PARAM_TYPE_DISCARD: u32 = 1 << 1;

/// Operations of a request.
pub(crate) mod operation {
    pub(crate) const READ: u32 = 0;
    pub(crate) const WRITE: u32 = 1;
    pub(crate) const FLUSH: u32 = 2;
    pub(crate) const DISCARD: u32 = 3;
    pub(crate) const WRITE_ZEROES: u32 = 5;
}

/// Flags of a request.
pub(crate) mod request_flag {
    pub(crate) const FUA: u32 = 1 << 13;
    pub(crate) const NO_UNMAP: u32 = 1 << 15;
}

/// Result of a fetch whose tag has a request; after any other result none will come.
pub(crate) const IO_RES_OK: i32 = 0;
/// Result of a fetch: the device was stopped or abandoned. Source: `UBLK_IO_RES_ABORT`, which is
/// `-ENODEV`.
pub(crate) const IO_RES_ABORT: i32 = -19;

/// Largest number of requests in flight on one queue.
pub const QUEUE_DEPTH_MAX: u16 = 4096;
/// Largest payload of a request, in bytes.
pub const IO_BYTES_MAX: u32 = 32 << 20;

/// Offset in `/dev/ublkcN` of the payload of a request (`UBLKSRV_IO_BUF_OFFSET`).
pub(crate) const fn payload_offset(queue: u16, tag: u16) -> u64 {
    0x8000_0000 + ((queue as u64) << 41) + ((tag as u64) << 25)
}

/// Offset in `/dev/ublkcN` at which the request descriptors of a queue are mapped. Source:
/// `ublk_ch_mmap`: per queue, the largest array of descriptors, rounded up to pages.
pub(crate) fn descriptors_offset(queue: u16, page_bytes: u64) -> u64 {
    let most = u64::from(QUEUE_DEPTH_MAX) * IO_DESC_BYTES as u64;
    u64::from(queue) * most.next_multiple_of(page_bytes)
}

/// Encodes `struct ublksrv_ctrl_cmd`, padded to the size of a long ring entry.
pub(crate) fn control(device: u32, buffer: Option<(u64, u16)>, data: u64) -> [u8; 80] {
    let (address, len) = buffer.unwrap_or((0, 0));
    let mut bytes = [0; 80];
    bytes[0..4].copy_from_slice(&device.to_ne_bytes());
    bytes[4..6].copy_from_slice(&u16::MAX.to_ne_bytes()); // no queue
    bytes[6..8].copy_from_slice(&len.to_ne_bytes());
    bytes[8..16].copy_from_slice(&address.to_ne_bytes());
    bytes[16..24].copy_from_slice(&data.to_ne_bytes());
    bytes
}

/// Encodes `struct ublksrv_io_cmd` without a buffer.
pub(crate) fn io(queue: u16, tag: u16, result: i32) -> [u8; IO_COMMAND_BYTES] {
    let mut bytes = [0; IO_COMMAND_BYTES];
    bytes[0..2].copy_from_slice(&queue.to_ne_bytes());
    bytes[2..4].copy_from_slice(&tag.to_ne_bytes());
    bytes[4..8].copy_from_slice(&result.to_ne_bytes());
    bytes
}

/// The driver's record of a device: `struct ublksrv_ctrl_dev_info`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Info {
    pub(crate) queue_count: u16,
    pub(crate) queue_depth: u16,
    pub(crate) state: u16,
    pub(crate) io_bytes_max: u32,
    pub(crate) device: u32,
    /// Process id of the server.
    pub(crate) server_pid: i32,
    pub(crate) flags: u64,
    /// The server's own value, by which it recognizes a device.
    pub(crate) cookie: u64,
}

impl Info {
    pub(crate) fn encode(&self) -> [u8; INFO_BYTES] {
        let mut bytes = [0; INFO_BYTES];
        bytes[0..2].copy_from_slice(&self.queue_count.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.queue_depth.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.state.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.io_bytes_max.to_ne_bytes());
        bytes[12..16].copy_from_slice(&self.device.to_ne_bytes());
        bytes[16..20].copy_from_slice(&self.server_pid.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.flags.to_ne_bytes());
        bytes[32..40].copy_from_slice(&self.cookie.to_ne_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; INFO_BYTES]) -> Info {
        Info {
            queue_count: u16::from_ne_bytes(part(bytes, 0)),
            queue_depth: u16::from_ne_bytes(part(bytes, 2)),
            state: u16::from_ne_bytes(part(bytes, 4)),
            io_bytes_max: u32::from_ne_bytes(part(bytes, 8)),
            device: u32::from_ne_bytes(part(bytes, 12)),
            server_pid: i32::from_ne_bytes(part(bytes, 16)),
            flags: u64::from_ne_bytes(part(bytes, 24)),
            cookie: u64::from_ne_bytes(part(bytes, 32)),
        }
    }
}

/// One request: `struct ublksrv_io_desc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) operation: u32,
    pub(crate) flags: u32,
    pub(crate) sector_count: u32,
    pub(crate) start_sector: u64,
}

impl Descriptor {
    pub(crate) fn decode(bytes: &[u8; IO_DESC_BYTES]) -> Descriptor {
        let op_flags = u32::from_ne_bytes(part(bytes, 0));
        Descriptor {
            operation: op_flags & 0xff,
            flags: op_flags & !0xff,
            sector_count: u32::from_ne_bytes(part(bytes, 4)),
            start_sector: u64::from_ne_bytes(part(bytes, 8)),
        }
    }
}

/// The parameters of a device: `struct ublk_params`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Params {
    pub(crate) attributes: u32,
    pub(crate) logical_shift: u8,
    pub(crate) physical_shift: u8,
    pub(crate) io_sectors_max: u32,
    pub(crate) device_sectors: u64,
    pub(crate) discard_granularity_bytes: u32,
    pub(crate) discard_sectors_max: u32,
    pub(crate) zeroes_sectors_max: u32,
}

impl Params {
    pub(crate) fn encode(&self) -> [u8; PARAMS_BYTES] {
        let mut bytes = [0; PARAMS_BYTES];
        let len = u32::try_from(PARAMS_BYTES).expect("it is small");
        bytes[0..4].copy_from_slice(&len.to_ne_bytes());
        bytes[4..8].copy_from_slice(&(PARAM_TYPE_BASIC | PARAM_TYPE_DISCARD).to_ne_bytes());
        // struct ublk_param_basic
        bytes[8..12].copy_from_slice(&self.attributes.to_ne_bytes());
        bytes[12] = self.logical_shift;
        bytes[13] = self.physical_shift;
        bytes[14] = self.physical_shift; // optimal request size
        bytes[15] = self.physical_shift; // smallest request size without extra cost
        bytes[16..20].copy_from_slice(&self.io_sectors_max.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.device_sectors.to_ne_bytes());
        // struct ublk_param_discard
        bytes[44..48].copy_from_slice(&self.discard_granularity_bytes.to_ne_bytes());
        bytes[48..52].copy_from_slice(&self.discard_sectors_max.to_ne_bytes());
        bytes[52..56].copy_from_slice(&self.zeroes_sectors_max.to_ne_bytes());
        bytes[56..58].copy_from_slice(&1u16.to_ne_bytes()); // segments of a discard
        bytes
    }
}

fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("the slice has that length")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers come from the kernel's macros, not from the functions in this file.
    #[test]
    fn commands_have_the_kernel_s_numbers() {
        assert_eq!(command::ADD_DEV, 0xc020_7504);
        assert_eq!(command::GET_DEV_INFO2, 0x8020_7512);
        assert_eq!(command::GET_FEATURES, 0x8020_7513);
        assert_eq!(command::UPDATE_SIZE, 0xc020_7515);
        assert_eq!(io_command::FETCH_REQ, 0xc010_7520);
        assert_eq!(io_command::COMMIT_AND_FETCH_REQ, 0xc010_7521);
    }

    #[test]
    fn places_in_the_character_device() {
        assert_eq!(payload_offset(0, 0), 0x8000_0000);
        assert_eq!(payload_offset(0, 1), 0x8000_0000 + (32 << 20));
        assert_eq!(payload_offset(3, 4095), 0x8000_0000 + (3 << 41) + (4095 << 25));
        assert_eq!(descriptors_offset(0, 4096), 0);
        assert_eq!(descriptors_offset(2, 4096), 2 * 98_304);
        assert_eq!(descriptors_offset(1, 65_536), 131_072);
    }

    #[test]
    fn layouts() {
        let info = Info {
            queue_count: 2,
            queue_depth: 64,
            state: state::QUIESCED,
            io_bytes_max: 1 << 20,
            device: 7,
            server_pid: -1,
            flags: feature::USER_COPY | feature::USER_RECOVERY,
            cookie: 0x0123_4567_89ab_cdef,
        };
        assert_eq!(Info::decode(&info.encode()), info);
        let mut bytes = [0; IO_DESC_BYTES];
        bytes[0..4].copy_from_slice(&(operation::WRITE | request_flag::FUA).to_ne_bytes());
        bytes[4..8].copy_from_slice(&8u32.to_ne_bytes());
        bytes[8..16].copy_from_slice(&(1u64 << 40).to_ne_bytes());
        let wanted = Descriptor {
            operation: operation::WRITE,
            flags: request_flag::FUA,
            sector_count: 8,
            start_sector: 1 << 40,
        };
        assert_eq!(Descriptor::decode(&bytes), wanted);
        let command = control(5, Some((0x1000, 64)), 9);
        assert_eq!(command[0..8], [5, 0, 0, 0, 0xff, 0xff, 64, 0]);
        assert_eq!(io(1, 2, -5), [1, 0, 2, 0, 0xfb, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
}
