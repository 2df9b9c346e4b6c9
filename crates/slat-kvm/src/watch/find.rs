//! Finds the processes of this host that have KVM guests, and the threads that run vCPUs.
//!
//! A VM, a vCPU and their statistics are descriptors of the process that made them; the kernel
//! names them `anon_inode:kvm-vm`, `kvm-vcpu:N`, `kvm-vm-stats` and `kvm-vcpu-stats:N`. Nothing
//! else has these names: paths of files begin with `/`.

use crate::procfs::Files;
use crate::watch::held::is_same_file;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};

/// A kernel's own thread in a process (`PF_USER_WORKER`, `PF_IO_WORKER` of `/proc/PID/stat`): it
/// shows the registers of the thread that started it, and runs no vCPU.
const WORKER: u64 = 0x4010;

/// `KVM_RUN`, as `/proc/PID/task/TID/syscall` shows an argument.
const RUN: &str = "0xae80";

/// The descriptors of KVM that a process has open, one of each file: a VMM may have several of one
/// VM or vCPU, such as a clone of the VM for each of its objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Descriptors {
    /// Descriptors of VMs.
    pub vms: Vec<i32>,
    /// Descriptors of VMs' statistics.
    pub vm_stats: Vec<i32>,
    /// Numbers and descriptors of vCPUs.
    pub vcpus: Vec<(u32, i32)>,
    /// Numbers of vCPUs, and descriptors of their statistics.
    pub vcpu_stats: Vec<(u32, i32)>,
    /// The process has memory that none of its figures has: `guest_memfd` or secretmem.
    pub private_memory: bool,
}

impl Descriptors {
    /// Keeps one descriptor of each open file of process `pid`.
    fn distinct(&mut self, pid: i32) {
        let same = |one: i32, other: i32| is_same_file((pid, one), (pid, other));
        let known = match &self.vms[..] {
            [first, second, ..] => same(*first, *second).is_some(),
            _ => true,
        };
        if known {
            distinct(&mut self.vms, |one, other| same(*one, *other));
        } else {
            // VMs that are not one have as many vCPUs of each number as there are VMs.
            let mut each = self.vcpus.chunk_by(|one, next| one.0 == next.0);
            if !each.all(|vcpus| vcpus.len() == self.vms.len()) {
                self.vms.truncate(1);
            }
        }
        distinct(&mut self.vm_stats, |one, other| same(*one, *other));
        for vcpus in [&mut self.vcpus, &mut self.vcpu_stats] {
            distinct(vcpus, |one, other| match one.0 == other.0 {
                true => same(one.1, other.1),
                false => Some(false),
            });
        }
    }
}

/// Drops what is the `same` as something before it.
fn distinct<T: Copy>(all: &mut Vec<T>, same: impl Fn(&T, &T) -> Option<bool>) {
    let mut kept: Vec<T> = Vec::new();
    all.retain(|this| {
        let new = !kept.iter().any(|other| same(this, other) == Some(true));
        kept.extend(new.then_some(*this));
        new
    });
}

/// A process that has guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestProcess {
    /// The process's PID.
    pub pid: i32,
    /// The process's name.
    pub name: String,
    /// The guest's name, by QEMU's `-name`.
    pub domain: Option<String>,
    /// The process's control group: of version 2, or else that of its memory.
    pub cgroup: Option<String>,
    /// The descriptors of KVM that it has open.
    pub has: Descriptors,
}

impl GuestProcess {
    /// Returns whether both processes have the same VM open.
    fn shares(&self, other: &Self) -> bool {
        let same = |one: &i32, two: &i32| is_same_file((self.pid, *one), (other.pid, *two));
        let mut pairs =
            self.has.vms.iter().flat_map(|one| other.has.vms.iter().map(move |it| (one, it)));
        pairs.any(|(one, two)| same(one, two) == Some(true))
    }
}

/// The result of a search through the host's processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// Processes with guests, ordered by PID.
    pub found: Vec<GuestProcess>,
    /// Number of processes whose descriptors could not be read.
    pub hidden: usize,
}

/// Why a process has no guest to watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotFound {
    /// There is no such process.
    NoProcess,
    /// The descriptors of the process cannot be read, as a rule because this user may not.
    Denied,
    /// The process has no VM open.
    NoVm,
    /// The number is that of a thread; this is its process. A thread has a folder in `/proc` like
    /// its process's, but no pidfd, and none of the process's accounts have its number.
    Thread(i32),
}

/// Returns the descriptors of KVM that a process has open.
///
/// # Errors
/// [`NotFound`], each of its variants.
pub fn descriptors(files: &Files<'_>, pid: i32) -> Result<Descriptors, NotFound> {
    let folder = files.0.join(format!("proc/{pid}/fd"));
    // A process that ends while it is read is ESRCH. All else, such as no free descriptor here,
    // does not say that the process ended.
    let unread = |error: io::Error| match error.kind() {
        ErrorKind::NotFound => NotFound::NoProcess,
        _ if error.raw_os_error() == Some(libc::ESRCH) => NotFound::NoProcess,
        _ => NotFound::Denied,
    };
    let mut has = Descriptors::default();
    for entry in fs::read_dir(&folder).map_err(unread)? {
        let entry = entry.map_err(unread)?;
        let fd = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        // A user may be allowed to list descriptors and not to see what they are.
        let name = match fs::read_link(entry.path()).map_err(unread) {
            Err(NotFound::Denied) => return Err(NotFound::Denied),
            // The process closed it.
            name => name.ok(),
        };
        let name = name.as_ref().and_then(|name| name.to_str());
        let private = ["anon_inode:[kvm-gmem]", "/[kvm-gmem] (deleted)", "/secretmem (deleted)"];
        has.private_memory |= name.is_some_and(|name| private.contains(&name));
        let name = name.and_then(|name| name.strip_prefix("anon_inode:kvm-"));
        let Some((fd, name)) = fd.zip(name) else { continue };
        let numbered = |prefix| name.strip_prefix(prefix)?.parse::<u32>().ok();
        match name {
            "vm" => has.vms.push(fd),
            "vm-stats" => has.vm_stats.push(fd),
            _ => {
                has.vcpus.extend(numbered("vcpu:").map(|vcpu| (vcpu, fd)));
                has.vcpu_stats.extend(numbered("vcpu-stats:").map(|vcpu| (vcpu, fd)));
            }
        }
    }
    has.vms.sort_unstable();
    has.vm_stats.sort_unstable();
    has.vcpus.sort_unstable();
    has.vcpu_stats.sort_unstable();
    has.distinct(pid);
    match has.vms.is_empty() {
        true => Err(NotFound::NoVm),
        false => Ok(has),
    }
}

/// Returns the guests of one process.
///
/// # Errors
/// [`NotFound`].
pub fn guest(files: &Files<'_>, pid: i32) -> Result<GuestProcess, NotFound> {
    let status = files.text(format!("proc/{pid}/status")).unwrap_or_default();
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
    match process.and_then(|process| process.trim().parse().ok()) {
        Some(process) if process != pid => Err(NotFound::Thread(process)),
        _ => of_process(files, pid),
    }
}

/// Returns the guests of a process, by a number that is no thread's.
fn of_process(files: &Files<'_>, pid: i32) -> Result<GuestProcess, NotFound> {
    let has = descriptors(files, pid)?;
    let name = files.text(format!("proc/{pid}/comm")).unwrap_or_default();
    let domain = files.text(format!("proc/{pid}/cmdline")).and_then(|line| domain(&line));
    let cgroup = files.text(format!("proc/{pid}/cgroup")).and_then(|groups| cgroup(&groups));
    Ok(GuestProcess { pid, name, domain, cgroup, has })
}

/// Returns the name in `-name NAME,debug-threads=on` or `-name guest=NAME`, in which QEMU doubles
/// commas.
fn domain(line: &str) -> Option<String> {
    let mut words = line.split('\0').skip_while(|word| !matches!(*word, "-name" | "--name"));
    let options = words.nth(1)?.replace(",,", "\0");
    let first = || options.split(',').next().filter(|it| !it.contains('='));
    let named = options.split(',').find_map(|it| it.strip_prefix("guest="));
    let name = named.or_else(first)?.replace('\0', ",");
    (!name.is_empty()).then_some(name)
}

/// Returns the control group in the text of `/proc/PID/cgroup`.
fn cgroup(groups: &str) -> Option<String> {
    let of_memory = |line: &&str| {
        line.split(':').nth(1).is_some_and(|it| it.split(',').any(|name| name == "memory"))
    };
    let line = groups
        .lines()
        .find(of_memory)
        .or_else(|| groups.lines().find(|line| line.starts_with("0::")))?;
    line.splitn(3, ':').nth(2).map(str::to_owned)
}

/// Returns the pod of Kubernetes that a control group belongs to, by its UID.
pub fn pod(cgroup: &str) -> Option<String> {
    let folders = cgroup.split('/').filter_map(|folder| folder.rsplit_once("pod"));
    let mut pods = folders.filter(|(before, _)| before.is_empty() || before.ends_with('-'));
    let is_uid =
        |uid: &str| uid.len() >= 32 && uid.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
    let uid = pods.find_map(|(_, uid)| {
        let uid = uid.trim_end_matches(".slice").replace('_', "-");
        is_uid(&uid).then_some(uid)
    });
    uid.filter(|_| cgroup.contains("kubepods"))
}

/// Returns all processes with guests.
pub fn guests(files: &Files<'_>) -> Search {
    let mut search = Search::default();
    let mut all = Vec::new();
    let mut pids: Vec<i32> =
        files.names("proc").iter().filter_map(|name| name.parse().ok()).collect();
    pids.sort_unstable();
    for pid in pids {
        // Threads have folders in /proc, but a list of it has processes alone.
        match of_process(files, pid) {
            Ok(found) => all.push((Reverse(found.has.vcpus.len()), started(files, pid), found)),
            Err(NotFound::Denied) => search.hidden += 1,
            Err(_) => {}
        }
    }
    // A helper that the VMM forked, and that kept its descriptors, has no guest of its own. It is
    // younger than the VMM, but may have a lower PID; a process that was sent the VM has no vCPUs.
    all.sort_by_key(|(vcpus, started, found)| (*vcpus, *started, found.pid));
    for (.., found) in all {
        if !search.found.iter().any(|before| before.shares(&found)) {
            search.found.push(found);
        }
    }
    search.found.sort_by_key(|found| found.pid);
    search
}

/// Returns when a process began, in ticks since boot.
fn started(files: &Files<'_>, pid: i32) -> Option<u64> {
    let stat = files.text(format!("proc/{pid}/stat"))?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// How a vCPU's thread was identified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum VcpuEvidence {
    /// By its name. A VMM may give any name to any thread.
    Name,
    /// By its system call: it sleeps in `KVM_RUN` on the vCPU's descriptor.
    Runs,
}

/// Returns the thread of each vCPU, where it is known.
///
/// A thread is identified by the system call that it sleeps in, or by its name. The names are those
/// that QEMU, Firecracker, cloud-hypervisor, crosvm, kvmtool and the laboratory give.
pub fn threads(files: &Files<'_>, found: &GuestProcess) -> BTreeMap<u32, i32> {
    let mut told: BTreeMap<u32, (VcpuEvidence, i32)> = BTreeMap::new();
    let tasks = format!("proc/{}/task", found.pid);
    for tid in files.names(&tasks).iter().filter_map(|name| name.parse::<i32>().ok()) {
        let at = |file: &str| files.text(format!("{tasks}/{tid}/{file}"));
        let Some(stat) = at("stat") else { continue };
        if flags(&stat).is_some_and(|flags| flags & WORKER != 0) {
            continue;
        }
        let run = at("syscall").and_then(|call| runs(&call));
        let run = run.and_then(|fd| found.has.vcpus.iter().find(|(_, vcpu)| *vcpu == fd));
        let name = || at("comm").and_then(|name| numbered(&name));
        let this = match run {
            Some((vcpu, _)) => Some((*vcpu, (VcpuEvidence::Runs, tid))),
            None => name().map(|vcpu| (vcpu, (VcpuEvidence::Name, tid))),
        };
        let has = |vcpu: u32| found.has.vcpus.iter().any(|(other, _)| *other == vcpu);
        if let Some((vcpu, this)) = this.filter(|(vcpu, _)| has(*vcpu)) {
            let best = told.entry(vcpu).or_insert(this);
            if this.0 > best.0 {
                *best = this;
            }
        }
    }
    told.into_iter().map(|(vcpu, (_, tid))| (vcpu, tid)).collect()
}

/// Returns the threads that sleep in `KVM_RUN` now, by the number of their vCPU.
pub(crate) fn running(files: &Files<'_>, found: &GuestProcess) -> BTreeMap<u32, i32> {
    let tasks = format!("proc/{}/task", found.pid);
    let tids = files.names(&tasks);
    let running = tids.iter().filter_map(|name| {
        let tid: i32 = name.parse().ok()?;
        let fd = runs(&files.text(format!("{tasks}/{tid}/syscall"))?)?;
        let stat = files.text(format!("{tasks}/{tid}/stat"))?;
        let (vcpu, _) = found.has.vcpus.iter().find(|(_, vcpu)| *vcpu == fd)?;
        flags(&stat).is_none_or(|flags| flags & WORKER == 0).then_some((*vcpu, tid))
    });
    running.collect()
}

/// Returns a thread's flags, from its `stat`.
fn flags(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(6)?.parse().ok()
}

/// Returns the descriptor of the vCPU that a thread runs, from its `syscall`.
fn runs(call: &str) -> Option<i32> {
    let mut words = call.split_whitespace().skip(1);
    let fd = i32::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    (words.next()? == RUN).then_some(fd)
}

/// Returns the number in the name of a vCPU's thread: `CPU 3/KVM`, `fc_vcpu 3`, `vcpu3`,
/// `crosvm_vcpu3`, `kvm-vcpu-3`.
fn numbered(name: &str) -> Option<u32> {
    if let Some(rest) = name.strip_prefix("CPU ") {
        return rest.strip_suffix("/KVM")?.parse().ok();
    }
    let (_, rest) = name.split_once("vcpu")?;
    rest.trim_start_matches([' ', '-', '_']).parse().ok()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    /// A made-up `/proc` of a host's processes.
    pub(crate) struct FakeProc(tempfile::TempDir);

    impl FakeProc {
        pub(crate) fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        pub(crate) fn files(&self) -> Files<'_> {
            Files(self.0.path())
        }

        pub(crate) fn write(&self, path: impl AsRef<Path>, text: &str) -> &Self {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        pub(crate) fn process(&self, pid: i32, name: &str, descriptors: &[&str]) -> &Self {
            self.write(format!("proc/{pid}/comm"), &format!("{name}\n"));
            let folder = self.0.path().join(format!("proc/{pid}/fd"));
            fs::create_dir_all(&folder).unwrap();
            for (fd, target) in descriptors.iter().enumerate() {
                symlink(target, folder.join(fd.to_string())).unwrap();
            }
            self
        }

        pub(crate) fn thread(&self, pid: i32, tid: i32, name: &str, flags: u64, call: &str) {
            let task = format!("proc/{pid}/task/{tid}");
            let stat = format!("{tid} ({name}) S 1 1 1 0 -1 {flags} 0 0 0 0 5 6 0 0 20 0");
            self.write(format!("{task}/comm"), name).write(format!("{task}/stat"), &stat);
            self.write(format!("{task}/syscall"), call);
        }
    }

    const QEMU: [&str; 6] = [
        "/dev/null",
        "anon_inode:kvm-vm",
        "anon_inode:kvm-vcpu:0",
        "anon_inode:kvm-vcpu-stats:0",
        "anon_inode:kvm-vcpu:1",
        "anon_inode:kvm-vcpu-stats:1",
    ];

    #[test]
    fn only_processes_with_vm_descriptors_are_found_as_guests() {
        let host = FakeProc::new();
        host.process(10, "qemu", &QEMU).process(9, "sh", &["/dev/null", "anon_inode:[eventfd]"]);
        // An ordinary file of that name is no VM.
        host.process(11, "liar", &["/tmp/anon_inode:kvm-vm"]);
        host.process(12, "device", &["/dev/kvm", "anon_inode:kvm-vcpu:x"]);
        let search = guests(&host.files());
        let pids: Vec<_> = search.found.iter().map(|found| (found.pid, &*found.name)).collect();
        assert_eq!((pids, search.hidden), (vec![(10, "qemu")], 0));
        let has = &search.found[0].has;
        assert_eq!((&*has.vms, &*has.vm_stats), (&[1][..], &[][..]));
        assert_eq!((&*has.vcpus, &*has.vcpu_stats), (&[(0, 2), (1, 4)][..], &[(0, 3), (1, 5)][..]));
        assert_eq!(guest(&host.files(), 9), Err(NotFound::NoVm));
        assert_eq!(guest(&host.files(), 77), Err(NotFound::NoProcess));
    }

    #[test]
    fn descriptors_that_are_listed_and_not_shown_are_hidden() {
        let host = FakeProc::new();
        // No link, as root may read any.
        host.process(10, "qemu", &QEMU).process(11, "hidden", &[]).write("proc/11/fd/3", "");
        let search = guests(&host.files());
        assert_eq!((search.found.len(), search.hidden), (1, 1));
        assert_eq!(guest(&host.files(), 11), Err(NotFound::Denied));
    }

    #[test]
    fn a_guest_has_the_name_that_qemu_was_given_and_its_group() {
        let named = |line: &str| domain(line).unwrap_or_default();
        assert_eq!(named("qemu\0-name\0guest=web01,debug-threads=on\0-S"), "web01");
        assert_eq!(named("qemu\0-name\0a,,b,process=x"), "a,b");
        assert_eq!(named("qemu\0-name\0debug-threads=on"), "");
        assert_eq!(named("qemu\0-S"), "");
        assert_eq!(named("qemu\0-name"), "");
        assert_eq!(cgroup("0::/vms/a:b").as_deref(), Some("/vms/a:b"));
        assert_eq!(cgroup("4:cpu,memory:/old\n0::/").as_deref(), Some("/old"));
        assert_eq!(cgroup("4:cpu:/old"), None);
        let uid = "6a1b2c3d-0000-1111-2222-333344445555";
        let slice = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod6a1b2c3d_0000_\
                     1111_2222_333344445555.slice/cri-containerd-aa.scope";
        let plain = format!("/kubepods/besteffort/pod{uid}/aa");
        assert_eq!([slice, &plain].map(|it| pod(it).unwrap()), [uid, uid]);
        assert_eq!(pod("/machine.slice/machine-qemu-1-pod.scope"), None);
    }

    #[test]
    fn a_threads_number_is_refused_with_its_process() {
        let host = FakeProc::new();
        for pid in [10, 20] {
            host.process(pid, "qemu", &QEMU).write(format!("proc/{pid}/status"), "Tgid:\t10\n");
        }
        assert_eq!(guest(&host.files(), 20), Err(NotFound::Thread(10)));
        assert_eq!(guest(&host.files(), 10).unwrap().pid, 10);
    }

    #[test]
    fn a_vcpu_is_identified_by_its_sleeping_call_then_by_name() {
        let host = FakeProc::new();
        host.process(10, "vmm", &QEMU);
        host.thread(10, 10, "vmm", 0, "running");
        host.thread(10, 20, "CPU 0/KVM", 0, "running");
        host.thread(10, 21, "worker", 0, "16 0x4 0xae80 0x0 0x0 0x0 0x0 0x7ffe 0x7f");
        // It has the name of a vCPU's thread, but another thread runs that vCPU.
        host.thread(10, 22, "vcpu1", 0, "202 0x4 0x0 0x0 0x0 0x0 0x0 0x0 0x0");
        // A kernel thread shows the registers of the thread that created it.
        host.thread(10, 23, "kvm-nx-lpage-re", 0x4040, "16 0x2 0xae80 0x0 0x0 0x0 0x0 0x0 0x0");
        host.thread(10, 24, "vcpu7", 0, "running");
        let found = guest(&host.files(), 10).unwrap();
        assert_eq!(threads(&host.files(), &found), BTreeMap::from([(0, 20), (1, 21)]));
    }

    #[test]
    fn each_vmms_names_are_known() {
        for name in ["CPU 3/KVM", "fc_vcpu 3", "vcpu3", "crosvm_vcpu3", "kvm-vcpu-3"] {
            assert_eq!(numbered(name), Some(3), "{name}");
        }
        for name in ["CPU 3/TCG", "vcpu", "vcpux3", "3", "IO 3/KVM"] {
            assert_eq!(numbered(name), None, "{name}");
        }
    }
}
