//! The programs that build a kernel, and the packages that bring them.

use slat_vm::Architecture;
use std::process::{Command, Stdio};

/// A program, an option with which it ends at once and well, and Debian's package.
type Tool = (&'static str, &'static str, &'static str);

const ALWAYS: [Tool; 6] = [
    ("make", "--version", "make"),
    ("gcc", "--version", "gcc"),
    ("flex", "--version", "flex"),
    ("bison", "--version", "bison"),
    ("bc", "--version", "bc"),
    ("perl", "--version", "perl"),
];

/// The prefix of the compiler's name, if it is another one than this machine's.
pub fn cross_compile(arch: Architecture) -> &'static str {
    match arch {
        arch if Some(arch) == Architecture::of_this_machine() => "",
        Architecture::Aarch64 => "aarch64-linux-gnu-",
        Architecture::X86_64 => "x86_64-linux-gnu-",
    }
}

/// The packages of what is missing on this machine to build for an architecture.
pub fn missing(arch: Architecture) -> Vec<&'static str> {
    let mut tools = ALWAYS.to_vec();
    tools.extend(match cross_compile(arch) {
        "" => None,
        "aarch64-linux-gnu-" => {
            Some(("aarch64-linux-gnu-gcc", "--version", "gcc-aarch64-linux-gnu"))
        }
        _ => Some(("x86_64-linux-gnu-gcc", "--version", "gcc-x86-64-linux-gnu")),
    });
    let mut missing: Vec<_> =
        tools.into_iter().filter(|tool| !answers(*tool)).map(|t| t.2).collect();
    // Headers of libelf, with which x86's objects are checked; there is no program that tells.
    if arch == Architecture::X86_64 && !std::path::Path::new("/usr/include/libelf.h").exists() {
        missing.push("libelf-dev");
    }
    missing
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
    }
}
