//! The `spindle` program. Everything it does is in the library.

use std::ffi::{c_int, c_long};
use std::process::ExitCode;

/// Many threads allocate what others free; measured: memory stays flat under the soak.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// How long memory that was freed stays with the process. What writes gather in memory is freed with
/// each window and wanted again by the next writes: with a second, the allocator's default, every other
/// write touched fresh memory, which the kernel has to map and to zero. Chosen by hand.
const KEPT_MS: c_long = 10_000;
/// Source: `mimalloc.h`, `mi_option_purge_delay`.
const PURGE_DELAY: c_int = 15;

unsafe extern "C" {
    fn mi_option_set(option: c_int, value: c_long);
}

fn main() -> ExitCode {
    keep_memory();
    server::cli::main()
}

#[expect(unsafe_code, reason = "the allocator's options have no safe interface")]
fn keep_memory() {
    // SAFETY: the allocator is linked in, and this is its function with its types; it takes no
    // pointers and may be called at any time. There is no other thread yet.
    unsafe { mi_option_set(PURGE_DELAY, KEPT_MS) }
}
