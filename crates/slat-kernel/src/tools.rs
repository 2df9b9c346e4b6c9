//! The programs that build a kernel, and the packages that have them.

use crate::vm::Architecture;
use anyhow::bail;
use std::path::Path;
use std::process::{Command, Stdio};

/// A program, an option with which it ends at once and successfully, and its Debian package.
type Tool = (&'static str, &'static str, &'static str);

const ALWAYS: [Tool; 6] = [
    ("make", "--version", "make"),
    ("gcc", "--version", "gcc"),
    ("flex", "--version", "flex"),
    ("bison", "--version", "bison"),
    ("bc", "--version", "bc"),
    ("perl", "--version", "perl"),
];

/// Returns the prefix of the compiler's name, if it is not this machine's.
pub fn cross_compile(arch: Architecture) -> &'static str {
    match arch {
        arch if Some(arch) == Architecture::of_this_machine() => "",
        Architecture::Aarch64 => "aarch64-linux-gnu-",
        Architecture::X86_64 => "x86_64-linux-gnu-",
        Architecture::Riscv64 => "riscv64-linux-gnu-",
        Architecture::Ppc64le => "powerpc64le-linux-gnu-",
    }
}

/// Returns Linux's name of an architecture, for `make`.
pub const fn linux_arch(arch: Architecture) -> &'static str {
    match arch {
        Architecture::X86_64 => "x86_64",
        Architecture::Aarch64 => "arm64",
        Architecture::Riscv64 => "riscv",
        Architecture::Ppc64le => "powerpc",
    }
}

/// Returns the compiler's description of its version; empty if there is no compiler.
pub fn compiler(arch: Architecture) -> String {
    let gcc = format!("{}gcc", cross_compile(arch));
    let output = Command::new(gcc).arg("--version").stdin(Stdio::null()).output();
    output.map_or_else(|_| String::new(), |o| String::from_utf8_lossy(&o.stdout).into_owned())
}

/// Checks that a kernel can be built here.
///
/// # Errors
/// Something is missing; the error has the command that installs it.
pub fn check(arch: Architecture) -> anyhow::Result<()> {
    let mut tools = ALWAYS.to_vec();
    tools.extend(match cross_compile(arch) {
        "" => None,
        "aarch64-linux-gnu-" => {
            Some(("aarch64-linux-gnu-gcc", "--version", "gcc-aarch64-linux-gnu"))
        }
        "riscv64-linux-gnu-" => {
            Some(("riscv64-linux-gnu-gcc", "--version", "gcc-riscv64-linux-gnu"))
        }
        "powerpc64le-linux-gnu-" => {
            Some(("powerpc64le-linux-gnu-gcc", "--version", "gcc-powerpc64le-linux-gnu"))
        }
        _ => Some(("x86_64-linux-gnu-gcc", "--version", "gcc-x86-64-linux-gnu")),
    });
    // Headers for checking x86's objects.
    let files: &[(&str, &str)] = match arch {
        Architecture::X86_64 => &[("/usr/include/libelf.h", "libelf-dev")],
        Architecture::Aarch64 | Architecture::Riscv64 | Architecture::Ppc64le => &[],
    };
    installed(&format!("a kernel for {arch}"), &tools, files)
}

/// Checks that selftests can be built here, static, in addition to a kernel.
///
/// # Errors
/// A package is missing.
pub fn check_for_selftests(arch: Architecture) -> anyhow::Result<()> {
    let files: &[(&str, &str)] = match cross_compile(arch) {
        "" => &[],
        "aarch64-linux-gnu-" => &[("/usr/aarch64-linux-gnu/lib/libc.a", "libc6-dev-arm64-cross")],
        "riscv64-linux-gnu-" => &[("/usr/riscv64-linux-gnu/lib/libc.a", "libc6-dev-riscv64-cross")],
        "powerpc64le-linux-gnu-" => {
            &[("/usr/powerpc64le-linux-gnu/lib/libc.a", "libc6-dev-ppc64el-cross")]
        }
        _ => &[("/usr/x86_64-linux-gnu/lib/libc.a", "libc6-dev-amd64-cross")],
    };
    installed(&format!("selftests for {arch}"), &[("rsync", "--version", "rsync")], files)
}

/// Returns whether sparse is installed, with which `make C=1` looks at what is compiled.
pub fn has_sparse() -> bool {
    answers(("sparse", "--version", "sparse"))
}

fn installed(what: &str, tools: &[Tool], files: &[(&str, &str)]) -> anyhow::Result<()> {
    let tools = tools.iter().filter(|tool| !answers(**tool)).map(|tool| tool.2);
    let files = files.iter().filter(|(file, _)| !Path::new(file).exists()).map(|(_, name)| *name);
    let missing: Vec<&str> = tools.chain(files).collect();
    if missing.is_empty() {
        return Ok(());
    }
    bail!(
        "to build {what} this machine lacks {}; as root: `apt-get install --no-install-recommends \
         {}`",
        missing.join(", "),
        missing.join(" ")
    )
}

fn answers((program, option, _): Tool) -> bool {
    let mut command = Command::new(program);
    command.arg(option).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_there_does_not_answer() {
        assert!(!answers(("slat-no-such-program", "--version", "none")));
        assert!(answers(("true", "--version", "coreutils")));
        let tools = [("slat-no-such-program", "--version", "some-package")];
        let error = installed("it", &tools, &[("/no/such/file", "some-dev"), ("/", "no")]);
        let text = error.unwrap_err().to_string();
        assert!(text.ends_with("--no-install-recommends some-package some-dev`"), "{text}");
    }
}
