//! Guests with more memory than there is, as threads over real memory: every page has a stamp, which the
//! guest checks at each read.
//!
//! `ROUNDS=N` for more.
#![cfg(target_os = "linux")]

mod alone;
mod bed;
mod storm;
