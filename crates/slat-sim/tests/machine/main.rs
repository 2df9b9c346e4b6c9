//! The engine on the adversarial machine, and what others did instead.
//!
//! A test whose name begins with what somebody got wrong has it wrong on purpose, in the platform
//! or in stores of its own, and is caught. Beside it the engine does the same, and nothing is
//! found.

#[macro_use]
mod cases;

mod ageing;
mod break_before_make;
mod caches;
mod casemate;
mod common;
mod contiguous;
mod dirty;
mod granted;
mod histories;
mod invalidation_arm;
mod invalidation_ept;
mod invalidation_riscv;
mod laziness;
mod left_out;
mod order;
#[cfg(feature = "every-format")]
mod power;
mod races;
mod threads;
mod trace;
mod walks;
mod young;
