//! The kernel of the machine, and its modules: a file, or one of Debian's, fetched once.

use super::modules::{Module, Tree};
use crate::cli::{Architecture, KernelChoice};
use slat_lab::failure::bad_input;
use slat_lab::session::Session;
use slat_vm::{Kernel as Debian, Teller};
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

    /// The modules that KVM needs here. TCG has SVM and no VMX, so it is AMD's; on arm64 KVM is
    /// built in wherever it is.
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
    let tell = Teller { say: &|what| session.say(what), note: &|line| session.note(line) };
    let kept = Debian::kept(&choice.to_string(), &arch.to_string(), &session.stop_flag(), tell);
    let Debian { image, modules } = kept.map_err(|error| {
        if session.interrupted() {
            return slat_lab::failure::Failure::Interrupted.into();
        }
        error.context(format!(
            "--kernel {choice}: it could not be fetched; a kernel from elsewhere can be given by \
             --kernel PATH --modules DIR"
        ))
    })?;
    Ok(Kernel { image, modules })
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
}
