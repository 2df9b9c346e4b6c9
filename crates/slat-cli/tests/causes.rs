//! Verdicts on guests whose stalls are made on purpose, one cause at a time and two.
//!
//! The test is for an emulated machine of one CPU: it takes the machine's memory and its CPU.

use rustix::mm::{Advice, madvise};
use rustix::mount::{MountFlags, mount};
use slat_cli::watch::verdict::{self, Cause};
use slat_kvm::bitmap::DirtyBitmap;
use slat_kvm::guest::{Guest, Shape};
use slat_kvm::procfs::Files;
use slat_kvm::watch::{Debugfs, Events, Watch, Which};
use slat_kvm::work::{Touch, Work};
use slat_kvm::{Backing, Mode};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What is done to a guest, in the environment of its process.
const MADE: &str = "SLAT_CAUSES";

const MEMORY: u64 = 8 << 20;
const GROUPS: &str = "/sys/fs/cgroup";
const GROUP: &str = "/sys/fs/cgroup/guest";

/// What is made, and the causes by which a verdict may call it.
const KINDS: [(&str, &[Cause]); 5] = [
    ("hog", &[Cause::WaitingForCpu]),
    ("log", &[Cause::ProtectedWrites]),
    ("unmap", &[Cause::Mapping]),
    ("pageout", &[Cause::Swap]),
    // Where memory.high is exceeded, the group reclaims, and what it took is read again.
    ("high", &[Cause::Reclaim, Cause::Swap]),
];

/// The process of a guest, or of a CPU hog.
#[test]
#[ignore = "the other test runs it, in a process of its own"]
fn child() {
    let Ok(made) = std::env::var(MADE) else { return };
    if made == "spin" {
        loop {
            std::hint::spin_loop();
        }
    }
    fs::write(format!("{GROUP}/cgroup.procs"), "0").unwrap();
    let has = |kind: &str| made.split(' ').any(|it| it == kind);
    let backing = if has("thp") { Backing::Thp } else { Backing::Small };
    let shape = Shape { memory: MEMORY, mode: Mode::Manual, backing, ..Shape::default() };
    let (guest, mut vcpus) = Guest::new(&shape).unwrap();
    let mut vcpu = vcpus.remove(0);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let run = || {
            while !over.load(Ordering::Relaxed) {
                vcpu.load(&Work::each_page(Touch::Write)).unwrap();
                vcpu.run().unwrap();
            }
        };
        std::thread::Builder::new().name("vcpu0".to_owned()).spawn_scoped(scope, run).unwrap();
        std::thread::sleep(Duration::from_millis(500));
        if has("log") {
            guest.start_log().unwrap();
        }
        println!("READY");
        let mut log = DirtyBitmap::new(guest.pages());
        let begin = guest.memory().host_address() as *mut std::ffi::c_void;
        let advise = |advice| {
            // SAFETY: the pages are guest memory, which the guest may read or write at any time. No
            // code of this process keeps a reference into them.
            unsafe { madvise(begin, guest.memory().len() as usize, advice) }.unwrap();
        };
        loop {
            std::thread::sleep(Duration::from_millis(100));
            if has("log") {
                guest.get_dirty_log(&mut log).unwrap();
                guest.clear_dirty_log(&log, 0, guest.slot_pages() as u32).unwrap();
            }
            if has("unmap") {
                advise(Advice::LinuxDontNeed);
            }
            if has("pageout") {
                advise(Advice::LinuxPageOut);
            }
        }
    });
}

/// A process of this program's test `child`, until it is dropped.
struct Process(Child);

impl Process {
    fn start(made: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "child", "--nocapture", "--include-ignored"]);
        child.env(MADE, made).stdout(Stdio::piped());
        Self(child.spawn().unwrap())
    }

    fn wait_until_ready(&mut self) {
        let lines = BufReader::new(self.0.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line.contains("READY")), "it ended");
    }

    fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Makes swap of compressed memory, and a control group for guests.
fn prepare() {
    fs::write("/sys/block/zram0/disksize", "128M").unwrap();
    let pages = (128u32 << 20) / 4096;
    let mut head = vec![0; 4096];
    head[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    head[1028..1032].copy_from_slice(&(pages - 1).to_ne_bytes());
    head[4086..].copy_from_slice(b"SWAPSPACE2");
    fs::write("/dev/zram0", head).unwrap();
    // SAFETY: the path ends with a zero, and the call keeps no pointer.
    assert_eq!(unsafe { libc::swapon(c"/dev/zram0".as_ptr(), 0) }, 0, "zram takes no swap");
    mount("cgroup2", GROUPS, "cgroup2", MountFlags::empty(), None).unwrap();
    fs::write(format!("{GROUPS}/cgroup.subtree_control"), "+memory").unwrap();
    fs::create_dir(GROUP).unwrap();
}

/// Makes what the words name, and returns the verdict.
fn watched(made: &str) -> verdict::Verdict {
    let has = |kind: &str| made.split(' ').any(|it| it == kind);
    let high = |limit: &str| fs::write(format!("{GROUP}/memory.high"), limit).unwrap();
    high("max");
    let mut guest = Process::start(made);
    guest.wait_until_ready();
    if has("high") {
        let now = fs::read_to_string(format!("{GROUP}/memory.current")).unwrap();
        high(&(now.trim().parse::<u64>().unwrap() - MEMORY / 2).to_string());
    }
    let _hogs = has("hog").then(|| [(); 3].map(|()| Process::start("spin")));
    let (files, debugfs) = (Files::here(), Debugfs::open());
    let which = Which::Pid(guest.pid());
    let mut watch = Watch::begin(files, debugfs, |_| Events::open(), which).unwrap();
    for _ in 0..6 {
        std::thread::sleep(Duration::from_millis(500));
        watch.step();
    }
    watch.end();
    verdict::of(watch.guests()[0].total())
}

#[test]
#[ignore = "takes all of an emulated machine: cargo xtask test emulators"]
fn verdicts_name_the_cause_that_was_made_first_in_19_of_20() {
    assert!(Path::new("/sys/block/zram0").exists(), "the machine needs --module zram");
    prepare();
    let names = KINDS.map(|(name, _)| name);
    let alone = names.iter().flat_map(|name| [vec![*name], vec![*name, "thp"]]);
    let pairs = (0..names.len())
        .flat_map(|one| (one + 1..names.len()).map(move |other| vec![names[one], names[other]]));
    let cases: Vec<Vec<&str>> = alone.chain(pairs).collect();
    assert_eq!(cases.len(), 20);
    let mut wrong = Vec::new();
    for case in &cases {
        let verdict = watched(&case.join(" "));
        let of = |name: &&str| KINDS.iter().find(|(kind, _)| kind == name).map(|(_, all)| *all);
        let made: Vec<&[Cause]> = case.iter().filter_map(of).collect();
        let first = verdict.causes.first().map(|found| found.cause);
        let is_first = first.is_some_and(|first| made.iter().any(|all| all.contains(&first)));
        // Of two causes, one may leave nothing to the other: what is unmapped is not swapped out.
        let is_found =
            |all: &&&[Cause]| !verdict.causes.iter().any(|found| all.contains(&found.cause));
        let (what, unseen) = (case.join("+"), made.iter().filter(is_found).count());
        println!("{} {what}, {unseen} unseen", if is_first { "right" } else { "WRONG" });
        wrong.extend((!is_first).then(|| format!("WRONG {what}: {}", verdict.said)));
    }
    println!("{}\n{} of {} right", wrong.join("\n"), cases.len() - wrong.len(), cases.len());
    assert!(wrong.len() <= 1, "{} are wrong", wrong.len());
}
