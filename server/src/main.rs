//! The `spindle` program. Everything it does is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    server::cli::main()
}
