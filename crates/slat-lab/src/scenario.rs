//! What can be measured, one scenario a file.
//!
//! A scenario is a function `run(&Args, &mut Session) -> anyhow::Result<Vec<Measurement>>`:
//!
//! * Input that cannot be right is [`Failure::BadInput`](crate::failure::Failure::BadInput), before
//!   anything is measured. Any other error is a measurement that failed.
//! * What this machine cannot do is [`Session::skip`](crate::session::Session::skip), not an error,
//!   as long as something of what was asked for remains.
//! * It asks [`Session::check`](crate::session::Session::check) between samples. Stopped, it returns
//!   `Ok` with what is complete enough to be read; the caller knows from
//!   [`Session::interrupted`](crate::session::Session::interrupted) that it is a part.

pub(crate) mod bed;
pub(crate) mod contest;
pub(crate) mod crew;
pub mod engine;
pub mod guest;
pub mod kvm;
pub(crate) mod limit;
pub mod peers;
pub mod replay;
pub(crate) mod scatter;
pub mod split;
pub(crate) mod tables;
pub(crate) mod touch;
