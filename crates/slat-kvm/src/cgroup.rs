//! A cgroup with a memory limit for the duration of a run.
//!
//! Memory beyond the limit is swapped. Without enough swap the kernel would kill a process,
//! probably this one, so the module checks the swap first. It supports both versions of cgroups
//! (admin-guide/cgroup-v2.rst, `memory.max`; cgroup-v1/memory.rst, `memory.limit_in_bytes`).

use crate::Error;
use crate::procfs::{Bound, Files, Groups, Version};
use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};

/// A cgroup of this process's own, which it leaves when this is dropped. It lies below the
/// process's cgroup, or below one whose limits are all that bound the process, so that every limit
/// that an administrator set still holds.
#[derive(Debug)]
pub struct MemoryLimit {
    home: PathBuf,
    own: PathBuf,
    /// A group whose children got the controller of memory.
    enabled: Option<PathBuf>,
    version: Version,
}

/// The file of a group, of version 2, that takes requests for memory.
const RECLAIM: &str = "memory.reclaim";

/// Returns whether the kernel may kill this process at a limit below what it uses, because it has
/// control groups of version 1 only.
pub fn may_kill() -> bool {
    let groups = Files::here().control_groups("memory", "memory.limit_in_bytes");
    groups.is_some_and(|groups| groups.version == Version::One)
}

/// Name of the cgroup that this process makes.
pub(crate) fn name() -> String {
    format!("slat-{}", std::process::id())
}

impl MemoryLimit {
    /// Makes a cgroup whose memory is limited to `bytes`, and moves this process into it.
    ///
    /// # Errors
    /// [`Error::NotEnoughSwap`] if the swap is smaller than the part of `needed` beyond the limit;
    /// [`Error::MemoryUntold`] if a group's limit of swap cannot be read;
    /// [`Error::NoControlGroup`] if there is none whose children can be limited; [`Error::Os`]
    /// without root.
    pub fn new(bytes: u64, needed: u64) -> Result<Self, Error> {
        let files = Files::here();
        let bounds = files.memory_bounds();
        let host = rustix::system::sysinfo();
        let swap = host.freeswap * u64::from(host.mem_unit);
        let limits: Result<Vec<_>, _> = bounds.iter().map(|bound| bound.swap.clone()).collect();
        let swap = limits.map_err(Error::untold)?.into_iter().flatten().fold(swap, u64::min);
        // 64 MiB for this program itself.
        let beyond = needed.saturating_add(64 << 20).saturating_sub(bytes);
        if swap < beyond {
            return Err(Error::NotEnoughSwap { needed: beyond >> 20, free: swap >> 20 });
        }
        let Some(groups) = files.control_groups("memory", "memory.limit_in_bytes") else {
            return Err(lack(
                "/sys/fs/cgroup",
                "is not there: mount -t cgroup2 none /sys/fs/cgroup",
            ));
        };
        Self::below(files, &groups, &bounds, bytes)
    }

    /// Sets another limit. The kernel takes away what is above it before the call returns.
    ///
    /// # Errors
    /// [`Error::Os`]: `EBUSY` if it cannot take away enough.
    fn set(&self, bytes: u64) -> Result<(), Error> {
        self.write(self.file(), bytes)
    }

    /// Sets the size from which on the kernel takes memory away: with version 2 `memory.high`,
    /// which kills nobody; with version 1 the limit.
    ///
    /// # Errors
    /// [`Error::Os`]: `EBUSY` if it cannot take away enough.
    pub fn press(&self, bytes: u64) -> Result<(), Error> {
        match self.version {
            Version::One => self.set(bytes),
            Version::Two => self.write("memory.high", bytes),
        }
    }

    fn write(&self, file: &str, bytes: u64) -> Result<(), Error> {
        std::fs::write(self.own.join(file), bytes.to_string())
            .map_err(Error::os("write of a cgroup's memory limit"))
    }

    /// Returns the bytes that the group holds.
    ///
    /// # Errors
    /// [`Error::NoControlGroup`] if the kernel does not tell.
    pub fn held(&self) -> Result<u64, Error> {
        let name = match self.version {
            Version::One => "memory.usage_in_bytes",
            Version::Two => "memory.current",
        };
        let text = std::fs::read_to_string(self.own.join(name)).ok();
        let held = text.and_then(|text| text.trim().parse().ok());
        held.ok_or_else(|| lack(&self.own.display().to_string(), "does not tell what it holds"))
    }

    /// Asks the kernel to take so many bytes away from the group (`memory.reclaim`, of version 2
    /// since Linux 5.19). It takes what it can.
    ///
    /// # Errors
    /// [`Error::NoControlGroup`] if the group has no such file; [`Error::Os`].
    pub fn reclaim(&self, bytes: u64) -> Result<(), Error> {
        match std::fs::write(self.own.join(RECLAIM), bytes.to_string()) {
            // It could take less than that.
            Err(error) if error.raw_os_error() == Some(Errno::AGAIN.raw_os_error()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => {
                self.takes_requests()?;
                Err(Error::os("write of memory.reclaim")(error))
            }
            Ok(()) => Ok(()),
        }
    }

    /// Checks that the kernel has what [`reclaim`](Self::reclaim) needs.
    ///
    /// # Errors
    /// [`Error::NoControlGroup`] if not.
    pub fn takes_requests(&self) -> Result<(), Error> {
        if self.own.join(RECLAIM).exists() {
            return Ok(());
        }
        let why = "memory.reclaim: version 2 of control groups has it since Linux 5.19";
        let parent = self.own.parent().unwrap_or(&self.own);
        Err(lack(&parent.display().to_string(), &format!("has no {why}")))
    }

    /// Returns the name of the file with the limit.
    fn file(&self) -> &'static str {
        match self.version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        }
    }

    fn below(files: Files<'_>, at: &Groups, bounds: &[Bound], bytes: u64) -> Result<Self, Error> {
        let folders: Vec<PathBuf> = at.folders.iter().map(|it| files.0.join(it)).collect();
        let Some(home) = folders.first() else { return Err(lack("/", "is in no control group")) };
        if at.version == Version::One {
            return Self::make(home, home, Version::One, bytes);
        }
        let mut refused = None;
        for (parent, bound) in folders.iter().zip(bounds) {
            match Self::make(home, parent, Version::Two, bytes) {
                // Other processes are in it: of version 2, its children have no controllers.
                Err(busy @ Error::NoControlGroup { .. }) => refused.get_or_insert(busy),
                result => return result,
            };
            // A group beside this one would escape its limit, which it may have if that is unknown.
            if bound.memory != Ok(None) || bound.swap != Ok(None) {
                break;
            }
        }
        Err(refused.unwrap_or_else(|| lack("/", "is in no control group")))
    }

    /// Makes the group below `parent`. The process is moved first: in version 2, only a group
    /// without processes, or the root, can give its children controllers.
    fn make(home: &Path, parent: &Path, version: Version, bytes: u64) -> Result<Self, Error> {
        let own = parent.join(name());
        let refused = |error: io::Error| match error.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                let why = format!("takes no group of this user: {error}; run as root");
                lack(&parent.display().to_string(), &why)
            }
            _ => Error::os("mkdir of a cgroup")(error),
        };
        std::fs::create_dir(&own).map_err(refused)?;
        // From here on, dropping `limit` removes the cgroup.
        let mut limit = Self { home: home.to_owned(), own, enabled: None, version };
        limit.join(&limit.own)?;
        if version == Version::Two {
            limit.enable(parent)?;
        }
        limit.set(bytes)?;
        Ok(limit)
    }

    /// Gives the children of `parent` the controller of memory, if they have none.
    fn enable(&mut self, parent: &Path) -> Result<(), Error> {
        let lists = |name: &str| {
            let text = std::fs::read_to_string(parent.join(name));
            let text = text.map_err(Error::os("read of a cgroup's controllers"))?;
            Ok::<_, Error>(text.split_whitespace().any(|name| name == "memory"))
        };
        if lists("cgroup.subtree_control")? {
            return Ok(());
        }
        if !lists("cgroup.controllers")? {
            return Err(lack(
                &parent.display().to_string(),
                "has no memory controller, as none was delegated to it: \
                 systemd-run --scope -p Delegate=yes …",
            ));
        }
        match std::fs::write(parent.join("cgroup.subtree_control"), "+memory") {
            Ok(()) => {
                self.enabled = Some(parent.to_owned());
                Ok(())
            }
            Err(error) if is_busy(&error) => Err(lack(
                &parent.display().to_string(),
                "has processes besides this one, so its children get no memory controller: \
                 systemd-run --scope -p Delegate=yes …",
            )),
            Err(error) => Err(Error::os("write of cgroup.subtree_control")(error)),
        }
    }

    fn join(&self, group: &Path) -> Result<(), Error> {
        std::fs::write(group.join("cgroup.procs"), std::process::id().to_string())
            .map_err(Error::os("write of cgroup.procs"))
    }
}

fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
}

fn lack(group: &str, why: &str) -> Error {
    Error::NoControlGroup { group: group.to_owned(), why: why.to_owned() }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        // If this fails, an empty cgroup stays, or this process stays in it. `drop` cannot report
        // either. The controller goes first: with it, the group below could not take processes.
        if let Some(parent) = &self.enabled {
            let _ = std::fs::write(parent.join("cgroup.subtree_control"), "-memory");
        }
        let _ = self.join(&self.home.clone());
        let _ = std::fs::remove_dir(&self.own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_for_memory_that_fails_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let (home, own) = (folder.path().to_owned(), folder.path().join("own"));
        std::fs::create_dir(&own).unwrap();
        let limit = MemoryLimit { home, own, enabled: None, version: Version::Two };
        match limit.takes_requests() {
            Err(Error::NoControlGroup { why, .. }) => assert!(why.contains("5.19"), "{why}"),
            result => panic!("{result:?}"),
        }
        std::fs::create_dir(limit.own.join(RECLAIM)).unwrap();
        assert!(limit.takes_requests().is_ok());
        assert!(matches!(limit.reclaim(4096), Err(Error::Os { .. })));
    }

    #[test]
    fn a_limit_too_large_for_swap_is_refused_before_any_group() {
        let result = MemoryLimit::new(1 << 20, 1 << 60);
        assert!(matches!(result, Err(Error::NotEnoughSwap { .. })), "{result:?}");
    }

    /// A tree of version 2 with this process in /unit/inner, and the group made in it.
    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Result<MemoryLimit, Error>) {
        let root = tempfile::tempdir().unwrap();
        let own = [("proc/self/cgroup", "0::/unit/inner\n")];
        for (path, text) in own.iter().chain(files) {
            let file = root.path().join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        let files = Files(root.path());
        let groups = files.control_groups("memory", "memory.limit_in_bytes").unwrap();
        let made = MemoryLimit::below(files, &groups, &files.memory_bounds(), 1 << 20);
        (root, made)
    }

    #[test]
    fn the_group_lies_below_the_limit_of_the_administrator() {
        let (root, made) = tree(&[
            ("sys/fs/cgroup/unit/inner/cgroup.subtree_control", "\n"),
            ("sys/fs/cgroup/unit/inner/cgroup.controllers", "cpu memory\n"),
        ]);
        let own = root.path().join("sys/fs/cgroup/unit/inner").join(name());
        assert_eq!(std::fs::read_to_string(own.join("memory.max")).unwrap(), "1048576");
        assert_eq!(made.unwrap().own, own);
    }

    #[test]
    fn a_parent_group_is_passed_over_only_if_it_has_no_limit() {
        let unit = ("sys/fs/cgroup/unit/cgroup.subtree_control", "memory\n");
        let inner = ("sys/fs/cgroup/unit/inner/cgroup.subtree_control", "\n");
        let none = ("sys/fs/cgroup/unit/inner/cgroup.controllers", "\n");
        let (root, made) = tree(&[unit, inner, none]);
        assert_eq!(made.unwrap().own, root.path().join("sys/fs/cgroup/unit").join(name()));
        let limit = ("sys/fs/cgroup/unit/inner/memory.max", "1048576\n");
        let (_root, made) = tree(&[unit, inner, none, limit]);
        let told = made.unwrap_err().to_string();
        assert!(told.contains("delegated"), "{told}");
        let unread = ("sys/fs/cgroup/unit/inner/memory.max/folder", "");
        let (_root, made) = tree(&[unit, inner, none, unread]);
        assert!(made.unwrap_err().to_string().contains("delegated"));
    }
}
