//! Stopping a run at any point leaves nothing behind. The test has a process of its own, because it
//! counts the process's threads, file descriptors and memory.

mod common;

use common::kvm_or_skip;
use slat_kvm::guest::Shape;
use slat_kvm::scenario::dirty_log::{Config, run};
use slat_kvm::{Error, Event, Mode, Setting};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MEMORY: u64 = 64 << 20;

fn entries(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

/// Returns the private resident memory in KiB. The size of the address space would not do: the
/// allocator reserves 64 MiB of it for each new thread, and keeps them.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_stop_at_any_event_leaves_no_thread_descriptor_or_memory() {
    if kvm_or_skip().is_none() {
        return;
    }
    let shape = Shape { memory: MEMORY, vcpus: 2, mode: Mode::Legacy, ..Shape::default() };
    let config = Config { shape, iterations: 2, ..Config::default() };
    let before = (entries("/proc/self/task"), entries("/proc/self/fd"));
    let resident_before = resident();
    // Events of a whole run: begin and end of eight phases, then the check of the stamps.
    let all = 2 * (2 + 1 + 2 * 2 + 1) + 1;
    for stop_at in 0..=all {
        let stop = AtomicBool::new(stop_at == 0);
        let mut events = 0;
        let on_event = &mut |event: Event<'_>| {
            events += 1;
            let last = matches!(event, Event::Checking);
            assert_eq!(last, events == all, "event {events}: {event:?}");
            if events == stop_at {
                stop.store(true, Ordering::Relaxed);
            }
        };
        let result = run(&config, Setting { stop: &stop, pin: &[], on_event });
        assert!(matches!(result, Err(Error::Stopped)), "stopped at {stop_at}: {result:?}");
        assert!(events <= stop_at + 1, "went on to event {events} after {stop_at}");
        // The directory of a joined thread may stay in /proc for a short time.
        let patience = Instant::now() + Duration::from_secs(10);
        while entries("/proc/self/task") > before.0 && Instant::now() < patience {
            std::thread::yield_now();
        }
        assert_eq!((entries("/proc/self/task"), entries("/proc/self/fd")), before);
        assert!(resident() < resident_before + (MEMORY >> 11), "guest memory is still there");
    }
}
