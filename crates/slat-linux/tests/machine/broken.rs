//! Faults made on purpose: what KVM or the shim leaves out, one at a time. The machine must notice
//! each, and nothing without one.

use super::*;
use slat_sim::{Firmware, HasFirmware, Kind, Moment};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

thread_local! {
    /// The number of the flush to leave out; `SEEN` counts the flushes so far.
    static LEFT_OUT: Cell<usize> = const { Cell::new(usize::MAX) };
    static SEEN: Cell<usize> = const { Cell::new(0) };
}

fn is_left_out() -> bool {
    SEEN.replace(SEEN.get() + 1) == LEFT_OUT.get()
}

fn flush(machine: &Machine<Arm>, what: &Invalidation) {
    if is_left_out() {
        // The stores are still published.
        machine.publish();
    } else {
        (Arm::FIRMWARE.invalidate)(machine, what);
    }
}

fn flush_local(machine: &Machine<Arm>, what: &Invalidation) {
    if !is_left_out() {
        (Arm::FIRMWARE.invalidate_local)(machine, what);
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    /// A call that gave the right to write says that it did not, so KVM does not log the page.
    DirtyDropped,
    /// A clear of the log leaves a page writable.
    PageSkipped,
    /// A fault in a protected block gives rights to the whole block.
    BlockLeft,
}

/// A KVM that logs writes, of which [`Fault`] spoils one step.
struct Kvm<'p> {
    vm: Vm<'p>,
    fault: Fault,
    log: RefCell<BTreeSet<u64>>,
}

impl Kvm<'_> {
    /// A write by the guest, with the faults that it takes.
    fn write(&self, cpu: usize, gpa: u64) {
        let machine = self.vm.machine;
        if machine.cpu(cpu).write(gpa).is_ok() {
            return;
        }
        machine.here(cpu);
        machine.unprotect(VMID, range(gpa, PAGE));
        let there = self.vm.size(gpa) == BLOCK && self.vm.raw(gpa) & 1 != 0;
        let given = if there && self.fault == Fault::BlockLeft {
            machine.unprotect(VMID, range(gpa & !(BLOCK - 1), BLOCK));
            self.vm.stage2.relax(gpa, ALL)
        } else {
            let mapped = self.vm.map(gpa, PAGE, RAM + (gpa - BASE), ALL);
            mapped.or_else(|_| self.vm.stage2.relax(gpa, ALL))
        };
        let dropped = self.fault == Fault::DirtyDropped && gpa == BASE + 5 * PAGE;
        let given = if dropped { Err(Errno::AGAIN) } else { given };
        if given.is_ok() {
            self.log.borrow_mut().insert(gpa);
        }
        machine.claim_progress(cpu, Gpa(gpa), Access::Write);
    }

    /// Takes the log, protects its pages and copies them.
    fn clear(&self) {
        let taken = self.log.take();
        for gpa in &taken {
            if self.fault != Fault::PageSkipped || *gpa != BASE + 5 * PAGE {
                self.vm.stage2.wrprotect(*gpa, PAGE).unwrap();
            }
        }
        self.vm.flush();
        for gpa in taken {
            self.vm.machine.protect(VMID, range(gpa, PAGE));
            self.vm.machine.copy(VMID, range(gpa, PAGE));
        }
    }
}

/// Logs a guest that begins with a block, gives two of its pages back to the host, and puts the
/// block in place again.
fn migrate(fault: Fault) -> Vec<Kind> {
    SEEN.set(0);
    let firmware = Firmware { invalidate: flush, invalidate_local: flush_local, ..Arm::FIRMWARE };
    let machine = machine(true).firmware(firmware);
    let kvm = Kvm { vm: Vm::new(&machine), fault, log: RefCell::default() };
    kvm.vm.fault(BASE, BLOCK, ALL).unwrap();
    kvm.vm.protect(BASE, BLOCK);
    machine.copy(VMID, range(BASE, BLOCK));
    for at in [5, 6, 5, 300] {
        kvm.write(at % 2, BASE + at as u64 * PAGE);
    }
    kvm.clear();
    for at in [6, 5, 7] {
        kvm.write(at % 2, BASE + at as u64 * PAGE);
    }
    machine.claim_clean(VMID, range(BASE, BLOCK), |gpa| kvm.log.borrow().contains(&gpa.0));
    kvm.vm.unmap(BASE + 6 * PAGE, 2 * PAGE);
    kvm.vm.fault(BASE, BLOCK, ALL).unwrap();
    machine.unprotect(VMID, range(BASE, BLOCK));
    kvm.write(1, BASE + 9 * PAGE);
    machine.claim_fresh(VMID, range(BASE, BLOCK));
    kvm.vm.readers();
    machine.finish().iter().map(|violation| violation.kind).collect()
}

#[test]
fn every_flush_that_is_left_out_is_noticed() {
    LEFT_OUT.set(usize::MAX);
    assert_eq!(migrate(Fault::None), []);
    let flushes = SEEN.get();
    assert!(flushes > 5, "{flushes} flushes");
    for number in 0..flushes {
        LEFT_OUT.set(number);
        assert_ne!(migrate(Fault::None), [], "nobody misses flush {number}");
    }
}

#[test]
fn a_write_that_is_missing_from_the_log_is_noticed() {
    LEFT_OUT.set(usize::MAX);
    assert_eq!(migrate(Fault::DirtyDropped), [Kind::LostDirty]);
    let skipped = migrate(Fault::PageSkipped);
    assert!(skipped.contains(&Kind::RevokedRight), "{skipped:?}");
}

#[test]
fn a_block_that_stays_over_logged_pages_is_noticed() {
    LEFT_OUT.set(usize::MAX);
    assert!(migrate(Fault::BlockLeft).contains(&Kind::LostDirty));
}

/// Puts a block in place of a table while another thread ages in it. Returns whether any moment of
/// that walk noticed; `after` is what ends the grace period.
fn is_freed_under_a_walk(at_once: bool) -> bool {
    (1..24).any(|nth| {
        let machine: &'static Machine<Arm> = Box::leak(Box::new(machine(true)));
        let vm: &'static Vm<'static> = Box::leak(Box::new(Vm::new(machine)));
        (0..8).for_each(|at| vm.fault(BASE + at * PAGE, PAGE, ALL).unwrap());
        let mut moments = 0;
        machine.meanwhile(move |_, moment| {
            moments += usize::from(moment == Moment::Table);
            if moments == nth {
                moments = 99;
                vm.map(BASE, BLOCK, RAM, ALL).unwrap();
                if at_once {
                    vm.readers();
                }
            }
        });
        vm.stage2.age(BASE, 16 * PAGE, true);
        machine.undisturbed();
        vm.readers();
        let found = machine.violations();
        assert!(found.iter().all(|found| found.kind == Kind::FreedTable), "{found:?}");
        !found.is_empty()
    })
}

#[test]
fn a_table_freed_before_the_grace_period_is_noticed() {
    assert!(!is_freed_under_a_walk(false));
    assert!(is_freed_under_a_walk(true));
}
