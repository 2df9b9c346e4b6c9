//! Guests with more memory than the host, as threads over real memory. Every page has a stamp,
//! which the guest checks at each read.
//!
//! `ROUNDS=N` for more.
#![cfg(all(target_os = "linux", not(loom)))]

mod accounts;
mod alone;
#[allow(dead_code, unused_imports, reason = "a part of it is for the other machine")]
#[path = "../machine/cases.rs"]
mod cases;
mod elsewhere;
mod fixture;
#[cfg(feature = "std")]
mod forgotten;
mod hooked;
mod neighbours;
#[path = "../../../../tests/seed.rs"]
mod seed;
mod shares;
mod storm;
mod unwinds;
mod waits;
