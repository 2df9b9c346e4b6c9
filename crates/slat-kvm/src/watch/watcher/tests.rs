//! Made-up hosts, whose guests start, change and end.

use super::*;
use crate::watch::events::{Accounts, Notices, Own, Place, Thread, USER_EXIT};
use crate::watch::find::tests::FakeProc;
use crate::watch::metric::Source;

const PID: i32 = i32::MAX - 1;
const ONE: [&str; 2] = ["anon_inode:kvm-vm", "anon_inode:kvm-vcpu:0"];

fn watch(host: &FakeProc, which: Which) -> Result<Watch<'_>, NotFound> {
    let events = |_| Events::nothing("no events");
    Watch::begin(host.files(), Err("no debugfs".to_owned()), events, which)
}

fn ran(host: &FakeProc, nanoseconds: u64) {
    host.write(format!("proc/{PID}/task/20/schedstat"), &format!("{nanoseconds} 6 7\n"));
}

#[test]
fn a_sample_has_the_change_since_the_last_and_the_total_all() {
    let host = FakeProc::new();
    host.process(PID, "vmm", &ONE).thread(PID, 20, "vcpu0", 0, "running");
    ran(&host, 100);
    let mut watch = watch(&host, Which::Pid(PID)).unwrap();
    for nanoseconds in [130, 170] {
        ran(&host, nanoseconds);
        watch.step();
    }
    let total = watch.guests()[0].total();
    let running: Vec<_> = total.samples.iter().map(|it| it.guest[&Metric::RunningNs]).collect();
    assert_eq!((running, total.total[&Metric::RunningNs]), (vec![30, 40], 70));
    assert_eq!(total.vcpus[0].total[&Metric::RunningNs], 70);
    assert_eq!(total.samples[1].vcpus[0][&Metric::RunningNs], 40);
}

#[test]
fn a_value_that_is_not_known_for_a_while_did_not_stand_still() {
    let host = FakeProc::new();
    host.process(PID, "vmm", &ONE).thread(PID, 20, "vcpu0", 0, "running");
    ran(&host, 100);
    let mut watch = watch(&host, Which::Pid(PID)).unwrap();
    for text in ["130 6 7\n", "", "170 6 7\n"] {
        host.write(format!("proc/{PID}/task/20/schedstat"), text);
        watch.step();
    }
    let total = watch.guests()[0].total();
    let of = |values: &Values| values.get(&Metric::RunningNs).copied();
    let guest: Vec<_> = total.samples.iter().map(|it| of(&it.guest)).collect();
    let vcpu: Vec<_> = total.samples.iter().map(|it| of(&it.vcpus[0])).collect();
    assert_eq!((guest, vcpu), (vec![Some(30), None, Some(40)], vec![Some(30), None, Some(40)]));
    assert_eq!(total.total[&Metric::RunningNs], 70);
}

#[test]
fn the_vmms_counters_fill_in_for_missing_sources() {
    let host = FakeProc::new();
    host.process(PID, "vmm", &ONE);
    let mut watch = watch(&host, Which::Pid(PID)).unwrap();
    let told = |faults: u64| Ok(BTreeMap::from([("pf_taken".to_owned(), faults)]));
    for faults in [100, 130, 170] {
        watch.tell(PID, &told(faults));
        watch.step();
    }
    let total = watch.guests()[0].total();
    let faults: Vec<_> = total.samples.iter().map(|it| it.guest.get(&Metric::Faults)).collect();
    assert_eq!(faults[1..], [Some(&30), Some(&40)]);
    assert_eq!(total.total[&Metric::Faults], 70);
    assert_eq!(total.knowledge.sources[&Metric::Faults], Source::QueryStats);
    assert!(total.knowledge.unknown[&Metric::Exits].contains("query-stats"));
}

#[test]
fn guests_that_ended_are_kept_up_to_a_bound() {
    let host = FakeProc::new();
    host.process(PID, "vmm", &ONE);
    let mut watch = watch(&host, Which::All).unwrap();
    watch.keep_ended(2);
    let folder = host.files().0.join(format!("proc/{PID}/fd"));
    for round in 0..5 {
        std::fs::remove_dir_all(&folder).unwrap();
        let step = watch.step();
        assert!(!watch.guests()[step.went[0]].is_there());
        host.process(PID, &format!("vmm{round}"), &[]);
        std::fs::remove_dir_all(&folder).unwrap();
        host.process(PID, &format!("vmm{round}"), &ONE);
        let came = std::iter::repeat_with(|| watch.step().came).take(1_000_000);
        let came = came.flatten().next().unwrap();
        assert!(watch.guests()[came].is_there());
    }
    watch.step();
    assert_eq!((watch.guests().len(), watch.forgotten()), (3, 3));
    assert_eq!(watch.guests()[0].total().name, "vmm2");
}

/// Accounts of tracepoints, in which the thread 20 of `PID` has had `exits`, and unmapped memory as
/// often.
fn heard(exits: u64) -> Accounts {
    let counts = [(USER_EXIT, exits)].into();
    let threads = [((PID, 20), Thread { counts, ..Thread::default() })].into();
    let notices = Notices { unmaps: exits, ..Notices::default() };
    let guests = [(PID, Own { notices, ..Own::default() })].into();
    Accounts { threads, guests, ..Accounts::default() }
}

/// Watches while the thread 20 of `PID` has had one after the other of `exits`.
fn hearing<'h>(host: &'h FakeProc, which: Which, exits: &[u64]) -> Watch<'h> {
    let events = Events::made(exits.iter().map(|exits| heard(*exits)));
    Watch::begin(host.files(), Err("no debugfs".to_owned()), |_| events, which).unwrap()
}

#[test]
fn events_before_a_guest_is_watched_are_not_counted() {
    let host = FakeProc::new();
    host.process(PID, "vmm", &ONE).thread(PID, 20, "vcpu0", 0, "running");
    let both = |total: &GuestTotal| {
        [Metric::UserExits, Metric::Invalidations].map(|metric| total.total[&metric])
    };
    let mut watch = hearing(&host, Which::Pid(PID), &[100, 107, 130]);
    assert_eq!(both(watch.guests()[0].total()), [0, 0]);
    watch.step();
    assert_eq!(both(watch.guests()[0].total()), [7, 7]);
    assert_eq!(watch.guests()[0].total().vcpus[0].total[&Metric::UserExits], 7);
    watch.step();
    assert_eq!(both(watch.guests()[0].total()), [30, 30]);
    // A guest that is found later has nothing from before, either.
    let host = FakeProc::new();
    host.write("proc/1/comm", "init");
    let mut watch = hearing(&host, Which::All, &[100, 170, 175]);
    host.process(PID, "vmm", &ONE).thread(PID, 20, "vcpu0", 0, "running");
    while watch.guests().is_empty() {
        watch.look_again = Instant::now();
        watch.step();
    }
    watch.step();
    assert_eq!(both(watch.guests()[0].total()), [5, 5]);
}

#[test]
fn the_last_events_of_a_guest_that_ends_in_a_step_are_counted() {
    for ends in [Which::Pid(PID), Which::All] {
        let host = FakeProc::new();
        host.process(PID, "vmm", &ONE).thread(PID, 20, "vcpu0", 0, "running");
        let mut watch = hearing(&host, ends, &[100, 105, 109]);
        // The accounts are heard with 5 exits, and the process ends with 9 before its state is
        // seen.
        std::fs::remove_dir_all(host.files().0.join(format!("proc/{PID}"))).unwrap();
        assert_eq!(watch.step().went, [0]);
        let total = watch.guests()[0].total();
        assert_eq!(total.total[&Metric::UserExits], 9);
        assert_eq!(total.vcpus[0].total[&Metric::UserExits], 9);
    }
}

#[test]
fn a_later_guest_is_found_and_an_ended_one_keeps_its_report() {
    let host = FakeProc::new();
    host.write("proc/1/comm", "init");
    let mut watch = watch(&host, Which::All).unwrap();
    assert!(watch.guests().is_empty());
    host.process(PID, "vmm", &ONE).thread(PID, 20, "vcpu0", 0, "running");
    ran(&host, 100);
    // The time between looks depends on how long they take.
    let came =
        std::iter::repeat_with(|| watch.step().came).take(1_000_000).find(|came| !came.is_empty());
    assert_eq!(came, Some(vec![0]));
    ran(&host, 150);
    watch.step();
    std::fs::remove_dir_all(host.files().0.join(format!("proc/{PID}"))).unwrap();
    assert_eq!(watch.step().went, [0]);
    let guest = &watch.guests()[0];
    assert!(!guest.is_there() && !watch.is_over());
    assert_eq!(guest.total().total[&Metric::RunningNs], 50);
    assert_eq!(guest.total().state, State::ProcessEnded);
    assert!(guest.total().knowledge.sources.contains_key(&Metric::RunningNs));
}

#[test]
fn a_guest_is_found_that_starts_while_the_watch_begins() {
    let host = FakeProc::new();
    host.write("proc/1/comm", "init").write("kvm/pf_taken", "0");
    let debugfs = || Ok(Debugfs::made(&host.files().0.join("kvm")));
    let starts = |_| {
        host.process(PID, "vmm", &ONE).write(format!("kvm/{PID}-0/pf_taken"), "0");
        Events::nothing("no events")
    };
    let watch = Watch::begin(host.files(), debugfs(), starts, Which::All).unwrap();
    assert_eq!(watch.guests().len(), 1);
}

#[test]
fn a_guest_is_found_whose_vm_is_listed_before_its_descriptor() {
    for lists_first in [true, false] {
        let host = FakeProc::new();
        host.process(PID, "vmm", &[]).write("kvm/pf_taken", "0");
        let lists = || host.write(format!("kvm/{PID}-0/pf_taken"), "0");
        if lists_first {
            lists();
        }
        let debugfs = Ok(Debugfs::made(&host.files().0.join("kvm")));
        let events = |_| Events::nothing("no events");
        let mut watch = Watch::begin(host.files(), debugfs, events, Which::All).unwrap();
        if !lists_first {
            watch.step();
            lists();
            assert!(watch.step().came.is_empty());
        }
        let fd = host.files().0.join(format!("proc/{PID}/fd/0"));
        std::os::unix::fs::symlink(ONE[0], fd).unwrap();
        // No time of a look is near.
        watch.look_again = Instant::now() + Duration::from_secs(3600);
        assert_eq!(watch.step().came, [0], "listed before the watch: {lists_first}");
    }
}

#[test]
fn a_later_vcpu_counts_from_its_start_and_may_change_threads() {
    let host = FakeProc::new();
    host.process(PID, "vmm", &ONE[..1]);
    let mut watch = watch(&host, Which::Pid(PID)).unwrap();
    let fds = host.files().0.join(format!("proc/{PID}/fd"));
    std::os::unix::fs::symlink(ONE[1], fds.join("1")).unwrap();
    host.thread(PID, 20, "vcpu0", 0, "running");
    ran(&host, 100);
    let mut steps = 0;
    while !watch.guests()[0].total().total.contains_key(&Metric::RunningNs) {
        watch.step();
        steps += 1;
        assert!(steps < 1_000_000);
    }
    let task = host.files().0.join(format!("proc/{PID}/task/20"));
    // Files of a thread that ended have no text, even if they are held open.
    for file in ["stat", "schedstat"] {
        std::fs::write(task.join(file), "").unwrap();
    }
    std::fs::remove_dir_all(task).unwrap();
    watch.step();
    host.thread(PID, 21, "vcpu0", 0, "running");
    host.write(format!("proc/{PID}/task/21/schedstat"), "40 1 1\n");
    while watch.guests()[0].total().vcpus[0].thread.is_none() && steps < 1_000_000 {
        watch.step();
        steps += 1;
    }
    watch.step();
    let total = watch.guests()[0].total();
    assert_eq!((total.vcpus[0].index, total.vcpus[0].thread), (0, Some(21)));
    assert_eq!(total.vcpus[0].total[&Metric::RunningNs], 140);
    assert_eq!(total.total[&Metric::RunningNs], 140);
    let changes = total.threads.iter().map(|it| (it.vcpu, it.came));
    assert_eq!(changes.collect::<Vec<_>>(), [(0, true), (0, false), (0, true)]);
    assert_eq!([total.threads[1].thread, total.threads[2].thread], [Some(20), Some(21)]);
}

#[test]
fn merged_samples_lose_no_count_and_keep_the_last_level() {
    let host = FakeProc::new();
    host.process(PID, "vmm", &ONE).thread(PID, 20, "vcpu0", 0, "running");
    ran(&host, 0);
    let mut watch = watch(&host, Which::Pid(PID)).unwrap();
    for nanoseconds in 1..=5 {
        ran(&host, nanoseconds);
        host.write(format!("proc/{PID}/status"), &format!("VmRSS: {nanoseconds} kB\n"));
        watch.step();
    }
    let total = watch.guests()[0].total();
    let mut samples = total.samples.clone();
    halve(&mut samples);
    assert_eq!(samples.len(), 3);
    let all = |of: fn(&Sample) -> u64| samples.iter().map(of).collect::<Vec<_>>();
    assert_eq!(all(|sample| sample.guest[&Metric::RunningNs]), [2, 2, 1]);
    assert_eq!(all(|sample| sample.vcpus[0][&Metric::RunningNs]), [2, 2, 1]);
    assert_eq!(all(|sample| sample.guest[&Metric::RssBytes]), [2048, 4096, 5120]);
    assert_eq!(samples[2].at, total.samples[4].at);
}

#[test]
fn the_end_of_the_process_and_not_of_its_vm_ends_the_watch() {
    let host = FakeProc::new();
    host.process(PID, "vmm", &ONE).process(5, "sh", &[]);
    assert_eq!(watch(&host, Which::Pid(5)).err(), Some(NotFound::NoVm));
    assert_eq!(watch(&host, Which::Pid(6)).err(), Some(NotFound::NoProcess));
    let mut watch = watch(&host, Which::Pid(PID)).unwrap();
    let fds = host.files().0.join(format!("proc/{PID}/fd"));
    std::fs::remove_file(fds.join("0")).unwrap();
    assert_eq!(watch.step().went, [0]);
    assert_eq!(watch.guests()[0].total().state, State::VmClosed);
    assert!(!watch.is_over());
    std::os::unix::fs::symlink("anon_inode:kvm-vm", fds.join("0")).unwrap();
    let came =
        std::iter::repeat_with(|| watch.step().came).take(1_000_000).find(|came| !came.is_empty());
    assert_eq!(came, Some(vec![1]));
    std::fs::remove_dir_all(host.files().0.join(format!("proc/{PID}"))).unwrap();
    watch.step();
    assert!(watch.is_over());
}

#[test]
fn a_metric_that_lost_events_is_unknown_for_that_guest_only() {
    let host = FakeProc::new();
    let other = PID - 1;
    host.process(PID, "vmm", &ONE).thread(PID, 20, "vcpu0", 0, "running");
    host.process(other, "other", &ONE).thread(other, 30, "vcpu0", 0, "running");
    let hear = |roomless: u64| {
        let mut heard = heard(100 + roomless);
        let stalls = Some(Stalls::new());
        heard.threads.get_mut(&(PID, 20)).unwrap().stalls.clone_from(&stalls);
        heard.guests.get_mut(&PID).unwrap().untimed = roomless;
        heard.guests.get_mut(&PID).unwrap().user_exits = roomless;
        heard.guests.insert(other, Own::default());
        heard.threads.insert((other, 30), Thread { stalls, ..Thread::default() });
        heard
    };
    let events = Events::made([0, 0, 3].map(hear));
    let no_debugfs = Err("no debugfs".to_owned());
    let mut watch = Watch::begin(host.files(), no_debugfs, |_| events, Which::All).unwrap();
    let of = |watch: &Watch<'_>, pid| {
        let guests = watch.guests().iter();
        guests.map(WatchedGuest::total).find(|it| it.pid == pid).unwrap().clone()
    };
    watch.step();
    assert_eq!(of(&watch, PID).total.get(&Metric::FaultNs), Some(&0));
    watch.step();
    let [lossy, whole] = [PID, other].map(|pid| of(&watch, pid));
    assert_eq!(watch.lost(), 6);
    assert_eq!(lossy.total.get(&Metric::FaultNs), None);
    assert!(!lossy.knowledge.sources.contains_key(&Metric::FaultNs));
    assert!(lossy.knowledge.unknown[&Metric::FaultNs].contains("lost"), "{lossy:?}");
    assert_eq!(lossy.vcpus[0].total.get(&Metric::UserExits), None);
    // The guest's own sum has the exits without room.
    assert_eq!(lossy.total[&Metric::UserExits], 6);
    assert_eq!(lossy.total[&Metric::Invalidations], 3);
    assert_eq!(whole.total[&Metric::FaultNs], 0);
    assert_eq!(whole.vcpus[0].total[&Metric::UserExits], 0);
}

#[test]
fn lost_ranges_make_invalidations_unknown_instead_of_zero() {
    let host = FakeProc::new();
    host.process(PID, "vmm", &ONE).thread(PID, 20, "vcpu0", 0, "running");
    host.process(5, "other", &["anon_inode:kvm-vm"]).process(6, "tool", &[]);
    let hear = |by: Option<i32>| {
        let notices = Notices { unmaps: 3, ..Notices::default() };
        let places = by.map(|by| (Place::anywhere(by), notices)).into_iter().collect();
        Accounts { places, ..heard(100) }
    };
    let events = Events::made([None, Some(5), None, Some(6)].map(hear));
    let no_debugfs = Err("no debugfs".to_owned());
    let mut watch = Watch::begin(host.files(), no_debugfs, |_| events, Which::Pid(PID)).unwrap();
    for _ in 0..2 {
        // Another guest's own ranges are not of this one.
        watch.step();
        assert_eq!(watch.guests()[0].total().total[&Metric::Invalidations], 0);
    }
    watch.step();
    let total = watch.guests()[0].total();
    assert_eq!(total.total.get(&Metric::Invalidations), None);
    let why = &total.knowledge.unknown[&Metric::Invalidations];
    assert!(why.contains("process 6 (tool)"), "{why}");
    // None of them aged anything.
    assert_eq!(total.total.get(&Metric::Ageings), Some(&0));
    assert_eq!(total.total[&Metric::UserExits], 0);
}

#[test]
fn the_end_of_a_watch_releases_guests_and_keeps_their_totals() {
    let host = FakeProc::new();
    host.process(PID, "vmm", &ONE).thread(PID, 20, "vcpu0", 0, "running");
    let mut watch = hearing(&host, Which::All, &[100, 107]);
    watch.step();
    let before = watch.guests()[0].total().clone();
    watch.end();
    assert!(!watch.guests()[0].is_there());
    assert_eq!(*watch.guests()[0].total(), before);
    assert_eq!((before.total[&Metric::UserExits], before.state), (7, State::Runs));
}
