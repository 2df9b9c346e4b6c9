//! Counts the fences in the engine's code on RISC-V, where an acquire is one. Walks load entries
//! relaxed and fence once for many ([decisions](../../docs/decisions.md)); acquire
//! loads in a run of entries would be eight fences in each place.

use crate::stages::Outcome;
use crate::{stages, target};
use anyhow::{Context, ensure};
use object::read::archive::ArchiveFile;
use object::{Object, ObjectSection, SectionKind};
use std::path::Path;

/// A target on which an acquire is an instruction of its own.
pub const TRIPLE: &str = "riscv64gc-unknown-none-elf";

/// `fence r, rw`: an acquire, by a load or alone.
const ACQUIRE: u32 = 0x0230_000f;

/// The most fences in all operations together: 505 in November 2026, as operations on one page
/// descend without a walk, and 1,046 if each load of an entry acquires.
const MOST: usize = 540;

/// Builds the engine, optimised, and counts its fences.
pub fn check() -> anyhow::Result<Outcome> {
    let folder = target().join("size");
    let mut build = stages::cargo(&["build", "--quiet", "--release", "--package", "slat-programs"]);
    build.args(["--target", TRIPLE, "--no-default-features", "--features", "riscv"]);
    build
        .env("CARGO_TARGET_DIR", &folder)
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "2")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
        .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0");
    stages::ran(&mut build)?;
    let count = acquires(&folder.join(TRIPLE).join("release/libslat_size.a"))?;
    println!("{count} fences for acquires in the engine's operations on RISC-V, {MOST} at most");
    ensure!(count != 0, "no fence at all: links of tables are followed without an acquire");
    ensure!(count <= MOST, "{count} fences for acquires on RISC-V, more than {MOST}");
    Ok(Outcome::Ran(Vec::new()))
}

/// Returns the number of fences for acquires in the compiled code of the engine and of
/// `slat-programs`.
fn acquires(archive: &Path) -> anyhow::Result<usize> {
    let failed = || format!("cannot read {}", archive.display());
    let data = std::fs::read(archive).with_context(failed)?;
    let mut count = 0;
    for member in ArchiveFile::parse(&*data).with_context(failed)?.members() {
        let member = member.with_context(failed)?;
        let name = member.name();
        if !(name.starts_with(b"slat_size-") || name.starts_with(b"slat-")) {
            continue;
        }
        let file = object::File::parse(member.data(&*data)?).with_context(failed)?;
        for section in file.sections().filter(|it| it.kind() == SectionKind::Text) {
            let code = section.data().with_context(failed)?;
            count += instructions(code).filter(|&it| it == ACQUIRE).count();
        }
    }
    Ok(count)
}

/// Returns the instructions of four bytes, without those of two.
fn instructions(mut code: &[u8]) -> impl Iterator<Item = u32> + '_ {
    core::iter::from_fn(move || {
        loop {
            let (&low, _) = code.split_first()?;
            if low & 3 == 3 {
                let (word, rest) = code.split_first_chunk()?;
                code = rest;
                return Some(u32::from_le_bytes(*word));
            }
            code = code.get(2..)?;
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_of_both_sizes_are_distinguished() {
        // c.nop, fence r, rw, c.nop, and a jump whose upper half looks like a short instruction.
        let code = [1, 0, 0x0f, 0, 0x30, 2, 1, 0, 0x6f, 0, 0, 0];
        assert_eq!(instructions(&code).collect::<Vec<_>>(), [ACQUIRE, 0x6f]);
        assert_eq!(instructions(&[0x0f, 0]).count(), 0);
    }
}
