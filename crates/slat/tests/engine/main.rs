//! Tests of the engine that need no scheduler of their own. They are one program: in several, the
//! same operations would be compiled again for the same formats and machines.
#![cfg_attr(not(feature = "every-format"), allow(unused, reason = "of the variants left out"))]
#![cfg(not(any(loom, shuttle)))]

mod common;

mod accounts;
mod between;
mod collapse;
mod collapsed;
mod consumers;
mod contended;
mod contiguous;
mod counts;
mod device;
mod discards;
mod edges;
mod emptied;
mod executable;
mod faults;
mod given_back;
mod golden_arm64;
mod golden_ept;
mod golden_lpa;
mod golden_lpa2;
mod golden_npt;
mod golden_power;
mod golden_riscv;
mod handover;
mod inactive;
mod intent;
mod interleavings;
mod leaf_ages;
mod limits;
mod looks;
mod model;
mod moved;
mod named;
mod numbered;
mod obligations;
mod owned;
mod owners;
mod promises;
mod protect;
mod refusals;
mod replaced;
mod reservations;
mod rounds;
mod seats;
mod software;
mod steps;
mod tables_taken;
mod told;
mod unmap_runs;
mod vtd;
mod young;
