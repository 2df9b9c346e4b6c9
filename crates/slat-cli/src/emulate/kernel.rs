//! Finds the kernel of the machine, and its modules: a file, a tree that is built, or one of
//! Debian's kernels, which is fetched once.

use crate::cli::{EmulateArgs, KernelChoice};
use crate::kernel::Source;
use slat_kernel::vm::modules::{Module, Tree};
use slat_kernel::vm::{Architecture, Debian, Kernel, Teller};
use slat_lab::failure::{Failure, bad_input};
use slat_lab::session::Session;

/// Returns the kernel that was asked for, and the folder of its modules.
///
/// # Errors
/// Returns an error if the file does not exist, if Debian's kernel cannot be fetched, or if the
/// tree cannot be built.
pub fn find(args: &EmulateArgs, arch: Architecture, session: &Session) -> anyhow::Result<Kernel> {
    let modules = args.modules.clone();
    match &args.kernel {
        KernelChoice::Tree(tree) => {
            let source = Source::find(tree, args.edits.edits.as_deref(), session)?;
            Ok(Kernel { image: source.build(arch, &args.config, session)?.image, modules })
        }
        KernelChoice::Path(path) if path.is_file() => Ok(Kernel { image: path.clone(), modules }),
        KernelChoice::Path(path) => Err(bad_input(format!(
            "--kernel {}: there is no such file; give debian-6.1, debian-6.12, tree:TREE, or the \
             path of a kernel",
            path.display()
        ))),
        KernelChoice::Debian(kernel) => {
            let own = debian(*kernel, arch, session)?;
            Ok(Kernel { modules: modules.or(own.modules), ..own })
        }
    }
}

/// Returns the modules that KVM needs in the machine. On x86 they are those of `kvm_amd`, because
/// TCG emulates SVM and not VMX. On arm64 there are none, because KVM is always built into the
/// kernel.
///
/// # Errors
/// Returns an error if a module is missing or cannot be read.
pub fn kvm_modules(kernel: &Kernel, arch: Architecture) -> anyhow::Result<Vec<Module>> {
    match (&kernel.modules, arch) {
        (Some(folder), Architecture::X86_64) => {
            let tree = Tree::read(folder);
            tree.map_err(|error| bad_input(format!("--modules {error}")))?.load("kvm_amd")
        }
        _ => Ok(Vec::new()),
    }
}

/// Returns one of Debian's kernels from the cache, or fetches it into the cache.
fn debian(kernel: Debian, arch: Architecture, session: &Session) -> anyhow::Result<Kernel> {
    let tell = Teller { say: &|what| session.say(what), note: &|line| session.note(line) };
    Kernel::kept(kernel, arch, &session.stop_flag(), tell).map_err(|error| {
        if session.interrupted() {
            return Failure::Interrupted.into();
        }
        error.context(format!(
            "--kernel {kernel}: it could not be fetched; a kernel from elsewhere can be given by \
             --kernel PATH --modules DIR"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_is_no_file_is_refused_with_what_there_is() {
        let args = EmulateArgs::of(KernelChoice::Path("/no/such/kernel".into()));
        let session = Session::quiet();
        let error = find(&args, Architecture::X86_64, &session).unwrap_err();
        assert!(error.to_string().contains("debian-6.12"), "{error}");
    }

    #[test]
    fn modules_that_are_none_are_a_value_that_cannot_be_right() {
        let folder = tempfile::tempdir().unwrap();
        let modules = Some(folder.path().to_owned());
        let kernel = Kernel { image: "Image".into(), modules };
        let error = kvm_modules(&kernel, Architecture::X86_64).unwrap_err();
        assert!(slat_lab::failure::is_bad_input(&error), "{error}");
        assert!(error.to_string().starts_with("--modules /"), "{error}");
    }
}
