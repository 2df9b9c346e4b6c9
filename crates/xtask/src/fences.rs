//! Counts the fences in the engine's code on RISC-V, where an acquire is one. Walks load entries
//! relaxed and fence once for many ([decisions](../../docs/decisions.md)); acquire
//! loads in a run of entries would be eight fences in each place.

use crate::size;
use crate::workspace::Outcome;
use anyhow::{Context, ensure};
use object::{Object as _, ObjectSection as _, SectionKind};
use std::path::Path;

/// A target on which an acquire is an instruction of its own.
pub const TRIPLE: &str = "riscv64gc-unknown-none-elf";

/// `fence r, rw`: an acquire, by a load or alone.
const ACQUIRE: u32 = 0x0230_000f;

/// The most fences in all operations together: 564 in November 2026, as operations on one page
/// descend without a walk; if each load of an entry acquired, they would be twice as many.
const MOST: usize = 600;

/// Builds the engine, optimised, and counts its fences.
pub fn check() -> anyhow::Result<Outcome> {
    let archive = size::archive(TRIPLE, size::PROGRAMS, "riscv", "2", &[])?;
    let count = acquires(&archive).with_context(|| format!("cannot read {}", archive.display()))?;
    println!("{count} fences for acquires in the engine's operations on RISC-V, {MOST} at most");
    ensure!(count != 0, "no fence at all: links of tables are followed without an acquire");
    ensure!(count <= MOST, "{count} fences for acquires on RISC-V, more than {MOST}");
    Ok(Outcome::Ran(Vec::new()))
}

/// Returns the number of fences for acquires in the compiled code of the engine and of
/// `slat-programs`.
fn acquires(archive: &Path) -> anyhow::Result<usize> {
    let mut count = 0;
    for file in size::own_files(&std::fs::read(archive)?)? {
        for section in file.sections().filter(|it| it.kind() == SectionKind::Text) {
            count += instructions(section.data()?).filter(|&it| it == ACQUIRE).count();
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
