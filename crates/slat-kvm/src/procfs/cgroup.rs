//! The control groups of this process, and what their limits leave it
//! (admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst).

use super::{Files, all, value_of, whole};
use std::ffi::OsString;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};

/// Version of the hierarchy that has a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// A hierarchy for each controller.
    One,
    /// One hierarchy for all.
    Two,
}

/// This process's control group and its ancestors, as far as they can be seen from here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Version of the hierarchy.
    pub version: Version,
    /// Their directories, its own first.
    pub folders: Vec<PathBuf>,
}

/// A number that the kernel tells, or nothing if there is none; or the file that is there and does
/// not tell it. Such a file is not one without a limit.
pub type KernelValue<T = u64> = Result<Option<T>, PathBuf>;

/// What a control group leaves of memory, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Its directory.
    pub group: PathBuf,
    /// What is left below its limit, if it has one. Page cache counts as left, as the kernel
    /// reclaims it before it refuses memory.
    pub memory: KernelValue,
    /// What may be swapped beyond, if that is limited.
    pub swap: KernelValue,
}

/// Available memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Available {
    /// In bytes.
    pub bytes: u64,
    /// The control group whose limit it is, if it is not what the host has available.
    pub group: Option<PathBuf>,
}

/// Without a limit, the number of version 1 is the largest multiple of a page, which is above this.
const NO_LIMIT: u64 = 1 << 62;

/// Where the hierarchies are by convention, if mountinfo does not tell.
const ROOT: &str = "sys/fs/cgroup";

impl Files<'_> {
    /// Returns this process's groups of a controller: those of version 1 if they have the file
    /// `first`, or else those of version 2.
    pub fn control_groups(&self, controller: &str, first: &str) -> Option<Groups> {
        let own = self.names_of_any_bytes("proc/self/cgroup");
        let lines = || own.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let has = |names: &str| names.split(',').any(|name| name == controller);
        let one = lines().find(|(names, _)| has(names)).map(|(_, path)| path);
        let two = lines().find(|(names, _)| names.is_empty()).map(|(_, path)| path);
        let mut mounts = self.hierarchies(Some(controller));
        mounts.push(("/".to_owned(), Path::new(ROOT).join(controller)));
        let found = mounts.iter().find_map(|mount| self.below(mount, &[one?], first));
        if let Some(folders) = found {
            return Some(Groups { version: Version::One, folders });
        }
        let mut mounts = self.hierarchies(None);
        let usual = [ROOT.into(), Path::new(ROOT).join("unified")];
        mounts.extend(usual.map(|folder| ("/".to_owned(), folder)));
        let paths: Vec<&str> = one.into_iter().chain(two).collect();
        let found = mounts.iter().find_map(|mount| self.below(mount, &paths, ""));
        found.map(|folders| Groups { version: Version::Two, folders })
    }

    /// Returns a file of names, each byte of it as the character with its number: a name need not
    /// be UTF-8, and [`path`] gives its bytes back.
    fn names_of_any_bytes(&self, file: &str) -> String {
        let bytes = File::open(self.0.join(file)).ok().and_then(|file| all(&file));
        bytes.unwrap_or_default().into_iter().map(char::from).collect()
    }

    /// Returns the mounted hierarchies that have a controller, in version 1, or those of version 2:
    /// the group that is mounted, and where.
    pub(crate) fn hierarchies(&self, controller: Option<&str>) -> Vec<(String, PathBuf)> {
        let text = self.names_of_any_bytes("proc/self/mountinfo");
        let hierarchy = |line: &str| {
            let (mount, kind) = line.split_once(" - ")?;
            let mut kind = kind.split(' ');
            let wanted = match (controller, kind.next()?) {
                (Some(controller), "cgroup") => kind.nth(1)?.split(',').any(|it| it == controller),
                (None, "cgroup2") => true,
                _ => false,
            };
            let mut words = mount.split(' ').skip(3).map(unescaped);
            let (root, at) = (words.next()?, words.next()?);
            wanted.then(|| (root, path(at.trim_start_matches('/'))))
        };
        text.lines().filter_map(hierarchy).collect()
    }

    /// Returns the directory of the first path that is below a mounted group, and its ancestors up
    /// to the mount. In a container the path may be one of the host: then the mount is the group.
    fn below(&self, mount: &(String, PathBuf), paths: &[&str], file: &str) -> Option<Vec<PathBuf>> {
        let (root, at) = mount;
        let relative = |own: &&str| {
            let own = path(own);
            let path = own.strip_prefix(path(root)).or_else(|_| own.strip_prefix("/")).ok()?;
            // A group outside of this process's namespace.
            let is_inside = !path.components().any(|part| part == Component::ParentDir);
            is_inside.then(|| path.to_owned())
        };
        let mut candidates = paths.iter().filter_map(relative).chain([PathBuf::new()]);
        let own = candidates.find(|path| {
            // One that may not be looked at may be there: its limits are unknown.
            self.0.join(at).join(path).join(file).try_exists().unwrap_or(true)
        })?;
        // Components, as joining an empty path would leave a slash at the end.
        Some(own.ancestors().map(|group| at.join(group).components().collect()).collect())
    }

    /// Returns the bounds that this process's control groups put on its memory, its own group's
    /// first.
    pub fn memory_bounds(&self) -> Vec<Bound> {
        if let Err(file) = self.told("proc/self/cgroup") {
            return vec![Bound {
                group: PathBuf::new(),
                memory: Err(file.clone()),
                swap: Err(file),
            }];
        }
        let groups = self.control_groups("memory", "memory.limit_in_bytes");
        let Some(Groups { version, folders }) = groups else { return Vec::new() };
        folders.into_iter().map(|group| self.bound(version, group)).collect()
    }

    /// Returns a file's text, or nothing if there is no such file.
    ///
    /// # Errors
    /// The file, if it cannot be read.
    pub fn told(&self, path: impl AsRef<Path>) -> KernelValue<String> {
        let path = path.as_ref();
        match File::open(self.0.join(path)) {
            Ok(file) => whole(&file).map(Some).ok_or_else(|| path.to_owned()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(_) => Err(path.to_owned()),
        }
    }

    /// Returns the number in a file, unless there is no such file or it says `max`.
    ///
    /// # Errors
    /// The file, if it cannot be read or has something else.
    pub fn told_number(&self, path: impl AsRef<Path>) -> KernelValue {
        let path = path.as_ref();
        let text = self.told(path)?;
        let number = |text: &str| text.trim().parse().map_err(|_| path.to_owned());
        text.as_deref().filter(|text| text.trim() != "max").map(number).transpose()
    }

    fn bound(&self, version: Version, group: PathBuf) -> Bound {
        let number = |name: &str| self.told_number(group.join(name));
        // Without a number of the cache, less counts as left.
        let stat = self.text(group.join("memory.stat")).unwrap_or_default();
        let stat = |name: &str| value_of(&stat, name).unwrap_or(0);
        let left = |limit: Option<u64>, used: &str, cache: u64| -> KernelValue {
            let Some(limit) = limit else { return Ok(None) };
            // A limit bounds even if there is no file of the use.
            let used = number(used)?.unwrap_or(0).saturating_sub(cache);
            Ok(Some(limit.saturating_sub(used)))
        };
        let limit = |name: &str| number(name).map(|it| it.filter(|bytes| *bytes < NO_LIMIT));
        let (memory, swap) = match version {
            Version::Two => {
                let cache = ["inactive_file", "active_file", "slab_reclaimable"].map(stat);
                let cache = cache.into_iter().fold(0, u64::saturating_add);
                let memory = number("memory.max").and_then(|max| {
                    let limit = max.into_iter().chain(number("memory.high")?).min();
                    left(limit, "memory.current", cache)
                });
                let swap = number("memory.swap.max");
                (memory, swap.and_then(|most| left(most, "memory.swap.current", 0)))
            }
            Version::One => {
                let cache = stat("total_inactive_file").saturating_add(stat("total_active_file"));
                let most = limit("memory.limit_in_bytes");
                let memory = most.clone().and_then(|it| left(it, "memory.usage_in_bytes", cache));
                let swap = limit("memory.memsw.limit_in_bytes").and_then(|both| {
                    let Some(both) = both else { return Ok(None) };
                    Ok(Some(both.saturating_sub(most?.unwrap_or(both))))
                });
                (memory, swap)
            }
        };
        Bound { group, memory, swap }
    }

    /// Returns the memory that this process can have without swapping: what the host has available
    /// (`MemAvailable`), or what `bounds` leave, if that is less.
    ///
    /// # Errors
    /// The file that does not tell, of the host's memory or of a bound: what is left of it may be
    /// less than any other.
    pub fn available_memory(&self, bounds: &[Bound]) -> Result<Available, PathBuf> {
        const HOST: &str = "proc/meminfo";
        let text = self.told(HOST)?;
        let host = text.and_then(|text| super::bytes(&text, "MemAvailable"));
        let mut least = host.map(|bytes| Available { bytes, group: None });
        for bound in bounds {
            if let Some(bytes) = bound.memory.clone()?
                && least.as_ref().is_none_or(|least| bytes < least.bytes)
            {
                least = Some(Available { bytes, group: Some(bound.group.clone()) });
            }
        }
        least.ok_or_else(|| HOST.into())
    }

    /// Returns what this process's control groups leave of huge pages of a size, if they limit
    /// them. A page beyond such a limit ends the process, as the pool may have it all the same.
    ///
    /// # Errors
    /// The file that does not tell.
    pub fn huge_page_bound(&self, page_size: u64) -> Result<Option<Available>, PathBuf> {
        self.told("proc/self/cgroup")?;
        // As the kernel names the size (mm/hugetlb_cgroup.c).
        let size = match page_size {
            1_073_741_824.. => format!("{}GB", page_size >> 30),
            1_048_576.. => format!("{}MB", page_size >> 20),
            _ => format!("{}KB", page_size >> 10),
        };
        let first = format!("hugetlb.{size}.limit_in_bytes");
        let Some(groups) = self.control_groups("hugetlb", &first) else { return Ok(None) };
        let [most, used] = match groups.version {
            Version::One => ["limit_in_bytes", "usage_in_bytes"],
            Version::Two => ["max", "current"],
        };
        let mut least: Option<Available> = None;
        // Pages that are used, and those that are reserved for mappings, have a limit each.
        for (group, kind) in groups.folders.iter().flat_map(|it| [(it, ""), (it, "rsvd.")]) {
            let number =
                |what| self.told_number(group.join(format!("hugetlb.{size}.{kind}{what}")));
            let Some(limit) = number(most)?.filter(|it| *it < NO_LIMIT) else { continue };
            let bytes = limit.saturating_sub(number(used)?.unwrap_or(0));
            if least.as_ref().is_none_or(|least| bytes < least.bytes) {
                least = Some(Available { bytes, group: Some(group.clone()) });
            }
        }
        Ok(least)
    }

    /// Returns whether control groups count huge pages of pools as memory, too (a mount option of
    /// version 2, `memory_hugetlb_accounting`).
    pub fn memory_has_huge_pages(&self) -> bool {
        let text = self.names_of_any_bytes("proc/self/mountinfo");
        let mut kinds = text.lines().filter_map(|line| Some(line.split_once(" - cgroup2 ")?.1));
        kinds.any(|kind| {
            let options = kind.split([' ', ',']);
            options.into_iter().any(|option| option == "memory_hugetlb_accounting")
        })
    }

    /// Returns the CPU time that this process's control groups allow it, in CPUs, if they limit it.
    ///
    /// # Errors
    /// The file that does not tell: its quota may be less than any other.
    pub fn cpu_quota(&self) -> KernelValue<f64> {
        self.told("proc/self/cgroup")?;
        let groups = self.control_groups("cpu", "cpu.cfs_quota_us");
        let Some(Groups { version, folders }) = groups else { return Ok(None) };
        let quota = |group: &PathBuf| -> KernelValue<f64> {
            let read = |name: &str| {
                let path = group.join(name);
                Ok::<_, PathBuf>(self.told(&path)?.map(|text| (text, path)))
            };
            let number = |(text, path): &(String, PathBuf), nth| {
                let word = text.split_whitespace().nth(nth).and_then(|word| word.parse().ok());
                word.ok_or_else(|| path.clone())
            };
            let (quota, period): (f64, f64) = match version {
                Version::Two => match read("cpu.max")? {
                    Some((text, _)) if text.starts_with("max") => return Ok(None),
                    Some(file) => (number(&file, 0)?, number(&file, 1)?),
                    None => return Ok(None),
                },
                Version::One => match (read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?) {
                    (Some((text, _)), _) if text.trim() == "-1" => return Ok(None),
                    (Some(quota), Some(period)) => (number(&quota, 0)?, number(&period, 0)?),
                    _ => return Ok(None),
                },
            };
            Ok((period > 0.0).then_some(quota / period))
        };
        let quotas: Result<Vec<_>, _> = folders.iter().map(quota).collect();
        Ok(quotas?.into_iter().flatten().min_by(f64::total_cmp))
    }
}

/// Returns the path that a part of [`Files::names_of_any_bytes`] is.
fn path(name: &str) -> PathBuf {
    OsString::from_vec(name.chars().map(|byte| byte as u8).collect()).into()
}

/// Returns a word of mountinfo, in which blanks, tabs, newlines and backslashes are octal.
fn unescaped(word: &str) -> String {
    let codes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    codes.iter().fold(word.to_owned(), |word, (code, is)| word.replace(code, is))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const MIB: u64 = 1 << 20;

    /// Returns a host that has these files.
    fn host(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let file = root.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        root
    }

    fn told(files: &[(&str, &str)]) -> Result<Available, PathBuf> {
        let root = host(files);
        let files = Files(root.path());
        files.available_memory(&files.memory_bounds())
    }

    fn left(files: &[(&str, &str)]) -> Option<Available> {
        told(files).ok()
    }

    #[test]
    fn a_limit_that_cannot_be_read_is_unknown_and_not_missing() {
        let own = ("proc/self/cgroup", "4:cpu,memory:/a\n0::/a\n");
        let host = ("proc/meminfo", "MemAvailable: 4096 kB\n");
        // Root may read any file, and no user can read a folder as one.
        for file in ["memory.max/x", "memory.high/x", "memory.swap.max/x", "cpu.max/x"] {
            let unread = format!("sys/fs/cgroup/a/{}", file.trim_end_matches("/x"));
            let root = self::host(&[own, host, (&format!("{unread}/x"), "")]);
            let files = Files(root.path());
            let bounds = files.memory_bounds();
            let wanted = |part: &str| match file.starts_with(part) {
                true => Err(PathBuf::from(&unread)),
                false => Ok(None),
            };
            let memory = wanted("memory.max").and(wanted("memory.high"));
            assert_eq!(bounds[0].memory, memory, "{file}");
            assert_eq!(files.available_memory(&bounds).is_err(), memory.is_err(), "{file}");
            assert_eq!(bounds[0].swap, wanted("memory.swap"), "{file}");
            assert_eq!(files.cpu_quota().map(|_| None), wanted("cpu"), "{file}");
        }
        let limit = ("sys/fs/cgroup/a/memory.max", "1048576\n");
        let used = ("sys/fs/cgroup/a/memory.current/x", "");
        assert_eq!(told(&[own, host, limit, used]), Err("sys/fs/cgroup/a/memory.current".into()));
        let odd = ("sys/fs/cgroup/a/memory.max", "many\n");
        assert_eq!(told(&[own, host, odd]), Err("sys/fs/cgroup/a/memory.max".into()));
        let one = "sys/fs/cgroup/memory/a/memory.limit_in_bytes";
        assert_eq!(told(&[own, host, (&format!("{one}/x"), "")]), Err(one.into()));
        let unread = ("proc/self/cgroup/x", "");
        assert_eq!(told(&[host, unread]), Err("proc/self/cgroup".into()));
    }

    #[test]
    fn a_limit_of_any_enclosing_group_bounds_memory() {
        let available = left(&[
            ("proc/meminfo", "MemAvailable: 4096 kB\n"),
            ("proc/self/cgroup", "0::/outer/inner\n"),
            ("sys/fs/cgroup/outer/memory.max", "1048576\n"),
            ("sys/fs/cgroup/outer/memory.current", "48576\n"),
            ("sys/fs/cgroup/outer/inner/cgroup.procs", "1\n"),
            ("sys/fs/cgroup/outer/inner/memory.max", "max\n"),
        ]);
        let group = Some("sys/fs/cgroup/outer".into());
        assert_eq!(available, Some(Available { bytes: 1_000_000, group }));
    }

    #[test]
    fn a_huge_page_limit_bounds_its_page_size_in_both_versions() {
        let two = host(&[
            ("proc/self/cgroup", "0::/a/b\n"),
            (
                "proc/self/mountinfo",
                "31 30 0:28 / /sys/fs/cgroup rw - cgroup2 none \
             rw,memory_hugetlb_accounting\n",
            ),
            ("sys/fs/cgroup/a/hugetlb.2MB.max", "8388608\n"),
            ("sys/fs/cgroup/a/hugetlb.2MB.current", "2097152\n"),
            ("sys/fs/cgroup/a/b/hugetlb.2MB.max", "max\n"),
            ("sys/fs/cgroup/a/b/hugetlb.2MB.rsvd.max", "4194304\n"),
            ("sys/fs/cgroup/a/b/hugetlb.1GB.max/x", ""),
        ]);
        let files = Files(two.path());
        let left = |size| files.huge_page_bound(size).map(|it| it.map(|it| it.bytes));
        assert_eq!((left(2 * MIB), left(32 * MIB)), (Ok(Some(4 * MIB)), Ok(None)));
        assert_eq!(left(1024 * MIB), Err("sys/fs/cgroup/a/b/hugetlb.1GB.max".into()));
        assert!(files.memory_has_huge_pages());
        let one = host(&[
            ("proc/self/cgroup", "7:hugetlb:/a\n0::/\n"),
            ("sys/fs/cgroup/hugetlb/hugetlb.64KB.limit_in_bytes", "131072\n"),
            ("sys/fs/cgroup/hugetlb/hugetlb.64KB.usage_in_bytes", "65536\n"),
            ("sys/fs/cgroup/hugetlb/a/hugetlb.64KB.limit_in_bytes", "9223372036854710272\n"),
        ]);
        let files = Files(one.path());
        let group = Some("sys/fs/cgroup/hugetlb".into());
        assert_eq!(files.huge_page_bound(65536), Ok(Some(Available { bytes: 65536, group })));
        assert!(!files.memory_has_huge_pages());
    }

    #[test]
    fn a_group_without_readable_mountinfo_and_meminfo_still_bounds() {
        let available = left(&[
            ("proc/self/cgroup", "4:memory:/a\n0::/\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1048576\n"),
        ]);
        assert_eq!(available.map(|it| it.bytes), Some(MIB));
    }

    #[test]
    fn the_group_in_a_container_is_the_one_that_is_mounted() {
        let mount = "31 30 0:28 /box /cg\\040two rw - cgroup2 none rw\n";
        for own in ["0::/box/a\n", "0::/../a\n", "0::/\n"] {
            let available = left(&[
                ("proc/self/cgroup", own),
                ("proc/self/mountinfo", mount),
                ("cg two/cgroup.procs", ""),
                ("cg two/memory.high", "1048576\n"),
            ]);
            assert_eq!(available.map(|it| it.bytes), Some(MIB), "{own}");
        }
    }

    #[test]
    fn a_limit_is_found_in_groups_and_mounts_with_non_utf8_names() {
        let root = tempfile::tempdir().unwrap();
        let name = |text: &[u8]| root.path().join(OsString::from_vec(text.to_vec()));
        let write = |at: &[u8], text: &[u8]| {
            fs::create_dir_all(name(at).parent().unwrap()).unwrap();
            fs::write(name(at), text).unwrap();
        };
        write(b"proc/self/cgroup", b"0::/caf\xe9/\xc3\n");
        write(b"proc/self/mountinfo", b"31 30 0:28 / /\xff\\040cg rw - cgroup2 none rw\n");
        write(b"\xff cg/caf\xe9/\xc3/memory.max", b"1048576\n");
        write(b"\xff cg/cgroup.procs", b"");
        let files = Files(root.path());
        let available = files.available_memory(&files.memory_bounds());
        assert_eq!(available.map(|it| it.bytes), Ok(MIB));
    }

    #[test]
    fn a_cpu_quota_is_read_in_both_versions() {
        let two = host(&[
            ("proc/self/cgroup", "0::/a\n"),
            ("sys/fs/cgroup/cgroup.procs", ""),
            ("sys/fs/cgroup/cpu.max", "150000 100000\n"),
        ]);
        assert_eq!(Files(two.path()).cpu_quota(), Ok(Some(1.5)));
        let one = |quota| {
            host(&[
                ("proc/self/cgroup", "3:cpu,cpuacct:/a\n"),
                ("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", quota),
                ("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n"),
            ])
        };
        assert_eq!(Files(one("50000\n").path()).cpu_quota(), Ok(Some(0.5)));
        assert_eq!(Files(one("-1\n").path()).cpu_quota(), Ok(None));
    }
}
