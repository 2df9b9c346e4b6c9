//! Memory that this process can have: of the machine, and of its control groups.

use crate::{Error, cgroup};
use rustix::io::Errno;
use slat_procfs::{Available, Files};

/// Returns the memory that is available without swapping. A group that this process made to limit
/// itself does not count.
///
/// # Errors
/// [`Error::Os`] if neither `/proc/meminfo` nor a control group tells.
pub fn available() -> Result<Available, Error> {
    let files = Files::here();
    let mut bounds = files.memory_bounds();
    bounds.retain(|bound| !bound.group.ends_with(cgroup::name()));
    let available = files.available_memory(&bounds);
    available.ok_or_else(|| Error::os("MemAvailable of /proc/meminfo")(Errno::NOENT))
}

/// Checks that `bytes` of guest memory are available, and the memory that KVM allocates to map
/// them.
///
/// KVM needs up to 8 bytes per page each for its table, the reverse map and the host's own page
/// table. 1/64 of the memory covers that, and 64 MiB cover the other needs of the process and the
/// kernel.
///
/// # Errors
/// [`Error::NotEnoughMemory`] if too little is available; [`Error::Os`] as for [`available`].
pub fn check(bytes: u64) -> Result<(), Error> {
    let available = available()?;
    let needed = bytes.saturating_add(bytes / 64).saturating_add(64 << 20);
    if needed > available.bytes {
        let by = match available.group {
            Some(group) => format!("the control group /{} leaves", group.display()),
            None => "MemAvailable of /proc/meminfo is".to_owned(),
        };
        let available = available.bytes >> 20;
        return Err(Error::NotEnoughMemory { needed: needed >> 20, available, by });
    }
    Ok(())
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
    fn more_than_any_machine_has_is_refused() {
        assert!(matches!(check(1 << 60), Err(Error::NotEnoughMemory { .. })));
        assert!(check(0).is_ok());
    }
}
