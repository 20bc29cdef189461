//! Prints the events of a run with their times, if `NODE_PRINT` is set: the faults, the daemons' decisions,
//! and the log lines of the product.

use crate::executor::World;
use std::fmt::{Arguments, Debug, Write};
use std::sync::LazyLock;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

static IS_ON: LazyLock<bool> = LazyLock::new(|| std::env::var_os("NODE_PRINT").is_some());

/// Whether anything is printed.
pub(crate) fn is_on() -> bool {
    *IS_ON
}

/// Prints a line.
pub(crate) fn print(world: &World, line: Arguments<'_>) {
    if is_on() {
        println!("{:9.3} {line}", world.now().as_secs_f64());
    }
}

/// Takes the log lines of the product.
pub(crate) struct LogLines(pub(crate) World);

struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let written = match field.name() {
            "message" => write!(self.0, "{value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
        written.expect("a string takes all");
    }
}

impl Subscriber for LogLines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        is_on() && *metadata.level() <= tracing::Level::INFO
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields(String::new());
        event.record(&mut fields);
        let process = self.0.current();
        print(&self.0, format_args!("process {process}: {}", fields.0));
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}
