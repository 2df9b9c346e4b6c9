//! Handles of one guest that come to another guest's worker, and what a guest costs that is dropped
//! unused.

use crate::machine::*;
use slat::format::arm64::Arm64K4;
use slat::{Access, Gpa, PageSize, Vmid, WrongTables};
use slat_guest::*;
use std::sync::Arc;

type OnArm = SharedGuest<Arm64K4, CountingMachine, OnePiece>;

/// A guest on a format on which vCPUs may bypass their caches.
fn on_arm(machine: &Arc<CountingMachine>, config: Config) -> OnArm {
    let (format, ram) = (Arm64K4::default(), OnePiece(PageSize::SIZE_2M));
    SharedGuest::new(format, Vmid(1), 39, machine.clone(), ram, config).unwrap()
}

#[test]
fn a_flush_is_refused_to_another_guests_worker_and_goes_on() {
    let machine = CountingMachine::new();
    let config = Config { caches: CachePolicy::Every, ..Config::new(1, PageSize::SIZE_2M) };
    let mut workers = [(); 2].map(|()| on_arm(&machine, config).vcpu(0).unwrap());
    for vcpu in &mut workers {
        vcpu.with(|vcpu| {
            vcpu.worker().set_memslot(memslot(M2)).unwrap();
            assert!(matches!(vcpu.fault(Gpa(BASE), Access::Write), Outcome::Mapped(_)));
        });
    }
    let [own, other] = &mut workers;
    let flush = own.with(|own| Flush::new(own.worker()));
    assert_eq!(other.with(|other| flush.run(other.worker())), Err(WrongTables));
    assert_eq!(other.with(|other| flush.finish(other.worker())), Err(WrongTables));
    assert!(!flush.is_done());
    assert_eq!(own.with(|own| flush.run(own.worker())), Ok(M2));
    assert!(flush.is_done());
}

#[test]
fn a_dropped_guest_invalidates_once_for_any_number_of_vcpus() {
    for (vcpus, caches_on, used) in [(1, false, true), (64, false, false), (64, true, true)] {
        let machine = CountingMachine::new();
        let config = Config { caches_on, ..Config::new(vcpus, PageSize::SIZE_2M) };
        let guest = on_arm(&machine, config);
        if used {
            let mut vcpu = guest.vcpu(0).unwrap();
            vcpu.with(|vcpu| {
                vcpu.worker().set_memslot(memslot(M2)).unwrap();
                assert!(matches!(vcpu.fault(Gpa(BASE), Access::Write), Outcome::Mapped(_)));
            });
        }
        machine.invalidations();
        drop(guest);
        assert_eq!(machine.invalidations(), 1, "{vcpus} vCPUs");
        assert_eq!(machine.frames(), 0);
    }
}

#[test]
fn vcpus_that_start_with_caches_on_share_tables_and_blocks() {
    let machine = CountingMachine::new();
    let config = Config { caches_on: true, ..Config::new(2, PageSize::SIZE_2M) };
    let guest = on_arm(&machine, config);
    let [mut one, mut two] = [0, 1].map(|id| guest.vcpu(id).unwrap());
    let root = guest.get().tables().root();
    one.with(|vcpu| {
        assert!(vcpu.is_cached() && !vcpu.has_view());
        assert_eq!(vcpu.root(), root);
        vcpu.worker().set_memslot(memslot(M2)).unwrap();
        let outcome = vcpu.fault(Gpa(BASE), Access::Write);
        assert_eq!(outcome, Outcome::Mapped(PageSize::SIZE_2M));
    });
    two.with(|vcpu| {
        assert_eq!(vcpu.fault(Gpa(BASE + K4), Access::Write), Outcome::Spurious);
        assert!(vcpu.worker().translate(Gpa(BASE)).unwrap().is_some());
        // A reset switches them off, even if the vCPU has not run before.
        let switch = vcpu.reset();
        assert!(switch.root_changed && switch.trap && vcpu.has_view());
        assert_ne!(vcpu.root(), root);
        let outcome = vcpu.fault(Gpa(BASE), Access::Write);
        assert_eq!(outcome, Outcome::Mapped(PageSize::SIZE_4K));
    });
    let stats = guest.get().stats();
    assert_eq!((stats.mapped.bytes(), stats.views.bytes()), (M2, K4));
    one.with(|vcpu| assert_eq!(vcpu.root(), root));
}

#[test]
fn a_reset_before_the_first_run_switches_the_caches_off() {
    for policy in [CachePolicy::Exact, CachePolicy::Every] {
        let machine = CountingMachine::new();
        let config =
            Config { caches_on: true, caches: policy, ..Config::new(1, PageSize::SIZE_2M) };
        let guest = on_arm(&machine, config);
        guest.vcpu(0).unwrap().with(|vcpu| {
            assert!(vcpu.reset().trap);
            assert!(!vcpu.is_cached());
            assert_eq!(vcpu.has_view(), policy == CachePolicy::Exact);
            assert!(!vcpu.set_caches(true).trap);
        });
    }
}
