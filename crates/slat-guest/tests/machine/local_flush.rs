//! Invalidations of the CPU that faulted, after its fault granted a right, or found it granted.

use crate::cases::Case;
use crate::common::*;
use slat::{Access, Format, Gpa, Invalidation, LocalFlush};
use slat_sim::{Firmware, HasFirmware, Kind, Machine};

type Of<'t, 'p, C> = LocalFlush<'t, 'p, <C as Case>::F, Machine<<C as Case>::A>>;

/// CPU 0 caches a page without the right to write, and faults. The fault is handled, and `used`
/// consumes the result. With `other`, a thread of another CPU has granted the right before.
fn answered<C: Case>(
    firmware: Firmware<C::A>,
    other: bool,
    used: impl for<'t, 'p> FnOnce(Of<'t, 'p, C>),
) -> Machine<C::A> {
    let machine = C::machine(2).firmware(firmware);
    {
        let guest = C::guest(&machine);
        let page = range(BASE, C::F::size(0).bytes());
        guest.map(BASE, RAM, page.size(), C::F::size(0));
        guest.write_protect(BASE, page.size());
        guest.read(0, BASE);
        assert!(machine.cpu(0).write(BASE).is_err());
        machine.unprotect(VMID, page);
        guest.with(|guard, _| {
            if other {
                assert!(guard.relax(page, Access::Write).unwrap().not_needed_here() != 0);
            }
            let granted = guard.relax(page, Access::Write).unwrap();
            assert_eq!(granted.is_changed(), !other);
            used(granted);
        });
        machine.claim_progress(0, Gpa(BASE), slat_sim::Access::Write);
    }
    machine
}

/// A platform on which only the handling of a fault makes a CPU drop entries.
fn alone<A: HasFirmware>() -> Firmware<A> {
    Firmware { resume: |_, _, _| (), ..A::FIRMWARE }
}

fn broadcast<A: HasFirmware>(machine: &Machine<A>, what: &Invalidation) {
    (A::FIRMWARE.invalidate)(machine, what);
}

fn a_cpu_that_forgets_locally_what_it_faulted_at_goes_on<C: Case>() {
    for other in [false, true] {
        clean(&answered::<C>(alone(), other, |granted| {
            granted.flush_local();
        }));
        // It faulted at that page.
        clean(&answered::<C>(alone(), other, |granted| {
            granted.at(Gpa(BASE)).flush_local();
        }));
    }
}

on_every_format!(a_cpu_that_forgets_locally_what_it_faulted_at_goes_on);

fn one_that_does_not_faults_for_ever_where_a_fault_keeps_it<C: Case>() {
    for other in [false, true] {
        let machine = answered::<C>(alone(), other, |granted| {
            granted.not_needed_here();
        });
        match C::F::KEEPS_FAULTING {
            true => caught(&machine, Kind::Livelock),
            false => clean(&machine),
        }
    }
}

on_every_format!(one_that_does_not_faults_for_ever_where_a_fault_keeps_it);

fn a_platform_that_says_nothing_broadcasts<C: Case>() {
    let firmware = Firmware { invalidate_local: broadcast::<C::A>, ..alone() };
    clean(&answered::<C>(firmware, true, |granted| {
        granted.flush_local();
    }));
}

on_every_format!(a_platform_that_says_nothing_broadcasts);

fn a_flush_that_does_nothing_is_noticed_where_it_is_needed<C: Case>() {
    let firmware = Firmware { invalidate_local: |_, _| (), ..alone() };
    let machine = answered::<C>(firmware, false, |granted| {
        granted.flush_local();
    });
    match C::F::KEEPS_FAULTING {
        true => caught(&machine, Kind::Livelock),
        false => clean(&machine),
    }
}

on_every_format!(a_flush_that_does_nothing_is_noticed_where_it_is_needed);
