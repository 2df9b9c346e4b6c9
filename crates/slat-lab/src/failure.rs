//! Errors that decide the exit code.

use std::process::ExitCode;

/// Why a command ended early, if this decides the exit code.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The input cannot be right on any machine. The text names the value, and what would be right.
    #[error("{0}")]
    BadInput(String),
    /// An emulated machine ended, or was ended, without a report. The text has the end of its
    /// output.
    #[error("{0}")]
    NoReport(String),
    /// The host lacks something that a scenario needs. The text says what, and what would change
    /// this.
    #[error("{0}")]
    CannotRun(String),
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
}

/// The exit code where this host cannot do what was asked for.
pub const CANNOT: u8 = 4;

/// Creates a [`Failure::CannotRun`] as the error that scenarios return.
pub fn cannot(message: impl Into<String>) -> anyhow::Error {
    Failure::CannotRun(message.into()).into()
}

/// Creates a [`Failure::BadInput`] as the error that scenarios return.
pub fn bad_input(message: impl Into<String>) -> anyhow::Error {
    Failure::BadInput(message.into()).into()
}

/// Creates a [`Failure::NoReport`] as the error that `slat emulate` returns.
pub fn no_report(message: impl Into<String>) -> anyhow::Error {
    Failure::NoReport(message.into()).into()
}

/// Returns the exit code that `--help` documents for this error.
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    match error.downcast_ref::<Failure>() {
        Some(Failure::BadInput(_)) => ExitCode::from(2),
        Some(Failure::NoReport(_)) => ExitCode::from(3),
        Some(Failure::CannotRun(_)) => ExitCode::from(CANNOT),
        Some(Failure::Interrupted) => ExitCode::from(130),
        None => ExitCode::from(1),
    }
}

/// Returns whether the error only says that the user pressed Ctrl-C.
pub fn is_interruption(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Failure::Interrupted))
}

/// Returns whether the error says that the input cannot be right.
pub fn is_bad_input(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Failure::BadInput(_)))
}
