//! Guests with more memory than there is, as threads over real memory: every page has a stamp, which the
//! guest checks at each read.
//!
//! `ROUNDS=N` for more.
#![cfg(all(target_os = "linux", not(loom)))]

mod alone;
mod bed;
mod elsewhere;
mod storm;
