//! A vCPU's own view, and everything else that happens to memory meanwhile.

use crate::model::{Machine, Mood};
use crate::vm::{
    BASE, BYTES, Cpu, Manners, TestGuest, config, host_range, hpa, memslot, page, range, with_guest,
};
use slat::{Access, AgeOptions, Gpa, Maintenance, Reader};
use slat_guest::{CachePolicy, Config, Flush, Logging, MemslotId, Outcome, Retry, Worker};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Runs a test with a vCPU whose caches are off, on a machine that fetches each line as early as it
/// can.
fn with_cpu(
    config: Config,
    log: bool,
    run: impl for<'w, 'm> FnOnce(&'m Machine, &'w TestGuest<'m>, Cpu<'w, 'm>),
) {
    let machine = Machine::new(Mood::Fetch, false);
    with_guest(&machine, config, log, |guest| {
        run(&machine, guest, Cpu::new(guest, 1, Manners::Relies));
    });
}

fn exact() -> Config {
    config(CachePolicy::Exact)
}

#[test]
fn the_host_reads_uncached_writes_of_a_page_taken_from_a_view() {
    with_cpu(exact(), false, |machine, guest, mut cpu| {
        cpu.write(page(5), 1);
        let mut worker = Worker::new(guest).unwrap();
        let mut taken = Vec::new();
        let invalidation = worker.invalidate(host_range(page(5), 4096), |page| taken.push(page));
        assert_eq!(taken.len(), 1);
        assert!(taken[0].dirty && taken[0].accessed && taken[0].gpa == Gpa(page(5)));
        assert_eq!(machine.read(hpa(page(5)), true), 1, "the host's copy");
        assert_eq!(cpu.vcpu.translate(Gpa(page(5))), None);
        let outcome = cpu.vcpu.fault(Gpa(page(5)), Access::Read);
        assert_eq!(outcome, Outcome::Retry(Retry::Invalidated));
        // The host puts other content there.
        machine.write(hpa(page(5)), 2, true);
        drop(invalidation);
        assert_eq!(cpu.read(page(5)), 2);
        cpu.write(page(5), 3);
        cpu.on();
        assert_eq!(cpu.read(page(5)), 3);
    });
}

#[test]
fn a_page_taken_from_a_view_is_right_once_caches_are_on() {
    for &policy in CachePolicy::ALL {
        with_cpu(config(policy), false, |_, guest, mut cpu| {
            cpu.write(page(5), 1);
            let mut worker = Worker::new(guest).unwrap();
            drop(worker.invalidate(host_range(page(5), 4096), |_| {}));
            cpu.on();
            assert_eq!(cpu.read(page(5)), 1, "{policy:?}");
        });
    }
}

#[test]
fn a_view_holds_pages_and_is_gone_once_caches_are_on() {
    with_cpu(exact(), false, |_, guest, mut cpu| {
        let outcome = cpu.vcpu.fault(Gpa(page(5)), Access::Write);
        assert_eq!(outcome, Outcome::Mapped(slat::PageSize::SIZE_4K));
        let mut other = Cpu::new(guest, 2, Manners::Relies);
        assert_eq!(other.vcpu.translate(Gpa(page(5))), None, "a view of one vCPU");
        assert_ne!(other.vcpu.root(), cpu.vcpu.root());
        cpu.on();
        assert_eq!(cpu.vcpu.root(), guest.tables().root());
        let outcome = cpu.vcpu.fault(Gpa(page(5)), Access::Write);
        assert_eq!(outcome, Outcome::Mapped(slat::PageSize::SIZE_2M));
        cpu.off(&[]);
        assert_eq!(cpu.vcpu.translate(Gpa(page(5))), None, "empty when it comes back");
    });
}

#[test]
fn a_write_in_a_view_is_logged_and_a_clear_protects_it_there() {
    for logging in [Logging::Protect, Logging::Hardware] {
        with_cpu(Config { logging, ..exact() }, true, |_, guest, mut cpu| {
            let mut worker = Worker::new(guest).unwrap();
            let mut bits = vec![0; (BYTES >> 18) as usize];
            cpu.read(page(4));
            cpu.write(page(5), 1);
            assert_eq!(worker.take_log(MemslotId(0), &mut bits), Ok(1));
            assert_eq!(bits[0], 1 << 5);
            let leaf = cpu.vcpu.translate(Gpa(page(5))).unwrap().attributes;
            assert!(match logging {
                Logging::Protect => !leaf.write,
                Logging::Hardware => !leaf.dirty,
            });
            assert_eq!(worker.take_log(MemslotId(0), &mut bits), Ok(0));
            if logging == Logging::Protect {
                cpu.write(page(5), 2);
                assert_eq!(worker.take_log(MemslotId(0), &mut bits), Ok(1));
            }
        });
    }
}

#[test]
fn dirty_state_known_only_to_a_view_is_logged_once_it_empties() {
    for reset in [false, true] {
        with_cpu(Config { logging: Logging::Hardware, ..exact() }, true, |_, guest, mut cpu| {
            let mut worker = Worker::new(guest).unwrap();
            cpu.write(page(5), 1);
            match reset {
                true => cpu.start(),
                false => cpu.on(),
            }
            let mut bits = vec![0; (BYTES >> 18) as usize];
            assert_eq!(worker.take_log(MemslotId(0), &mut bits), Ok(1));
            assert_eq!(bits[0], 1 << 5);
        });
    }
}

#[test]
fn a_migration_that_reports_its_reads_copies_uncached_writes() {
    for &policy in CachePolicy::ALL {
        with_cpu(config(policy), true, |machine, guest, mut cpu| {
            let mut worker = Worker::new(guest).unwrap();
            let mut bits = vec![0; (BYTES >> 18) as usize];
            cpu.write(page(5), 1);
            assert_eq!(worker.take_log(MemslotId(0), &mut bits), Ok(1));
            worker.host_reads(range(page(5), 4096));
            assert_eq!(machine.read(hpa(page(5)), true), 1, "{policy:?}");
        });
    }
}

#[test]
fn a_page_used_in_a_view_alone_is_young_until_it_is_aged() {
    with_cpu(exact(), false, |_, guest, mut cpu| {
        let mut worker = Worker::new(guest).unwrap();
        cpu.read(page(5));
        for young in [1 << 5, 0] {
            let mut bits = [0];
            worker.age(range(BASE, 64 << 12), None, &mut bits, AgeOptions::LEAVES).unwrap();
            assert_eq!(bits[0], young);
        }
    });
}

#[test]
fn a_deleted_memslot_leaves_the_views_and_returns_its_memory() {
    with_cpu(exact(), false, |machine, guest, mut cpu| {
        let mut worker = Worker::new(guest).unwrap();
        cpu.write(page(5), 1);
        worker.set_memslot(memslot(0, false)).unwrap();
        assert_eq!(cpu.vcpu.translate(Gpa(page(5))), None);
        assert_eq!(cpu.vcpu.fault(Gpa(page(5)), Access::Read), Outcome::Mmio);
        assert_eq!(machine.read(hpa(page(5)), true), 1);
    });
}

#[test]
fn data_is_lost_without_maintenance_at_a_touch_or_a_views_end() {
    // Maintenance of the host's writes, when the page is touched.
    for skip in [false, true] {
        let machine = Machine::new(Mood::Lazy, false);
        with_guest(&machine, exact(), false, |guest| {
            let mut cpu = Cpu::new(guest, 1, Manners::Relies);
            machine.write(hpa(page(5)), 7, true);
            machine.skip(skip);
            assert_eq!(cpu.read(page(5)) == 7, !skip);
            assert_eq!(machine.skipped() != 0, skip);
        });
    }
    // Maintenance of the guest's writes, when the vCPU leaves the view.
    for skip in [false, true] {
        with_cpu(exact(), false, |machine, _, mut cpu| {
            cpu.write(page(5), 1);
            machine.skip(skip);
            cpu.on();
            machine.skip(false);
            assert_eq!(machine.read(hpa(page(5)), true) == 1, !skip);
        });
    }
}

#[test]
fn host_writes_during_a_fault_are_seen_by_the_guest() {
    for &policy in CachePolicy::ALL {
        let machine = Machine::new(Mood::Lazy, false);
        with_guest(&machine, config(policy), false, |guest| {
            let mut cpu = Cpu::new(guest, 0, Manners::Relies);
            // The host writes before the page is maintained.
            *guest.backing().interrupts.lock().unwrap() = Some((hpa(page(4)), 1));
            assert_eq!(cpu.read(page(4)), 1);
            // The host writes between maintenance and mapping: another thread reports the write
            // before the page can be found, and the report does not return before the fault has.
            let (told, done) = machine.hold_maintenance();
            let machine = &machine;
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let mut worker = Worker::new(guest).unwrap();
                    told.recv().unwrap();
                    machine.write(hpa(page(1000)), 2, true);
                    worker.host_wrote(range(page(1000), 4096), Maintenance::Data);
                    let _ = done.send(());
                });
                cpu.touch(page(1000), Access::Read);
            });
            assert_eq!(cpu.read(page(1000)), 2, "{policy:?}");
        });
    }
}

#[test]
fn a_set_way_operation_reaches_vcpus_that_wait_uncached() {
    for &policy in CachePolicy::ALL {
        with_cpu(config(policy), false, |_, guest, mut cpu| {
            let mut waits = Cpu::new(guest, 0, Manners::Relies);
            cpu.on();
            assert_eq!(waits.read(page(5)), 0);
            cpu.write(page(5), 1);
            cpu.vcpu.set_way();
            assert_eq!(waits.read(page(5)), 1, "{policy:?}");
        });
    }
}

#[test]
fn under_exact_a_starting_vcpu_sees_anothers_cached_writes() {
    for (policy, seen) in [(CachePolicy::Every, 0), (CachePolicy::Exact, 1)] {
        with_cpu(config(policy), false, |_, guest, mut cpu| {
            let mut starts = Cpu::new(guest, 0, Manners::Relies);
            cpu.on();
            cpu.write(page(5), 1);
            starts.start();
            assert_eq!(starts.read(page(5)), seen, "{policy:?}");
        });
    }
}

#[test]
fn a_restarted_vcpu_finds_the_hosts_new_data_and_instructions() {
    for &policy in CachePolicy::ALL {
        for (caches, forced) in [(false, false), (true, false), (true, true)] {
            let machine = Machine::new(Mood::Lazy, forced);
            with_guest(&machine, config(policy), false, |guest| {
                let mut cpu = Cpu::new(guest, 0, Manners::Relies);
                machine.write(hpa(page(5)), 1, true);
                if caches {
                    cpu.on();
                }
                assert_eq!((cpu.execute(page(5)), cpu.read(page(6))), (1, 0));
                machine.write(hpa(page(5)), 2, true);
                machine.write(hpa(page(6)), 3, true);
                cpu.start();
                assert!(!cpu.vcpu.is_cached());
                assert_eq!((cpu.execute(page(5)), cpu.read(page(6))), (2, 3), "{policy:?}");
            });
        }
    }
}

#[test]
fn code_that_the_host_wrote_is_executed_once_it_said_so() {
    for (policy, forced) in [(CachePolicy::Exact, false), (CachePolicy::Exact, true)] {
        for on in [false, true] {
            let machine = Machine::new(Mood::Lazy, forced);
            with_guest(&machine, config(policy), false, |guest| {
                let mut cpu = Cpu::new(guest, 0, Manners::Relies);
                if on {
                    cpu.on();
                }
                assert_eq!(cpu.execute(page(5)), 0);
                machine.write(hpa(page(5)), 2, true);
                cpu.worker().host_wrote(range(page(5), 4096), Maintenance::Instructions);
                assert_eq!(cpu.execute(page(5)), 2);
            });
        }
    }
}

#[test]
fn a_guest_that_switches_off_untrapped_stays_on_shared_tables() {
    with_cpu(exact(), false, |_, guest, mut cpu| {
        cpu.on();
        let root = cpu.vcpu.root();
        let switch = cpu.vcpu.set_caches(true);
        assert!(!switch.trap && !switch.root_changed);
        assert_eq!((root, cpu.vcpu.is_cached()), (guest.tables().root(), true));
        // A VMM that traps the write anyway reports it, and the switch is done.
        let switch = cpu.vcpu.set_caches(false);
        assert!(switch.trap && switch.root_changed && !cpu.vcpu.is_cached());
    });
}

#[test]
fn the_state_of_caches_is_the_vcpus_not_its_threads() {
    with_cpu(exact(), false, |_, guest, mut cpu| {
        cpu.write(page(5), 1);
        let root = cpu.vcpu.root();
        drop(cpu);
        let mut cpu = Cpu::new(guest, 1, Manners::Relies);
        assert_eq!((cpu.vcpu.root(), cpu.vcpu.is_cached()), (root, false));
        assert_eq!(cpu.vcpu.set_caches(true).maintained, 4096);
        drop(cpu);
        let cpu = Cpu::new(guest, 1, Manners::Relies);
        assert_eq!((cpu.vcpu.root(), cpu.vcpu.is_cached()), (guest.tables().root(), true));
    });
}

#[test]
fn a_flush_reaches_what_a_fault_of_another_maps_meanwhile() {
    for policy in [CachePolicy::Every, CachePolicy::First] {
        let machine = Machine::new(Mood::Lazy, false);
        with_guest(&machine, Config { vcpus: 2, ..config(policy) }, false, |guest| {
            let mut faults = Cpu::new(guest, 0, Manners::Relies);
            let mut switches = Cpu::new(guest, 1, Manners::Relies);
            faults.on();
            switches.on();
            let (told, done) = machine.hold_maintenance();
            std::thread::scope(|scope| {
                scope.spawn(move || faults.touch(page(5), Access::Read));
                told.recv().unwrap();
                // No vCPU is past the caches, so the host does not have to report the write.
                machine.write(hpa(page(5)), 1, true);
                switches.vcpu.set_way();
                switches.vcpu.set_caches(false);
                let _ = done.send(());
            });
            assert!(!switches.vcpu.is_cached());
            let leaf = switches.vcpu.translate(Gpa(page(5))).unwrap();
            assert_eq!(machine.read(leaf.hpa.0, false), 1, "{policy:?}");
        });
    }
}

/// A guest that maintains its lines may switch off untrapped, and write past the caches to memory
/// that is mapped in the shared tables.
#[test]
fn what_is_taken_from_shared_tables_is_maintained_for_the_host() {
    for &policy in CachePolicy::ALL {
        with_cpu(config(policy), false, |machine, guest, mut cpu| {
            cpu.on();
            assert_eq!(cpu.read(page(5)), 0);
            let mut worker = Worker::new(guest).unwrap();
            machine.read(hpa(page(5)), true);
            machine.write(hpa(page(5)), 7, false);
            drop(worker.invalidate(host_range(page(5), 4096), |_| {}));
            assert_eq!(machine.read(hpa(page(5)), true), 7, "{policy:?}: invalidated");
            assert_eq!(cpu.read(page(6)), 0);
            machine.read(hpa(page(6)), true);
            machine.write(hpa(page(6)), 8, false);
            worker.set_memslot(memslot(0, false)).unwrap();
            assert_eq!(machine.read(hpa(page(6)), true), 8, "{policy:?}: its memslot deleted");
        });
    }
}

#[test]
fn a_view_is_searched_again_from_the_first_fault_after_a_reset() {
    with_cpu(exact(), false, |_, guest, mut cpu| {
        cpu.write(page(5), 1);
        cpu.start();
        assert_eq!(cpu.vcpu.translate(Gpa(page(5))), None, "the view is empty");
        cpu.write(page(5), 2);
        let mut worker = Worker::new(guest).unwrap();
        drop(worker.invalidate(host_range(page(5), 4096), |_| {}));
        assert_eq!(cpu.vcpu.translate(Gpa(page(5))), None);
    });
}

/// A chunk of 16 MiB is under way in another thread, which helps.
#[test]
fn a_flush_is_over_when_all_its_chunks_are() {
    let machine = Machine::new(Mood::Lazy, false);
    with_guest(&machine, config(CachePolicy::Every), false, |guest| {
        let mut cpu = Cpu::new(guest, 0, Manners::Relies);
        cpu.on();
        let second = page(Flush::CHUNK / 4096);
        [page(0), second].into_iter().for_each(|at| cpu.touch(at, Access::Read));
        let (first, begun) = mpsc::channel::<()>();
        let (second, taken) = mpsc::channel::<()>();
        let (done, returned) = mpsc::channel::<()>();
        let over = Arc::new(AtomicBool::new(false));
        // In its first chunk the thread waits until another has taken the second.
        machine.after_maintenance(Box::new(move || {
            first.send(()).unwrap();
            taken.recv().unwrap();
        }));
        std::thread::scope(|scope| {
            let (machine, ends) = (&machine, over.clone());
            scope.spawn(move || {
                let mut worker = Worker::new(guest).unwrap();
                begun.recv().unwrap();
                machine.after_maintenance(Box::new(move || {
                    second.send(()).unwrap();
                    let _ = returned.recv_timeout(Duration::from_millis(200));
                    ends.store(true, Ordering::SeqCst);
                }));
                assert_eq!(worker.help_flush(), 2 << 20);
            });
            cpu.vcpu.set_caches(false);
            let is_over = over.load(Ordering::SeqCst);
            let _ = done.send(());
            assert!(is_over, "a chunk is under way");
        });
    });
}

/// The tables that it gives up cannot be freed before another thread has left them.
#[test]
fn a_view_without_room_for_tables_waits_for_threads_inside() {
    let machine = Machine::new(Mood::Lazy, false);
    with_guest(&machine, exact(), false, |guest| {
        machine.room.store(8, Ordering::SeqCst);
        let mut cpu = Cpu::new(guest, 0, Manners::Relies);
        let (inside, entered) = mpsc::channel::<()>();
        let (leave, leaves) = mpsc::channel::<()>();
        let (left, has_left) = mpsc::channel::<()>();
        machine.when_waiting(Box::new(move || {
            leave.send(()).unwrap();
            has_left.recv().unwrap();
        }));
        std::thread::scope(|scope| {
            let machine = &machine;
            scope.spawn(move || {
                let mut reader = Reader::register(machine).unwrap();
                let guard = guest.tables().enter(&mut reader).unwrap();
                inside.send(()).unwrap();
                assert!(leaves.recv().is_ok(), "nobody waited");
                drop(guard);
                left.send(()).unwrap();
            });
            entered.recv().unwrap();
            (0..BYTES >> 21).for_each(|block| cpu.touch(BASE + (block << 21), Access::Read));
            // If nobody has waited, the other thread learns it here.
            machine.when_waiting(Box::new(|| ()));
        });
    });
}

#[test]
fn a_set_way_operation_reaches_a_page_being_mapped_in_a_view() {
    let machine = Machine::new(Mood::Lazy, false);
    with_guest(&machine, exact(), false, |guest| {
        let mut waits = Cpu::new(guest, 0, Manners::Relies);
        let mut cpu = Cpu::new(guest, 1, Manners::Relies);
        cpu.on();
        cpu.touch(page(5), Access::Write);
        let (told, done) = machine.hold_maintenance();
        std::thread::scope(|scope| {
            let waits = &mut waits;
            scope.spawn(move || waits.touch(page(5), Access::Read));
            told.recv().unwrap();
            cpu.write(page(5), 1);
            cpu.vcpu.set_way();
            let _ = done.send(());
        });
        assert_eq!(waits.read(page(5)), 1);
    });
}
