//! The guest's first memslot, which is never logged. It holds the guest's code, its own page
//! tables, and a mailbox for each vCPU.
//!
//! The guest's tables map its addresses one to one with 2 MiB pages, because 1 GiB pages need a
//! CPUID bit on x86 that not every host has. The tables have the same form on each architecture:
//! four levels of tables with 512 entries of 8 bytes. The bits of the entries are in [`arch`].

use crate::arch::{self, CODE_GPA, MEMORY_GPA, Piece, ROOT_GPA};
use crate::mailbox::{self, Mailbox};
use crate::memory::{Backing, HostMemory};
use crate::{Error, work::Touch};

const TABLES_GPA: u64 = 0x5000;

const PAGE: u64 = 4096;
const SIZE_2M: u64 = 2 << 20;
const SIZE_1G: u64 = 1 << 30;
const SIZE_512G: u64 = 512 << 30;

/// The memory of the slot.
#[derive(Debug)]
pub(crate) struct Boot {
    memory: HostMemory,
    /// Guest address of the first mailbox.
    mailboxes: u64,
    /// Guest address of the first vCPU's records.
    records: u64,
    /// Bytes of each vCPU's records.
    each: u64,
}

/// Numbers of the guest's tables for a size of test memory.
struct Tables {
    /// Number of third-level tables, of 512 GiB each.
    thirds: u64,
    /// Number of second-level tables, of 1 GiB each: one for the boot slot, the others for the test
    /// memory.
    seconds: u64,
}

impl Tables {
    fn new(bytes: u64) -> Self {
        let end = MEMORY_GPA + bytes;
        Self { thirds: end.div_ceil(SIZE_512G), seconds: 1 + bytes.div_ceil(SIZE_1G) }
    }

    fn third(&self, index: u64) -> u64 {
        TABLES_GPA + index * PAGE
    }

    fn second(&self, index: u64) -> u64 {
        TABLES_GPA + (self.thirds + index) * PAGE
    }

    fn end(&self) -> u64 {
        self.second(self.seconds)
    }
}

impl Boot {
    /// Makes and fills the memory of the slot, for `bytes` bytes of test memory and `vcpus` vCPUs
    /// with room for `records` values of the clock each.
    ///
    /// # Errors
    /// [`Error::Os`] if there is too little memory; [`Error::Invalid`] if the mailboxes of `vcpus`
    /// vCPUs exceed the room for the slot, [`arch::BOOT_LIMIT`].
    pub fn new(bytes: u64, vcpus: usize, records: u64) -> Result<Self, Error> {
        let mailboxes = Tables::new(bytes).end();
        let first = mailboxes + vcpus as u64 * mailbox::STRIDE;
        if first > arch::BOOT_LIMIT {
            return Err(Error::invalid("vCPUs", vcpus, "have no room for their mailboxes"));
        }
        let each = records.saturating_mul(8).checked_next_multiple_of(PAGE);
        let all = each.and_then(|each| each.checked_mul(vcpus as u64));
        let len = all.and_then(|all| all.checked_add(first)).filter(|len| *len <= arch::BOOT_LIMIT);
        let Some((len, each)) = len.zip(each) else {
            return Err(Error::invalid("records", records, "have no room beside the mailboxes"));
        };
        let len = len.next_multiple_of(Backing::Small.page_size());
        let memory = HostMemory::new(len, Backing::Small)?;
        let boot = Self { memory, mailboxes, records: first, each };
        boot.write(bytes).ok_or_else(|| Error::os("boot memory")(rustix::io::Errno::NOSPC))?;
        Ok(boot)
    }

    /// Returns the memory that backs the slot.
    pub fn memory(&self) -> &HostMemory {
        &self.memory
    }

    /// Returns the guest address of a vCPU's mailbox.
    pub fn mailbox_gpa(&self, vcpu: usize) -> u64 {
        self.mailboxes + vcpu as u64 * mailbox::STRIDE
    }

    /// Returns a vCPU's mailbox.
    pub fn mailbox(&self, vcpu: usize) -> Option<Mailbox<'_>> {
        Mailbox::new(&self.memory, self.mailbox_gpa(vcpu))
    }

    /// Returns the guest address of a vCPU's records.
    pub fn records_gpa(&self, vcpu: usize) -> u64 {
        self.records + vcpu as u64 * self.each
    }

    /// Returns how many values of the clock a vCPU has room for.
    pub fn records(&self) -> u64 {
        self.each / 8
    }

    fn write(&self, bytes: u64) -> Option<()> {
        // The host's pages of the records are there before a guest is timed.
        let records = self.records..self.memory.len();
        records.step_by(PAGE as usize).try_for_each(|at| self.memory.write(at, 0))?;
        for (index, chunk) in arch::code().chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.memory.write(CODE_GPA + index as u64 * 8, u64::from_le_bytes(word))?;
        }
        let tables = Tables::new(bytes);
        for third in 0..tables.thirds {
            self.memory.write(ROOT_GPA + third * 8, arch::table(tables.third(third)))?;
        }
        self.memory.write(tables.third(0), arch::table(tables.second(0)))?;
        for page in 0..self.memory.len().div_ceil(SIZE_2M) {
            self.memory.write(tables.second(0) + page * 8, arch::page_2m(page * SIZE_2M))?;
        }
        if let Some((gpa, entry)) = arch::DEVICE {
            self.memory.write(tables.second(0) + gpa / SIZE_2M * 8, entry)?;
        }
        for second in 1..tables.seconds {
            let gpa = MEMORY_GPA + (second - 1) * SIZE_1G;
            let third = tables.third(gpa / SIZE_512G);
            let entry = arch::table(tables.second(second));
            self.memory.write(third + gpa % SIZE_512G / SIZE_1G * 8, entry)?;
            let pages = (MEMORY_GPA + bytes - gpa).min(SIZE_1G).div_ceil(SIZE_2M);
            for page in 0..pages {
                let entry = arch::page_2m(gpa + page * SIZE_2M);
                self.memory.write(tables.second(second) + page * 8, entry)?;
            }
        }
        Some(())
    }
}

/// Returns the guest address of a piece of the code.
pub(crate) fn piece(piece: Piece) -> u64 {
    CODE_GPA + arch::offset(piece)
}

/// Returns the guest address of the code for a [`Touch`].
pub(crate) fn touching(touch: Touch) -> u64 {
    piece(match touch {
        Touch::Write => Piece::Write,
        Touch::Read => Piece::Read,
        Touch::Sum => Piece::Sum,
        Touch::Execute => Piece::Execute,
        Touch::Skip => Piece::Skip,
        Touch::Ask => Piece::Ask,
        Touch::ToggleCaches => Piece::Toggle,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Walks the guest's tables as its MMU does.
    fn translate(memory: &HostMemory, gva: u64) -> Option<u64> {
        let mut table = ROOT_GPA;
        for shift in [39, 30, 21] {
            let entry = memory.read(table + (gva >> shift & 511) * 8)?;
            table = arch::address(entry);
            let expected = if shift == 21 { arch::page_2m(table) } else { arch::table(table) };
            if entry != expected {
                return None;
            }
        }
        Some(table + gva % SIZE_2M)
    }

    #[test]
    fn test_memory_is_mapped_one_to_one_and_nothing_else() {
        for bytes in [4096, 64 << 20, SIZE_1G, SIZE_1G + SIZE_2M, 600 << 30] {
            let boot = Boot::new(bytes, 3, 1000).unwrap();
            let end = MEMORY_GPA + bytes;
            let last = boot.mailbox_gpa(2) + mailbox::STRIDE - 8;
            for gpa in [CODE_GPA, last, MEMORY_GPA, MEMORY_GPA + bytes / 2, end - 1] {
                assert_eq!(translate(boot.memory(), gpa), Some(gpa), "{bytes:#x} {gpa:#x}");
            }
            let after_boot = boot.memory().len().next_multiple_of(SIZE_2M);
            assert_eq!(translate(boot.memory(), after_boot), None);
            assert_eq!(translate(boot.memory(), MEMORY_GPA - 1), None);
            assert_eq!(translate(boot.memory(), end.next_multiple_of(SIZE_2M)), None);
            assert!(boot.mailbox(2).is_some());
            assert!(boot.mailbox(2 + 1000).is_none());
        }
    }

    #[test]
    fn the_code_has_room_and_its_pieces_lie_in_it() {
        let code = arch::code();
        assert!(!code.is_empty() && CODE_GPA + code.len() as u64 <= ROOT_GPA);
        use Piece::*;
        let mut offsets = [Sequential, Random, Hot, Listed, Write, Read, Sum, Execute, Ask, Skip]
            .map(arch::offset);
        assert!(offsets.iter().all(|&offset| offset > 0 && offset < code.len() as u64));
        offsets.sort_unstable();
        assert!(offsets.windows(2).all(|pair| pair[0] < pair[1]), "{offsets:?}");
    }

    #[test]
    fn as_many_vcpus_as_kvm_has_fit() {
        assert!(Boot::new(64 << 20, 4096, 0).is_ok());
        assert!(Boot::new(64 << 20, 1 << 20, 0).is_err());
        assert!(Boot::new(64 << 20, 1, 1 << 40).is_err());
    }
}
