//! The rules for memslots, and what happens to memory when they change.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, Gpa, PageSize};
use slat_guest::*;

#[test]
fn slots_follow_the_rules_of_linux() {
    let machine = Intel::machine(1);
    let guest = guest::<Intel>(&machine, &Ram::new(), config());
    let mut worker = Worker::new(&guest).unwrap();
    let base = memslot(16 * M2);
    let gib = |n: u64| Gpa(n * G1);
    let errors = [
        (MemslotSpec { gpa: Gpa(BASE + 1), ..base }, "EINVAL"),
        (MemslotSpec { host: Hva(HOST + 0x800), ..base }, "EINVAL"),
        (MemslotSpec { bytes: 0x1800, ..base }, "EINVAL"),
        (MemslotSpec { bytes: 0, ..base }, "EINVAL"),
        (MemslotSpec { gpa: Gpa(!0xfff), ..base }, "EINVAL"),
        (MemslotSpec { host: Hva(!0xfff), ..base }, "EINVAL"),
    ];
    for (spec, errno) in errors {
        for kvm in [Kvm::X86, Kvm::Arm64, Kvm::RiscV] {
            let result = worker.set_memslot(spec);
            assert_eq!(result.map_err(|error| error.errno(kvm)), Err(errno), "{spec:?}");
        }
    }
    let beyond =
        worker.set_memslot(MemslotSpec { gpa: Gpa((1 << BITS) - M2), ..base }).unwrap_err();
    assert_eq!(beyond, MemslotError::Beyond { bits: BITS });
    let errnos = [Kvm::X86, Kvm::Arm64, Kvm::RiscV].map(|kvm| beyond.errno(kvm));
    assert_eq!(errnos, ["EINVAL", "EFAULT", "EFAULT"]);
    assert_eq!(worker.set_memslot(base), Ok(MemslotChange::Inserted));
    assert_eq!(worker.set_memslot(base), Ok(MemslotChange::Same));
    let other = MemslotSpec { id: MemslotId(1), gpa: Gpa(BASE + 16 * M2), ..base };
    assert_eq!(worker.set_memslot(other), Ok(MemslotChange::Inserted));
    let overlapping = [
        MemslotSpec { id: MemslotId(2), gpa: Gpa(BASE + 15 * M2), ..base },
        MemslotSpec { id: MemslotId(2), gpa: Gpa(BASE - M2), ..base },
        MemslotSpec { id: MemslotId(2), gpa: Gpa(BASE + M2), bytes: M2, ..base },
        // A move onto another memslot.
        MemslotSpec { gpa: Gpa(BASE + 17 * M2), ..base },
    ];
    for spec in overlapping {
        assert_eq!(worker.set_memslot(spec).map_err(|error| error.errno(Kvm::X86)), Err("EEXIST"));
    }
    let differing = [
        MemslotSpec { bytes: 8 * M2, ..base },
        MemslotSpec { host: Hva(HOST + M2), ..base },
        MemslotSpec { read_only: true, ..base },
    ];
    for spec in differing {
        assert_eq!(worker.set_memslot(spec), Err(MemslotError::Differs { is: base }));
    }
    assert_eq!(worker.set_memslot(MemslotSpec { gpa: gib(9), ..base }), Ok(MemslotChange::Moved));
    assert!(matches!(
        worker.set_memslot(MemslotSpec { gpa: gib(9), log_dirty: true, ..base }),
        Ok(MemslotChange::LogOn(None))
    ));
    assert_eq!(worker.set_memslot(MemslotSpec { bytes: 0, ..base }), Ok(MemslotChange::Deleted));
    assert_eq!(worker.memslots(), [other]);
    let missing = MemslotError::Missing { id: MemslotId(0) };
    assert_eq!(worker.set_memslot(MemslotSpec { bytes: 0, ..base }), Err(missing));
    assert!(missing.to_string().contains("no memslot 0"));
}

on_all! {
    fn memory_of_a_deleted_slot_is_out_of_the_guests_reach<C: Case>() {
        with_guest!(C, config(), memslot(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        for page in [0, 1, 700] {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
        }
        machine.cpu(1).load(VMID, vcpu.root());
        let spec = MemslotSpec { bytes: 0, ..memslot(4 * M2) };
        assert_eq!(vcpu.worker().set_memslot(spec), Ok(MemslotChange::Deleted));
        for block in 0..4 {
            machine.take_back(slat::Hpa(ram.get(HOST + block * M2).unwrap().hpa), M2);
        }
        let found = attempt::<C>(&machine, &mut vcpu, BASE, Access::Read);
        assert_eq!(found.map(|_| ()), Err(Outcome::Mmio));
        assert!(machine.cpu(1).read(BASE).is_err());
        assert!(machine.finish().is_empty());
    }

    fn a_slot_that_moves_takes_its_memory_along<C: Case>() {
        with_guest!(C, config(), memslot(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let (hpa, _) = attempt::<C>(&machine, &mut vcpu, BASE + K4, Access::Write).unwrap();
        let moved = MemslotSpec { gpa: Gpa(BASE + G1), ..memslot(4 * M2) };
        assert_eq!(vcpu.worker().set_memslot(moved), Ok(MemslotChange::Moved));
        let old = attempt::<C>(&machine, &mut vcpu, BASE + K4, Access::Read);
        assert_eq!(old.map(|_| ()), Err(Outcome::Mmio));
        let (there, _) =
            attempt::<C>(&machine, &mut vcpu, BASE + G1 + K4, Access::Read).unwrap();
        assert_eq!(there, hpa);
        assert!(machine.finish().is_empty());
    }

}

#[test]
fn a_guest_that_cannot_be_is_refused_with_the_reason() {
    let machine = ArmPlain::machine(1);
    let new = |config| {
        let format = ArmPlain::format();
        let guest = Guest::new(format, VMID, BITS, &machine, Ram::new(), config);
        guest.map(|_| ()).map_err(|error| error.to_string())
    };
    let hardware = Config { logging: Logging::Hardware, ..config() };
    assert!(new(hardware).unwrap_err().contains("log by write protection"));
    let odd = Config { ring: Some(1000), ..config() };
    assert!(new(odd).unwrap_err().contains("from 128 to 65536"));
    let dirty = Intel::machine(1);
    let both = Config { ring: Some(128), logging: Logging::Hardware, ..config() };
    let refused = Guest::new(Intel::format(), VMID, BITS, &dirty, Ram::new(), both);
    assert_eq!(refused.map(drop).unwrap_err(), GuestError::RingNeedsProtection);
    let size = Config { largest: PageSize::from_bytes(16 << 10).unwrap(), ..config() };
    assert!(new(size).is_err());
    let vcpus = guest::<ArmPlain>(&machine, &Ram::new(), config());
    let error = Vcpu::new(&vcpus, 2).unwrap_err();
    assert_eq!(error.to_string(), "the guest has vCPUs 0 to 1");
}

/// Linux looks at neither.
#[test]
fn a_deletion_is_of_a_memslot_whatever_else_the_request_says() {
    type C = Intel;
    with_guest!(C, config(), memslot(4 * M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
    let worker = vcpu.worker();
    let private = MemslotSpec { id: MemslotId(2), gpa: Gpa(32 * G1), ..hidden(M2) };
    worker.set_memslot(private).unwrap();
    for gpa in [Gpa(BASE + M2), Gpa(1), Gpa(u64::MAX)] {
        let other = MemslotSpec::new(MemslotId(1), Gpa(0), M2, Hva(HOST + 64 * G1));
        worker.set_memslot(other).unwrap();
        let at = private.private.map(|at| PrivateAt(at.0 + K4));
        let delete = MemslotSpec { gpa, bytes: 0, host: Hva(3), private: at, ..other };
        assert_eq!(worker.set_memslot(delete), Ok(MemslotChange::Deleted), "{gpa:?}");
    }
}

/// The machine counts a private page once: two memslots that had it would each report its removal.
#[test]
fn two_memslots_have_no_private_memory_in_common() {
    type C = Intel;
    let is = hidden(4 * M2);
    with_guest!(C, config(), is, PageSize::SIZE_2M => machine, ram, guest, vcpu);
    ram.populate_private(HIDDEN, is.bytes, PageSize::SIZE_2M);
    let at = |private| MemslotSpec {
        id: MemslotId(1),
        gpa: Gpa(BASE + 8 * G1),
        private: Some(PrivateAt(private)),
        ..is
    };
    for private in [HIDDEN, HIDDEN - M2, HIDDEN + is.bytes - M2] {
        let refused = vcpu.worker().set_memslot(at(private));
        assert_eq!(refused, Err(MemslotError::Overlaps { id: is.id }), "{private:#x}");
    }
    for private in [HIDDEN - is.bytes, HIDDEN + is.bytes] {
        let beside = at(private);
        assert_eq!(vcpu.worker().set_memslot(beside), Ok(MemslotChange::Inserted));
        vcpu.worker().set_memslot(MemslotSpec { bytes: 0, ..beside }).unwrap();
    }
    // A memslot that was deleted leaves all of its private memory to the next.
    let mut uses = |spec: MemslotSpec| {
        let all = range(spec.gpa.0, spec.bytes);
        vcpu.worker().convert(all, MemoryKind::Private, |_| {}).unwrap();
        machine.claim_kind(VMID, all, MemoryKind::Private);
        for block in 0..4 {
            attempt::<C>(&machine, &mut vcpu, spec.gpa.0 + block * M2, Access::Write).unwrap();
        }
        assert_eq!(machine.assigned() as u64, spec.bytes / K4);
        let gone = vcpu.worker().set_memslot(MemslotSpec { bytes: 0, ..spec });
        assert_eq!((gone, machine.assigned()), (Ok(MemslotChange::Deleted), 0));
        machine.claim_kind(VMID, all, MemoryKind::Shared);
        vcpu.worker().set_memslot(at(HIDDEN)).unwrap();
    };
    uses(is);
    uses(at(HIDDEN));
    assert!(machine.finish().is_empty());
}
