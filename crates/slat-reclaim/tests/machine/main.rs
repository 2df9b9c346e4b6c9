//! Guests with more memory than there is, on the adversarial machine: TLBs keep what no
//! invalidation has named, stores arrive late, and at every step of a reclaim some other thread may
//! go on.
//!
//! `HISTORIES=600` for ten times as many, `HISTORIES=1 SLAT_SEED=N` for one.
#![cfg(all(target_os = "linux", not(loom)))]

mod cases;
mod history;
mod turns;
mod world;
