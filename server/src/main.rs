//! The `spindle` program. All of its work is done in the library.

use std::ffi::{c_int, c_long};
use std::process::ExitCode;

/// Many threads free memory that other threads have allocated. Measured with this allocator: memory
/// stays flat under the soak.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Milliseconds for which the process keeps freed memory. The memory that gathers writes is freed
/// with each window and needed again by the next writes. With one second, the allocator's default,
/// every other write touched fresh memory, which the kernel had to map and to zero. Chosen by hand.
const KEPT_MS: c_long = 10_000;
/// Source: `mimalloc.h`, `mi_option_purge_delay`.
const PURGE_DELAY: c_int = 15;

unsafe extern "C" {
    fn mi_option_set(option: c_int, value: c_long);
}

fn main() -> ExitCode {
    keep_memory();
    server::process::main()
}

#[expect(unsafe_code, reason = "the allocator's options have no safe interface")]
fn keep_memory() {
    // SAFETY: the allocator is linked in, and this is its function with its types. The function
    // takes no pointers and may be called at any time. No other thread runs yet.
    unsafe { mi_option_set(PURGE_DELAY, KEPT_MS) }
}
