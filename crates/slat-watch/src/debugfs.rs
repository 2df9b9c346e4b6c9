//! KVM's folder in debugfs: each VM has a folder `kvm/PID-FD` with one file per counter.
//!
//! If debugfs is not mounted, it is mounted for this process alone. The mount is detached: no
//! directory leads to it, and it ends with its descriptor.

use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Where debugfs is usually mounted.
const USUAL: &str = "/sys/kernel/debug/kvm";

/// KVM's folder in debugfs.
#[derive(Debug)]
pub struct Debugfs {
    folder: PathBuf,
    /// Keeps this process's own mount.
    mount: Option<OwnedFd>,
}

impl Debugfs {
    /// Finds the folder, or mounts debugfs for this process alone.
    ///
    /// # Errors
    /// Why the folder cannot be read, and what would change that.
    pub fn open() -> Result<Self, String> {
        match fs::read_dir(USUAL) {
            Ok(_) => return Ok(Self { folder: USUAL.into(), mount: None }),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return Err("debugfs is root's: run as root".to_owned());
            }
            Err(_) => {}
        }
        let mount =
            private("debugfs", MountAttrFlags::MOUNT_ATTR_RDONLY).map_err(|error| match error {
                Errno::PERM => {
                    "debugfs is not mounted, and to mount it takes root: run as root".to_owned()
                }
                Errno::NODEV => "this kernel has no debugfs".to_owned(),
                error => format!("debugfs is not mounted, and cannot be: {error}"),
            })?;
        let folder = PathBuf::from(format!("/proc/self/fd/{}/kvm", mount.as_raw_fd()));
        match fs::read_dir(&folder) {
            Ok(_) => Ok(Self { folder, mount: Some(mount) }),
            Err(_) => Err("debugfs has no folder of KVM's".to_owned()),
        }
    }

    /// Returns whether the folder is in a mount that only this process has.
    pub fn is_private(&self) -> bool {
        self.mount.is_some()
    }

    /// Uses a made-up folder.
    #[cfg(test)]
    pub(crate) fn made(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), mount: None }
    }

    /// Returns the names in the folder. A VM's folder exists as long as the VM.
    pub(crate) fn list(&self) -> BTreeSet<OsString> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name()).collect()
    }

    /// Returns the folders of a process's VMs.
    pub(crate) fn of(&self, pid: i32) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let is_its =
            |name: &str| name.split_once('-').is_some_and(|(own, _)| own.parse() == Ok(pid));
        let its = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_its));
        let mut folders: Vec<PathBuf> = its.map(|entry| entry.path()).collect();
        folders.sort();
        folders
    }
}

/// Creates a detached mount of a file system of this kind.
pub(crate) fn private(kind: &str, how: MountAttrFlags) -> Result<OwnedFd, Errno> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, how)
}

/// Returns the sum, over folders, of the counters that the kernel has.
pub(crate) fn sum(folders: &[PathBuf], counters: &[&str]) -> Result<u64, String> {
    if folders.is_empty() {
        return Err("debugfs has no folder of this process's".to_owned());
    }
    let mut sum = None;
    for path in folders.iter().flat_map(|folder| counters.iter().map(|name| folder.join(name))) {
        match fs::read_to_string(&path) {
            Ok(text) => {
                let value: u64 = text.trim().parse().map_err(|_| "debugfs has no number there")?;
                sum = Some(sum.unwrap_or(0u64).saturating_add(value));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return Err(
                    "debugfs refuses the file: the kernel is locked down, or restricts it \
                            to what nobody may write"
                        .to_owned(),
                );
            }
            Err(error) => return Err(format!("debugfs: {error}")),
        }
    }
    // Also the last file of a guest that ended is not found.
    sum.ok_or_else(|| match folders.iter().any(|folder| folder.exists()) {
        true => format!("this kernel's KVM has no {}", counters.join(" or ")),
        false => "the guest's folder in debugfs is gone: the guest ended".to_owned(),
    })
}

/// Returns the thread of a vCPU.
pub(crate) fn thread(folder: &Path, vcpu: u32) -> Option<i32> {
    fs::read_to_string(folder.join(format!("vcpu{vcpu}/pid"))).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_a_process_are_summed_over_its_vms_and_no_other_processs() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("7-4/pf_taken", "5\n");
        write("7-9/pf_taken", "8\n");
        write("7-9/vcpu1/pid", "79\n");
        write("77-4/pf_taken", "100\n");
        write("pf_taken", "113\n");
        write("7-4/odd", "many\n");
        let folders = Debugfs::made(root.path()).of(7);
        assert_eq!(folders, ["7-4", "7-9"].map(|name| root.path().join(name)));
        assert_eq!(sum(&folders, &["pf_taken"]), Ok(13));
        assert!(sum(&folders, &["exits"]).unwrap_err().contains("no exits"));
        assert!(sum(&folders, &["odd"]).unwrap_err().contains("no number"));
        assert!(sum(&[], &["pf_taken"]).unwrap_err().contains("no folder"));
        let gone = [root.path().join("8-4")];
        assert!(sum(&gone, &["exits"]).unwrap_err().contains("the guest ended"));
        assert_eq!((thread(&folders[1], 1), thread(&folders[1], 0)), (Some(79), None));
    }
}
