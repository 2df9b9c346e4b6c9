//! Whole runs, on a small guest, in every mode. No test looks at a time.

mod common;

use common::kvm_or_skip;
use slat_kvm::dirty_log::{Config, Event, Mode, Phase, Report, run};
use slat_kvm::{Backing, Error, HostKvm, hugetlb};
use std::sync::atomic::AtomicBool;

const SMALL: Config = Config {
    memory: 32 << 20,
    vcpus: 2,
    iterations: 3,
    backing: Backing::Small,
    mode: Mode::Legacy,
    clear_chunk: None,
    write_share: 100,
};

/// Runs what the host can do: nothing if it lacks a mode or has no huge pages to give.
fn run_if_possible(host: &HostKvm, config: &Config) -> Option<Report> {
    if let Err(error) = config.check(host) {
        eprintln!("skipped: {config:?}: {error}");
        return None;
    }
    Some(run(config, &AtomicBool::new(false), &mut |_| {}).unwrap())
}

fn check(config: &Config, report: &Report) {
    let pages = config.memory / 4096;
    let manual = config.mode.is_manual();
    let mut expected = vec![(Phase::Populate, None), (Phase::Enable, None)];
    for round in (1..=config.iterations).map(Some) {
        expected.extend([(Phase::Dirty, round), (Phase::Get, round)]);
        expected.extend(manual.then_some((Phase::Clear, round)));
    }
    expected.push((Phase::Disable, None));
    let order: Vec<_> = report.phases.iter().map(|run| (run.phase, run.iteration)).collect();
    assert_eq!(order, expected);

    assert_eq!(report.pages, pages);
    assert_eq!(report.stamps_checked, pages);
    assert_eq!(report.left_in_log, 0, "left in the log after it was cleared: {config:?}");
    assert_eq!(report.excess(), 0, "pages in the log that nobody wrote: {config:?}");

    let share = u64::from(config.write_share);
    for (dirty, get) in report.of(Phase::Dirty).zip(report.of(Phase::Get)) {
        let log = get.log.expect("a get has a tally");
        assert_eq!(dirty.vcpus.len(), config.vcpus);
        assert_eq!(log.written, dirty.vcpus.iter().map(|vcpu| vcpu.pages).sum::<u64>());
        assert!(log.written.abs_diff(pages * share / 100) <= config.vcpus as u64);
        let starts_full = config.mode == Mode::ManualInitiallySet && get.iteration == Some(1);
        assert_eq!(log.in_log, if starts_full { pages } else { log.written });
    }
    let chunks = config.clear_chunk.map_or(1, |chunk| pages.div_ceil(chunk));
    assert!(report.of(Phase::Clear).all(|clear| clear.calls == chunks));
}

#[test]
fn every_mode_logs_exactly_what_was_written() {
    let Some(host) = kvm_or_skip() else { return };
    for mode in Mode::ALL {
        for backing in [Backing::Small, Backing::Thp] {
            for write_share in [100, 30] {
                let config = Config { mode, backing, write_share, ..SMALL };
                let Some(report) = run_if_possible(&host, &config) else { continue };
                check(&config, &report);
            }
        }
    }
}

#[test]
fn hugetlb_memory_is_logged_where_the_host_has_any() {
    let Some(host) = kvm_or_skip() else { return };
    for (backing, memory) in [(Backing::Hugetlb2M, 32 << 20), (Backing::Hugetlb1G, 2 << 30)] {
        let config = Config { backing, memory, mode: Mode::Manual, write_share: 50, ..SMALL };
        let Some(report) = run_if_possible(&host, &config) else { continue };
        check(&config, &report);
    }
}

#[test]
fn the_log_is_cleared_in_chunks_of_any_allowed_size() {
    let Some(host) = kvm_or_skip() else { return };
    // 8232 pages: the last chunk is none of 64 pages.
    let memory = SMALL.memory + 40 * 4096;
    for chunk in [64, 4096, 1 << 40] {
        let config = Config { mode: Mode::Manual, memory, clear_chunk: Some(chunk), ..SMALL };
        let Some(report) = run_if_possible(&host, &config) else { continue };
        check(&config, &report);
    }
}

#[test]
fn guest_code_runs_natively_and_kernel_counters_say_so() {
    let Some(host) = kvm_or_skip() else { return };
    if !host.binary_stats {
        eprintln!("skipped: this KVM has no binary statistics");
        return;
    }
    let Some(report) = run_if_possible(&host, &SMALL) else { return };
    for dirty in report.of(Phase::Dirty) {
        for vcpu in &dirty.vcpus {
            let count = |name: &str| vcpu.counters.get(name).copied().unwrap_or(0);
            assert!(count("exits") > 0, "{:?}", vcpu.counters);
            let emulated = count("insn_emulation");
            assert!((emulated as u64) < vcpu.pages / 100, "{emulated} instructions emulated");
        }
    }
    // KVM counts what it maps: all of the memory, in small pages, and the guest's code.
    let populate = report.of(Phase::Populate).next().expect("it is always there");
    if let Some(mapped) = populate.mapped {
        assert!(mapped.size_4k >= report.pages, "{mapped:?}");
    }
}

#[test]
fn huge_pages_are_split_by_logging() {
    let Some(host) = kvm_or_skip() else { return };
    let config = Config { backing: Backing::Thp, mode: Mode::Legacy, ..SMALL };
    let Some(report) = run_if_possible(&host, &config) else { return };
    let mapped = |phase| report.of(phase).next().and_then(|run| run.mapped);
    let (Some(before), Some(after)) = (mapped(Phase::Populate), mapped(Phase::Dirty)) else {
        eprintln!("skipped: this KVM does not count mapped pages");
        return;
    };
    if report.transparent_huge_bytes != Some(config.memory) {
        eprintln!("skipped: the kernel found {:?} of huge pages", report.transparent_huge_bytes);
        return;
    }
    assert_eq!(before.size_2m, config.memory >> 21);
    assert_eq!(after.size_2m, 0);
    assert!(after.size_4k >= report.pages);
}

#[test]
fn each_end_of_a_phase_is_told_once_and_in_order() {
    if kvm_or_skip().is_none() {
        return;
    }
    let mut told = Vec::new();
    let report = run(&SMALL, &AtomicBool::new(false), &mut |event| match event {
        Event::Begin { phase, iteration } => told.push((phase, iteration, false)),
        Event::End(run) => {
            assert_eq!(run.log.is_some(), run.phase == Phase::Get);
            told.push((run.phase, run.iteration, true));
        }
        _ => {}
    })
    .unwrap();
    let expected: Vec<_> = report
        .phases
        .iter()
        .flat_map(|run| [false, true].map(|end| (run.phase, run.iteration, end)))
        .collect();
    assert_eq!(told, expected);
}

#[test]
fn more_huge_pages_than_are_free_is_an_error_with_a_number() {
    if kvm_or_skip().is_none() {
        return;
    }
    let backing = Backing::Hugetlb2M;
    let free = hugetlb::available().into_iter().find(|pool| pool.page_size == 2 << 20);
    let needed = free.map_or(0, |pool| pool.free) + 2;
    let memory = needed.next_multiple_of(2) * (2 << 20);
    let config = Config { memory, backing, ..SMALL };
    match run(&config, &AtomicBool::new(false), &mut |_| {}) {
        Err(Error::NoHugePages { needed, .. }) => assert_eq!(needed, memory >> 21),
        other => panic!("{other:?}"),
    }
}
