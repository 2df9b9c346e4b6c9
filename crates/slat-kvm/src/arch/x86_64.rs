//! A guest of x86-64: long mode set up from outside, code in ring 3.
//!
//! Nothing of the guest runs in ring 0, not even to get there: a KVM without hardware
//! virtualization interprets ring 0 code, and would write memory without a fault. IOPL is 3, so
//! that `out` in ring 3 leaves the guest without a fault of its own. There is no IDT, because
//! nothing faults in the guest: what faults is the second level, which the guest does not see.
//!
//! Guest addresses are mapped one to one with 2 MiB pages (1 GiB ones need a CPUID bit that not
//! every host gives). Accessed and dirty bits of the guest's own tables are set beforehand, so
//! that no walk has to set them: on a KVM with shadow page tables that would be one more fault.
//!
//! Sources: Intel SDM, volume 3, "Segment Descriptors", "4-Level Paging and 5-Level Paging" and
//! "Checks on the Guest State Area" (what VMX wants of all this); volume 1, "I/O Privilege Level";
//! api.rst, `KVM_SET_SREGS`.

use super::{Progress, Stretch};
use crate::write_pass::WHOLE;
use crate::{Error, memory::HostMemory};
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

/// Where the test memory starts: above the holes that chipsets and KVM itself use below 4 GiB,
/// and aligned for 1 GiB pages.
pub(crate) const MEMORY_GPA: u64 = 1 << 32;

/// Where the code is. Page 0 stays empty, so that a jump through a null pointer shows.
const CODE_GPA: u64 = 0x1000;
/// The guest's own tables: root, then the third level, then the second.
const ROOT_GPA: u64 = 0x2000;
const TABLES_GPA: u64 = 0x3000;

const PAGE: u64 = 4096;
const SIZE_2M: u64 = 2 << 20;
const SIZE_1G: u64 = 1 << 30;
const SIZE_512G: u64 = 512 << 30;

/// Present, writable, user, accessed.
const TABLE: u64 = 0x27;
/// The same, dirty, and a page rather than a table.
const PAGE_2M: u64 = 0xe7;

/// Port by which the guest says that a stretch is done. Any would do.
const DONE_PORT: u16 = 0x5a;

/// Walks the pages of a stretch. Registers are those of [`Registers::set`].
///
/// ```text
/// walk: 4d 01 c2     add  r10, r8        ; accumulator += share
///       4d 39 ca     cmp  r10, r9        ; one whole reached?
///       72 0d        jb   next
///       4d 29 ca     sub  r10, r9
///       48 8d 0c 38  lea  rcx, [rax+rdi] ; stamp = tag + address
///       48 89 0f     mov  [rdi], rcx     ; the write that is measured
///       49 ff c4     inc  r12            ; pages written
/// next: 48 01 df     add  rdi, rbx       ; page after page
///       48 ff ce     dec  rsi
///       75 e3        jnz  walk
///       e6 5a        out  0x5a, al       ; exit to the host, which sets the next stretch
///       eb df        jmp  walk
/// ```
#[rustfmt::skip]
const CODE: [u8; 33] = [
    0x4d, 0x01, 0xc2,
    0x4d, 0x39, 0xca,
    0x72, 0x0d,
    0x4d, 0x29, 0xca,
    0x48, 0x8d, 0x0c, 0x38,
    0x48, 0x89, 0x0f,
    0x49, 0xff, 0xc4,
    0x48, 0x01, 0xdf,
    0x48, 0xff, 0xce,
    0x75, 0xe3,
    0xe6, DONE_PORT as u8,
    0xeb, 0xdf,
];

/// Checks that `bytes` of test memory lie within the guest's physical addresses.
pub(crate) fn check(kvm: &Kvm, bytes: u64) -> Result<(), Error> {
    let cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(Error::os("KVM_GET_SUPPORTED_CPUID"))?;
    let sizes = cpuid.as_slice().iter().find(|entry| entry.function == 0x8000_0008);
    // 36 bits is what a CPU without the leaf has (SDM, volume 3, "Enumeration of Paging
    // Features by CPUID"). The guest's virtual
    // addresses are the same numbers and must stay below 2^47.
    let bits = sizes.map_or(36, |entry| entry.eax & 0xff).min(47);
    let limit = (1u64 << bits) - MEMORY_GPA;
    if bytes > limit {
        let rule = format!("this CPU's guest addresses have room for {} MiB", limit >> 20);
        return Err(Error::invalid("memory", bytes, rule));
    }
    Ok(())
}

/// The guest's own tables for the code and for `bytes` of test memory.
struct Tables {
    /// 512 GiB each.
    thirds: u64,
    /// 1 GiB each: one for the code, then those of the test memory.
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
}

/// Bytes of memory for the code and the guest's own tables.
pub(crate) fn boot_bytes(bytes: u64) -> u64 {
    let tables = Tables::new(bytes);
    tables.second(tables.seconds)
}

/// Writes the code and the guest's own tables. Nothing if `boot` is too small for them.
pub(crate) fn write_boot(boot: &HostMemory, bytes: u64) -> Option<()> {
    for (index, chunk) in CODE.chunks(8).enumerate() {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        boot.write(CODE_GPA + index as u64 * 8, u64::from_le_bytes(word))?;
    }
    let tables = Tables::new(bytes);
    for third in 0..tables.thirds {
        boot.write(ROOT_GPA + third * 8, tables.third(third) | TABLE)?;
    }
    boot.write(tables.third(0), tables.second(0) | TABLE)?;
    boot.write(tables.second(0), PAGE_2M)?;
    for second in 1..tables.seconds {
        let gpa = MEMORY_GPA + (second - 1) * SIZE_1G;
        let third = tables.third(gpa / SIZE_512G);
        boot.write(third + gpa % SIZE_512G / SIZE_1G * 8, tables.second(second) | TABLE)?;
        let pages = (MEMORY_GPA + bytes - gpa).min(SIZE_1G).div_ceil(SIZE_2M);
        for page in 0..pages {
            boot.write(tables.second(second) + page * 8, (gpa + page * SIZE_2M) | PAGE_2M)?;
        }
    }
    Some(())
}

/// What a VM needs before its first vCPU.
pub(crate) fn set_up_vm(vm: &VmFd) -> Result<(), Error> {
    // Intel's CPUs need three pages for a task state segment, anywhere below 4 GiB and outside
    // of any memslot (api.rst, `KVM_SET_TSS_ADDR`). The address is the customary one.
    vm.set_tss_address(0xfffb_d000).map_err(Error::os("KVM_SET_TSS_ADDR"))
}

/// Puts a vCPU into long mode, ring 3.
pub(crate) fn set_up_vcpu(kvm: &Kvm, vcpu: &VcpuFd) -> Result<(), Error> {
    let cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(Error::os("KVM_GET_SUPPORTED_CPUID"))?;
    vcpu.set_cpuid2(&cpuid).map_err(Error::os("KVM_SET_CPUID2"))?;
    let mut sregs = vcpu.get_sregs().map_err(Error::os("KVM_GET_SREGS"))?;
    let data = kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector: 0x2b,
        type_: 3, // data, writable, accessed
        present: 1,
        dpl: 3,
        db: 1,
        s: 1,
        l: 0,
        g: 1,
        avl: 0,
        unusable: 0,
        padding: 0,
    };
    // Type 11: code, readable, accessed. L: 64-bit.
    sregs.cs = kvm_segment { selector: 0x33, type_: 11, db: 0, l: 1, ..data };
    sregs.ds = data;
    sregs.es = data;
    sregs.fs = data;
    sregs.gs = data;
    sregs.ss = data;
    sregs.cr3 = ROOT_GPA;
    sregs.cr0 = 0x8005_0033; // PG, AM, WP, NE, ET, MP, PE
    sregs.cr4 = 1 << 5; // PAE
    sregs.efer = 1 << 8 | 1 << 10; // LME, LMA
    vcpu.set_sregs(&sregs).map_err(Error::os("KVM_SET_SREGS"))
}

/// Whether the guest's code says that its stretch is done.
pub(crate) fn is_end_of_stretch(exit: &VcpuExit<'_>) -> bool {
    matches!(exit, VcpuExit::IoOut(DONE_PORT, _))
}

/// A vCPU's general registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Registers(kvm_regs);

impl Registers {
    /// Those of a vCPU about to run its first stretch.
    pub(crate) fn at_entry() -> Self {
        // Bit 1 is always set; IOPL is 3; interrupts are off.
        Self(kvm_regs { rip: CODE_GPA, rflags: 0x3002, ..Default::default() })
    }

    /// Sets a stretch. The instruction pointer stays where it is: after an `out` exit only KVM
    /// knows whether the instruction is finished (api.rst, "The kvm_run structure"), and from either
    /// place the code goes on to the start of the walk.
    pub(crate) fn set(&mut self, stretch: Stretch) {
        self.0.rdi = stretch.gpa;
        self.0.rsi = stretch.pages;
        self.0.rbx = PAGE;
        self.0.r8 = stretch.share;
        self.0.r9 = WHOLE;
        self.0.r10 = stretch.accumulator;
        self.0.r12 = 0;
        self.0.rax = stretch.tag;
    }

    /// Gives them to the vCPU.
    pub(crate) fn store(&self, vcpu: &VcpuFd) -> Result<(), Error> {
        vcpu.set_regs(&self.0).map_err(Error::os("KVM_SET_REGS"))
    }

    /// Takes them from the vCPU.
    pub(crate) fn fetch(&mut self, vcpu: &VcpuFd) -> Result<(), Error> {
        self.0 = vcpu.get_regs().map_err(Error::os("KVM_GET_REGS"))?;
        Ok(())
    }

    /// How far the code came.
    pub(crate) fn progress(&self) -> Progress {
        Progress { gpa: self.0.rdi, left: self.0.rsi, written: self.0.r12 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Backing;

    /// Walks the guest's tables as its MMU does.
    fn translate(boot: &HostMemory, gva: u64) -> Option<u64> {
        let mut table = ROOT_GPA;
        for shift in [39, 30, 21] {
            let entry = boot.read(table + (gva >> shift & 511) * 8)?;
            if entry & 7 != 7 {
                return None;
            }
            let address = entry & 0x000f_ffff_ffff_f000;
            if shift == 21 {
                assert_eq!(entry & 0xe0, 0xe0, "a dirty, accessed 2 MiB page");
                return Some(address + gva % SIZE_2M);
            }
            assert_eq!(entry & 0xa0, 0x20, "an accessed table");
            table = address;
        }
        None
    }

    #[test]
    fn test_memory_is_mapped_one_to_one_and_nothing_else() {
        for bytes in [4096, 64 << 20, SIZE_1G, SIZE_1G + SIZE_2M, 600 << 30] {
            let boot = HostMemory::new(boot_bytes(bytes), Backing::Small).unwrap();
            write_boot(&boot, bytes).unwrap();
            let end = MEMORY_GPA + bytes;
            for gpa in [CODE_GPA, MEMORY_GPA, MEMORY_GPA + bytes / 2, end - 1] {
                assert_eq!(translate(&boot, gpa), Some(gpa), "{bytes:#x} {gpa:#x}");
            }
            assert_eq!(translate(&boot, SIZE_2M), None);
            assert_eq!(translate(&boot, MEMORY_GPA - 1), None);
            assert_eq!(translate(&boot, end.next_multiple_of(SIZE_2M)), None);
        }
    }

    #[test]
    fn boot_memory_that_is_too_small_is_noticed() {
        let boot = HostMemory::new(boot_bytes(SIZE_1G) - PAGE, Backing::Small).unwrap();
        assert_eq!(write_boot(&boot, SIZE_1G), None);
    }

    #[test]
    fn jumps_of_the_code_land_on_instructions() {
        let target = |at: usize| at as i64 + 2 + i64::from(CODE[at + 1] as i8);
        assert_eq!(CODE[6], 0x72);
        assert_eq!(target(6), 0x15);
        assert_eq!([CODE[27], CODE[31]], [0x75, 0xeb]);
        assert_eq!([target(27), target(31)], [0, 0]);
    }
}
