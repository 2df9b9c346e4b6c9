//! Watches guests of the laboratory under this host's KVM, which count themselves: in this process,
//! and in one that ends.

mod other;

use other::{CHILD, Other, guest, watch};
use slat_kvm::guest::{Guest, Vcpu};
use slat_kvm::stats::Reading;
use slat_kvm::watch::{Metric, NotFound, Source, State, Watch, Which};
use slat_kvm::work::{Touch, Work};
use std::process::Command;

fn write_all(vcpu: &mut Vcpu) {
    vcpu.load(&Work::each_page(Touch::Write)).unwrap();
    vcpu.run().unwrap();
}

/// Returns a counter of each vCPU from the guest's own statistics.
fn own(guest: &Guest, name: &str) -> Vec<Option<u64>> {
    let value = |stats: &slat_kvm::stats::Stats| {
        let mut reading = Reading::default();
        stats.read(&mut reading).unwrap();
        stats.value(&reading, name)
    };
    guest.vcpu_stats().iter().map(value).collect()
}

/// The child process that [`Other`] runs.
#[test]
#[ignore = "the other tests run it, in a process of its own"]
fn child() {
    match std::env::var(CHILD).as_deref() {
        Ok("guest") => {}
        Ok("bare") => return bare(),
        _ => return,
    }
    let say = |guest: &Guest| {
        let sum = |name| own(guest, name).into_iter().flatten().sum::<u64>();
        println!("SAYS {} {}", sum("pf_taken"), sum("exits"));
    };
    let mut both = guest();
    say(&both.as_ref().unwrap().0);
    for line in std::io::stdin().lines() {
        match &*line.unwrap() {
            "close" => {
                both = None;
                println!("SAYS 0 0");
                continue;
            }
            "again" => {
                drop(both);
                both = guest();
            }
            _ => {}
        }
        let (guest, vcpus) = both.as_mut().unwrap();
        // Pages that were taken away fault again when they are written.
        guest.unmap_all().unwrap();
        vcpus.iter_mut().for_each(write_all);
        say(guest);
    }
}

/// Makes a VM and a vCPU without statistics descriptors, as in many VMMs.
fn bare() {
    let kvm = kvm_ioctls::Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    let _vcpu = vm.create_vcpu(0).unwrap();
    println!("SAYS 0 0");
    std::io::stdin().lines().for_each(drop);
}

#[test]
fn a_watched_guests_counts_match_its_own_statistics() {
    let Some(mut other) = Other::start() else { return };
    let before = other.run();
    let mut watch = watch(Which::Pid(other.pid())).unwrap();
    let mut after = before;
    for _ in 0..3 {
        after = other.run();
        watch.step();
    }
    watch.end();
    let total = watch.guests()[0].total();
    assert_eq!(total.pid, other.pid());
    let same = |metric: Metric, place: usize| {
        let (truth, value) = (after[place] - before[place], total.total.get(&metric));
        // On Arm, KVM does not count faults.
        if total.knowledge.unknown.contains_key(&metric) && truth == 0 {
            return;
        }
        assert!(truth > 0);
        assert_eq!(value, Some(&truth), "{metric:?}");
        assert_eq!(total.knowledge.sources[&metric], Source::BinaryStatistics);
        let sampled: u64 = total.samples.iter().map(|sample| sample.guest[&metric]).sum();
        let each: u64 = total.vcpus.iter().map(|vcpu| vcpu.total[&metric]).sum();
        assert_eq!([sampled, each], [truth; 2], "{metric:?}");
    };
    same(Metric::Faults, 0);
    same(Metric::Exits, 1);
    if cfg!(target_arch = "x86_64") {
        assert!(total.vcpus.iter().all(|vcpu| vcpu.statistics["pf_taken"] > 0), "{total:?}");
        assert!(total.total[&Metric::Pages4k] >= 2048, "{:?}", total.total);
        assert_eq!(total.total.get(&Metric::NestedRuns), Some(&0));
    }
    assert!(total.total[&Metric::RssBytes] >= 8 << 20);
    // Each metric has a source, or a reason why it has none.
    for metric in Metric::ALL {
        let told = total.knowledge.sources.contains_key(&metric);
        assert_eq!(told, total.total.contains_key(&metric), "{metric:?}");
        assert!(told != total.knowledge.unknown.contains_key(&metric), "{metric:?}");
    }
    other.end();
}

#[test]
fn an_ended_guest_is_reported_to_its_last_fault_and_released() {
    let Some(mut other) = Other::start() else { return };
    let pid = other.pid();
    let mut watch = watch(Which::Pid(pid)).unwrap();
    let before = other.run();
    watch.step();
    let after = other.run();
    other.end();
    assert!(!watch.guests()[0].total().samples.is_empty());
    watch.wait(std::time::Duration::from_secs(600));
    assert!(watch.is_ending());
    assert_eq!(watch.step().went, [0]);
    assert!(watch.is_over());
    let guest = &watch.guests()[0];
    assert_eq!((guest.total().state, guest.is_there()), (State::ProcessEnded, false));
    let last = guest.total().samples.last().unwrap();
    if let Some(faults) = last.guest.get(&Metric::Faults) {
        assert_eq!(*faults, after[0] - before[0]);
    }
    // The guest's tables are gone, so the last count of mappings stays.
    if let Some(pages) = guest.total().total.get(&Metric::Pages4k) {
        assert!(*pages >= 2048, "{pages}");
    }
    // The watch holds nothing of the guest, though it goes on.
    drop(watch);
}

#[test]
fn a_guest_that_starts_later_is_found_among_all() {
    if guest().is_none() {
        return;
    }
    let mut watch = watch(Which::All).unwrap();
    let other = Other::start().unwrap();
    let pid = other.pid();
    let has = |watch: &Watch<'_>| watch.guests().iter().any(|guest| guest.total().pid == pid);
    assert!(!has(&watch));
    while !has(&watch) {
        watch.wait(std::time::Duration::from_millis(50));
        watch.step();
    }
    other.end();
}

#[test]
fn a_process_with_two_vms_in_turn_has_two_guests() {
    let Some(mut other) = Other::start() else { return };
    let before = other.run();
    let mut watch = watch(Which::Pid(other.pid())).unwrap();
    let first = other.run();
    watch.step();
    // The new VM's descriptors have the same numbers and names.
    let second = other.told("again");
    let step = watch.step();
    assert_eq!((step.went, step.came, watch.is_over()), (vec![0], vec![1], false));
    let last = other.run();
    watch.step();
    let [one, two] = [0, 1].map(|place| watch.guests()[place].total());
    assert_eq!((one.state, two.state), (State::VmClosed, State::Runs));
    for (guest, faults) in [(one, first[0] - before[0]), (two, last[0] - second[0])] {
        if let Some(counted) = guest.total.get(&Metric::Faults) {
            assert_eq!(*counted, faults);
        }
    }
    // The same thread of the same process ran both VMs. Each of the two vCPUs of the second one ran
    // once since that was found. Where perf counts, the thread has to be known.
    if two.knowledge.sources.get(&Metric::UserExits) == Some(&Source::Tracepoints) {
        assert_eq!(two.total[&Metric::UserExits], 2);
    }
    other.end();
}

#[test]
fn a_process_that_ends_after_its_vm_ends_the_watch() {
    let Some(mut other) = Other::start() else { return };
    let mut watch = watch(Which::Pid(other.pid())).unwrap();
    other.told("close");
    assert_eq!(watch.step().went, [0]);
    assert_eq!((watch.guests()[0].total().state, watch.is_over()), (State::VmClosed, false));
    other.end();
    assert!(watch.is_over());
}

#[test]
fn a_watch_of_a_vmm_without_statistics_reports_less_and_why() {
    let Some(other) = Other::start_as("bare") else { return };
    let mut watch = watch(Which::Pid(other.pid())).unwrap();
    watch.step();
    let total = watch.guests()[0].total();
    match total.knowledge.sources.get(&Metric::Faults) {
        Some(by) => assert_eq!(*by, Source::Debugfs),
        None => assert!(total.knowledge.unknown[&Metric::Faults].contains("EIO"), "{total:?}"),
    }
    assert!(total.total.contains_key(&Metric::RssBytes));
    other.end();
    // KVM gives statistics to the process that made the VM.
    let kvm = kvm_ioctls::Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let mut account = slat_kvm::watch::own::Vcpu::new(&vcpu, std::time::Duration::ZERO).unwrap();
    account.enter();
    assert!(account.leave().unwrap());
    assert_eq!(account.account().unwrap().runs, 1);
}

#[test]
fn a_process_without_a_vm_differs_from_a_missing_process() {
    let mut sleep = Command::new("sleep").arg("600").spawn().unwrap();
    let pid = sleep.id().cast_signed();
    assert_eq!(watch(Which::Pid(pid)).err(), Some(NotFound::NoVm));
    sleep.kill().unwrap();
    sleep.wait().unwrap();
    assert_eq!(watch(Which::Pid(pid)).err(), Some(NotFound::NoProcess));
    for pid in [0, -1, i32::MIN] {
        assert_eq!(watch(Which::Pid(pid)).err(), Some(NotFound::NoProcess));
    }
}
