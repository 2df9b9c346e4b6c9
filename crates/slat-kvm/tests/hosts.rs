//! Hosts and VMMs as they are: descriptors that were duplicated, names that are no UTF-8, vCPUs
//! that move to other threads, memory that is in no figure of a process.

#[path = "hosts/memory.rs"]
mod memory;
mod other;

use slat_kvm::procfs::Files;
use slat_kvm::watch::{Debugfs, Events, GuestTotal, Metric, NotFound, Watch, Which, WorkingSets};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::time::Duration;

const PID: i32 = i32::MAX - 1;

/// A made-up host.
struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }
    fn files(&self) -> Files<'_> {
        Files(self.0.path())
    }
    fn write(&self, path: &str, text: impl AsRef<[u8]>) -> &Self {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }
    fn process(&self, fds: &[&str]) -> &Self {
        self.write(&format!("proc/{PID}/comm"), "vmm\n");
        let folder = self.0.path().join(format!("proc/{PID}/fd"));
        fs::create_dir_all(&folder).unwrap();
        for (fd, target) in fds.iter().enumerate() {
            symlink(target, folder.join(fd.to_string())).unwrap();
        }
        self
    }
    fn thread(&self, tid: i32, name: &[u8], call: &str, schedstat: &str) {
        let task = format!("proc/{PID}/task/{tid}");
        let mut stat = format!("{tid} (").into_bytes();
        stat.extend_from_slice(name);
        stat.extend_from_slice(
            b") S 1 1 1 0 -1 0 0 0 0 0 5 6 0 0 20 0 1 0 9 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 0 0 \
              0 0 59 0",
        );
        let mut comm = name.to_vec();
        comm.push(b'\n');
        self.write(&format!("{task}/comm"), comm).write(&format!("{task}/stat"), stat);
        self.write(&format!("{task}/syscall"), call).write(&format!("{task}/schedstat"), schedstat);
    }
    fn watch(&self) -> Watch<'_> {
        let files = self.files();
        let none = || Err("debugfs is not here".to_owned());
        let debugfs = Debugfs::usual(&files).and_then(|usual| usual.map_or_else(none, Ok));
        let refused = Events::refused(&files);
        let events = |_| Events::nothing(refused.as_deref().unwrap_or("no events"));
        Watch::begin(self.files(), debugfs, events, Which::Pid(PID)).unwrap()
    }
}

fn run(fd: i32) -> String {
    format!("16 {fd:#x} 0xae80 0x0 0x0 0x0 0x0 0x7ffe 0x7f")
}

const ASLEEP: &str = "202 0x5 0x80 0x0 0x0 0x0 0x0 0x7ffe 0x7f";

const ONE: [&str; 2] = ["anon_inode:kvm-vm", "anon_inode:kvm-vcpu:0"];

fn crosvm(fds: &[&str]) -> Host {
    let host = Host::new();
    host.process(fds);
    let at = |name: &str| fds.iter().position(|fd| *fd == name).unwrap() as i32;
    host.thread(20, b"crosvm_vcpu0", &run(at("anon_inode:kvm-vcpu:0")), "5 6 7\n");
    host.thread(21, b"crosvm_vcpu1", &run(at("anon_inode:kvm-vcpu:1")), "50 60 70\n");
    host
}

fn two_vcpus_are_known(total: &GuestTotal) {
    let rows: Vec<_> = total.vcpus.iter().map(|row| (row.index, row.thread)).collect();
    assert_eq!(rows, [(0, Some(20)), (1, Some(21))], "vCPUs and their threads");
    assert_eq!(total.vms, 1, "number of VMs");
}

#[test]
fn a_vm_with_one_descriptor_has_its_threads() {
    let host = crosvm(&["anon_inode:kvm-vm", "anon_inode:kvm-vcpu:0", "anon_inode:kvm-vcpu:1"]);
    two_vcpus_are_known(host.watch().guests()[0].total());
}

#[test]
fn a_vm_whose_descriptor_was_duplicated_has_its_threads() {
    let vm = "anon_inode:kvm-vm";
    let host = crosvm(&[
        vm,
        vm,
        vm,
        "anon_inode:kvm-vcpu:0",
        "anon_inode:kvm-vcpu:1",
        "anon_inode:kvm-vm-stats",
    ]);
    two_vcpus_are_known(host.watch().guests()[0].total());
}

#[test]
fn a_duplicated_vcpu_descriptor_is_no_second_vcpu() {
    let vm = "anon_inode:kvm-vm";
    let host = crosvm(&[
        vm,
        vm,
        "anon_inode:kvm-vcpu:0",
        "anon_inode:kvm-vcpu:0",
        "anon_inode:kvm-vcpu:1",
    ]);
    two_vcpus_are_known(host.watch().guests()[0].total());
}

/// The same with a real VMM: the guest of the laboratory, whose VM descriptor is duplicated
/// twice, as a library that keeps a clone of its VM object in each vCPU does.
#[test]
#[ignore = "the other tests run it, in a process of its own"]
fn child() {
    let kind = std::env::var(other::CHILD).unwrap_or_default();
    if !["plain", "clones", "later", "doubled", "forked"].contains(&kind.as_str())
        && !kind.starts_with("name")
    {
        return;
    }
    if kind.starts_with("name") {
        // What is left of `abcdefghijklmnö` after 15 bytes.
        fs::write("/proc/self/comm", b"abcdefghijklmn\xc3").unwrap();
    }
    let (guest, mut vcpus) = other::guest().unwrap();
    let clones = || {
        for entry in fs::read_dir("/proc/self/fd").unwrap().flatten() {
            if fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str() == "anon_inode:kvm-vm") {
                let fd: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
                for _ in 0..2 {
                    // SAFETY: only duplicates a descriptor; it stays open until the process ends.
                    assert!(unsafe { libc::dup(fd) } > 0);
                }
                return;
            }
        }
    };
    if kind == "clones" {
        clones();
    }
    if kind == "forked" {
        // A helper that keeps all descriptors, as long as its parent lives.
        // SAFETY: between fork and the end of the helper only functions are called that are safe in
        // a signal handler.
        unsafe {
            if libc::fork() == 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                loop {
                    libc::pause();
                }
            }
        }
    }
    if kind == "doubled" {
        // One more descriptor of each file of KVM's.
        let names: Vec<_> =
            fs::read_dir("/proc/self/fd").unwrap().flatten().map(|entry| entry.path()).collect();
        for path in names {
            let kvm = fs::read_link(&path)
                .is_ok_and(|to| to.as_os_str().as_bytes().starts_with(b"anon_inode:kvm-"));
            if kvm {
                let fd: i32 = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
                // SAFETY: as above.
                assert!(unsafe { libc::dup(fd) } > 0);
            }
        }
    }
    let say = |guest: &slat_kvm::guest::Guest| {
        let sum = |name: &str| -> u64 {
            let value = |stats: &slat_kvm::stats::Stats| {
                let mut reading = slat_kvm::stats::Reading::default();
                stats.read(&mut reading).unwrap();
                stats.value(&reading, name).unwrap_or(0)
            };
            guest.vcpu_stats().iter().map(value).sum()
        };
        println!("SAYS {} {}", sum("pf_taken"), sum("exits"));
    };
    say(&guest);
    for line in std::io::stdin().lines() {
        if line.unwrap() == "clone" {
            clones();
        }
        guest.unmap_all().unwrap();
        for vcpu in &mut vcpus {
            let work = slat_kvm::work::Work::each_page(slat_kvm::work::Touch::Write);
            vcpu.load(&work).unwrap();
            vcpu.run().unwrap();
        }
        say(&guest);
    }
}

fn of_a_real_guest(kind: &str) -> Option<GuestTotal> {
    let mut other = other::Other::start_as(kind)?;
    let mut watch = other::watch(Which::Pid(other.pid())).unwrap();
    other.run();
    watch.step();
    other.run();
    watch.step();
    watch.end();
    let total = watch.guests()[0].total().clone();
    other.end();
    Some(total)
}

fn told(total: &GuestTotal) -> String {
    let known: Vec<_> =
        total.knowledge.sources.iter().map(|(m, s)| format!("{m:?}:{s:?}")).collect();
    format!(
        "vms {}, threads {:?}, known {}",
        total.vms,
        total.vcpus.iter().map(|row| (row.index, row.thread)).collect::<Vec<_>>(),
        known.join(" ")
    )
}

#[test]
fn a_vmm_with_clones_of_its_vm_is_known_as_well() {
    let (Some(plain), Some(clones)) = (of_a_real_guest("plain"), of_a_real_guest("clones")) else {
        return;
    };
    let threads =
        |total: &GuestTotal| total.vcpus.iter().map(|row| row.thread.is_some()).collect::<Vec<_>>();
    eprintln!("plain:  {}\nclones: {}", told(&plain), told(&clones));
    for (metric, why) in &clones.knowledge.unknown {
        if plain.knowledge.sources.contains_key(metric) {
            eprintln!("lost: {metric:?}: {why}");
        }
    }
    assert_eq!((clones.vms, clones.vcpus.len()), (plain.vms, plain.vcpus.len()), "VMs and vCPUs");
    assert_eq!(threads(&clones), threads(&plain), "threads that are known");
    assert_eq!(clones.knowledge.sources, plain.knowledge.sources, "metrics that are known");
}

/// One more descriptor of each file: the counts are those of one VM, and not twice as many.
#[test]
fn descriptors_that_are_there_twice_do_not_double_counts() {
    for kind in ["plain", "doubled"] {
        let Some(mut other) = other::Other::start_as(kind) else { return };
        let before = other.run();
        let mut watch = other::watch(Which::Pid(other.pid())).unwrap();
        let after = other.run();
        watch.step();
        watch.end();
        let total = watch.guests()[0].total().clone();
        other.end();
        let (faults, exits) = (total.total.get(&Metric::Faults), total.total.get(&Metric::Exits));
        let pages = total.total.get(&Metric::Pages4k);
        eprintln!(
            "{kind}: its own count {}, {}; the watch: faults {faults:?}, exits {exits:?}, pages \
             {pages:?}, VMs {}, vCPUs {}",
            after[0] - before[0],
            after[1] - before[1],
            total.vms,
            total.vcpus.len()
        );
        assert!(
            faults.is_none_or(|faults| *faults == after[0] - before[0]),
            "{kind}: faults {faults:?} of {}",
            after[0] - before[0]
        );
    }
}

#[test]
fn a_helper_that_keeps_the_descriptors_of_a_vmm_has_no_guest() {
    let Some(mut other) = other::Other::start_as("forked") else { return };
    other.run();
    let parent = format!("\nPPid:\t{}\n", other.pid());
    let is_helper = |pid: &i32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status"));
        status.is_ok_and(|status| status.contains(&parent))
    };
    let names = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name());
    let pids = names.filter_map(|name| name.to_str()?.parse().ok());
    let helper = pids.into_iter().find(is_helper).expect("the VMM forked a helper");
    let has_vm = |pid: i32| {
        let all = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        let mut links = all.filter_map(|entry| fs::read_link(entry.path()).ok());
        links.any(|to| to.as_os_str() == "anon_inode:kvm-vm")
    };
    assert!(has_vm(other.pid()) && has_vm(helper));
    // Other tests have guests as well.
    let watch = other::watch(Which::All).unwrap();
    let known: Vec<i32> = watch.guests().iter().map(|guest| guest.total().pid).collect();
    let count = |pid: i32| known.iter().filter(|known| **known == pid).count();
    assert_eq!((count(other.pid()), count(helper)), (1, 0), "{known:?}");
    other.end();
}

#[test]
fn a_clone_of_the_vm_that_is_made_later_is_no_other_vm() {
    let Some(mut other) = other::Other::start_as("later") else { return };
    let mut watch = other::watch(Which::Pid(other.pid())).unwrap();
    other.run();
    watch.step();
    other.told("clone");
    let mut went = 0;
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(200));
        went += watch.step().went.len();
    }
    let states: Vec<_> = watch.guests().iter().map(|guest| guest.total().state).collect();
    assert_eq!((went, states.len()), (0, 1), "{states:?}");
    other.end();
}

const CUT: &[u8] = b"abcdefghijklmn\xc3";

#[test]
fn a_vmm_with_an_ordinary_name_is_watched() {
    named(b"abcdefghijklmn");
}

#[test]
fn a_vmm_whose_name_is_cut_within_a_character_is_watched() {
    named(CUT);
}

fn named(name: &[u8]) {
    let host = Host::new();
    host.process(&ONE);
    let mut comm = name.to_vec();
    comm.push(b'\n');
    let mut status = b"Name:\t".to_vec();
    status.extend_from_slice(&comm);
    status
        .extend_from_slice(format!("Tgid:\t{PID}\nVmRSS:\t  100 kB\nVmSwap:\t  8 kB\n").as_bytes());
    let mut stat = format!("{PID} (").into_bytes();
    stat.extend_from_slice(name);
    stat.extend_from_slice(b") S 1 1 1 0 -1 0 11 0 13 0 5 6 0 0 20 0");
    host.write(&format!("proc/{PID}/comm"), comm).write(&format!("proc/{PID}/status"), status);
    host.write(&format!("proc/{PID}/stat"), stat);
    host.thread(20, name, &run(1), "5 6 7\n");
    let mut watch = host.watch();
    watch.step();
    let total = watch.guests()[0].total();
    eprintln!(
        "name {:?}, RSS {:?} {:?}",
        total.name,
        total.total.get(&Metric::RssBytes),
        total.knowledge.unknown.get(&Metric::RssBytes)
    );
    assert!(total.name.starts_with("abcdefghijklmn"), "name {:?}", total.name);
    assert_eq!(
        total.total.get(&Metric::RssBytes),
        Some(&(100 << 10)),
        "{:?}",
        total.knowledge.unknown.get(&Metric::RssBytes)
    );
    assert!(
        total.knowledge.sources.contains_key(&Metric::HostMinorFaults),
        "{:?}",
        total.knowledge.unknown.get(&Metric::HostMinorFaults)
    );
    assert_eq!(total.vcpus[0].thread, Some(20), "thread");
    assert!(total.vcpus[0].total.contains_key(&Metric::GuestNs), "guest time");
}

#[test]
fn the_number_of_a_thread_whose_name_is_cut_is_no_process() {
    let host = Host::new();
    host.process(&ONE);
    let mut status = b"Name:\t".to_vec();
    status.extend_from_slice(CUT);
    status.extend_from_slice(b"\nTgid:\t77\n");
    host.write(&format!("proc/{PID}/status"), status);
    assert_eq!(slat_kvm::watch::find_guest(&host.files(), PID), Err(NotFound::Thread(77)));
}

#[test]
fn a_real_vmm_with_a_cut_name_has_memory_and_a_name() {
    let Some(total) = of_a_real_guest("name") else { return };
    eprintln!(
        "{:?}: {}; RSS: {:?}",
        total.name,
        told(&total),
        total.knowledge.unknown.get(&Metric::RssBytes)
    );
    let why = total.knowledge.unknown.get(&Metric::RssBytes);
    assert!(total.name.starts_with("abcdefghijklmn"), "name {:?}", total.name);
    assert!(total.total.contains_key(&Metric::RssBytes), "{why:?}");
}

#[test]
fn a_vcpu_that_moves_to_another_thread_is_counted_there() {
    let host = Host::new();
    host.process(&ONE);
    host.thread(10, b"worker-1", &run(1), "1000 10 1\n");
    host.thread(11, b"worker-2", ASLEEP, "1 1 1\n");
    let mut watch = host.watch();
    assert_eq!(watch.guests()[0].total().vcpus[0].thread, Some(10), "control");
    host.thread(10, b"worker-1", ASLEEP, "2000 20 2\n");
    watch.step();
    host.thread(11, b"worker-2", &run(1), "5001 1 2\n");
    // The time between looks depends on how long they take.
    for _ in 0..600 {
        std::thread::sleep(Duration::from_millis(50));
        watch.step();
        if watch.guests()[0].total().vcpus[0].thread == Some(11) {
            break;
        }
    }
    host.thread(11, b"worker-2", &run(1), "9001 1 3\n");
    watch.step();
    let total = watch.guests()[0].total();
    let row = &total.vcpus[0];
    let ran = row.total.get(&Metric::RunningNs).copied();
    // 1,000 ns on thread 10. 4,000 to 9,000 ns on thread 11, by when that was noticed.
    assert!(
        row.thread == Some(11) && ran.is_some_and(|ran| ran >= 5000),
        "thread {:?}, ran {ran:?} ns",
        row.thread
    );
}

/// The answers of a host's readers.
struct Answers {
    name: &'static str,
    /// What the file of the host has.
    host: &'static str,
    threads: &'static [Option<i32>],
    rss: Result<u64, &'static str>,
    working_set: &'static str,
    pressure: Result<u64, &'static str>,
    faults: &'static str,
    events: &'static str,
}

/// Each host is a text in the folder `hosts`: a remark, and then its files and links.
const HOSTS: [Answers; 7] = [
    Answers {
        name: "qemu-system-x86",
        host: include_str!("hosts/qemu"),
        threads: &[Some(20), Some(21)],
        rss: Ok((60_000 + 16_777_216) << 10),
        working_set: "hugetlbfs",
        pressure: Err("control group"),
        faults: "debugfs is not here",
        events: "no events",
    },
    Answers {
        name: "crosvm",
        host: include_str!("hosts/crosvm"),
        threads: &[Some(20), Some(21)],
        rss: Ok(500 << 10),
        working_set: "clear_refs",
        pressure: Err("control group"),
        faults: "debugfs is not here",
        events: "no events",
    },
    Answers {
        name: "cloud-hyperviso",
        host: include_str!("hosts/cloud-hypervisor-private"),
        threads: &[Some(20)],
        rss: Err("guest_memfd"),
        working_set: "guest_memfd",
        pressure: Err("control group"),
        faults: "debugfs is not here",
        events: "no events",
    },
    Answers {
        name: "firecracker",
        host: include_str!("hosts/firecracker-in-a-container"),
        threads: &[Some(20)],
        rss: Ok(500 << 10),
        working_set: "namespace of control groups",
        pressure: Err("control group"),
        faults: "a namespace of processes",
        events: "no events",
    },
    Answers {
        name: "lkvm",
        host: include_str!("hosts/kvmtool-hybrid"),
        threads: &[Some(20), Some(21)],
        rss: Ok(40_000 << 10),
        working_set: "no referenced pages",
        pressure: Ok(0),
        faults: "debugfs is not here",
        events: "no events",
    },
    Answers {
        name: "qemu-system-x86",
        host: include_str!("hosts/qemu-locked-for-integrity"),
        threads: &[Some(20)],
        rss: Ok(60_000 << 10),
        working_set: "clear_refs",
        pressure: Err("control group"),
        faults: "the kernel is locked down",
        events: "no events",
    },
    Answers {
        name: "qemu-system-x86",
        host: include_str!("hosts/qemu-locked-for-confidentiality"),
        threads: &[Some(20)],
        rss: Ok(60_000 << 10),
        working_set: "clear_refs",
        pressure: Err("control group"),
        faults: "the kernel is locked down",
        events: "locked down for confidentiality",
    },
];

fn host(text: &str) -> Host {
    let host = Host::new();
    for part in text.split("\n== ").skip(1) {
        let (head, text) = part.split_once('\n').unwrap_or((part, ""));
        match head.split_once(" -> ") {
            None => {
                host.write(head, format!("{text}\n"));
            }
            Some((path, target)) => {
                let path = host.0.path().join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                symlink(target, path).unwrap();
            }
        }
    }
    host
}

#[test]
fn each_host_has_its_threads_memory_and_reasons() {
    for it in HOSTS {
        let host = host(it.host);
        let lru_gen = host.0.path().join("sys/kernel/debug/lru_gen");
        let before = fs::read(&lru_gen).ok();
        let mut watch = host.watch();
        watch.estimate(WorkingSets::new(Duration::ZERO, None));
        watch.step();
        let total = watch.guests()[0].total();
        let threads: Vec<_> = total.vcpus.iter().map(|row| row.thread).collect();
        assert_eq!((&*total.name, total.vms, &*threads), (it.name, 1, it.threads));
        let unknown = |metric| &*total.knowledge.unknown[&metric];
        for (metric, told) in [
            (Metric::RssBytes, it.rss),
            (Metric::PressureSomeNs, it.pressure),
            (Metric::WorkingSetBytes, Err(it.working_set)),
            (Metric::Faults, Err(it.faults)),
            (Metric::OtherExitNs, Err(it.events)),
        ] {
            match told {
                Ok(value) => assert_eq!(total.total.get(&metric), Some(&value), "{}", it.name),
                Err(why) => {
                    assert!(unknown(metric).contains(why), "{}: {}", it.name, unknown(metric));
                }
            }
        }
        // What debugfs does show is known.
        let pages = total.total.get(&Metric::Pages4k);
        assert_eq!(pages.is_some(), it.faults.contains("locked down"), "{}", it.name);
        assert!(watch.working_sets().unwrap().told().is_empty(), "{}", it.name);
        assert_eq!(fs::read(&lru_gen).ok(), before, "another group was aged");
    }
}
