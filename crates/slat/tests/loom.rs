//! Every interleaving of pairs of operations, and of operations with the hardware, on the smallest
//! trees that can go wrong.
//!
//! `RUSTFLAGS="--cfg loom -C debug-assertions" cargo test -p slat --release --features loom --test
//! loom`
//!
//! Each test is named by the sentence that it proves. A test continues an operation that gave up as
//! contended, after the other threads ended, from where it says that it stopped: nothing may be
//! lost on the way. Every model ends with a reclaim, and with all table pages given back.
//!
//! Unless the model is about readers, operations enter without a reader slot, and reclaim after all
//! threads were joined: that keeps the number of orders small.
//!
//! Models are exhaustive unless they say `bounded` or `at most`. They do not reach `pass_run`
//! (tables of two entries never fill a run), nor the ordering of a walker's loads by their address
//! dependency, which loom does not know; the hardware loads with acquire instead.
#![cfg(loom)]

#[path = "loom/age.rs"]
mod age;
#[path = "loom/collapse.rs"]
mod collapse;
#[path = "loom/contiguous.rs"]
mod contiguous;
#[path = "loom/explorer.rs"]
mod explorer;
#[path = "loom/given_up.rs"]
mod given_up;
#[path = "loom/guest.rs"]
mod guest;
#[path = "loom/hardware.rs"]
mod hardware;
#[path = "loom/ledger.rs"]
mod ledger;
#[path = "loom/machine.rs"]
mod machine;
#[path = "loom/map.rs"]
mod map;
#[path = "loom/owner.rs"]
mod owner;
#[path = "loom/pairs.rs"]
mod pairs;
#[path = "loom/protect.rs"]
mod protect;
#[path = "loom/readers.rs"]
mod readers;
#[path = "loom/replace.rs"]
mod replace;
#[path = "loom/replace_table.rs"]
mod replace_table;
#[path = "loom/reserve.rs"]
mod reserve;
#[path = "loom/rest.rs"]
mod rest;
#[path = "loom/split.rs"]
mod split;
#[path = "loom/unmap.rs"]
mod unmap;
#[path = "loom/walked.rs"]
mod walked;
