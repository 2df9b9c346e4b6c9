//! Debian's cloud kernels, downloaded once and kept in the cache.

use crate::vm::{Architecture, Archive, Request, kept};
use anyhow::{Context, bail, ensure};
use clap::ValueEnum;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// A cloud kernel of Debian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Debian {
    /// Of Debian 12
    #[value(name = "debian-6.1")]
    Linux6_1,
    /// Of Debian 12's backports
    #[value(name = "debian-6.12")]
    Linux6_12,
}

impl Debian {
    /// Returns Linux's version, and the suite that has the kernel.
    const fn known(self) -> (&'static str, &'static str) {
        match self {
            Self::Linux6_1 => ("6.1", "bookworm"),
            Self::Linux6_12 => ("6.12", "bookworm-backports"),
        }
    }
}

impl fmt::Display for Debian {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "debian-{}", self.known().0)
    }
}

/// A kernel in the file system of this machine.
#[derive(Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The image that a machine boots.
    pub image: PathBuf,
    /// The directory of its modules, if it has any.
    pub modules: Option<PathBuf>,
}

/// Reports the progress of a download to the user.
#[derive(Clone, Copy)]
pub struct Teller<'a> {
    /// Reports the current activity.
    pub say: &'a dyn Fn(&str),
    /// Reports a message that stays on a line of its own.
    pub note: &'a dyn Fn(&str),
}

impl Kernel {
    /// Returns Debian's kernel for an architecture from the cache, and downloads it first if
    /// necessary.
    ///
    /// # Errors
    /// The download fails, or the cache cannot be written.
    pub fn kept(
        debian: Debian,
        arch: Architecture,
        stop: &AtomicBool,
        tell: Teller,
    ) -> anyhow::Result<Self> {
        let ((version, suite), architecture) = (debian.known(), arch.debian());
        let name = format!("kernels/{debian}-{arch}");
        let kept = kept(&name, |folder, tree| {
            (tell.say)(&format!("fetching the list of packages of Debian's {suite}"));
            let archive = Archive::open(Request { suite, architecture, folder, stop })?;
            let name = format!("linux-image-cloud-{architecture}");
            let image = archive.depends(&name)?;
            let image = image.into_iter().find(|name| name.starts_with("linux-image-"));
            let image = image.with_context(|| format!("{name} of {suite} stands for no kernel"))?;
            let prefix = format!("linux-image-{version}.");
            ensure!(image.starts_with(&prefix), "{suite} has {image} now, and no {debian}");
            (tell.note)(&format!("fetching {image} for {arch}, about 30 MB"));
            (tell.say)(&format!("fetching {image}"));
            archive.unpack(&image, tree)?;
            unpacked(tree).map(drop)
        })?;
        unpacked(&kept)
    }
}

/// Finds the kernel in the directory to which its package was unpacked.
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
    // Packages of newer suites have it below `usr`.
    let mut modules = only(&folder.join("lib/modules"), "")?;
    if modules.is_none() {
        modules = only(&folder.join("usr/lib/modules"), "")?;
    }
    Ok(Kernel { image, modules })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_of_both_layouts_yield_their_kernel_and_modules() {
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

    #[test]
    fn a_kernel_is_called_as_the_command_line_calls_it() {
        for kernel in Debian::value_variants() {
            assert_eq!(Debian::from_str(&kernel.to_string(), false), Ok(*kernel));
        }
    }
}
