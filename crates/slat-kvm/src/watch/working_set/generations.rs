//! The multi-generational LRU ages a control group on request
//! (Documentation/admin-guide/mm/multigen_lru.rst, "Working set estimation"): pages that were used
//! since the last generation are in the two newest.

use super::{UsedBytes, page};
use crate::idle::{Group, Row, head, newest, rows};
use crate::procfs::Files;
use crate::watch::debugfs;
use rustix::mount::MountAttrFlags;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

const FILE: &str = "sys/kernel/debug/lru_gen";

pub(super) const CHANGES: &str = "ages the control group's memory by a generation (lru_gen), as \
                                  the host's reclaim does when memory is short";

#[derive(Debug)]
pub(super) struct Generations {
    pid: i32,
    file: PathBuf,
    /// Keeps this process's own mount.
    _mount: Option<OwnedFd>,
    group: Group,
    /// The newest generation of each node after the mark was made.
    since: Vec<(u64, u64)>,
}

/// Returns whether this kernel's walks of page tables ask KVM as well.
pub(super) fn sees_guests(files: &Files<'_>) -> bool {
    // Of a kernel that does not tell, the bound stays a lower one.
    let release = files.text("proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|it| it.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 12)
}

impl Generations {
    pub fn open(files: &Files<'_>, pid: i32) -> Result<Self, String> {
        let enabled = files.text("sys/kernel/mm/lru_gen/enabled");
        let enabled = enabled.ok_or("this kernel has no MGLRU (CONFIG_LRU_GEN, 6.1)")?;
        let mask = crate::idle::components(&enabled)
            .ok_or_else(|| format!("lru_gen/enabled is no number: {enabled}"))?;
        if mask & 1 == 0 {
            return Err("MGLRU is off: echo y > /sys/kernel/mm/lru_gen/enabled".to_owned());
        }
        if !files.in_first_namespace("cgroup") {
            // To age another group's memory would be worse than no answer.
            return Err(
                "lru_gen has the host's names of control groups, and this is a namespace of \
                        control groups, in which other groups may have the same names: watch from \
                        the host"
                    .to_owned(),
            );
        }
        let (file, mount) = file(files)?;
        let group = of_process(files, pid, &text(&file)?)?;
        Ok(Self { pid, file, _mount: mount, group, since: Vec::new() })
    }

    /// Returns the rows of the process's control group.
    fn rows(&self, files: &Files<'_>) -> Result<Vec<Row>, String> {
        let text = text(&self.file)?;
        if of_process(files, self.pid, &text)? != self.group {
            return Err("the process is in another control group since the mark".to_owned());
        }
        match rows(&text, self.group.number) {
            Some(rows) if !rows.is_empty() => Ok(rows),
            _ => Err("lru_gen tells no generations of the control group".to_owned()),
        }
    }

    /// Makes a new generation on each node, from the pages that were used since the last one.
    fn age(&self, files: &Files<'_>) -> Result<(), String> {
        for (node, newest) in newest(&self.rows(files)?) {
            // Includes pages that could be swapped out (`can_swap`), and scans every page
            // (`force_scan`).
            let command = format!("+ {} {node} {newest} 1 1", self.group.number);
            let file = OpenOptions::new().write(true).open(&self.file);
            file.and_then(|mut file| file.write_all(command.as_bytes()))
                .map_err(|error| format!("lru_gen: {error}"))?;
        }
        Ok(())
    }

    pub fn make(&mut self, files: &Files<'_>) -> Result<(), String> {
        self.age(files)?;
        self.since = newest(&self.rows(files)?);
        Ok(())
    }

    pub fn look(&mut self, files: &Files<'_>) -> Result<UsedBytes, String> {
        self.age(files)?;
        Ok(seen(&self.rows(files)?, &self.since))
    }

    pub fn error(&self, files: &Files<'_>) -> String {
        let sees = match sees_guests(files) {
            true => "",
            false => {
                "a lower bound, as this kernel does not ask KVM (6.12 does): pages that a guest \
                 uses through mappings that KVM has already are not seen; "
            }
        };
        let path = &self.group.path;
        format!("{sees}of all processes of the control group {path}, without pages of files")
    }
}

/// Returns the text, in which another group's name may be no UTF-8.
fn text(file: &Path) -> Result<String, String> {
    fs::read(file).map(crate::procfs::lossy).map_err(|error| format!("lru_gen: {error}"))
}

/// Returns the file, in the mounted debugfs or in a mount that only this process has.
fn file(files: &Files<'_>) -> Result<(PathBuf, Option<OwnedFd>), String> {
    let usual = files.0.join(FILE);
    if usual.exists() || files.0 != Path::new("/") {
        return Ok((usual, None));
    }
    let mount = debugfs::private("debugfs", MountAttrFlags::empty())
        .map_err(|error| format!("lru_gen: debugfs cannot be mounted ({error}): run as root"))?;
    let file = PathBuf::from(format!("/proc/self/fd/{}/lru_gen", mount.as_raw_fd()));
    Ok((file, Some(mount)))
}

/// Returns the control group of a process, in the text of `lru_gen`.
fn of_process(files: &Files<'_>, pid: i32, text: &str) -> Result<Group, String> {
    let groups = files.told(format!("proc/{pid}/cgroup"));
    let groups = groups.map_err(|file| format!("{} cannot be read", file.display()))?;
    group(text, &groups.ok_or("the process ended")?).ok_or_else(|| {
        "MGLRU ages whole control groups, and the process is in none of its own that counts memory"
            .to_owned()
    })
}

/// Returns the control group of a process that counts memory: its own, or the next one above it.
/// The root does not count, because it has all processes of the host.
fn group(text: &str, groups: &str) -> Option<Group> {
    let lines = groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let of_memory = |names: &str| names.is_empty() || names.split(',').any(|it| it == "memory");
    // Another group's name with other bytes in place of a replacement would look the same.
    let is_sure = |path: &&str| !path.contains(char::REPLACEMENT_CHARACTER);
    let paths = lines.filter(|(names, _)| of_memory(names)).map(|(_, path)| path).filter(is_sure);
    let above = paths.flat_map(|path| Path::new(path).ancestors()).filter_map(Path::to_str);
    let mut above = above.filter(|path| *path != "/");
    let known: Vec<Group> = text.lines().filter_map(head).collect();
    above.find_map(|path| known.iter().find(|group| group.path == path).cloned())
}

/// Returns the pages of the generations since the mark.
fn seen(rows: &[Row], since: &[(u64, u64)]) -> UsedBytes {
    let is_used = |row: &Row| {
        since.iter().any(|(node, generation)| *node == row.node && row.generation >= *generation)
    };
    let sum =
        |rows: &mut dyn Iterator<Item = &Row>| rows.map(|row| row.pages).sum::<u64>() * page();
    UsedBytes { used: sum(&mut rows.iter().filter(|row| is_used(row))), all: sum(&mut rows.iter()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::find::tests::FakeProc;

    const TEXT: &str = "memcg     1 /
 node     0
          0      1234          5           6
          1       234          5          -0
memcg    42 /vms/a
 node     0
          7      900         10           1
          8      800         20           1
          9       10        400           1
         10        0          8           0
 node     1
          3      900         30           0
          4        0          2           0
";

    #[test]
    fn pages_used_since_the_mark_are_in_newer_generations_per_node() {
        let rows = rows(TEXT, 42).unwrap();
        assert_eq!(newest(&rows), [(0, 10), (1, 4)]);
        let pages = |seen: UsedBytes| (seen.used / page(), seen.all / page());
        assert_eq!(pages(seen(&rows, &[(0, 9), (1, 4)])), (410, 470));
        assert_eq!(pages(seen(&rows, &[(0, 11)])), (0, 470));
        assert_eq!(super::rows(TEXT, 43), Some(Vec::new()));
        assert_eq!(super::rows(TEXT, 1).unwrap()[1].pages, 5);
        for (known, odd) in [(" node     1", " node     x"), ("         30", "          ?")] {
            assert_eq!(super::rows(&TEXT.replace(known, odd), 42), None, "{odd}");
            assert!(super::rows(&TEXT.replace(known, odd), 1).is_some());
        }
    }

    #[test]
    fn a_group_that_is_gone_or_was_left_has_no_working_set() {
        let host = FakeProc::new();
        host.write("sys/kernel/mm/lru_gen/enabled", "0x0007\n")
            .write("proc/7/cgroup", "0::/vms/a\n");
        host.write(FILE, TEXT);
        let files = host.files();
        let mut it = Generations::open(&files, 7).unwrap();
        it.since = vec![(0, 9)];
        // An attempt to age writes to the file.
        assert!(it.rows(&files).is_ok());
        for (groups, text, why) in [
            ("0::/\n", TEXT, "none of its own"),
            ("0::/vms/a\n", "memcg    42 /vms/a\n", "no generations"),
            ("0::/vms/b\n", "memcg    43 /vms/b\n node 0\n 1 2 3 4\n", "another control group"),
        ] {
            host.write("proc/7/cgroup", groups).write(FILE, text);
            let told = it.look(&files).unwrap_err();
            assert!(told.contains(why), "{told}");
            assert_eq!(std::fs::read_to_string(files.0.join(FILE)).unwrap(), text, "it was aged");
        }
        std::fs::remove_file(files.0.join("proc/7/cgroup")).unwrap();
        assert_eq!(it.look(&files), Err("the process ended".to_owned()));
    }

    #[test]
    fn the_group_is_the_next_that_counts_memory_and_never_the_root() {
        let number = |groups| group(TEXT, groups).map(|group| group.number);
        assert_eq!(number("0::/vms/a"), Some(42));
        assert_eq!(number("0::/vms/a/libvirt/emulator"), Some(42));
        assert_eq!(number("4:cpu:/vms/a\n3:cpuset,memory:/\n0::/\n"), None);
        assert_eq!(number("3:memory:/vms/a\n0::/\n"), Some(42));
        assert_eq!(number("0::/other"), None);
    }

    #[test]
    fn a_kernel_that_ages_guest_pages_is_recognised_by_its_release() {
        let host = FakeProc::new();
        for (release, sees) in
            [("6.11.10+bpo", false), ("6.12.95+deb12-cloud", true), ("7.1", true)]
        {
            host.write("proc/sys/kernel/osrelease", release);
            assert_eq!(sees_guests(&host.files()), sees, "{release}");
        }
    }

    #[test]
    fn what_is_off_or_in_the_root_group_has_a_reason() {
        let host = FakeProc::new();
        let why = || Generations::open(&host.files(), 7).unwrap_err();
        assert!(why().contains("no MGLRU"));
        host.write("sys/kernel/mm/lru_gen/enabled", "0x0000\n");
        assert!(why().contains("off"));
        host.write("sys/kernel/mm/lru_gen/enabled", "0x0007\n").write(FILE, TEXT);
        host.write("proc/7/cgroup", "0::/\n");
        assert!(why().contains("control group"));
        host.write("proc/7/cgroup", "0::/vms/a\n").write("proc/sys/kernel/osrelease", "6.6");
        let it = Generations::open(&host.files(), 7).unwrap();
        assert!(it.error(&host.files()).contains("lower bound"));
    }
}
