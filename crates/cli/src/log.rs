//! Notes on standard error.

use std::fmt;

use tracing::{Event, Level, Subscriber, level_filters::LevelFilter};
use tracing_subscriber::{
    filter::Targets,
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    layer::SubscriberExt,
    registry::LookupSpan,
    util::SubscriberInitExt,
};

use crate::args::Global;

/// Sends this project's events to standard error, one plain line each.
pub fn init(global: &Global) {
    let level = match (global.quiet, global.verbose) {
        (true, _) => LevelFilter::ERROR,
        (false, 0) => LevelFilter::INFO,
        (false, 1) => LevelFilter::DEBUG,
        (false, _) => LevelFilter::TRACE,
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .log_internal_errors(false)
        .with_ansi(false)
        .event_format(Plain);
    // Prefix of every target of the workspace; dependencies keep quiet.
    let ours = Targets::new().with_target("resolvent", level);
    // A host program that embeds `run` may have its own subscriber: then that one is used.
    let _ = tracing_subscriber::registry().with(lines).with(ours).try_init();
}

/// `warning: ...`, or the bare message of a note.
struct Plain;

impl<S, N> FormatEvent<S, N> for Plain
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        to.write_str(match *event.metadata().level() {
            Level::ERROR | Level::WARN => "warning: ",
            Level::INFO => "",
            Level::DEBUG | Level::TRACE => "debug: ",
        })?;
        ctx.field_format().format_fields(to.by_ref(), event)?;
        writeln!(to)
    }
}
