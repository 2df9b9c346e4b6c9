//! Chooses the program that runs in the machine, which has no other files: a statically linked one,
//! or one for this host's architecture together with its shared libraries.

use anyhow::{Context, ensure};
use object::elf::{EM_AARCH64, EM_PPC64, EM_RISCV, EM_X86_64, FileHeader64, PT_INTERP};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, elf};
use slat_kernel::vm::Architecture;
use slat_lab::failure::bad_input;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The properties of an executable that matter here.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Kind {
    machine: elf::Machine,
    /// The dynamic loader; `None` if the executable is statically linked.
    interpreter: Option<PathBuf>,
}

/// A program for the machine.
#[derive(Debug)]
pub struct Program {
    /// The executable.
    pub bytes: Vec<u8>,
    /// Shared libraries and the dynamic loader, each with its path; empty if it is statically
    /// linked.
    pub libraries: Vec<(PathBuf, Vec<u8>)>,
}

impl Program {
    fn new(path: &Path, bytes: Vec<u8>, interpreter: Option<&Path>) -> anyhow::Result<Self> {
        let paths = interpreter.map(|interpreter| libraries(path, interpreter)).transpose()?;
        let libraries = paths.unwrap_or_default().into_iter().map(|path| {
            let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
            Ok((path, bytes))
        });
        Ok(Self { bytes, libraries: libraries.collect::<anyhow::Result<_>>()? })
    }
}

/// Returns the program of that name for the machine. It is the one that was asked for; otherwise
/// this program, a file beside it, or a static program built from the sources of this one, if they
/// still exist.
///
/// # Errors
/// [`Failure::BadInput`](slat_lab::failure::Failure::BadInput) if no program is found that can run
/// in the machine.
pub fn choose(asked: Option<&Path>, name: &str, arch: Architecture) -> anyhow::Result<Program> {
    if let Some(path) = asked {
        let bytes = read(path)?;
        let interpreter = fits(&bytes, arch).map_err(|why| refused(path, name, &why, arch))?;
        return Program::new(path, bytes, interpreter.as_deref());
    }
    if !arch.runs_slat() {
        return power(arch);
    }
    let own = std::env::current_exe().context("cannot find out where this program is")?;
    let here = if name == "slat" { own.clone() } else { own.with_file_name(name) };
    let candidates = [here.clone(), own.with_file_name(format!("{name}-{arch}"))];
    for path in &candidates {
        if let Ok(bytes) = std::fs::read(path)
            && let Ok(interpreter) = fits(&bytes, arch)
        {
            return Program::new(path, bytes, interpreter.as_deref());
        }
    }
    if let Some(path) = built(name, arch, &own)? {
        return Program::new(&path, read(&path)?, None);
    }
    let why = match std::fs::read(&here) {
        Ok(bytes) => fits(&bytes, arch).err().unwrap_or_default(),
        Err(_) => "is not there".to_owned(),
    };
    Err(refused(&here, name, &why, arch))
}

/// The program that runs in place of slat on Power, in C: the first process, and guests.
const POWER: [(&str, &str); 2] = [
    ("first.c", include_str!("../../power/first.c")),
    ("guest.c", include_str!("../../power/guest.c")),
];

/// Compiles the program for Power.
fn power(arch: Architecture) -> anyhow::Result<Program> {
    slat_kernel::check_for_selftests(arch)?;
    let folder = tempfile::tempdir().context("cannot make a temporary directory")?;
    let path = folder.path().join("power");
    let mut gcc = Command::new(format!("{}gcc", slat_kernel::cross_compile(arch)));
    gcc.args(["-D_GNU_SOURCE", "-O2", "-Wall", "-static", "-pthread", "-o"]).arg(&path);
    for (name, text) in POWER {
        let source = folder.path().join(name);
        std::fs::write(&source, text).context("cannot write a temporary file")?;
        gcc.arg(source);
    }
    let output = gcc.stdin(Stdio::null()).output().context("cannot start the compiler")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the program for {arch} cannot be compiled: {said}");
    Program::new(&path, std::fs::read(&path)?, None)
}

/// Returns the path of a static program from the sources. Builds it if it does not exist, or if
/// this program is newer.
fn built(name: &str, arch: Architecture, own: &Path) -> anyhow::Result<Option<PathBuf>> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    if !sources.join("crates/xtask/Cargo.toml").exists() {
        return Ok(None);
    }
    let path = sources.join("target/static").join(format!("{name}-{arch}"));
    let changed = |path: &Path| path.metadata().and_then(|it| it.modified()).ok();
    if changed(&path) < changed(own) {
        eprintln!(
            "slat: building {} once, which takes minutes: cargo xtask static --arch {arch} \
             --program {name}",
            path.display()
        );
        let mut cargo = Command::new("cargo");
        cargo.args(["xtask", "static", "--arch", &arch.to_string(), "--program", name]);
        cargo.current_dir(&sources);
        // stdout is for the report of the machine only.
        let status = cargo.stdout(Stdio::null()).status().context("cannot start cargo")?;
        ensure!(status.success(), "`cargo xtask static --arch {arch}` failed: {status}");
    }
    Ok(path.exists().then_some(path))
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| bad_input(format!("--binary {}: {error}", path.display())))
}

fn refused(path: &Path, name: &str, why: &str, arch: Architecture) -> anyhow::Error {
    bad_input(format!(
        "{} {why}; the machine needs a {name} for {arch}, static unless it is this machine's own: \
         build one with `cargo xtask static --arch {arch}` and give it by `--binary \
         target/static/{name}-{arch}`",
        path.display()
    ))
}

/// Returns the paths of a program's shared libraries, as the dynamic loader lists them (`ld.so
/// --list`), and of the loader.
fn libraries(program: &Path, interpreter: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let output = Command::new(interpreter).arg("--list").arg(program).output();
    let output = output.with_context(|| interpreter.display().to_string())?;
    ensure!(
        output.status.success(),
        "{} --list {} failed: {}",
        interpreter.display(),
        program.display(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let mut paths = listed(&String::from_utf8_lossy(&output.stdout));
    paths.retain(|path| path != interpreter);
    paths.push(interpreter.to_owned());
    Ok(paths)
}

/// Returns the files of such a list: `libc.so.6 => /lib/libc.so.6 (0x7f00)`, `/lib64/ld.so.2
/// (0x7f00)`.
fn listed(text: &str) -> Vec<PathBuf> {
    let path = |line: &str| {
        let place = line.split_once("=>").map_or(line, |(_, place)| place);
        place.split_whitespace().next().map(PathBuf::from)
    };
    text.lines().filter_map(path).filter(|path| path.is_absolute()).collect()
}

/// Returns the dynamic loader that a program needs in the machine, if it needs one. The error says
/// why the program cannot run there.
fn fits(bytes: &[u8], arch: Architecture) -> Result<Option<PathBuf>, String> {
    let kind = kind(bytes).ok_or("is no ELF executable of 64 bits")?;
    let machine = match arch {
        Architecture::X86_64 => EM_X86_64,
        Architecture::Aarch64 => EM_AARCH64,
        Architecture::Riscv64 => EM_RISCV,
        Architecture::Ppc64le => EM_PPC64,
    };
    match kind {
        Kind { machine: other, .. } if other != machine => Err(format!("is not for {arch}")),
        Kind { interpreter: Some(_), .. } if Architecture::of_this_machine() != Some(arch) => {
            Err("is not static".to_owned())
        }
        Kind { interpreter, .. } => Ok(interpreter),
    }
}

fn kind(bytes: &[u8]) -> Option<Kind> {
    let header = FileHeader64::<Endianness>::parse(bytes).ok()?;
    let endian = header.endian().ok()?;
    let kind = header.e_type(endian);
    if kind != elf::ET_EXEC && kind != elf::ET_DYN {
        return None;
    }
    // A program that names an interpreter is dynamically linked; the interpreter is its loader.
    let segments = header.program_headers(endian, bytes).ok()?;
    let named = segments.iter().find(|segment| segment.p_type(endian) == PT_INTERP);
    let interpreter = match named {
        Some(segment) => {
            let name = segment.interpreter(endian, bytes).ok()??;
            Some(PathBuf::from(OsStr::from_bytes(name)))
        }
        None => None,
    };
    Some(Kind { machine: header.e_machine(endian), interpreter })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns the smallest executable: a header, and one segment of the given kind.
    pub fn executable(machine: u16, segment: u32) -> Vec<u8> {
        let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
        bytes.resize(16, 0);
        bytes.extend(2u16.to_le_bytes()); // ET_EXEC
        bytes.extend(machine.to_le_bytes());
        bytes.extend(1u32.to_le_bytes());
        bytes.extend(0u64.to_le_bytes()); // entry
        bytes.extend(64u64.to_le_bytes()); // program headers
        bytes.extend(0u64.to_le_bytes()); // section headers
        bytes.extend(0u32.to_le_bytes()); // flags
        for half in [64u16, 56, 1, 64, 0, 0] {
            bytes.extend(half.to_le_bytes());
        }
        bytes.extend(segment.to_le_bytes());
        bytes.extend(0u32.to_le_bytes()); // flags
        // The segment is the name behind the headers, which only an interpreter's segment needs.
        for word in [64 + 56, 0, 0, NAME.len() as u64, NAME.len() as u64, 1] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(NAME);
        bytes
    }

    const NAME: &[u8] = b"/lib/ld.so\0";

    const LOAD: u32 = 1;
    const INTERP: u32 = 3;
    const X86: u16 = 62;
    const ARM: u16 = 183;

    #[test]
    fn a_static_program_of_the_architecture_fits() {
        assert_eq!(fits(&executable(X86, LOAD), Architecture::X86_64), Ok(None));
        assert_eq!(fits(&executable(ARM, LOAD), Architecture::Aarch64), Ok(None));
    }

    #[test]
    fn other_programs_do_not_fit_and_the_reason_is_reported() {
        let why = |bytes: &[u8], arch| fits(bytes, arch).unwrap_err();
        assert_eq!(why(&executable(ARM, LOAD), Architecture::X86_64), "is not for x86_64");
        let (machine, other) = foreign();
        assert_eq!(why(&executable(machine, INTERP), other), "is not static");
        assert!(why(b"#!/bin/sh\n", Architecture::X86_64).contains("no ELF"));
        assert!(why(&[], Architecture::X86_64).contains("no ELF"));
        let mut object = executable(X86, LOAD);
        object[16] = 1; // ET_REL
        assert!(why(&object, Architecture::X86_64).contains("no ELF"));
    }

    #[test]
    fn the_way_to_a_right_one_is_in_the_refusal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("slat");
        let (machine, other) = foreign();
        std::fs::write(&path, executable(machine, INTERP)).unwrap();
        let error = choose(Some(&path), "slat", other).unwrap_err().to_string();
        assert!(error.contains("not static") && error.contains("cargo xtask static"), "{error}");
    }

    /// Returns an architecture that is not this host's.
    fn foreign() -> (u16, Architecture) {
        match Architecture::of_this_machine() {
            Some(Architecture::Aarch64) => (X86, Architecture::X86_64),
            _ => (ARM, Architecture::Aarch64),
        }
    }

    #[test]
    fn a_program_of_this_machine_comes_with_its_libraries() {
        let Some(own) = Architecture::of_this_machine() else { return };
        let program = choose(Some(&std::env::current_exe().unwrap()), "slat", own).unwrap();
        let names: Vec<_> = program.libraries.iter().map(|(path, _)| path).collect();
        assert_eq!(names.is_empty(), cfg!(target_feature = "crt-static"), "{names:?}");
        assert!(program.libraries.iter().all(|(_, bytes)| bytes.starts_with(b"\x7fELF")));
    }

    #[test]
    fn a_list_of_libraries_names_files_and_what_the_kernel_brings() {
        let text = "\tlinux-vdso.so.1 (0x7ffd)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x7f0)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x7f1)\n";
        let expected = ["/lib/x/libc.so.6", "/lib64/ld-linux-x86-64.so.2"];
        assert_eq!(listed(text), expected.map(PathBuf::from));
    }
}
