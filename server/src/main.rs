//! The `spindle` program. Everything it does is in the library.

use std::process::ExitCode;

/// Many threads allocate what others free; measured: memory stays flat under the soak.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    server::cli::main()
}
