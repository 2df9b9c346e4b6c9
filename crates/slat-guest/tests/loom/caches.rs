//! Maintenance while faults are under way. A vCPU reads page 0 past the caches, once it is mapped.

use crate::fixture::*;
use loom::sync::atomic::Ordering;
use slat::{Access, BreakBeforeMake, Gpa, GpaRange, Maintenance};

fn all() -> GpaRange {
    GpaRange::new(Gpa(0), PAGE).unwrap()
}

/// The host writes page 0 while a vCPU whose caches are off faults on it.
fn fault_and_host_writes() {
    let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
    let guest = uncached(world, ram);
    let mut writes = worker(guest);
    writes.set_memslot(memslot(false)).unwrap();
    let thread = faulting(vcpu(guest), 0, Access::Read);
    world.cached.store(1, Ordering::Release);
    writes.host_wrote(all(), Maintenance::Data);
    let mut vcpu = thread.join().unwrap().get();
    let mapped = vcpu.translate(Gpa(0)).is_some();
    assert!(!mapped || world.past_caches.get() == 1, "the vCPU misses the host's write");
}

/// A vCPU writes page 0 by its caches, and maintains them by set and way, while another vCPU, whose
/// caches are off, faults on the page.
fn fault_and_set_way() {
    let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
    let guest = uncached_two(world, ram);
    let mut setup = worker(guest);
    setup.set_memslot(memslot(false)).unwrap();
    let mut writes = vcpu_of(guest, 1);
    writes.set_caches(true);
    writes.fault(Gpa(0), Access::Write);
    let thread = faulting(vcpu_of(guest, 0), 0, Access::Read);
    world.cached.store(1, Ordering::Release);
    writes.set_way();
    let mut vcpu = thread.join().unwrap().get();
    let mapped = vcpu.translate(Gpa(0)).is_some();
    assert!(!mapped || world.past_caches.get() == 1, "the vCPU misses the other's write");
}

#[test]
fn a_vcpu_past_the_caches_reads_what_the_host_wrote() {
    bounded("fault past the caches || the host writes", 3, fault_and_host_writes);
}

#[test]
fn an_uncached_vcpu_reads_data_maintained_by_set_way() {
    bounded("fault past the caches || set and way", 3, fault_and_set_way);
}
