//! Errors that decide the exit code.

use std::process::ExitCode;

/// Why a command ended early, where it matters to the caller of the process.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// What was asked for cannot be right on any machine; the text names the value and what would
    /// be right.
    #[error("{0}")]
    BadInput(String),
    /// An emulated machine ended, or was ended, without a report; the text has what it last said.
    #[error("{0}")]
    NoReport(String),
    /// The host lacks what a scenario cannot do without; the text says what, and what would change
    /// it.
    #[error("{0}")]
    CannotRun(String),
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
}

/// A [`Failure::BadInput`] as the error that scenarios return.
pub fn bad_input(message: impl Into<String>) -> anyhow::Error {
    Failure::BadInput(message.into()).into()
}

/// A [`Failure::NoReport`] as the error that `slat emulate` returns.
pub fn no_report(message: impl Into<String>) -> anyhow::Error {
    Failure::NoReport(message.into()).into()
}

/// The exit code that `--help` documents for this error.
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    match error.downcast_ref::<Failure>() {
        Some(Failure::BadInput(_)) => ExitCode::from(2),
        Some(Failure::NoReport(_)) => ExitCode::from(3),
        Some(Failure::CannotRun(_)) => ExitCode::from(4),
        Some(Failure::Interrupted) => ExitCode::from(130),
        None => ExitCode::from(1),
    }
}

/// Whether the error only says that Ctrl-C was pressed.
pub fn is_interruption(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Failure::Interrupted))
}

/// Whether the error says that what was asked for cannot be right.
pub fn is_bad_input(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Failure::BadInput(_)))
}
