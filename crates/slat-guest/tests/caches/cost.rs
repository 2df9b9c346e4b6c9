//! What is maintained, and by which thread.

use crate::model::{Machine, Mood};
use crate::vm::{BASE, BYTES, Cpu, Manners, config, page, with_guest};
use slat::Access;
use slat_guest::{CachePolicy, Flush, Worker};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;

const PAGES: u64 = 37;

#[test]
fn exact_maintains_twice_only_memory_touched_past_the_caches() {
    let machine = Machine::new(Mood::Lazy, false);
    with_guest(&machine, config(CachePolicy::Exact), false, |guest| {
        let mut first = Cpu::new(guest, 0, Manners::Relies);
        let mut second = Cpu::new(guest, 1, Manners::Relies);
        // The first maps all memory in the shared tables, in blocks.
        first.on();
        (0..BYTES >> 21).for_each(|block| first.touch(BASE + (block << 21), Access::Write));
        assert_eq!(machine.maintained(), BYTES);
        assert_eq!(guest.stats().totals.mapped_bytes, BYTES);
        for round in 1..4 {
            let before = machine.maintained();
            (0..PAGES).for_each(|number| second.write(page(number * 7), round));
            (0..PAGES).for_each(|number| assert_eq!(second.read(page(number * 7)), round));
            assert_eq!(machine.maintained() - before, PAGES * 4096);
            let switch = second.vcpu.set_caches(true);
            assert!(switch.root_changed && !switch.trap);
            assert_eq!(switch.maintained, PAGES * 4096);
            assert_eq!(machine.maintained() - before, 2 * PAGES * 4096);
            let switch = second.vcpu.set_caches(false);
            assert!(switch.root_changed && switch.trap);
            assert_eq!(switch.maintained, 0);
            let totals = guest.stats().totals;
            assert_eq!(totals.touched_bytes, round * PAGES * 4096);
            assert_eq!(totals.flushed_bytes, round * PAGES * 4096);
            assert_eq!((totals.flushes, totals.mapped_bytes), (0, BYTES));
        }
    });
}

#[test]
fn a_switch_that_touched_nothing_costs_nothing_under_exact() {
    let machine = Machine::new(Mood::Lazy, false);
    with_guest(&machine, config(CachePolicy::Exact), false, |guest| {
        let mut cpu = Cpu::new(guest, 0, Manners::Relies);
        for _ in 0..3 {
            assert_eq!(cpu.vcpu.set_caches(true).maintained, 0);
            assert_eq!(cpu.vcpu.set_caches(false).maintained, 0);
        }
        assert_eq!(machine.maintained(), 0);
    });
}

#[test]
fn every_maintains_all_mapped_memory_at_each_switch() {
    let machine = Machine::new(Mood::Lazy, false);
    with_guest(&machine, config(CachePolicy::Every), false, |guest| {
        let mut cpu = Cpu::new(guest, 3, Manners::Relies);
        (0..4).for_each(|block| cpu.touch(BASE + (block << 21), Access::Write));
        for switches in 1..4 {
            let switch = cpu.vcpu.set_caches(switches % 2 == 1);
            assert!(!switch.root_changed);
            assert_eq!(switch.maintained, 8 << 20);
            // A second report of the same state is no switch.
            assert_eq!(cpu.vcpu.set_caches(switches % 2 == 1).maintained, 0);
            let stats = guest.stats();
            assert_eq!(stats.totals.flushes, switches);
            assert_eq!(stats.totals.flushed_bytes, switches * (8 << 20));
            let spent = stats.vcpus[3].caches;
            assert_eq!(spent.count, switches);
            assert!(spent.ticks >= switches);
        }
    });
}

#[test]
fn only_the_first_set_way_operation_before_a_switch_flushes() {
    let machine = Machine::new(Mood::Lazy, false);
    with_guest(&machine, config(CachePolicy::Every), false, |guest| {
        let mut cpu = Cpu::new(guest, 1, Manners::Relies);
        cpu.touch(BASE, Access::Write);
        assert_eq!(cpu.vcpu.set_way().maintained, 0, "off: it is flushed as it switches on");
        assert!(!cpu.vcpu.set_caches(true).trap);
        let first = cpu.vcpu.set_way();
        assert_eq!((first.maintained, first.trap), (2 << 20, true));
        assert_eq!(cpu.vcpu.set_way().maintained, 0);
        assert!(!cpu.vcpu.set_caches(true).trap, "on as before: no more traps");
        assert_eq!(cpu.vcpu.set_way().maintained, 2 << 20);
    });
}

#[test]
fn workers_share_a_flush_and_maintain_each_byte_once() {
    let machine = Machine::new(Mood::Lazy, false);
    with_guest(&machine, config(CachePolicy::Every), false, |guest| {
        let mut cpu = Cpu::new(guest, 0, Manners::Relies);
        (0..BYTES >> 21).for_each(|block| cpu.touch(BASE + (block << 21), Access::Write));
        let before = machine.maintained();
        let flush = Flush::new(cpu.worker());
        let bytes: u64 = std::thread::scope(|scope| {
            let run = || {
                let mut worker = Worker::new(guest).unwrap();
                let bytes = flush.run(&mut worker).unwrap();
                flush.finish(&mut worker).unwrap();
                assert!(flush.is_done());
                bytes
            };
            let helpers = [(); 3].map(|()| scope.spawn(run));
            helpers.map(|helper| helper.join().unwrap()).into_iter().sum()
        });
        assert_eq!((bytes, flush.bytes()), (BYTES, BYTES));
        assert_eq!(machine.maintained() - before, BYTES);
    });
}

#[test]
fn a_thread_that_waits_for_a_flush_calls_the_hosts_wait() {
    let machine = Machine::new(Mood::Lazy, false);
    with_guest(&machine, config(CachePolicy::Every), false, |guest| {
        let mut cpu = Cpu::new(guest, 0, Manners::Relies);
        cpu.touch(BASE, Access::Write);
        let flush = Flush::new(cpu.worker());
        let ((inside, stopped), (go, gone)) = (channel(), channel());
        machine.after_maintenance(Box::new(move || {
            inside.send(()).unwrap();
            gone.recv().unwrap();
        }));
        // A thread that spins without `Host::wait` hangs the test.
        machine.when_waiting(Box::new(move || go.send(()).unwrap()));
        std::thread::scope(|scope| {
            scope.spawn(|| flush.run(&mut Worker::new(guest).unwrap()).unwrap());
            stopped.recv().unwrap();
            flush.finish(cpu.worker()).unwrap();
        });
        assert_eq!((flush.is_done(), flush.bytes()), (true, 2 << 20));
    });
}

#[test]
fn a_vcpu_that_flushes_is_helped() {
    let machine = Machine::new(Mood::Lazy, false);
    with_guest(&machine, config(CachePolicy::Every), false, |guest| {
        let mut cpu = Cpu::new(guest, 0, Manners::Relies);
        (0..BYTES >> 21).for_each(|block| cpu.touch(BASE + (block << 21), Access::Write));
        let before = machine.maintained();
        let (stop, helped, mut switches) = (AtomicBool::new(false), AtomicU64::new(0), 0);
        let mut all = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut worker = Worker::new(guest).unwrap();
                while !stop.load(Ordering::Acquire) {
                    helped.fetch_add(worker.help_flush(), Ordering::AcqRel);
                }
            });
            while helped.load(Ordering::Acquire) == 0 && switches < 100_000 {
                switches += 1;
                all += cpu.vcpu.set_caches(switches % 2 == 1).maintained;
            }
            stop.store(true, Ordering::Release);
        });
        assert_ne!(helped.into_inner(), 0);
        assert_eq!((all, machine.maintained() - before), (switches * BYTES, switches * BYTES));
    });
}

#[test]
fn a_thread_that_finishes_a_flush_waits_for_threads_that_help() {
    let machine = Machine::new(Mood::Lazy, false);
    with_guest(&machine, config(CachePolicy::Every), false, |guest| {
        let mut cpu = Cpu::new(guest, 0, Manners::Relies);
        (0..BYTES >> 21).for_each(|block| cpu.touch(BASE + (block << 21), Access::Write));
        let flush = Flush::new(cpu.worker());
        let (helps, finished) = machine.hold_maintenance();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                flush.run(&mut Worker::new(guest).unwrap()).unwrap();
            });
            helps.recv().unwrap();
            flush.finish(cpu.worker()).unwrap();
            assert!(flush.is_done());
            let _ = finished.send(());
        });
        assert_eq!(flush.bytes(), BYTES);
    });
}
