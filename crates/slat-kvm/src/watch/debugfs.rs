//! KVM's folder in debugfs: each VM has a folder `kvm/PID-FD` with one file per counter.
//!
//! If debugfs is not mounted, it is mounted for this process alone. The mount is detached: no
//! directory leads to it, and it ends with its descriptor.

use crate::procfs::Files;
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// Where debugfs is usually mounted.
const USUAL: &str = "sys/kernel/debug/kvm";

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
        if let Some(usual) = Self::usual(&Files::here())? {
            return Ok(usual);
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

    /// Finds the folder at its usual place among the files of a host, and mounts nothing.
    ///
    /// # Errors
    /// Those of [`Debugfs::open`].
    pub fn usual(files: &Files<'_>) -> Result<Option<Self>, String> {
        if !files.in_first_namespace("pid") {
            return Err("debugfs names guests by the host's numbers of processes, and this is a \
                        namespace of processes, in which others have these numbers: watch from the \
                        host"
                .to_owned());
        }
        let folder = files.0.join(USUAL);
        match fs::read_dir(&folder) {
            Ok(_) => Ok(Some(Self { folder, mount: None })),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                Err("debugfs is root's: run as root".to_owned())
            }
            Err(_) => Ok(None),
        }
    }

    /// Returns whether the folder is in a mount that only this process has.
    pub fn is_private(&self) -> bool {
        self.mount.is_some()
    }

    /// Uses a made-up folder.
    #[cfg(test)]
    pub(crate) fn made(folder: &std::path::Path) -> Self {
        Self { folder: folder.to_owned(), mount: None }
    }

    /// Returns the names in the folder. A VM's folder exists as long as the VM.
    pub(crate) fn list(&self) -> BTreeSet<OsString> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name()).collect()
    }

    /// Returns the folders of a process's VMs. KVM names each by the thread that made it, which may
    /// be any thread of the process, and by the descriptor.
    ///
    /// # Errors
    /// Why they cannot be listed, in words.
    pub(crate) fn of(&self, files: &Files<'_>, pid: i32) -> Result<Vec<VmFolder>, String> {
        let entries = fs::read_dir(&self.folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let entries = entries.map_err(|error| format!("debugfs: {error}"))?;
        let of = |entry: fs::DirEntry| {
            let name = entry.file_name();
            let (maker, fd) = name.to_str()?.split_once('-')?;
            let (maker, fd) = (maker.parse().ok()?, fd.parse().ok()?);
            let folder = VmFolder { number: entry.metadata().ok()?.ino(), path: entry.path() };
            folder.is_of(files, pid, maker, fd).then_some(folder)
        };
        let mut folders: Vec<VmFolder> = entries.into_iter().filter_map(of).collect();
        folders.sort();
        Ok(folders)
    }
}

/// The folder of a VM.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct VmFolder {
    pub path: PathBuf,
    /// Its inode. A VM that is made later has another one, also where it has the same name.
    number: u64,
}

impl VmFolder {
    /// Returns whether the VM is still the same. Only a folder that is gone, or that is another
    /// one, says that it is not.
    pub fn is_there(&self) -> bool {
        match fs::metadata(&self.path) {
            Ok(now) => now.ino() == self.number,
            Err(error) => error.kind() != ErrorKind::NotFound,
        }
    }

    /// Returns whether the VM is one of process `pid`, by its descriptor there and by its threads.
    /// The thread that made the VM may have ended, and its number may be another process's now.
    fn is_of(&self, files: &Files<'_>, pid: i32, maker: i32, fd: i32) -> bool {
        let exists = |path: String| files.0.join(path).exists();
        let is_own = |tid: i32| tid == pid || exists(format!("proc/{pid}/task/{tid}"));
        let made = is_own(maker);
        let link = fs::read_link(files.0.join(format!("proc/{pid}/fd/{fd}")));
        if !link.is_ok_and(|name| name.as_os_str() == "anon_inode:kvm-vm")
            || (!made && exists(format!("proc/{maker}")))
        {
            return false;
        }
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        let vcpus = entries.filter_map(|entry| {
            entry.file_name().to_str()?.strip_prefix("vcpu")?.parse::<u32>().ok()
        });
        for tid in vcpus.filter_map(|vcpu| thread(self, vcpu)) {
            if is_own(tid) {
                return true;
            }
            if exists(format!("proc/{tid}")) {
                return false;
            }
        }
        made
    }
}

/// Creates a detached mount of a file system of this kind.
pub(crate) fn private(kind: &str, how: MountAttrFlags) -> Result<OwnedFd, Errno> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, how)
}

/// Returns the sum, over folders, of the counters that the kernel has.
pub(crate) fn sum(folders: &[VmFolder], counters: &[&str]) -> Result<u64, String> {
    if folders.is_empty() {
        return Err("debugfs has no folder of this process's".to_owned());
    }
    folders.iter().try_fold(0u64, |sum, folder| Ok(sum.saturating_add(of_one(folder, counters)?)))
}

/// Returns the sum of the counters that the kernel has in one folder.
fn of_one(folder: &VmFolder, counters: &[&str]) -> Result<u64, String> {
    let mut sum = None;
    for name in counters {
        match fs::read_to_string(folder.path.join(name)) {
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
    sum.ok_or_else(|| match folder.path.exists() {
        true => format!("this kernel's KVM has no {}", counters.join(" or ")),
        false => "the guest's folder in debugfs is gone: the guest ended".to_owned(),
    })
}

/// Returns the thread of a vCPU; `None` before it has run (KVM says 0).
pub(crate) fn thread(folder: &VmFolder, vcpu: u32) -> Option<i32> {
    let text = fs::read_to_string(folder.path.join(format!("vcpu{vcpu}/pid"))).ok()?;
    text.trim().parse().ok().filter(|thread| *thread > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debugfs_counters_are_summed_over_the_vms_of_one_process() {
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
        // A VM that another thread of the process made.
        write("8-5/pf_taken", "2\n");
        write("proc/7/task/8/comm", "a");
        write("7-9/vcpu0/pid", "0\n");
        for fd in ["4", "5", "6", "9"] {
            fs::create_dir_all(root.path().join("proc/7/fd")).unwrap();
            let fd = root.path().join("proc/7/fd").join(fd);
            std::os::unix::fs::symlink("anon_inode:kvm-vm", fd).unwrap();
        }
        // A VM that a thread made that ended, but that this process runs.
        write("81-6/vcpu0/pid", "8\n");
        // VMs of others: of a process that ended and whose number is this one's now, and of a
        // thread that lives elsewhere.
        write("7-6/vcpu0/pid", "99\n");
        write("98-5/pf_taken", "1000\n");
        write("proc/98/comm", "b");
        write("proc/99/comm", "b");
        write("7-3/pf_taken", "1000\n");
        let folders = Debugfs::made(root.path()).of(&Files(root.path()), 7).unwrap();
        let paths: Vec<_> = folders.iter().map(|folder| folder.path.clone()).collect();
        assert_eq!(paths, ["7-4", "7-9", "8-5", "81-6"].map(|name| root.path().join(name)));
        assert_eq!(sum(&folders[..3], &["pf_taken"]), Ok(15));
        let part = sum(&folders, &["pf_taken"]).unwrap_err();
        assert!(part.contains("no pf_taken"), "a part of the VMs is not all: {part}");
        let unlisted = Debugfs::made(&root.path().join("pf_taken")).of(&Files(root.path()), 7);
        assert!(unlisted.unwrap_err().contains("Not a directory"));
        assert!(sum(&folders, &["exits"]).unwrap_err().contains("no exits"));
        assert!(sum(&folders, &["odd"]).unwrap_err().contains("no number"));
        assert!(sum(&[], &["pf_taken"]).unwrap_err().contains("no folder"));
        let mut gone = folders[..1].to_vec();
        fs::remove_dir_all(&gone[0].path).unwrap();
        assert!(!gone[0].is_there() && folders[1].is_there());
        assert!(sum(&folders[..3], &["pf_taken"]).unwrap_err().contains("the guest ended"));
        gone[0].path = root.path().join("8-4");
        assert!(sum(&gone, &["exits"]).unwrap_err().contains("the guest ended"));
        assert_eq!((thread(&folders[1], 1), thread(&folders[1], 0)), (Some(79), None));
    }
}
