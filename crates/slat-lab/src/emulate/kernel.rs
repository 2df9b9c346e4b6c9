//! The kernel of the machine, and its modules: a file, or one of Debian's, fetched once.

use super::modules::{Module, Tree};
use crate::cli::{Architecture, KernelChoice};
use crate::failure::bad_input;
use crate::session::Session;
use anyhow::{Context, bail, ensure};
use slat_debian::{Archive, Request};
use std::fs;
use std::path::{Path, PathBuf};

/// A kernel on this machine's disk.
#[derive(Debug)]
pub struct Kernel {
    /// The image that QEMU loads.
    pub image: PathBuf,
    /// Its modules, if it has any.
    pub modules: Option<PathBuf>,
}

impl Kernel {
    /// The kernel that was asked for.
    ///
    /// # Errors
    /// There is no such file, or Debian's kernel cannot be fetched.
    pub fn find(
        choice: &KernelChoice,
        modules: Option<&Path>,
        arch: Architecture,
        session: &Session,
    ) -> anyhow::Result<Self> {
        let modules = modules.map(Path::to_owned);
        match choice {
            KernelChoice::Path(path) if path.is_file() => Ok(Self { image: path.clone(), modules }),
            KernelChoice::Path(path) => Err(bad_input(format!(
                "--kernel {}: there is no such file; give debian-6.1, debian-6.12, or the path of a \
                 kernel",
                path.display()
            ))),
            KernelChoice::Debian6_1 | KernelChoice::Debian6_12 => {
                let own = debian(choice, arch, session)?;
                Ok(Self { modules: modules.or(own.modules), ..own })
            }
        }
    }

    /// The modules that KVM needs here. TCG has SVM and no VMX, so it is AMD's; on arm64 KVM is built
    /// in wherever it is.
    ///
    /// # Errors
    /// A module is missing or cannot be read.
    pub fn kvm_modules(&self, arch: Architecture) -> anyhow::Result<Vec<Module>> {
        match (&self.modules, arch) {
            (Some(folder), Architecture::X86_64) => Tree::read(folder)?.load("kvm_amd"),
            _ => Ok(Vec::new()),
        }
    }
}

/// One of Debian's kernels: where it is kept, or else fetched to.
fn debian(choice: &KernelChoice, arch: Architecture, session: &Session) -> anyhow::Result<Kernel> {
    let kernels = cache_folder()?.join("slat/kernels");
    let kept = kernels.join(format!("{choice}-{arch}"));
    if kept.is_dir() {
        return unpacked(&kept);
    }
    let failed = || format!("cannot write to {}", kernels.display());
    fs::create_dir_all(&kernels).with_context(failed)?;
    // Beside its place, so that it gets there whole or not at all.
    let folder = tempfile::Builder::new().prefix(".fetching-").tempdir_in(&kernels);
    let folder = folder.with_context(failed)?;
    let tree = folder.path().join("tree");
    fetch(choice, arch, folder.path(), &tree, session).map_err(|error| {
        if session.interrupted() {
            return crate::failure::Failure::Interrupted.into();
        }
        error.context(format!(
            "--kernel {choice}: it could not be fetched; a kernel from elsewhere can be given by \
             --kernel PATH --modules DIR"
        ))
    })?;
    unpacked(&tree)?;
    // Somebody else may have been faster.
    if let Err(error) = fs::rename(&tree, &kept)
        && !kept.is_dir()
    {
        return Err(error).with_context(failed);
    }
    unpacked(&kept)
}

fn fetch(
    choice: &KernelChoice,
    arch: Architecture,
    folder: &Path,
    tree: &Path,
    session: &Session,
) -> anyhow::Result<()> {
    let suite = match choice {
        KernelChoice::Debian6_12 => "bookworm-backports",
        _ => "bookworm",
    };
    let architecture = match arch {
        Architecture::X86_64 => "amd64",
        Architecture::Aarch64 => "arm64",
    };
    let stop = session.stop_flag();
    session.say(&format!("fetching the list of packages of Debian's {suite}"));
    let archive = Archive::open(Request { suite, architecture, folder, stop: &stop })?;
    let name = format!("linux-image-cloud-{architecture}");
    let image = archive.depends(&name)?;
    let image = image.into_iter().find(|name| name.starts_with("linux-image-"));
    let image = image.with_context(|| format!("{name} of {suite} stands for no kernel"))?;
    let version = format!("linux-image-{}.", choice.to_string().trim_start_matches("debian-"));
    ensure!(image.starts_with(&version), "{suite} has {image} now, and no {choice}");
    session.note(&format!("fetching {image} for {architecture}, about 30 MB"));
    session.say(&format!("fetching {image}"));
    archive.unpack(&image, tree)
}

/// A kernel in the folder that its package was unpacked to.
fn unpacked(folder: &Path) -> anyhow::Result<Kernel> {
    let only = |folder: &Path, prefix: &str| -> anyhow::Result<Option<PathBuf>> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let name = |path: &Path| path.file_name()?.to_str().map(str::to_owned);
        let mut found: Vec<PathBuf> = entries
            .map(|entry| entry.path())
            .filter(|path| name(path).is_some_and(|name| name.starts_with(prefix)))
            .collect();
        if found.len() > 1 {
            bail!("there is more than one kernel in {}", folder.display());
        }
        Ok(found.pop())
    };
    let image = only(&folder.join("boot"), "vmlinuz-")?.with_context(|| {
        format!("there is no kernel in {}; remove it to fetch it anew", folder.display())
    })?;
    // Packages of newer suites have it below usr.
    let mut modules = only(&folder.join("lib/modules"), "")?;
    if modules.is_none() {
        modules = only(&folder.join("usr/lib/modules"), "")?;
    }
    Ok(Kernel { image, modules })
}

/// Where this user's programs keep what they can fetch again (XDG Base Directory Specification).
fn cache_folder() -> anyhow::Result<PathBuf> {
    let absolute = |name: &str| {
        let path = PathBuf::from(std::env::var_os(name)?);
        path.is_absolute().then_some(path)
    };
    absolute("XDG_CACHE_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".cache")))
        .context("neither XDG_CACHE_HOME nor HOME says where a kernel could be kept")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_is_no_file_is_refused_with_what_there_is() {
        let choice = KernelChoice::Path("/no/such/kernel".into());
        let session = Session::quiet();
        let error = Kernel::find(&choice, None, Architecture::X86_64, &session).unwrap_err();
        assert!(error.to_string().contains("debian-6.12"), "{error}");
    }

    #[test]
    fn a_package_of_either_layout_has_its_kernel_and_its_modules_found() {
        for lib in ["lib", "usr/lib"] {
            let folder = tempfile::tempdir().unwrap();
            let modules = folder.path().join(lib).join("modules/6.1.0");
            fs::create_dir_all(&modules).unwrap();
            fs::create_dir(folder.path().join("boot")).unwrap();
            assert!(unpacked(folder.path()).unwrap_err().to_string().contains("remove it"));
            let image = folder.path().join("boot/vmlinuz-6.1.0");
            fs::write(&image, "").unwrap();
            let kernel = unpacked(folder.path()).unwrap();
            assert_eq!((kernel.image, kernel.modules), (image, Some(modules)));
        }
    }
}
