use super::*;
use crate::watch::events::Events;
use crate::watch::find::tests::FakeProc;

fn has(vms: usize, vcpus: &[(u32, i32)], vcpu_stats: &[(u32, i32)]) -> Descriptors {
    let (vcpus, vcpu_stats) = (vcpus.to_vec(), vcpu_stats.to_vec());
    let (vms, vm_stats) = ((0..vms as i32).collect(), Vec::new());
    Descriptors { vms, vm_stats, vcpus, vcpu_stats, private_memory: false }
}

#[test]
fn vcpus_are_matched_to_statistics_only_if_unambiguous() {
    let one = has(1, &[(0, 5), (0, 9), (1, 7)], &[(0, 6), (0, 10)]);
    let of = |has| rows(has).iter().map(|row| (row.index, row.fd, row.stats)).collect::<Vec<_>>();
    assert_eq!(of(&one), [(0, 5, Some(6)), (1, 7, None)]);
    let two = has(2, &[(0, 5), (0, 9)], &[(0, 6), (0, 10)]);
    assert_eq!(of(&two), [(0, 5, Some(6)), (0, 9, Some(10))]);
    let unclear = has(2, &[(0, 5), (0, 9)], &[(0, 6)]);
    assert_eq!(of(&unclear), [(0, 5, None), (0, 9, None)]);
}

#[test]
fn a_guest_without_readable_statistics_reports_procfs_and_why() {
    let host = FakeProc::new();
    let pid = i32::MAX - 1;
    host.process(pid, "vmm", &["anon_inode:kvm-vm", "anon_inode:kvm-vcpu:0"]);
    host.thread(pid, 20, "vcpu0", 0, "running");
    host.write(format!("proc/{pid}/task/20/schedstat"), "5 6 7\n");
    let files = host.files();
    let found = find::guest(&files, pid).unwrap();
    let debugfs = Err("debugfs is root's: run as root".to_owned());
    let mut guest = Guest::attach(&files, &debugfs, found);
    let (reading, knowledge) =
        guest.read(&files, &TraceCounts::new(Events::nothing("no events")), 1);
    assert_eq!(guest.vcpus().collect::<Vec<_>>(), [(0, Some(20))]);
    assert_eq!(reading.guest.get(&Metric::WaitingNs), Some(&6));
    assert_eq!(reading.vcpus[0].get(&Metric::RunningNs), Some(&5));
    // Each metric has either a source or a reason.
    for metric in Metric::ALL {
        let (by, why) = (knowledge.sources.get(&metric), knowledge.unknown.get(&metric));
        assert_eq!(by.is_some(), reading.guest.contains_key(&metric), "{metric:?}");
        assert!(by.is_some() != why.is_some_and(|why| !why.is_empty()), "{metric:?}");
    }
    let why = &knowledge.unknown[&Metric::Faults];
    assert!(why.contains("pidfd_open") && why.contains("run as root"), "{why}");
    assert_eq!(guest.state(&files), State::Runs);
}

#[test]
fn debugfs_is_the_source_where_there_is_no_descriptor() {
    let host = FakeProc::new();
    let pid = i32::MAX - 1;
    host.process(pid, "vmm", &["anon_inode:kvm-vm", "anon_inode:kvm-vcpu:0"]);
    host.write(format!("kvm/{pid}-0/pf_taken"), "12\n");
    host.write(format!("kvm/{pid}-0/pages_4k"), "34\n");
    host.write(format!("kvm/{pid}-0/vcpu0/pid"), "77\n");
    host.thread(pid, 77, "a", 0, "running");
    let files = host.files();
    let found = find::guest(&files, pid).unwrap();
    let debugfs = Ok(Debugfs::made(&files.0.join("kvm")));
    let mut guest = Guest::attach(&files, &debugfs, found);
    assert_eq!(guest.vcpus().collect::<Vec<_>>(), [(0, Some(77))]);
    let (reading, knowledge) =
        guest.read(&files, &TraceCounts::new(Events::nothing("no events")), 1);
    for (metric, value) in [(Metric::Faults, 12), (Metric::Pages4k, 34)] {
        assert_eq!(reading.guest.get(&metric), Some(&value));
        assert_eq!(knowledge.sources.get(&metric), Some(&Source::Debugfs));
    }
    assert!(knowledge.unknown[&Metric::Exits].contains("no exits"));
    assert!(reading.vcpus[0].is_empty());
}

/// A process with a VM of descriptor 0, which has a folder in debugfs.
fn in_debugfs(descriptors: &[&str]) -> (FakeProc, i32, Result<Debugfs, String>) {
    let (host, pid) = (FakeProc::new(), i32::MAX - 1);
    host.process(pid, "vmm", descriptors);
    host.write(format!("kvm/{pid}-0/pf_taken"), "12\n");
    let debugfs = Ok(Debugfs::made(&host.files().0.join("kvm")));
    (host, pid, debugfs)
}

#[test]
fn a_vcpu_that_never_sleeps_is_followed_to_another_thread() {
    let (host, pid, debugfs) = in_debugfs(&["anon_inode:kvm-vm", "anon_inode:kvm-vcpu:0"]);
    let files = host.files();
    let run = |tid: i32| {
        host.write(format!("kvm/{pid}-0/vcpu0/pid"), &format!("{tid}\n"));
    };
    // Threads that never sleep show no call.
    for (tid, time) in [(20, 1000), (21, 500)] {
        host.thread(pid, tid, "a", 0, "running");
        host.write(format!("proc/{pid}/task/{tid}/schedstat"), &format!("{time} 1 1\n"));
    }
    run(0);
    let mut guest = Guest::attach(&files, &debugfs, find::guest(&files, pid).unwrap());
    let traced = TraceCounts::new(Events::nothing("no events"));
    let ran = |guest: &mut Guest| {
        guest.read(&files, &traced, 1).0.vcpus[0].get(&Metric::RunningNs).copied()
    };
    assert_eq!(ran(&mut guest), None, "0 is no thread");
    run(20);
    assert_eq!(ran(&mut guest), Some(1000), "the first reading after it ran");
    run(21);
    let has = find::descriptors(&files, pid).unwrap();
    assert!(!guest.look_again(&files, &debugfs, &has));
    assert_eq!(guest.vcpus().collect::<Vec<_>>(), [(0, Some(21))]);
    host.write(format!("proc/{pid}/task/21/schedstat"), "700 1 1\n");
    assert_eq!(ran(&mut guest), Some(1200), "what a thread did before does not count");
    // The number of a thread that ended is no thread's.
    run(22);
    assert!(!guest.look_again(&files, &debugfs, &has));
    assert_eq!(guest.vcpus().collect::<Vec<_>>(), [(0, Some(21))]);
}

#[test]
fn a_vm_that_replaces_another_is_another_guest() {
    let (host, pid, debugfs) = in_debugfs(&["anon_inode:kvm-vm"]);
    let files = host.files();
    let mut guest = Guest::attach(&files, &debugfs, find::guest(&files, pid).unwrap());
    let has = find::descriptors(&files, pid).unwrap();
    assert_eq!(guest.state(&files), State::Runs);
    assert!(!guest.look_again(&files, &debugfs, &has));
    // The VM stays while another one of its descriptors is closed.
    let other = Descriptors { vms: vec![5], ..has.clone() };
    assert!(!guest.look_again(&files, &debugfs, &other));
    let folder = files.0.join(format!("kvm/{pid}-0"));
    host.write("other/pf_taken", "0\n");
    std::fs::rename(&folder, files.0.join("gone")).unwrap();
    std::fs::rename(files.0.join("other"), &folder).unwrap();
    assert_eq!(guest.state(&files), State::VmClosed);
    assert!(guest.look_again(&files, &debugfs, &has));
}

#[test]
fn descriptors_that_are_hidden_from_now_on_close_no_vm() {
    let host = FakeProc::new();
    let pid = i32::MAX - 1;
    host.process(pid, "vmm", &["anon_inode:kvm-vm"]);
    let files = host.files();
    let none = Err("no debugfs".to_owned());
    let guest = Guest::attach(&files, &none, find::guest(&files, pid).unwrap());
    let folder = files.0.join(format!("proc/{pid}/fd"));
    std::fs::rename(&folder, files.0.join("gone")).unwrap();
    // A file in the folder's place, as root may list any folder.
    std::fs::write(&folder, "").unwrap();
    assert_eq!(guest.state(&files), State::Runs);
    std::fs::remove_file(&folder).unwrap();
    assert_eq!(guest.state(&files), State::ProcessEnded);
}

#[test]
fn the_counts_of_one_of_two_vms_are_not_those_of_the_guest() {
    // Two VMs, as each has a vCPU 0; the thread that made the second is not known.
    let two = ["anon_inode:kvm-vm", "anon_inode:kvm-vm"];
    let vcpus = ["anon_inode:kvm-vcpu:0", "anon_inode:kvm-vcpu:0"];
    let (host, pid, debugfs) = in_debugfs(&[two, vcpus].concat());
    let files = host.files();
    let mut guest = Guest::attach(&files, &debugfs, find::guest(&files, pid).unwrap());
    let traced = TraceCounts::new(Events::nothing("no events"));
    let (reading, knowledge) = guest.read(&files, &traced, 1);
    assert_eq!((guest.vms(), reading.guest.get(&Metric::Faults)), (2, None));
    assert!(knowledge.unknown[&Metric::Faults].contains("which of its VMs"));
}
