//! Guests with more memory than the host, on the adversarial machine: TLBs keep every translation
//! that no invalidation has named, stores arrive late, and another thread may run at every step of
//! a reclaim.
//!
//! `HISTORIES=600` for ten times as many, `HISTORIES=1 SLAT_SEED=N` for one.
#![cfg(all(target_os = "linux", not(loom)))]

mod cases;
mod history;
#[path = "../../../../tests/seed.rs"]
mod seed;
mod turns;
mod world;
