//! Available memory of the machine, from `/proc/meminfo`.

use crate::Error;
use rustix::io::Errno;
use slat_procfs::Files;

/// Returns the bytes that are available without swapping (`MemAvailable`).
///
/// # Errors
/// [`Error::Os`] if `/proc/meminfo` cannot be read or lacks the line.
pub fn available() -> Result<u64, Error> {
    let available = Files::here().meminfo("MemAvailable");
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
    if needed > available {
        return Err(Error::NotEnoughMemory { needed: needed >> 20, available: available >> 20 });
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
