//! Finds the kernel of the machine, and its modules: a file, a tree that is built, or one of
//! Debian's kernels, which is fetched once.

use crate::cli::{EmulateArgs, KernelChoice};
use crate::kernel::Source;
use slat_kernel::vm::modules::{Module, Tree};
use slat_kernel::vm::{Architecture, Debian, Kernel, Teller};
use slat_lab::failure::{Failure, bad_input};
use slat_lab::session::Session;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Returns the kernel that was asked for, and the folder of its modules.
///
/// # Errors
/// Returns an error if the file does not exist, if Debian's kernel cannot be fetched, or if the
/// tree cannot be built.
pub fn find(args: &EmulateArgs, arch: Architecture, session: &Session) -> anyhow::Result<Kernel> {
    let modules = args.modules.clone();
    if !args.patches.is_empty() && !matches!(args.kernel, KernelChoice::Tree(_)) {
        return Err(bad_input(
            "--patch and --range need a kernel that is built: --kernel tree:TREE",
        ));
    }
    match &args.kernel {
        KernelChoice::Tree(tree) => {
            let source = Source::find(tree, &args.edits, &args.patches, session)?;
            Ok(Kernel { image: source.build(arch, &args.config, session)?.image, modules })
        }
        KernelChoice::Path(path) if path.is_file() => {
            check(path, arch)?;
            Ok(Kernel { image: path.clone(), modules })
        }
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

/// Checks that a file looks like a kernel that QEMU can boot: a bzImage (`HdrS`), an Image
/// (`ARM\x64` or `RSC\x05`), packed by gzip or with a program that unpacks it; or an ELF file.
fn check(path: &Path, arch: Architecture) -> anyhow::Result<()> {
    let failed = |why: &str| bad_input(format!("--kernel {}: {why}", path.display()));
    let mut head = Vec::new();
    let file = File::open(path).map_err(|error| failed(&error.to_string()))?;
    file.take(0x206).read_to_end(&mut head).map_err(|error| failed(&error.to_string()))?;
    let has = |at: usize, magic: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(magic));
    let (x86, arm) = (has(0x202, b"HdrS"), has(0x38, b"ARM\x64"));
    let riscv = has(0x38, b"RSC\x05");
    let is_it = match arch {
        Architecture::X86_64 => x86 || has(0, b"\x7fELF"),
        Architecture::Aarch64 => arm || has(0, &[0x1f, 0x8b]) || (has(0, b"MZ") && !x86 && !riscv),
        Architecture::Riscv64 => riscv || has(0, &[0x1f, 0x8b]),
        Architecture::Ppc64le => has(0, b"\x7fELF"),
    };
    match is_it {
        true => Ok(()),
        false if x86 || arm || riscv => {
            Err(failed(&format!("it is a kernel, and not for {arch}; see --arch")))
        }
        false => Err(failed(&format!(
            "it is no kernel for {arch}; give a bzImage, an Image or a vmlinux"
        ))),
    }
}

/// Returns the modules that KVM needs in the machine, then those of `further`, each after the ones
/// that it needs. On x86 KVM is that of `kvm_amd`, because TCG emulates SVM and not VMX. On other
/// architectures KVM is built into the kernel.
///
/// # Errors
/// Returns an error if a module is missing or cannot be read.
pub fn modules(
    kernel: &Kernel,
    arch: Architecture,
    further: &[String],
) -> anyhow::Result<Vec<Module>> {
    let of_kvm = (arch == Architecture::X86_64).then_some("kvm_amd");
    let Some(folder) = &kernel.modules else {
        return match further {
            [] => Ok(Vec::new()),
            _ => Err(bad_input("--module: this kernel has no modules; give them by --modules DIR")),
        };
    };
    let names: Vec<&str> = of_kvm.into_iter().chain(further.iter().map(|name| &**name)).collect();
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let tree = Tree::read(folder).map_err(|error| bad_input(format!("--modules {error}")))?;
    let mut all: Vec<Module> = Vec::new();
    for name in names {
        for module in tree.load(&name.replace('-', "_"))? {
            if !all.iter().any(|known| known.name == module.name) {
                all.push(module);
            }
        }
    }
    Ok(all)
}

/// Returns the modules of a disk in memory, for swap, if the kernel has them as modules.
pub fn swap_modules(kernel: &Kernel) -> Vec<Module> {
    let tree = kernel.modules.as_deref().and_then(|folder| Tree::read(folder).ok());
    tree.and_then(|tree| tree.load("zram").ok()).unwrap_or_default()
}

/// Returns one of Debian's kernels from the cache, or fetches it into the cache.
fn debian(kernel: Debian, arch: Architecture, session: &Session) -> anyhow::Result<Kernel> {
    if matches!(arch, Architecture::Riscv64 | Architecture::Ppc64le) {
        return Err(bad_input(format!(
            "--kernel {kernel}: slat fetches no kernel of Debian for {arch}; \
             `--kernel tree:debian-6.12` builds one"
        )));
    }
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
    fn a_file_that_is_no_kernel_of_that_architecture_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernel");
        let refused = |at: usize, magic: &[u8], arch| {
            let mut bytes = vec![0; 0x1000];
            bytes[at..at + magic.len()].copy_from_slice(magic);
            std::fs::write(&path, bytes).unwrap();
            check(&path, arch).err().map(|error| error.to_string())
        };
        let (x86, arm) = (Architecture::X86_64, Architecture::Aarch64);
        assert!(refused(0x202, b"HdrS", x86).is_none() && refused(0x38, b"ARM\x64", arm).is_none());
        assert!(refused(0x202, b"HdrS", arm).unwrap().contains("not for aarch64"));
        assert!(refused(0, b"root:x:0", x86).unwrap().contains("no kernel for x86_64"));
    }

    #[test]
    fn modules_that_are_none_are_a_value_that_cannot_be_right() {
        let folder = tempfile::tempdir().unwrap();
        let none = Some(folder.path().to_owned());
        let kernel = Kernel { image: "Image".into(), modules: none };
        let error = modules(&kernel, Architecture::X86_64, &[]).unwrap_err();
        assert!(slat_lab::failure::is_bad_input(&error), "{error}");
        assert!(error.to_string().starts_with("--modules /"), "{error}");
    }
}
