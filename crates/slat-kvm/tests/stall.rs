//! Stalls, compared with two known quantities: threads that only take CPU time, and a delay in the
//! fault path. Both tests compare ratios of measurements that are taken in turns.

mod common;

use common::kvm_or_skip;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{UserfaultfdFlags, userfaultfd};
use slat_kvm::guest::Shape;
use slat_kvm::phase::Phase;
use slat_kvm::procfs::Files;
use slat_kvm::scenario::dirty_log::{Config, Report, run};
use slat_kvm::stall::Stalls;
use slat_kvm::work::{Touch, Work};
use slat_kvm::{Backing, Event, Mode, Setting};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// The largest relative error of a stall.
const OFF: f64 = 0.1;
/// Most repetitions of a measurement, in case the machine is busy.
const TRIES: usize = 8;

fn config(memory: u64, iterations: u32) -> Config {
    let shape =
        Shape { memory, vcpus: 1, mode: Mode::Legacy, backing: Backing::Small, ..Shape::default() };
    Config { shape, iterations, work: Work::each_page(Touch::Write), ..Config::default() }
}

fn measured(config: &Config, on_event: &mut dyn FnMut(Event<'_>)) -> Report {
    run(config, Setting { stop: &AtomicBool::new(false), pin: &[], on_event }).unwrap()
}

/// Returns the stalls of each round, and the number of pages that it wrote.
fn rounds(report: &Report) -> Vec<(Stalls, f64)> {
    let vcpus = report.of(Phase::Dirty).map(|round| round.vcpus[0].clone());
    vcpus.map(|vcpu| (vcpu.stalls.unwrap(), vcpu.pages as f64)).collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns the medians over rounds of the stall per page, and of the longest stall.
fn stalled(config: &Config) -> [f64; 2] {
    let rounds = rounds(&measured(config, &mut |_| {}));
    let a_page = rounds.iter().map(|(stalls, pages)| stalls.seconds / pages);
    [a_page.collect(), rounds.iter().map(|(stalls, _)| stalls.longest).collect()].map(median)
}

fn beside_threads_that_spin<R>(act: impl FnOnce() -> R) -> R {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let result = act();
        stop.store(true, Relaxed);
        result
    })
}

#[test]
fn two_spinning_threads_change_neither_a_stall_nor_the_longest() {
    if kvm_or_skip().is_none() {
        return;
    }
    let config = config(32 << 20, 3);
    let mut ratios = [const { Vec::new() }; 2];
    let mut now = [f64::NAN; 2];
    for _ in 0..TRIES {
        for _ in 0..3 {
            let alone = stalled(&config);
            let beside = beside_threads_that_spin(|| stalled(&config));
            (0..2).for_each(|what| ratios[what].push(beside[what] / alone[what]));
        }
        now = ratios.each_ref().map(|ratios| median(ratios.clone()));
        // A time slice of the scheduler is fifty times as long as the longest fault here.
        if (now[0] - 1.0).abs() <= OFF && now[1] < 4.0 {
            return;
        }
    }
    panic!("a page, and the longest: {now:?} times as long beside them; {ratios:?}");
}

/// Delays the first write to each page of a memory of this process, by userfaultfd
/// (admin-guide/mm/userfaultfd.rst, "Write Protect Notifications").
struct Delays {
    uffd: OwnedFd,
    bytes: u64,
}

impl Delays {
    // Request codes of `<linux/userfaultfd.h>`. Each request has a structure of three or four
    // 64-bit words.
    const API: u64 = 0xc018_aa3f;
    const REGISTER: u64 = 0xc020_aa00;
    const WRITE_PROTECT: u64 = 0xc018_aa06;

    /// Write-protects the guest's memory, which is the only mapping of `bytes` bytes.
    fn begin(bytes: u64) -> Self {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let address = |text| u64::from_str_radix(text, 16).unwrap();
        let ranges = maps.lines().filter(|line| line.contains(" rw-p ")).map(|line| {
            let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            (address(start), address(end))
        });
        let found: Vec<_> = ranges.filter(|(start, end)| end - start == bytes).collect();
        let [(start, _)] = found[..] else { panic!("no one mapping of {bytes:#x}: {maps}") };
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // SAFETY: only the guest's memory is registered, and `answer` resolves all of its faults.
        let uffd = unsafe { userfaultfd(flags) }.unwrap();
        let delays = Self { uffd, bytes };
        // Version 0xaa, PAGEFAULT_FLAG_WP, and space for the kernel's features and requests.
        delays.call(Self::API, [0xaa, 1, 0, 0]);
        delays.call(Self::REGISTER, [start, bytes, 2, 0]);
        delays.call(Self::WRITE_PROTECT, [start, bytes, 1, 0]);
        delays
    }

    fn call(&self, request: u64, mut words: [u64; 4]) {
        // SAFETY: the three requests read and write a structure of at most four words. The kernel
        // follows no word as a pointer.
        let done = unsafe { libc::ioctl(self.uffd.as_raw_fd(), request, words.as_mut_ptr()) };
        assert_eq!(done, 0, "{request:#x}: {}", std::io::Error::last_os_error());
    }

    /// Resolves each page's first write after the delay `each`. Returns the seconds of all delays,
    /// including this thread's own waits for a CPU.
    fn answer(&self, each: Duration) -> f64 {
        let page = rustix::param::page_size() as u64;
        let begin = waited();
        let (mut held, mut within) = (Duration::ZERO, 0.0);
        for _ in 0..self.bytes / page {
            let mut event = [0u64; 4];
            let mut ready = [PollFd::new(&self.uffd, PollFlags::IN)];
            let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
            assert_eq!(poll(&mut ready, Some(&minute)).unwrap(), 1, "no page was written");
            // SAFETY: four words are 32 bytes, the size of an event, and any bits are valid words.
            let bytes = unsafe { event.align_to_mut::<u8>() }.1;
            assert_eq!(rustix::io::read(&self.uffd, &mut *bytes).unwrap(), 32);
            let (at, before) = (Instant::now(), waited());
            thread::sleep(each);
            within += waited() - before;
            held += at.elapsed();
            // The third word of a page fault's event is the address.
            self.call(Self::WRITE_PROTECT, [event[2] & !(page - 1), page, 0, 0]);
        }
        held.as_secs_f64() + waited() - begin - within
    }
}

/// Returns the seconds that this thread has waited for a CPU.
fn waited() -> f64 {
    Files::here().waits().map_or(0.0, |(nanoseconds, _)| nanoseconds as f64 / 1e9)
}

#[test]
fn a_delay_in_the_fault_path_is_found_in_the_stall() {
    if kvm_or_skip().is_none() {
        return;
    }
    // SAFETY: no memory is registered with it.
    if let Err(error) = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC) } {
        eprintln!("skipped: userfaultfd: {error}; run as root");
        return;
    }
    // A size that no stack has, because `begin` finds the mapping by its size.
    let config = config(3 << 20, 2);
    let mut found = Vec::new();
    for _ in 0..TRIES {
        let mut known = Vec::new();
        let report = thread::scope(|scope| {
            let mut answers = None;
            let report = measured(&config, &mut |event| {
                if let Event::Begin { phase: Phase::Dirty, iteration: Some(round) } = event {
                    let before: Option<thread::ScopedJoinHandle<'_, f64>> = answers.take();
                    known.extend(before.map(|answers| answers.join().unwrap()));
                    let delays = Delays::begin(config.shape.memory);
                    let each = Duration::from_millis(round.into());
                    answers = Some(scope.spawn(move || delays.answer(each)));
                }
            });
            known.push(answers.unwrap().join().unwrap());
            report
        });
        // Both rounds wake this thread and the vCPU equally often, at a tenth of a millisecond each
        // in a virtual machine. So only the longer delay makes the difference.
        let rounds = rounds(&report);
        let added = known[1] - known[0];
        // On a busy machine the first round may have been delayed as long by others.
        if added <= 0.5 {
            continue;
        }
        found.push((rounds[1].0.seconds - rounds[0].0.seconds) / added);
        if (median(found.clone()) - 1.0).abs() <= OFF {
            return;
        }
    }
    panic!("of each second of delay, in stalls: {found:?}");
}
