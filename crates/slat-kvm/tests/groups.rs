//! Control groups of version 2, as the kernel has them: in an emulated machine, whose groups no
//! other process needs.

use rustix::mount::{MountFlags, mount};
use slat_kvm::Error;
use slat_kvm::cgroup::MemoryLimit;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

const GROUPS: &str = "/sys/fs/cgroup";
const BUSY: &str = "/sys/fs/cgroup/busy";
const LIMIT: u64 = 128 << 20;

/// A process that waits until its standard input ends.
#[test]
#[ignore = "the other test runs it, in a process of its own"]
fn child() {
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

fn own_group() -> String {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap();
    text.lines().find_map(|line| line.strip_prefix("0::")).expect("version 2").to_owned()
}

fn limited() -> Result<MemoryLimit, Error> {
    MemoryLimit::new(LIMIT, LIMIT / 4)
}

#[test]
#[ignore = "changes a machine's control groups: cargo xtask test metrics"]
fn a_group_with_other_processes_is_passed_over_without_a_limit() {
    if !Path::new(GROUPS).join("cgroup.procs").exists() {
        mount("none", GROUPS, "cgroup2", MountFlags::empty(), None).unwrap();
    }
    fs::write(format!("{GROUPS}/cgroup.subtree_control"), "+memory").unwrap();
    fs::create_dir(BUSY).unwrap();
    let mut other = Command::new(std::env::current_exe().unwrap());
    other.args(["--exact", "child", "--include-ignored"]).stdin(Stdio::piped());
    let mut other = other.stdout(Stdio::null()).spawn().unwrap();
    for process in [other.id(), std::process::id()] {
        fs::write(format!("{BUSY}/cgroup.procs"), process.to_string()).unwrap();
    }
    let left = || fs::read_dir(BUSY).unwrap().flatten().any(|it| it.path().is_dir());

    // The kernel gives the children of a group with processes no controller: EBUSY.
    let limit = limited().unwrap();
    let own = own_group();
    assert_eq!(own, format!("/slat-{}", std::process::id()));
    let max = fs::read_to_string(format!("{GROUPS}{own}/memory.max")).unwrap();
    assert_eq!(max.trim(), LIMIT.to_string());
    drop(limit);
    assert_eq!((own_group(), left()), ("/busy".to_owned(), false));
    assert!(!Path::new(GROUPS).join(&own[1..]).exists());

    // Beside a group with a limit, its limit would not hold.
    fs::write(format!("{BUSY}/memory.max"), (2 * LIMIT).to_string()).unwrap();
    match limited() {
        Err(Error::NoControlGroup { group, why }) => {
            assert!(group.ends_with("/busy") && why.contains("besides this one"), "{group} {why}");
        }
        result => panic!("{result:?}"),
    }
    assert_eq!((own_group(), left()), ("/busy".to_owned(), false));

    // Alone in its group, it makes a group below.
    drop(other.stdin.take());
    other.wait().unwrap();
    let limit = limited().unwrap();
    assert_eq!(own_group(), format!("/busy/slat-{}", std::process::id()));
    drop(limit);
    assert_eq!((own_group(), left()), ("/busy".to_owned(), false));
}
