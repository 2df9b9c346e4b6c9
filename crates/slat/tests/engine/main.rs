//! Tests of the engine that need no scheduler of their own. They are one program: in several, the
//! same operations would be compiled again for the same formats and machines.
#![cfg_attr(not(feature = "every-format"), allow(unused, reason = "of the variants left out"))]
#![cfg(not(any(loom, shuttle)))]

#[macro_use]
mod common;

mod accounts;
mod address_ends;
mod age_cost;
mod batches;
mod bounds;
mod collapse;
mod collapsed;
mod commit_callback;
mod contended;
mod contiguous;
mod counts;
mod device;
mod discards;
mod emptied;
mod executable;
mod faults;
mod given;
mod given_back;
mod golden_arm64;
mod golden_ept;
mod golden_npt;
mod golden_power;
mod golden_riscv;
mod handover;
mod intent;
mod interleavings;
mod leaf_ages;
mod members;
mod model;
mod moved;
mod named;
mod numbered;
mod obligations;
mod own_rcu;
mod owned;
mod owned_pages;
mod owners;
mod promises;
#[path = "../../../../tests/properties.rs"]
mod properties;
mod protect;
mod queries;
mod queries_concurrent;
mod readers;
mod refusals;
mod replaced;
mod replaced_tables;
mod reservations;
mod rounds;
#[path = "../../../../tests/seed.rs"]
mod seed;
mod software;
mod splits;
mod steps;
mod table_accessed_bits;
mod tables_taken;
mod underway;
mod unloaded;
mod unmap_runs;
mod vacated;
mod vtd;
mod withheld;
