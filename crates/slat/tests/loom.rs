//! Every interleaving of pairs of operations, and of operations with the hardware, on the smallest
//! trees that can go wrong.
//!
//! `RUSTFLAGS="--cfg loom -C debug-assertions" cargo test -p slat --release --test loom`
//!
//! Each test is named by the sentence that it proves. An operation that gives up as contended is
//! continued after the others ended, from where it says that it stopped: nothing may be lost on the
//! way. Every model ends with a reclaim, and with all table pages given back.
//!
//! Models are exhaustive unless they say `bounded`. Out of reach here: `pass_run` (tables of two
//! slots never fill a run), and the ordering of a walker's loads by their address dependency, which
//! loom does not know; the hardware loads with acquire instead.
#![cfg(loom)]

#[path = "loom/hardware.rs"]
mod hardware;
#[path = "loom/machine.rs"]
mod machine;
#[path = "loom/map.rs"]
mod map;
#[path = "loom/protect.rs"]
mod protect;
#[path = "loom/relax.rs"]
mod relax;
#[path = "loom/split.rs"]
mod split;
#[path = "loom/unmap.rs"]
mod unmap;
