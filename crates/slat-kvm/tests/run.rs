//! Whole runs with a small guest, in every mode. No test depends on how long a run takes.

mod common;

use common::kvm_or_skip;
use slat_kvm::guest::Shape;
use slat_kvm::phase::Phase;
use slat_kvm::scenario::dirty_log::{Config, Report, run};
use slat_kvm::work::{Order, Touch, Work};
use slat_kvm::{Backing, Error, Event, HostKvm, Mode, Setting, hugetlb};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const MEMORY: u64 = 32 << 20;

fn shape(mode: Mode, backing: Backing) -> Shape {
    Shape { memory: MEMORY, vcpus: 2, mode, backing, ..Shape::default() }
}

fn config(shape: Shape, share: u8) -> Config {
    let work = Work { share, ..Work::each_page(Touch::Write) };
    Config { shape, iterations: 3, work, ..Config::default() }
}

fn run_telling(config: &Config, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Report, Error> {
    run(config, Setting { stop: &AtomicBool::new(false), pin: &[], on_event })
}

/// Runs a configuration, or returns `None` if the host lacks a mode or huge pages. It repeats the
/// run if the log has pages that were not written: if the host moved a page meanwhile, a read maps
/// it again, writable if possible, and KVM then marks it as dirty.
fn run_if_possible(host: &HostKvm, config: &Config) -> Option<Report> {
    if let Err(error) = config.check(host) {
        eprintln!("skipped: {config:?}: {error}");
        return None;
    }
    let mut report = run_telling(config, &mut |_| {}).unwrap();
    for _ in 0..2 {
        if report.excess() != 0 {
            report = run_telling(config, &mut |_| {}).unwrap();
        }
    }
    Some(report)
}

fn check(config: &Config, report: &Report) {
    let shape = &config.shape;
    let pages = shape.memory / rustix::param::page_size() as u64;
    let manual = shape.mode.is_manual();
    let mut expected = vec![(Phase::Populate, None), (Phase::Warm, None), (Phase::Enable, None)];
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

    let share = u64::from(config.work.share);
    for (dirty, get) in report.of(Phase::Dirty).zip(report.of(Phase::Get)) {
        let log = get.log.expect("a get has a tally");
        assert_eq!(dirty.vcpus.len(), shape.vcpus);
        for vcpu in &dirty.vcpus {
            let each = if shape.overlap { pages } else { pages / shape.vcpus as u64 };
            assert_eq!(vcpu.pages, each);
            let stalls = vcpu.stalls.expect("what is usual is known");
            match config.work.miss {
                Touch::Skip => assert!(stalls.accesses.abs_diff(each * share / 100) <= 1),
                _ => assert_eq!(stalls.accesses, each),
            }
            assert!(stalls.warm > 0.0 && stalls.longest >= stalls.p50, "{stalls:?}");
        }
        let starts_full = shape.mode == Mode::ManualInitiallySet && get.iteration == Some(1);
        assert_eq!(log.in_log, if starts_full { pages } else { log.written });
        if config.work.order == Order::Sequential {
            let written = pages * share / 100;
            assert!(log.written.abs_diff(written) <= shape.vcpus as u64);
        }
    }
    let chunks =
        config.clear_chunk.map_or(1, |chunk| (pages / u64::from(shape.slots)).div_ceil(chunk));
    let calls = chunks * u64::from(shape.slots);
    assert!(report.of(Phase::Clear).all(|clear| clear.calls == calls));
}

#[test]
fn every_mode_logs_exactly_what_was_written() {
    let Some(host) = kvm_or_skip() else { return };
    for mode in Mode::ALL {
        for backing in [Backing::Small, Backing::Thp] {
            for share in [100, 30] {
                let config = config(shape(mode, backing), share);
                let Some(report) = run_if_possible(&host, &config) else { continue };
                check(&config, &report);
            }
        }
    }
}

#[test]
fn random_writes_of_overlapping_vcpus_are_logged_exactly() {
    let Some(host) = kvm_or_skip() else { return };
    let orders = [Order::Random { seed: 3 }, Order::Hot { seed: 4, percent: 10, share: 90 }];
    for mode in Mode::ALL {
        for order in orders {
            for (overlap, miss) in [(false, Touch::Read), (true, Touch::Skip)] {
                let shape = Shape { slots: 4, overlap, ..shape(mode, Backing::Small) };
                let mut config = config(shape, 40);
                config.work = Work { order, miss, ..config.work };
                let Some(report) = run_if_possible(&host, &config) else { continue };
                check(&config, &report);
            }
        }
    }
}

#[test]
fn vcpus_stop_at_a_full_ring_and_lose_nothing() {
    let Some(host) = kvm_or_skip() else { return };
    // Each vCPU writes 4096 pages in each of three rounds, and the host harvests only full rings.
    let config = Config {
        ring_interval: Duration::from_secs(60),
        ..config(shape(Mode::Ring { entries: 1024 }, Backing::Small), 100)
    };
    let Some(report) = run_if_possible(&host, &config) else { return };
    check(&config, &report);
    assert!(report.full_rings >= 2 * 3, "{}", report.full_rings);
}

#[test]
fn hugetlb_memory_is_logged_where_the_host_has_any() {
    let Some(host) = kvm_or_skip() else { return };
    for (backing, memory) in
        [(Backing::Hugetlb(2 << 20), 32 << 20), (Backing::Hugetlb(1 << 30), 2 << 30)]
    {
        let shape = Shape { memory, ..shape(Mode::Manual, backing) };
        let config = config(shape, 50);
        let Some(report) = run_if_possible(&host, &config) else { continue };
        check(&config, &report);
    }
}

#[test]
fn the_log_is_cleared_in_chunks_of_any_allowed_size() {
    let Some(host) = kvm_or_skip() else { return };
    // 8232 pages: the last chunk is no multiple of 64 pages.
    let memory = MEMORY + 40 * rustix::param::page_size() as u64;
    for chunk in [64, 4096, 1 << 40] {
        let shape = Shape { memory, ..shape(Mode::Manual, Backing::Small) };
        let config = Config { clear_chunk: Some(chunk), ..config(shape, 100) };
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
    let config = config(shape(Mode::Legacy, Backing::Small), 100);
    let Some(report) = run_if_possible(&host, &config) else { return };
    for dirty in report.of(Phase::Dirty) {
        for vcpu in &dirty.vcpus {
            let count = |name: &str| vcpu.counters.get(name).copied().unwrap_or(0);
            assert!(count("exits") > 0, "{:?}", vcpu.counters);
            let emulated = count("insn_emulation");
            assert!((emulated as u64) < vcpu.pages / 100, "{emulated} instructions emulated");
        }
    }
    // KVM's count includes all of the memory, in small pages, and the guest's code.
    let populate = report.of(Phase::Populate).next().expect("it is always there");
    if let Some(mapped) = populate.mapped {
        assert!(mapped.size_4k >= report.pages, "{mapped:?}");
    }
}

#[test]
fn huge_pages_are_split_by_logging() {
    let Some(host) = kvm_or_skip() else { return };
    let config = config(shape(Mode::Legacy, Backing::Thp), 100);
    let Some(report) = run_if_possible(&host, &config) else { return };
    let mapped = |phase| report.of(phase).next().and_then(|run| run.mapped);
    let (Some(before), Some(after)) = (mapped(Phase::Populate), mapped(Phase::Dirty)) else {
        eprintln!("skipped: this KVM does not count mapped pages");
        return;
    };
    if report.transparent_huge_bytes != Some(MEMORY) {
        eprintln!("skipped: the kernel found {:?} of huge pages", report.transparent_huge_bytes);
        return;
    }
    assert_eq!(before.size_2m, MEMORY >> 21);
    assert_eq!(after.size_2m, 0);
    assert!(after.size_4k >= report.pages);
}

#[test]
fn each_phases_start_and_end_are_reported_once_and_in_order() {
    if kvm_or_skip().is_none() {
        return;
    }
    let mut told = Vec::new();
    let config = config(shape(Mode::Legacy, Backing::Small), 100);
    let report = run_telling(&config, &mut |event| match event {
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
    let backing = Backing::Hugetlb(2 << 20);
    let needed = hugetlb::free(2 << 20).unwrap_or(0) + 2;
    let memory = needed.next_multiple_of(2) * (2 << 20);
    let config = config(Shape { memory, ..shape(Mode::Legacy, backing) }, 100);
    match run_telling(&config, &mut |_| {}) {
        Err(Error::NoHugePages { needed, .. }) => assert_eq!(needed, memory >> 21),
        other => panic!("{other:?}"),
    }
}
