//! The engine on the adversarial machine, compared with faulty code.
//!
//! A test whose name describes a bug has that bug on purpose, in its platform or in its own stores,
//! and the machine finds it. Next to it, the engine does the same, and the machine finds nothing.
#![cfg(not(loom))]

#[macro_use]
mod cases;

mod accessed_bits;
mod ageing;
mod break_before_make;
mod caches;
mod common;
mod contiguous;
mod dirty;
mod histories;
mod invalidation_arm;
mod invalidation_ept;
mod invalidation_riscv;
mod laziness;
mod left_out;
mod local_flush;
mod order;
#[cfg(feature = "every-format")]
mod power;
mod races;
#[path = "../../../../tests/seed.rs"]
mod seed;
mod seeds;
mod threads;
mod walks;
