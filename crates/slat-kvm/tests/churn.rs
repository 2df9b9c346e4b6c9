//! Guests that use up accounts, beside a guest whose events have to be counted all the same. If
//! this process may not listen, the tests print the reason.

mod other;

use other::{CHILD, Other, watch};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use slat_kvm::watch::{GuestTotal, Metric, Source, Watch, Which};
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// Threads that run a vCPU one after the other: more than a room has accounts.
const THREADS: u64 = 1200;
/// Places that are unmapped: more than there is room for.
const PLACES: u64 = 9000;
/// Events of the guest beside it.
const EVENTS: u64 = 1000;

/// The child process that [`Other`] runs. Each line of input has what it does, and how often; it
/// reports its exits to the VMM and the ranges that it unmapped.
#[test]
#[ignore = "the other tests run it, in a process of its own"]
fn child() {
    if std::env::var(CHILD).as_deref() != Ok("churn") {
        return;
    }
    let kvm = kvm_ioctls::Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    let mut vcpu = vm.create_vcpu(0).unwrap();
    vcpu.set_kvm_immediate_exit(1);
    let mut run = || assert!(vcpu.run().is_err_and(|error| error.errno() == libc::EINTR));
    println!("SAYS 0 0");
    let [mut exits, mut ranges] = [0, 0];
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let (what, times) = line.split_once(' ').unwrap();
        let times: u64 = times.parse().unwrap();
        match what {
            "threads" => (0..times).for_each(|_| {
                std::thread::scope(|scope| scope.spawn(&mut run).join().unwrap());
                exits += 1;
            }),
            "runs" => (0..times).for_each(|_| {
                run();
                exits += 1;
            }),
            _ => (0..times).for_each(|place| {
                unmap(place);
                ranges += 1;
            }),
        }
        println!("SAYS {exits} {ranges}");
    }
}

/// Maps a page at a place, writes to it, and unmaps it.
fn unmap(place: u64) {
    let at = (0x2000_0000_0000 + (place << 26)) as *mut c_void;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: the call replaces no mapping, and nothing else uses what it maps here; one page is
    // the least that is mapped.
    unsafe {
        let page = mmap_anonymous(at, 4096, ProtFlags::READ | ProtFlags::WRITE, flags).unwrap();
        page.cast::<u8>().write_volatile(1);
        munmap(page, 4096).unwrap();
    }
}

/// Guests of one test that end within a sample of another may have unmapped memory of any guest.
static ALONE: Mutex<()> = Mutex::new(());

/// Starts both guests, and watches; `None` if events of the second are not received by programs.
fn start(which: impl Fn(i32) -> Which) -> Option<(Other, Other, Watch<'static>)> {
    if !cfg!(target_arch = "x86_64") {
        eprintln!("skipped: a vCPU without registers runs on x86 only");
        return None;
    }
    let (bad, good) = (Other::start_as("churn")?, Other::start_as("churn")?);
    let watch = watch(which(good.pid())).unwrap();
    if total(&watch, &good).knowledge.sources.get(&Metric::Invalidations)
        != Some(&Source::Tracepoints)
    {
        eprintln!("skipped: {}", watch.events().how());
        [bad, good].into_iter().for_each(Other::end);
        return None;
    }
    Some((bad, good, watch))
}

fn total<'w>(watch: &'w Watch<'_>, of: &Other) -> &'w GuestTotal {
    let mut totals = watch.guests().iter().map(|guest| guest.total());
    totals.find(|total| total.pid == of.pid()).unwrap()
}

/// Checks that so many ranges were counted, or that a process of this host which is not `bad` made
/// them unknown meanwhile.
fn unmapped(total: &GuestTotal, ranges: u64, bad: &Other) {
    match total.knowledge.unknown.get(&Metric::Invalidations) {
        Some(why) => assert!(!why.contains(&format!("process {} ", bad.pid())), "{why}"),
        None => assert_eq!(total.total.get(&Metric::Invalidations), Some(&ranges)),
    }
}

#[test]
fn a_guest_that_changes_threads_hides_no_event_of_another() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((mut bad, mut good, mut watch)) = start(|_| Which::All) else { return };
    let mut truth = [0; 2];
    for _ in 0..3 {
        truth =
            [bad.told(&format!("threads {THREADS}"))[0], good.told(&format!("runs {EVENTS}"))[0]];
        watch.step();
    }
    let told = [&bad, &good].map(|of| total(&watch, of).total.get(&Metric::UserExits).copied());
    assert_eq!(told, truth.map(Some));
    assert_eq!(truth[1], 3 * EVENTS);
    // Which of the threads ran the vCPU is not known for all.
    assert!(watch.lost() > 0);
    let vcpu = &total(&watch, &bad).vcpus[0].total;
    assert_eq!(vcpu.get(&Metric::UserExits), None, "{vcpu:?}");
    [bad, good].into_iter().for_each(Other::end);
}

#[test]
fn guests_that_are_not_watched_fill_no_account() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((mut bad, mut good, mut watch)) = start(Which::Pid) else { return };
    bad.told(&format!("threads {THREADS}"));
    bad.told(&format!("places {PLACES}"));
    good.told(&format!("runs {EVENTS}"));
    good.told(&format!("places {EVENTS}"));
    watch.step();
    let total = total(&watch, &good);
    assert_eq!(total.total.get(&Metric::UserExits), Some(&EVENTS));
    unmapped(total, EVENTS, &bad);
    assert_eq!(watch.lost(), 0);
    [bad, good].into_iter().for_each(Other::end);
}

#[test]
fn a_guest_that_unmaps_many_places_hides_no_range_of_another() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((mut bad, mut good, mut watch)) = start(|_| Which::All) else { return };
    bad.told(&format!("places {PLACES}"));
    good.told(&format!("places {EVENTS}"));
    watch.step();
    unmapped(total(&watch, &bad), PLACES, &bad);
    unmapped(total(&watch, &good), EVENTS, &bad);
    [bad, good].into_iter().for_each(Other::end);
}
