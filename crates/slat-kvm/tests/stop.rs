//! Stopping a run at any point leaves nothing behind. Alone in its process, whose threads, file
//! descriptors and memory it counts.

mod common;

use common::kvm_or_skip;
use slat_kvm::dirty_log::{Config, Event, Mode, run};
use slat_kvm::{Backing, Error};
use std::sync::atomic::{AtomicBool, Ordering};

const MEMORY: u64 = 64 << 20;

fn entries(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

/// Private memory in KiB that is really there. Not the address space: the allocator reserves
/// 64 MiB of that for each new thread, and keeps it.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn stopping_anywhere_leaves_no_thread_no_descriptor_and_no_memory() {
    if kvm_or_skip().is_none() {
        return;
    }
    let config = Config {
        memory: MEMORY,
        vcpus: 2,
        iterations: 2,
        backing: Backing::Small,
        mode: Mode::Legacy,
        ..Config::default()
    };
    let before = (entries("/proc/self/task"), entries("/proc/self/fd"));
    let resident_before = resident();
    // Events until the end: begin and end of eight phases, then the check of the stamps.
    let all = 2 * (1 + 1 + 2 * 2 + 1) + 1;
    for stop_at in 0..=all {
        let stop = AtomicBool::new(stop_at == 0);
        let mut events = 0;
        let result = run(&config, &stop, &mut |event| {
            events += 1;
            let last = matches!(event, Event::Checking);
            assert_eq!(last, events == all, "event {events}: {event:?}");
            if events == stop_at {
                stop.store(true, Ordering::Relaxed);
            }
        });
        assert!(matches!(result, Err(Error::Stopped)), "stopped at {stop_at}: {result:?}");
        assert!(events <= stop_at + 1, "went on to event {events} after {stop_at}");
        assert_eq!((entries("/proc/self/task"), entries("/proc/self/fd")), before);
        assert!(resident() < resident_before + (MEMORY >> 11), "guest memory is still there");
    }
}
