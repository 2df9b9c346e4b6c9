use super::*;
use crate::watch::events::times::Times;
use crate::watch::find::tests::FakeProc;

const HERE: u64 = 0x7f00_0000_0000;

fn heard(places: &[(i32, u64, u64)]) -> Accounts {
    let notices = |unmaps| Notices { unmaps, unmapped_bytes: unmaps << 12, ages: 3 * unmaps };
    let place = |&(by, at, unmaps): &(i32, u64, u64)| (Place::new(by, at), notices(unmaps));
    Accounts { places: places.iter().map(place).collect(), ..Accounts::default() }
}

/// Watches guests of these processes, from nothing on.
fn watching(pids: &[i32]) -> TraceCounts {
    let mut traced = TraceCounts::new(Events::heard_in_a_test());
    traced.watched = pids.iter().map(|pid| (*pid, "vmm".to_owned())).collect();
    traced
}

fn of(traced: &TraceCounts, pid: i32) -> [u64; 4] {
    let mut sink = Sink::default();
    traced.guest(pid, &mut sink);
    let all = Metric::of(Scope::Noticed);
    let values: Vec<u64> = all.map(|metric| sink.values[&metric]).collect();
    values.try_into().unwrap()
}

#[test]
fn a_notice_belongs_to_its_process_or_the_only_guest_in_range() {
    let host = FakeProc::new();
    for pid in [10, 11] {
        host.process(pid, "vmm", &["anon_inode:kvm-vm"]);
    }
    host.process(2, "ksmd", &[]);
    host.write("proc/10/maps", &format!("{HERE:x}-{:x} rw-p 0 00:00 0\n", HERE + (1 << 30)));
    let other = HERE + (1 << 29);
    host.write("proc/11/maps", &format!("{other:x}-{:x} rw-p 0 00:00 0\n", HERE + (2 << 30)));
    let mut traced = watching(&[10, 11]);
    let all = [
        (11, HERE, 5),                   // A guest itself, wherever.
        (2, HERE + 4096, 7),             // Only one has memory there.
        (2, other, 11),                  // Both have.
        (2, HERE + (3 << 30), 13),       // None has.
        (2, HERE + (1 << 30) + 4096, 1), // Only the other.
    ];
    traced.heard = heard(&all);
    traced.place(&host.files(), None);
    assert_eq!(of(&traced, 10), [7, 7 << 12, 7, 21]);
    assert_eq!(of(&traced, 11), [6, 6 << 12, 1, 18]);
    assert_eq!(traced.ambiguous(), 11);
    assert_eq!(traced.invalidated_by(11), [("vmm".to_owned(), 5), ("ksmd".to_owned(), 1)].into());
}

#[test]
fn a_guest_whose_maps_cannot_be_read_gives_no_place_to_another() {
    let host = FakeProc::new();
    for pid in [10, 11] {
        host.process(pid, "vmm", &["anon_inode:kvm-vm"]);
    }
    host.process(2, "ksmd", &[]);
    host.write("proc/10/maps", &format!("{HERE:x}-{:x} rw-p 0 00:00 0\n", HERE + (1 << 30)));
    // A folder in the file's place, as root may read any file.
    host.write("proc/11/maps/x", "");
    let mut traced = watching(&[10, 11]);
    traced.heard = heard(&[(2, HERE, 7)]);
    traced.place(&host.files(), None);
    for pid in [10, 11] {
        let mut sink = Sink::default();
        traced.guest(pid, &mut sink);
        assert!(sink.values.is_empty(), "{sink:?}");
        assert!(sink.unknown[&Metric::Invalidations].contains("maps cannot be read"), "{sink:?}");
    }
    // One that ended has no memory there.
    std::fs::remove_dir_all(host.files().0.join("proc/11")).unwrap();
    let mut traced = watching(&[10]);
    traced.heard = heard(&[(2, HERE, 7)]);
    traced.place(&host.files(), Some(vec![10, 11]));
    assert_eq!(of(&traced, 10)[0], 7);
}

#[test]
fn an_ended_guests_place_passes_to_the_next_guest_in_its_range() {
    let host = FakeProc::new();
    let maps = |pid: i32| {
        let range = format!("{HERE:x}-{:x} rw-p 0 00:00 0\n", HERE + (1 << 30));
        host.write(format!("proc/{pid}/maps"), &range);
    };
    host.process(10, "vmm", &["anon_inode:kvm-vm"]);
    host.process(2, "ksmd", &[]);
    maps(10);
    let mut traced = watching(&[10, 11]);
    let hear = |traced: &mut TraceCounts, pids: &[i32], unmaps| {
        traced.heard = heard(&[(2, HERE, unmaps)]);
        traced.look_again = Instant::now();
        traced.place(&host.files(), Some(pids.to_vec()));
    };
    hear(&mut traced, &[10], 7);
    assert_eq!(of(&traced, 10)[0], 7);
    traced.forget(10);
    host.process(11, "vmm", &["anon_inode:kvm-vm"]);
    maps(11);
    hear(&mut traced, &[11], 2);
    assert_eq!((of(&traced, 10)[0], of(&traced, 11)[0]), (0, 2));
    // Several guests have memory there for a while: these unmaps stay ambiguous.
    traced.forget(11);
    traced.watched = watching(&[10, 11]).watched;
    hear(&mut traced, &[10, 11], 5);
    assert_eq!((traced.ambiguous(), of(&traced, 11)[0]), (5, 0));
    traced.forget(10);
    hear(&mut traced, &[11], 1);
    assert_eq!((traced.ambiguous(), of(&traced, 11)[0]), (5, 1));
}

#[test]
fn time_in_faults_needs_a_transition_per_fault_or_has_a_reason() {
    let times = |count, total_ns| {
        let mut times = Times::default();
        (times.count, times.total_ns) = (count, total_ns);
        times
    };
    let stalls = [
        (Why::FaultWrite, times(2, 1000)),
        (Why::FaultRead, times(1, 300)),
        (Why::Other, times(9, 9000)),
    ];
    let thread = Thread { stalls: Some(stalls.into()), ..Thread::default() };
    let told = |events| {
        let mut traced = TraceCounts::new(events);
        traced.heard.threads = [((10, 20), thread.clone())].into();
        traced.note_fires();
        let mut sink = Sink::default();
        traced.vcpu(10, None, &mut sink);
        sink
    };
    let known = told(Events::calibrated_in_a_test(400));
    assert_eq!(known.values[&Metric::FaultNs], 1300);
    assert_eq!(known.values[&Metric::FaultNsWithTransitions], 1300 + 3 * 400);
    let unknown = told(Events::heard_in_a_test());
    assert_eq!(unknown.values[&Metric::FaultNs], 1300);
    let why = &unknown.unknown[&Metric::FaultNsWithTransitions];
    assert!(why.contains("--no-calibration"), "{why}");
}

#[test]
fn unread_accounts_and_unfollowed_threads_are_not_zero() {
    let told = |traced: &TraceCounts, tids| {
        let mut sink = Sink::default();
        traced.vcpu(10, tids, &mut sink);
        traced.guest(10, &mut sink);
        sink
    };
    let mut traced = TraceCounts::new(Events::heard_in_a_test());
    traced.heard.no_threads = Some("not readable".to_owned());
    traced.heard.no_places = Some("neither".to_owned());
    let unread = told(&traced, None);
    assert!(unread.values.is_empty(), "{unread:?}");
    assert_eq!(unread.unknown[&Metric::UserExits], "not readable");
    assert_eq!(unread.unknown[&Metric::Invalidations], "neither");
    let mut traced = TraceCounts::new(Events::counted_in_a_test());
    let counts = [("kvm_userspace_exit", 3)].into();
    let thread = Thread { counts, ..Thread::default() };
    // Of the thread 21, perf refused the events.
    traced.heard.threads = [((10, 20), thread), ((10, 21), Thread::default())].into();
    assert_eq!(told(&traced, None).values[&Metric::UserExits], 3);
    for unknown in [told(&traced, Some(&[21])), told(&traced, Some(&[22]))] {
        assert!(unknown.unknown[&Metric::UserExits].contains("no thread"), "{unknown:?}");
    }
}

#[test]
fn threads_are_summed_and_exits_that_never_come_are_no_zero() {
    let mut traced = TraceCounts::new(Events::heard_in_a_test());
    let thread = |exits: u64, vcpu| Thread {
        vcpu,
        counts: [("kvm_userspace_exit", exits)].into(),
        ..Thread::default()
    };
    traced.heard.threads = [((10, 20), thread(3, None)), ((10, 21), thread(4, Some(1)))].into();
    traced.heard.threads.insert((11, 22), thread(100, Some(1)));
    traced.note_fires();
    let told = |traced: &TraceCounts, tids| {
        let mut sink = Sink::default();
        traced.vcpu(10, tids, &mut sink);
        sink
    };
    assert_eq!(
        told(&traced, None).values,
        [(Metric::UserExits, 7), (Metric::PagesLogged, 0)].into()
    );
    assert_eq!(told(&traced, Some(&[20])).values[&Metric::UserExits], 3);
    assert!(told(&traced, None).unknown[&Metric::FaultNs].contains("has not fired"));
    assert_eq!((traced.thread(10, 1), traced.thread(10, 0)), (Some(21), None));
    // Once an exit of any guest is received, a guest without exits has zero.
    traced.heard.threads.get_mut(&(11, 22)).unwrap().stalls = Some(Stalls::new());
    traced.note_fires();
    assert_eq!(told(&traced, None).values[&Metric::FaultNs], 0);
}

#[test]
fn a_vcpu_that_moved_is_on_the_thread_that_had_its_last_exit() {
    let mut traced = watching(&[10]);
    let thread = |last| Thread { vcpu: Some(0), last, ..Thread::default() };
    traced.heard.threads = [((10, 20), thread(5)), ((10, 31), thread(9))].into();
    traced.heard.threads.insert((10, 40), thread(7));
    assert_eq!(traced.thread(10, 0), Some(31));
}

#[test]
fn a_process_that_has_anothers_number_has_its_own_name() {
    let host = FakeProc::new();
    host.process(10, "vmm", &["anon_inode:kvm-vm"]).process(2, "first", &[]);
    host.write("proc/10/maps", &format!("{HERE:x}-{:x} rw-p 0 00:00 0\n", HERE + (1 << 30)));
    let mut traced = watching(&[10]);
    for (name, unmaps) in [("first", 3), ("second", 5)] {
        host.write("proc/2/comm", name);
        traced.heard = heard(&[(2, HERE, unmaps)]);
        traced.look_again = Instant::now();
        traced.place(&host.files(), Some(vec![10]));
    }
    let by = [("first".to_owned(), 3), ("second".to_owned(), 5)];
    assert_eq!(traced.invalidated_by(10), by.into());
}

#[test]
fn surplus_places_belong_to_their_processs_guest_or_to_none() {
    let host = FakeProc::new();
    for pid in [10, 11, 12] {
        host.process(pid, "vmm", &["anon_inode:kvm-vm"]);
    }
    host.process(2, "reclaimer", &[]);
    let notices = Notices { unmaps: 3, unmapped_bytes: 3 << 12, ages: 0 };
    let mut traced = watching(&[10, 11]);
    let unknown = |traced: &TraceCounts| {
        [10, 11].map(|pid| traced.lost_of_notices(pid, Metric::Invalidations).is_some())
    };
    traced.take_anywhere(&host.files(), 10, notices);
    // A guest that is not watched unmaps of its own memory.
    traced.take_anywhere(&host.files(), 12, notices);
    assert_eq!((unknown(&traced), of(&traced, 10)[0], of(&traced, 11)[0]), ([false; 2], 3, 0));
    // The kernel tells the process, and not whose memory it was.
    traced.take_anywhere(&host.files(), 2, notices);
    assert_eq!(unknown(&traced), [true; 2]);
    let why = traced.lost_of_notices(11, Metric::Invalidations).unwrap();
    assert!(why.contains("process 2 (reclaimer)"), "{why}");
    assert!(traced.lost_of_notices(11, Metric::Ageings).is_none());
}
