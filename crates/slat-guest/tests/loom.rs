//! Every interleaving of a fault with other operations on the guest's memory, on tables of two
//! entries.
//!
//! `RUSTFLAGS="--cfg loom -C debug-assertions" cargo test -p slat-guest --release --features
//! loom --test loom`
//!
//! TLBs, and hardware that sets bits, are in the engine's models; here a vCPU reads its leaf, uses
//! it, or faults. Models that bound the number of preemptions say so.
#![cfg(loom)]

#[path = "loom/async_fault.rs"]
mod async_fault;
#[path = "loom/buffers.rs"]
mod buffers;
#[path = "loom/caches.rs"]
mod caches;
#[path = "loom/convert.rs"]
mod convert;
#[path = "loom/devices.rs"]
mod devices;
#[path = "loom/fixture.rs"]
mod fixture;
#[path = "loom/frames.rs"]
mod frames;
#[path = "loom/hold.rs"]
mod hold;
#[path = "loom/invalidation.rs"]
mod invalidation;
#[path = "loom/log.rs"]
mod log;
#[path = "loom/moved.rs"]
mod moved;
#[path = "loom/pieces.rs"]
mod pieces;
#[path = "loom/pinned.rs"]
mod pinned;
#[path = "loom/recovery.rs"]
mod recovery;
#[path = "loom/replacing.rs"]
mod replacing;
