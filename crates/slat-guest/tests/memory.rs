//! A guest's memory on the adversarial machine: the contract of each service, one by one, and all
//! services together.

#![cfg(not(loom))]

#[path = "memory/age.rs"]
mod age;
#[path = "memory/async_fault.rs"]
mod async_fault;
#[path = "memory/buffers.rs"]
mod buffers;
#[path = "memory/combinations.rs"]
mod combinations;
#[path = "memory/contiguous.rs"]
mod contiguous;
#[path = "memory/devices.rs"]
mod devices;
#[path = "memory/epochs.rs"]
mod epochs;
#[path = "memory/eviction.rs"]
mod eviction;
#[path = "memory/faults.rs"]
mod faults;
#[path = "memory/fixture.rs"]
mod fixture;
#[path = "memory/fork.rs"]
mod fork;
#[path = "memory/frames.rs"]
mod frames;
#[path = "memory/histories.rs"]
mod histories;
#[path = "memory/huge.rs"]
mod huge;
#[path = "memory/invalidation.rs"]
mod invalidation;
#[path = "memory/log.rs"]
mod log;
#[path = "memory/log_words.rs"]
mod log_words;
#[path = "memory/mapped.rs"]
mod mapped;
#[path = "memory/memslots.rs"]
mod memslots;
#[path = "memory/outcomes.rs"]
mod outcomes;
#[path = "memory/pairs.rs"]
mod pairs;
#[path = "memory/postcopy.rs"]
mod postcopy;
#[path = "memory/private.rs"]
mod private;
#[path = "memory/recovery.rs"]
mod recovery;
#[path = "memory/replaced.rs"]
mod replaced;
#[path = "memory/ring.rs"]
mod ring;
#[path = "../../../tests/seed.rs"]
mod seed;
#[path = "memory/spilled_bits.rs"]
mod spilled_bits;
#[path = "memory/two_memslots.rs"]
mod two_memslots;
#[path = "memory/watched.rs"]
mod watched;
