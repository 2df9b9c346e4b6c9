//! Memory that this process can have: of the machine, and of its control groups.

use crate::procfs::{Available, Bound, Files};
use crate::{Error, cgroup};

/// Returns the memory that is available without swapping. A group that this process made to limit
/// itself does not count.
///
/// # Errors
/// [`Error::MemoryUntold`] if `/proc/meminfo` or the limit of a control group does not tell.
pub fn available() -> Result<Available, Error> {
    within(Files::here())
}

pub(crate) fn within(files: Files<'_>) -> Result<Available, Error> {
    files.available_memory(&bounds(files)).map_err(Error::untold)
}

/// Returns the bounds of this process's control groups, but the one that it made.
pub(crate) fn bounds(files: Files<'_>) -> Vec<Bound> {
    let mut bounds = files.memory_bounds();
    bounds.retain(|bound| !bound.group.ends_with(cgroup::name()));
    bounds
}

/// Checks that `bytes` of guest memory are available, and the memory that KVM allocates to map
/// them.
///
/// KVM needs up to 8 bytes per page each for its table, the reverse map and the host's own page
/// table. 1/64 of the memory covers that, and 64 MiB cover the other needs of the process and the
/// kernel.
///
/// # Errors
/// [`Error::NotEnoughMemory`] if too little is available; [`Error::MemoryUntold`] as for
/// [`available`].
pub fn check(bytes: u64) -> Result<(), Error> {
    let needed = bytes.saturating_add(bytes / 64).saturating_add(64 << 20);
    refuse(needed, available()?)
}

/// Returns an error if more bytes are needed than are available.
pub(crate) fn refuse(needed: u64, available: Available) -> Result<(), Error> {
    if needed <= available.bytes {
        return Ok(());
    }
    let by = match available.group {
        Some(group) => format!("the control group /{} leaves", group.display()),
        None => "MemAvailable of /proc/meminfo is".to_owned(),
    };
    Err(Error::NotEnoughMemory { needed: needed >> 20, available: available.bytes >> 20, by })
}

/// Returns the bytes of the second-level tables of all guests on the host (`SecPageTables`, since
/// Linux 6.1).
pub(crate) fn second_level_tables() -> Option<u64> {
    Files::here().meminfo("SecPageTables")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_below_a_limit_that_cannot_be_read_is_refused() {
        let root = tempfile::tempdir().unwrap();
        // A folder in the file's place, as root may read any file.
        for folder in ["proc/self", "sys/fs/cgroup/a/memory.max"] {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        std::fs::write(root.path().join("proc/self/cgroup"), "0::/a\n").unwrap();
        std::fs::write(root.path().join("proc/meminfo"), "MemAvailable: 4194304 kB\n").unwrap();
        let told = within(Files(root.path())).unwrap_err().to_string();
        assert!(told.starts_with("/sys/fs/cgroup/a/memory.max does not tell"), "{told}");
    }

    #[test]
    fn more_than_any_machine_has_is_refused() {
        assert!(matches!(check(1 << 60), Err(Error::NotEnoughMemory { .. })));
        assert!(check(0).is_ok());
    }
}
