//! The sources of findings: files below a root, KVM's capabilities, and the folders of programs.

use slat_kvm::HostKvm;
use slat_kvm::procfs::{Files, value};
use slat_lab::host::Host;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// A host that the doctor examines.
pub struct Evidence {
    root: PathBuf,
    /// The description of the host that reports have as well.
    pub(super) host: Host,
    /// KVM's capabilities, or why KVM cannot be used.
    pub(super) kvm: Result<HostKvm, slat_kvm::Error>,
    /// Folders in which programs are searched.
    programs: Vec<PathBuf>,
}

/// Result of an attempt to read a file or folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// This process can read it.
    Readable,
    /// It exists, and this process cannot read it.
    Denied,
    /// It does not exist.
    Absent,
}

/// Number of `CAP_SYS_ADMIN` in a mask of capabilities.
pub const SYS_ADMIN: u32 = 21;
/// Number of `CAP_SYS_PTRACE`.
pub const PTRACE: u32 = 19;
/// Number of `CAP_PERFMON`.
pub const PERFMON: u32 = 38;

impl Evidence {
    /// Returns the evidence of the host that this process runs on.
    pub fn here() -> Self {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let programs = std::env::split_paths(&path).collect();
        Self::below(PathBuf::from("/"), slat_kvm::probe(), programs)
    }

    /// Returns the evidence of a host whose files are below `root`.
    pub(super) fn below(
        root: PathBuf,
        kvm: Result<HostKvm, slat_kvm::Error>,
        programs: Vec<PathBuf>,
    ) -> Self {
        let host = Host::read_below(&root);
        Self { root, host, kvm, programs }
    }

    pub(super) fn files(&self) -> Files<'_> {
        Files(&self.root)
    }

    /// Tries to open a file or folder for reading.
    pub(super) fn access(&self, path: &str) -> Access {
        let path = self.root.join(path);
        let opened = match path.is_dir() {
            true => fs::read_dir(path).map(drop),
            false => fs::File::open(path).map(drop),
        };
        match opened.map_err(|error| error.kind()) {
            Ok(()) => Access::Readable,
            Err(ErrorKind::NotFound | ErrorKind::NotADirectory) => Access::Absent,
            Err(_) => Access::Denied,
        }
    }

    /// Returns whether the mode of a file lets its owner write it.
    pub(super) fn is_writable(&self, path: &str) -> bool {
        let metadata = fs::metadata(self.root.join(path));
        metadata.is_ok_and(|file| file.permissions().mode() & 0o200 != 0)
    }

    /// Returns whether the mode of a file lets its group read and write it.
    pub(super) fn is_writable_by_group(&self, path: &str) -> bool {
        let metadata = fs::metadata(self.root.join(path));
        metadata.is_ok_and(|file| file.permissions().mode() & 0o060 == 0o060)
    }

    /// Returns the flags of x86, or the features of Arm, that /proc/cpuinfo lists.
    pub(super) fn flags(&self) -> Option<String> {
        let cpuinfo = self.files().text("proc/cpuinfo")?;
        let flags = value(&cpuinfo, "flags").or_else(|| value(&cpuinfo, "Features"));
        flags.map(str::to_owned)
    }

    /// Returns whether /proc/cpuinfo lists a flag.
    pub(super) fn has_flag(&self, name: &str) -> bool {
        let flags = self.flags();
        flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == name))
    }

    /// Returns whether the kernel has a file system, as far as it tells.
    pub(super) fn may_have(&self, file_system: &str) -> bool {
        let known = self.files().text("proc/filesystems");
        let is_it = |line: &str| line.split_whitespace().last() == Some(file_system);
        known.is_none_or(|known| known.lines().any(is_it)) || self.files().is_mounted(file_system)
    }

    /// Returns whether debugfs is mounted where this program looks.
    pub(super) fn has_debugfs(&self) -> bool {
        self.files().is_mounted_at("debugfs", "/sys/kernel/debug")
    }

    /// Returns a parameter of one of KVM's modules.
    pub(super) fn parameter(&self, module: &str, name: &str) -> Option<&str> {
        self.host.kvm.parameters.get(module)?.get(name)?.0.as_deref()
    }

    /// Returns whether a module has a parameter, readable or not.
    pub(super) fn has_parameter(&self, module: &str, name: &str) -> bool {
        self.host.kvm.parameters.get(module).is_some_and(|all| all.contains_key(name))
    }

    /// Returns the path of a program, from the first folder that has it.
    pub(super) fn program(&self, name: &str) -> Option<PathBuf> {
        let within = |folder: &Path| self.root.join(folder.strip_prefix("/").unwrap_or(folder));
        let is_program = |path: &PathBuf| {
            let file = fs::metadata(within(path.as_path()));
            file.is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
        };
        self.programs.iter().map(|folder| folder.join(name)).find(is_program)
    }

    /// Returns whether this host is known to be a guest.
    pub(super) fn is_guest(&self) -> bool {
        self.host.virtualisation.hypervisor.0 == Some(true)
    }

    /// Returns whether KVM is known to work on this host without hardware virtualisation.
    pub(super) fn is_software_kvm(&self) -> bool {
        let helped = self.has_flag("vmx") || self.has_flag("svm") || self.flags().is_none();
        self.host.cpu.architecture == "x86_64" && self.kvm.is_ok() && !helped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_lab::fake::files as fake;

    fn below(files: &[(&str, &str)]) -> (tempfile::TempDir, Evidence) {
        let root = fake(files);
        let programs = vec!["/sbin".into(), "/usr/bin".into()];
        let kvm = Err(slat_kvm::Error::NoKvm);
        let evidence = Evidence::below(root.path().to_owned(), kvm, programs);
        (root, evidence)
    }

    #[test]
    fn a_program_is_a_file_that_can_be_executed() {
        let (root, evidence) = below(&[("sbin/tool", ""), ("usr/bin/tool", "")]);
        assert_eq!(evidence.program("tool"), None);
        let file = root.path().join("usr/bin/tool");
        fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(evidence.program("tool"), Some("/usr/bin/tool".into()));
    }
}
