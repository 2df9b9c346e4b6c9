//! vCPUs that run while their log is fetched, and migrations. No test depends on how long a run
//! takes.

mod common;

use common::kvm_or_skip;
use slat_kvm::guest::Shape;
use slat_kvm::phase::Phase;
use slat_kvm::scenario::{live, memory_stress, memslot, migrate, populate};
use slat_kvm::work::{Order, Touch, Work};
use slat_kvm::{Backing, Error, HostKvm, Mode, Setting};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const MEMORY: u64 = 16 << 20;
static GO_ON: AtomicBool = AtomicBool::new(false);

fn shape(mode: Mode) -> Shape {
    Shape { memory: MEMORY, vcpus: 2, mode, ..Shape::default() }
}

fn works() -> [Work; 3] {
    let all = Work { per_second: Some(20_000.0), ..Work::each_page(Touch::Write) };
    let hot = Order::Hot { seed: 1, percent: 10, share: 90 };
    [
        all,
        Work { order: Order::Random { seed: 2 }, per_second: None, ..all },
        Work { order: hot, share: 30, miss: Touch::Read, ..all },
    ]
}

fn skip_unless(host: &HostKvm, result: Result<(), Error>) -> bool {
    let _ = host;
    result.map_err(|error| eprintln!("skipped: {error}")).is_err()
}

#[test]
fn a_log_fetched_from_running_vcpus_has_exactly_written_pages() {
    let Some(host) = kvm_or_skip() else { return };
    for mode in [Mode::Legacy, Mode::Manual, Mode::ManualInitiallySet, Mode::Ring { entries: 1024 }]
    {
        for (slots, overlap, work) in [(1, false, 0), (1, true, 1), (4, false, 2)] {
            let mut config = live::Config {
                shape: Shape { slots, overlap, ..shape(mode) },
                work: works()[work],
                duration: Duration::from_millis(300),
                interval: Duration::from_millis(20),
                clear_chunk: None,
            };
            if skip_unless(&host, config.check(&host)) {
                continue;
            }
            let setting = Setting { stop: &GO_ON, pin: &[], on_event: &mut |_| {} };
            let mut report = live::run(&config, setting).unwrap();
            // On a machine that others use, vCPUs may do little in that time.
            while (report.verified.writes <= 100 || report.rounds < 3)
                && config.duration < Duration::from_secs(20)
            {
                config.duration *= 2;
                let setting = Setting { stop: &GO_ON, pin: &[], on_event: &mut |_| {} };
                report = live::run(&config, setting).unwrap();
            }
            assert!(report.rounds >= 3 && report.named > 0, "{report:?}");
            assert!(report.verified.writes > 100, "{:?}", report.verified);
            assert_eq!(report.verified.excess, 0, "{mode}, {:?}", config.work);
            let phases: Vec<_> = report.phases.iter().map(|run| run.phase).collect();
            assert_eq!(phases, [Phase::Populate, Phase::Warm, Phase::Baseline, Phase::Run]);
            let steps: u64 = report.samples.iter().map(|sample| sample.steps).sum();
            let done: u64 = report.phases[3].vcpus.iter().map(|vcpu| vcpu.pages).sum();
            assert!(0 < steps && steps <= done, "{steps} of {done} steps sampled");
        }
    }
}

#[test]
fn a_migrated_memory_is_the_guests_in_each_mode() {
    let Some(host) = kvm_or_skip() else { return };
    for mode in Mode::ALL {
        for work in works() {
            let config = migrate::Config {
                shape: shape(mode),
                work,
                link: 400e6,
                max_downtime: Duration::from_millis(20),
                max_rounds: 4,
                baseline: Duration::from_millis(100),
                clear_chunk: None,
            };
            if skip_unless(&host, config.check(&host)) {
                continue;
            }
            let setting = Setting { stop: &GO_ON, pin: &[], on_event: &mut |_| {} };
            let report = migrate::run(&config, setting).unwrap();
            assert_eq!(report.compared, report.config.shape.memory / 4096);
            assert_eq!(report.passes[0].pages, report.compared, "all is copied first");
            assert!(report.passes.len() <= 4 && (report.converged || report.passes.len() == 4));
            let copied = report.passes.iter().map(|pass| pass.pages).sum::<u64>();
            assert_eq!(report.bytes, (copied + report.downtime_pages) * 4096);
            // The link also sets a least time for the pages copied.
            assert!(report.seconds >= report.bytes as f64 / 400e6, "{report:?}");
        }
    }
}

#[test]
fn a_guest_faster_than_the_link_is_copied_without_converging() {
    let Some(host) = kvm_or_skip() else { return };
    let config = migrate::Config {
        shape: shape(Mode::Manual),
        work: works()[1],
        link: 20e6,
        max_downtime: Duration::from_millis(1),
        max_rounds: 2,
        baseline: Duration::from_millis(50),
        clear_chunk: Some(64),
    };
    if skip_unless(&host, config.check(&host)) {
        return;
    }
    let setting = Setting { stop: &GO_ON, pin: &[], on_event: &mut |_| {} };
    let report = migrate::run(&config, setting).unwrap();
    assert!(!report.converged);
    assert_eq!(report.passes.len(), 2);
    assert!(report.downtime > 0.001 && report.downtime_pages > 0);
}

#[test]
fn intervals_that_cannot_be_are_refused() {
    let Some(host) = kvm_or_skip() else { return };
    let config = live::Config {
        shape: shape(Mode::Legacy),
        work: works()[0],
        duration: Duration::from_secs(1),
        interval: Duration::ZERO,
        clear_chunk: None,
    };
    let refused = |config: live::Config| config.check(&host).unwrap_err().to_string();
    assert!(refused(config.clone()).contains("above 0"));
    let longer = Duration::from_secs(2);
    assert!(refused(live::Config { interval: longer, ..config.clone() }).contains("at most"));
    let shape = Shape { memory: 1 << 36, ..config.shape.clone() };
    let many = live::Config { shape, interval: Duration::from_millis(1), ..config };
    assert!(refused(many).contains("more logs than can be kept"));
}

#[test]
fn memslots_change_under_running_vcpus_and_memory_stays_intact() {
    let Some(host) = kvm_or_skip() else { return };
    for (slot_zap_all, slots, overlap, work) in
        [(true, 1, false, 0), (true, 4, true, 1), (false, 2, false, 2)]
    {
        let config = memslot::Config {
            shape: Shape { slots, overlap, slot_zap_all, ..shape(Mode::Legacy) },
            work: works()[work],
            slot: MEMORY / 2,
            iterations: 10,
            delay: Duration::from_millis(2),
        };
        if skip_unless(&host, config.check(&host)) {
            continue;
        }
        let setting = Setting { stop: &GO_ON, pin: &[], on_event: &mut |_| {} };
        let report = memslot::run(&config, setting).unwrap();
        for calls in [report.add, report.shift, report.delete] {
            assert_eq!(calls.count, 10);
            assert!(calls.longest > 0.0 && calls.longest <= calls.seconds, "{calls:?}");
        }
        let phases: Vec<_> = report.phases.iter().map(|run| run.phase).collect();
        let run = [Phase::Populate, Phase::Warm, Phase::Baseline, Phase::Run, Phase::Read];
        assert_eq!(phases, run);
        assert!(report.phases[3].vcpus.iter().all(|vcpu| vcpu.pages > 100));
    }
}

#[test]
fn slots_that_cannot_be_are_refused() {
    let Some(host) = kvm_or_skip() else { return };
    let config = memslot::Config {
        shape: shape(Mode::Legacy),
        work: works()[0],
        slot: MEMORY,
        iterations: 1,
        delay: Duration::ZERO,
    };
    assert!(config.check(&host).is_ok());
    let refused = |config: memslot::Config| config.check(&host).unwrap_err().to_string();
    for slot in [0, 4095, 2 * MEMORY] {
        assert!(refused(memslot::Config { slot, ..config.clone() }).contains("slot"));
    }
    assert!(refused(memslot::Config { iterations: 0, ..config.clone() }).contains("above 0"));
    let shape = Shape { slots: host.max_memslots as u32 - 1, ..config.shape.clone() };
    assert!(refused(memslot::Config { shape, ..config }).contains("free"));
}

#[test]
fn a_guests_memory_lies_on_the_nodes_that_it_is_bound_to() {
    let Some(host) = kvm_or_skip() else { return };
    for node in slat_kvm::numa::nodes() {
        let shape = Shape { nodes: vec![node], ..shape(Mode::Legacy) };
        if skip_unless(&host, shape.check(&host)) {
            continue;
        }
        let pin = slat_kvm::numa::cpus(node).unwrap_or_default();
        let setting = Setting { stop: &GO_ON, pin: &pin, on_event: &mut |_| {} };
        let phases = populate::run(&shape, setting).unwrap();
        // Where the kernel reports the placement, all of the memory is on the node.
        assert!(phases[0].nodes.iter().all(|it| it == (&node, &MEMORY)), "{:?}", phases[0].nodes);
    }
}

#[test]
fn filled_memory_is_as_written_on_every_backing() {
    let Some(host) = kvm_or_skip() else { return };
    for backing in Backing::ALL {
        let memory = MEMORY.max(2 * backing.page_size());
        let shape = Shape { backing, memory, slots: 2, ..shape(Mode::Legacy) };
        if skip_unless(&host, shape.check(&host)) {
            continue;
        }
        let setting = Setting { stop: &GO_ON, pin: &[0], on_event: &mut |_| {} };
        let phases = memory_stress::run(&shape, 2, setting).unwrap();
        assert_eq!(phases.len(), 2 + 2 * 4, "{backing}");
    }
}
