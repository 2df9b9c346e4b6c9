//! A cgroup with a memory limit for the duration of a run.
//!
//! Memory beyond the limit is swapped. Without enough swap the kernel would kill a process,
//! probably this one, so the module checks the swap first. It supports both versions of cgroups
//! (admin-guide/cgroup-v2.rst, `memory.max`; cgroup-v1/memory.rst, `memory.limit_in_bytes`).

use crate::Error;
use slat_procfs::Files;
use std::path::{Path, PathBuf};

/// A cgroup of this process's own, which it leaves when this is dropped.
#[derive(Debug)]
pub struct MemoryLimit {
    home: PathBuf,
    own: PathBuf,
}

impl MemoryLimit {
    /// Makes a cgroup whose memory is limited to `bytes`, and moves this process into it.
    ///
    /// # Errors
    /// [`Error::NotEnoughSwap`] if the swap is smaller than the part of `needed` beyond the limit;
    /// [`Error::Os`] without root or without cgroups.
    pub fn new(bytes: u64, needed: u64) -> Result<Self, Error> {
        let host = rustix::system::sysinfo();
        let swap = host.freeswap * u64::from(host.mem_unit);
        // 64 MiB for this program itself.
        let beyond = (needed + (64 << 20)).saturating_sub(bytes);
        if swap < beyond {
            return Err(Error::NotEnoughSwap { needed: beyond >> 20, free: swap >> 20 });
        }
        let Place { home, parent, file } = place()?;
        let own = parent.join(format!("slat-{}", std::process::id()));
        std::fs::create_dir(&own).map_err(Error::os("mkdir of a cgroup (needs root)"))?;
        // From here on, dropping `limit` removes the cgroup.
        let limit = Self { home, own };
        std::fs::write(limit.own.join(file), bytes.to_string())
            .map_err(Error::os("write of a cgroup's memory limit"))?;
        limit.join(&limit.own)?;
        Ok(limit)
    }

    fn join(&self, group: &Path) -> Result<(), Error> {
        std::fs::write(group.join("cgroup.procs"), std::process::id().to_string())
            .map_err(Error::os("write of cgroup.procs"))
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        // If this fails, an empty cgroup stays, or this process stays in it. `drop` cannot report
        // either.
        let _ = self.join(&self.home.clone());
        let _ = std::fs::remove_dir(&self.own);
    }
}

/// The directory in which a cgroup can be made.
struct Place {
    /// The cgroup in which this process is.
    home: PathBuf,
    parent: PathBuf,
    /// Name of the limit's file.
    file: &'static str,
}

fn place() -> Result<Place, Error> {
    let group = Files::here().group("memory");
    let path = group.trim_start_matches('/');
    // Inside a container, the path may be the host's, and the mount point is then the cgroup
    // itself.
    let home = |mount: &Path| {
        let homes = [mount.join(path), mount.to_path_buf()];
        homes.into_iter().find(|home| home.join("cgroup.procs").exists())
    };
    let first = Path::new("/sys/fs/cgroup/memory");
    if let Some(home) = home(first).filter(|home| home.join("memory.limit_in_bytes").exists()) {
        return Ok(Place { parent: home.clone(), home, file: "memory.limit_in_bytes" });
    }
    // In version 2, a cgroup other than the root that has processes gives its children no
    // controllers.
    let root = Path::new("/sys/fs/cgroup");
    match home(root).filter(|_| root.join("cgroup.controllers").exists()) {
        Some(home) => {
            // It is often enabled already. If it cannot be enabled, the write of the limit fails.
            let _ = std::fs::write(root.join("cgroup.subtree_control"), "+memory");
            Ok(Place { parent: root.into(), home, file: "memory.max" })
        }
        None => Err(Error::os("cgroups of memory")(rustix::io::Errno::NOENT)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_swap_cannot_take_up_is_refused_before_anything_is_made() {
        let result = MemoryLimit::new(1 << 20, 1 << 60);
        assert!(matches!(result, Err(Error::NotEnoughSwap { .. })), "{result:?}");
    }
}
