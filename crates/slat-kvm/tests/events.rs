//! Compares accounts of KVM's tracepoints with guests of the laboratory, which count themselves. If
//! this process may not listen, the tests print the reason.

mod other;

use other::{CHILD, Other, watch};
use rustix::mm::{Advice, madvise};
use slat_kvm::bitmap::DirtyBitmap;
use slat_kvm::guest::{Guest, Shape, Vcpu};
use slat_kvm::procfs::Files;
use slat_kvm::watch::{Debugfs, Events, GuestTotal, Metric, Source, Values, Watch, Which, faults};
use slat_kvm::work::{Touch, Work};
use slat_kvm::{Backing, Mode};
use std::io::Lines;
use std::time::Instant;

/// Pages of a guest that are taken away one by one.
const PAGES: usize = 64;

/// Memory of guests whose faults are timed: 16 huge pages.
const MEMORY: u64 = 32 << 20;

fn shape(mode: Mode) -> Shape {
    Shape { memory: 8 << 20, mode, ..Shape::default() }
}

fn write_all(vcpu: &mut Vcpu) {
    vcpu.load(&Work::each_page(Touch::Write)).unwrap();
    vcpu.run().unwrap();
}

/// The child process that [`Other`] runs.
#[test]
#[ignore = "the other tests run it, in a process of its own"]
fn child() {
    let lines = || std::io::stdin().lines();
    match std::env::var(CHILD).as_deref() {
        Ok("ring") => ring(),
        Ok("advice") => advice(lines()),
        Ok("protected") => protected(lines()),
        Ok("small") => pages(Backing::Small),
        Ok("huge") => pages(Backing::Thp),
        _ => {}
    }
}

/// Reports how many pages its ring named, and how often `KVM_RUN` returned.
fn ring() {
    let Ok((guest, mut vcpus)) = Guest::new(&shape(Mode::Ring { entries: 4096 })) else {
        return println!("SAYS 0 0");
    };
    guest.start_log().unwrap();
    let mut log = DirtyBitmap::new(guest.pages());
    let (mut named, mut runs) = (0, 0);
    // The watch identifies a vCPU's thread by this name.
    std::thread::scope(|scope| {
        let run = move || {
            println!("SAYS 0 0");
            for _ in std::io::stdin().lines() {
                write_all(&mut vcpus[0]);
                runs += 1;
                named += guest.harvest(&mut log).unwrap();
                println!("SAYS {named} {}", runs + guest.full_rings());
            }
        };
        std::thread::Builder::new().name("vcpu0".to_owned()).spawn_scoped(scope, run).unwrap();
    });
}

/// Reports how many pages its guest wrote while a dirty log protected them. Each line of input has
/// the per cent of the pages to write.
fn protected(lines: Lines<std::io::StdinLock<'_>>) {
    let (guest, mut vcpus) = Guest::new(&shape(Mode::Manual)).unwrap();
    write_all(&mut vcpus[0]);
    guest.start_log().unwrap();
    println!("SAYS 0 0");
    let (mut log, mut written) = (DirtyBitmap::new(guest.pages()), 0);
    for line in lines.map_while(Result::ok) {
        let share: u8 = line.parse().unwrap();
        if share == 0 {
            vcpus[0].load(&Work::each_page(Touch::Read)).unwrap();
        } else {
            vcpus[0].load(&Work { share, ..Work::each_page(Touch::Write) }).unwrap();
        }
        vcpus[0].run().unwrap();
        // Protects the written pages again.
        guest.get_dirty_log(&mut log).unwrap();
        written += log.count();
        guest.clear_dirty_log(&log, 0, guest.slot_pages() as u32).unwrap();
        println!("SAYS {written} 0");
    }
}

/// Reports how often it took pages of its guest away, and how many bytes.
fn advice(lines: Lines<std::io::StdinLock<'_>>) {
    let (guest, mut vcpus) = Guest::new(&shape(Mode::Manual)).unwrap();
    println!("SAYS 0 0");
    let page = guest.page_size() as usize;
    let mut taken = 0;
    let begin = guest.memory().host_address() as *mut std::ffi::c_void;
    for line in lines.map_while(Result::ok) {
        write_all(&mut vcpus[0]);
        if line == "merge" {
            let pages = guest.pages();
            (0..pages).for_each(|at| {
                (0..page / 8).for_each(|word| {
                    guest.memory().write(at * page as u64 + 8 * word as u64, 7).unwrap();
                });
            });
            let all = guest.memory().len() as usize;
            // SAFETY: as below; this advice does not change the contents of the pages.
            unsafe { madvise(begin, all, Advice::LinuxMergeable) }.unwrap();
            println!("SAYS {pages} 0");
            continue;
        }
        for at in 0..PAGES {
            // SAFETY: the pages are guest memory, which the guest may read or write at any time. No
            // code of this process keeps a reference into them.
            unsafe { madvise(begin.wrapping_byte_add(at * page), page, Advice::LinuxDontNeed) }
                .unwrap();
            taken += 1;
        }
        println!("SAYS {taken} {}", taken * page);
    }
}

/// Reports how many faults its statistics count, and how many nanoseconds the last pass took, in
/// total and beyond a pass without faults. It also prints the longest step, by the guest's own
/// clock.
fn pages(backing: Backing) {
    let shape = Shape { memory: MEMORY, backing, ..Shape::default() };
    let (guest, mut vcpus) = match Guest::new(&shape) {
        Ok(made) => made,
        Err(error) => return println!("{error}\nSAYS 0 0"),
    };
    let taken = || {
        let stats = &guest.vcpu_stats()[0];
        let mut reading = slat_kvm::stats::Reading::default();
        stats.read(&mut reading).unwrap();
        stats.value(&reading, "pf_taken").unwrap_or(0)
    };
    let mut pass = || {
        let began = Instant::now();
        write_all(&mut vcpus[0]);
        began.elapsed()
    };
    pass();
    let warm = pass();
    guest.set_warm(0, guest.times(0).median().unwrap_or(1).max(1));
    println!("SAYS {} 0", taken());
    for _ in std::io::stdin().lines() {
        let all = guest.memory().len() as usize;
        let begin = guest.memory().host_address() as *mut std::ffi::c_void;
        // SAFETY: as above.
        unsafe { madvise(begin, all, Advice::LinuxDontNeed) }.unwrap();
        guest.take_longest(0);
        let all = pass();
        // The time of a pass without faults is subtracted. If other work uses the CPU, this is no
        // bound.
        let felt = all.saturating_sub(warm);
        let longest = guest.take_longest(0) as f64 / guest.ticks_per_second() * 1e9;
        println!("SAYS {} {} {} {longest:.0}", taken(), all.as_nanos(), felt.as_nanos());
    }
}

/// Starts a guest with dirty rings, which RISC-V's KVM has not.
fn ringed() -> Option<Other> {
    if let Err(error) = Guest::new(&shape(Mode::Ring { entries: 4096 })) {
        eprintln!("skipped: {error}");
        return None;
    }
    Other::start_as("ring")
}

/// Watches the process, with the transition measured, if programs may listen.
fn listening(other: &Other) -> Option<Watch<'static>> {
    let events = |_| {
        let mut events = Events::open();
        events.calibrate();
        events
    };
    let which = Which::Pid(other.pid());
    let watch = Watch::begin(Files::here(), Debugfs::open(), events, which).unwrap();
    let total = watch.guests()[0].total();
    match total.knowledge.sources.get(&Metric::UserExits) {
        Some(Source::Tracepoints) => Some(watch),
        _ => {
            eprintln!("skipped: {}", watch.events().how());
            None
        }
    }
}

fn total<'w>(watch: &'w mut Watch<'_>) -> &'w GuestTotal {
    watch.step();
    watch.guests()[0].total()
}

fn of(values: &Values, metrics: [Metric; 2]) -> [u64; 2] {
    metrics.map(|metric| values[&metric])
}

#[test]
fn ring_pages_and_exits_to_the_vmm_are_counted_exactly() {
    let Some(mut other) = ringed() else { return };
    let Some(mut watch) = listening(&other) else { return other.end() };
    let both = [Metric::PagesLogged, Metric::UserExits];
    for round in 0..3 {
        let truth = other.run();
        if truth[0] == 0 {
            eprintln!("skipped: no dirty rings");
            break;
        }
        let total = total(&mut watch);
        assert_eq!(of(&total.total, both), truth, "{round}");
        let sampled = |metric| total.samples.iter().map(|it| it.guest[&metric]).sum::<u64>();
        assert_eq!(both.map(sampled), truth);
        let vcpu = &total.vcpus[0];
        if vcpu.thread.is_some() {
            assert_eq!(of(&vcpu.total, both), truth, "{vcpu:?}");
        }
    }
    assert_eq!(watch.lost(), 0);
    other.end();
}

#[test]
fn two_watches_at_once_report_the_same() {
    let Some(mut other) = ringed() else { return };
    let Some(mut one) = listening(&other) else { return other.end() };
    let mut two = listening(&other).unwrap();
    let both = [Metric::PagesLogged, Metric::UserExits];
    let truth = other.run();
    let told = [&mut one, &mut two].map(|watch| of(&total(watch).total, both));
    drop(one);
    let after = other.run();
    assert_eq!((told, of(&total(&mut two).total, both)), ([truth; 2], after));
    other.end();
}

/// Runs the same test program in a container. There its threads have other numbers than the
/// kernel's programs see, so perf counts them.
#[test]
fn in_a_container_threads_are_counted_and_times_have_a_reason() {
    let done = std::process::Command::new("unshare")
        .args(["--pid", "--fork", "--mount-proc"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "in_a_container", "--nocapture", "--ignored"])
        .env(CONTAINER, "1")
        .output();
    let Ok(done) = done else { return eprintln!("skipped: no unshare") };
    let said = String::from_utf8_lossy(&done.stderr);
    if !done.status.success() && said.contains("unshare failed") {
        return eprintln!("skipped: {said}");
    }
    assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stdout));
}

const CONTAINER: &str = "SLAT_WATCH_TEST_CONTAINER";

#[test]
#[ignore = "another test runs it, in a container"]
fn in_a_container() {
    if std::env::var_os(CONTAINER).is_none() {
        return;
    }
    let Some(mut other) = ringed() else { return };
    let mut watch = watch(Which::Pid(other.pid())).unwrap();
    let truth = other.run();
    let total = total(&mut watch);
    let Some(Source::PerfCounts) = total.knowledge.sources.get(&Metric::UserExits) else {
        let why = &total.knowledge.unknown[&Metric::UserExits];
        assert!(why.contains("container") || why.contains("root"), "{why}");
        eprintln!("skipped: {why}");
        return other.end();
    };
    assert_eq!(of(&total.total, [Metric::PagesLogged, Metric::UserExits]), truth);
    for metric in [Metric::FaultNs, Metric::Invalidations] {
        let why = &total.knowledge.unknown[&metric];
        assert!(why.contains("container"), "{why}");
    }
    other.end();
}

#[test]
fn ranges_that_a_vmm_invalidates_are_reported_as_its_own() {
    let Some(mut other) = Other::start_as("advice") else { return };
    let Some(mut watch) = listening(&other) else { return other.end() };
    // The first run maps and unmaps more than later ones.
    other.run();
    let both = [Metric::Invalidations, Metric::InvalidatedBytes];
    let before = of(&total(&mut watch).total, both);
    let first = other.run();
    let after = total(&mut watch);
    let truth = [first[0] - PAGES as u64, first[1] / 2];
    let told = of(&after.total, both);
    assert_eq!([told[0] - before[0], told[1] - before[1]], truth);
    assert_eq!(after.total[&Metric::InvalidationsByOthers], 0);
    let by: Vec<u64> = after.invalidated_by.values().copied().collect();
    assert_eq!(by, [told[0]], "{:?}", after.invalidated_by);
    other.end();
}

#[test]
#[ignore = "switches KSM on for a few seconds"]
fn ranges_that_ksm_invalidates_are_reported_with_its_name() {
    let Some(mut other) = Other::start_as("advice") else { return };
    let Some(mut watch) = listening(&other) else { return other.end() };
    let merged = other.told("merge");
    let ksm = |file: &str| format!("/sys/kernel/mm/ksm/{file}");
    let before = ["run", "pages_to_scan"].map(|file| std::fs::read_to_string(ksm(file)).unwrap());
    std::fs::write(ksm("pages_to_scan"), "5000").unwrap();
    std::fs::write(ksm("run"), "1").unwrap();
    let by_ksm = |watch: &mut Watch<'_>| {
        watch.wait(std::time::Duration::from_millis(100));
        total(watch).invalidated_by.get("ksmd").copied().unwrap_or(0)
    };
    let told = (0..100).map(|_| by_ksm(&mut watch)).find(|told| *told >= merged[0] - 1);
    std::fs::write(ksm("run"), &before[0]).unwrap();
    std::fs::write(ksm("pages_to_scan"), &before[1]).unwrap();
    eprintln!("ksmd: {told:?} ranges of {} pages", merged[0]);
    assert!(told.is_some());
    assert!(watch.guests()[0].total().total[&Metric::InvalidationsByOthers] >= merged[0] - 1);
    other.end();
}

/// While a log is enabled, its faults are counted separately from all others.
#[test]
fn writes_to_log_protected_pages_are_counted_exactly_and_apart() {
    let Some(mut other) = Other::start_as("protected") else { return };
    let Some(mut watch) = listening(&other) else { return other.end() };
    // The first run may map more than later ones.
    other.told("100");
    let first = total(&mut watch).total.clone();
    let Some(before) = first.get(&Metric::FaultsProtected) else {
        let why = &watch.guests()[0].total().knowledge.unknown[&Metric::FaultsProtected];
        eprintln!("skipped: {why}");
        return other.end();
    };
    let mut wanted = *before;
    let mut last = other.told("0")[0];
    for share in ["100", "25", "0", "50"] {
        let said = other.told(share)[0];
        wanted += said - last;
        last = said;
        let told = total(&mut watch).total.clone();
        eprintln!("{share} %: {wanted} faults, {} told apart", told[&Metric::FaultsProtected]);
        assert_eq!(told[&Metric::FaultsProtected], wanted);
        assert_eq!(told[&Metric::FaultsWritten], first[&Metric::FaultsWritten]);
        assert!(told[&Metric::ProtectedNs] <= told[&Metric::FaultNs]);
    }
    let stalls = &watch.guests()[0].total().stalls;
    assert_eq!(stalls[&slat_kvm::watch::Why::FaultProtected].count, wanted);
    other.end();
}

/// For hosts on which KVM's tracepoints show exits, as with two-dimensional paging.
#[test]
fn faults_match_the_statistics_and_their_time_fits_the_pass() {
    held_up("small");
}

/// Most of the time in a short fault is the fault's own, and the rest is the transition.
#[test]
#[ignore = "where clocks count instructions, as in an emulated machine that is asked to"]
fn short_faults_with_transitions_match_the_guests_own_times() {
    let [told, felt] = held_up("small").expect("a KVM whose exits are told");
    assert!((told as f64 / felt as f64 - 1.0).abs() < 0.1, "{told} ns of {felt}");
}

/// A fault that clears 2 MiB is long, and the way out of the guest and back is a small part of it.
#[test]
fn long_faults_are_reported_with_the_guests_own_duration() {
    held_up("huge");
}

/// What the watch tells of the last pass with transitions, and what the guest felt, in nanoseconds;
/// nothing if exits are not reported.
fn held_up(kind: &str) -> Option<[u64; 2]> {
    let mut other = Other::start_as(kind)?;
    other.run();
    other.run();
    let alone = other.more[0];
    let Some(mut watch) = listening(&other) else {
        other.end();
        return None;
    };
    other.run();
    let first = faults(&total(&mut watch).stalls);
    let before = other.run();
    let between = faults(&total(&mut watch).stalls);
    let after = other.run();
    let total = total(&mut watch).clone();
    let Some(ns) = total.total.get(&Metric::FaultNs) else {
        for metric in [Metric::FaultNs, Metric::FaultNsWithTransitions] {
            let why = &total.knowledge.unknown[&metric];
            assert!(why.contains("kvm_exit"), "{why}");
            eprintln!("skipped: {why}");
        }
        other.end();
        return None;
    };
    let transition = watch.events().transition().unwrap();
    let all = faults(&total.stalls);
    assert_eq!(*ns, all.total_ns);
    let (count, time) = (all.count - between.count, all.total_ns - between.total_ns);
    let with = time + count * transition;
    let felt = other.more[0];
    eprintln!(
        "{kind}: {count} faults, {} by the statistics; {:.3} ms, with transitions of {transition} \
         ns {:.3} ms, of {:.3} that the guest felt ({:.1} %, {:.1} %), of {:.3} for the pass; \
         {:.3} ms felt while nobody watched; all passes: p50 {:?}, p99 {:?}, longest {:.3} ms",
        after[0] - before[0],
        time as f64 / 1e6,
        with as f64 / 1e6,
        felt as f64 / 1e6,
        100.0 * time as f64 / felt as f64,
        100.0 * with as f64 / felt as f64,
        after[1] as f64 / 1e6,
        alone as f64 / 1e6,
        all.quantile(0.5),
        all.quantile(0.99),
        all.longest_ns as f64 / 1e6,
    );
    // On Arm, KVM does not count faults.
    match after[0] - before[0] {
        0 => assert!(count > 0),
        taken => assert_eq!(count, taken),
    }
    assert!(between.count > first.count && all.count > between.count);
    // A pass has this time, the way out and back, and the guest's own work.
    assert!(time <= after[1], "{time} {after:?}");
    assert!(all.longest_ns <= all.total_ns && all.longest_ns > 0);
    let told = total.total[&Metric::FaultNsWithTransitions];
    assert_eq!(told, all.total_ns + all.count * transition);
    assert_eq!(watch.lost(), 0);
    other.end();
    Some([with, felt])
}
