//! One vCPU: a VMCB (15.5.1, appendix B "VMCB Layout"), and the guest's code.

use super::machine::{Memory, Serial};
use super::platform::{Fault, LOWEST_ADDRESS, Why};
use core::arch::asm;
use core::arch::x86_64::__cpuid;
use core::fmt::Write;
use slat::format::npt::fault::NestedPageFault;
use slat::format::npt::{Npt, Npt1G};
use slat::{Access, Gpa, GuestRoot};

pub type Tree = Npt1G;
/// 5.4: accessed and dirty in a leaf, accessed in a table.
pub const ACCESSED: u64 = 1 << 5;
pub const DIRTY: u64 = 1 << 6;
/// 15.25.6: bits of EXITINFO1: those of a page fault's error code, of which U is always set, and
/// the place of the fault.
const PRESENT: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const FETCH: u64 = 1 << 4;
const FINAL: u64 = 1 << 32;
const GUEST_WALK: u64 = 1 << 33;

/// Address of the guest's own tables and code in its memory.
pub const GUEST_TABLES: u64 = 0x1000;
pub const CODE: u64 = 0x4000;
/// `mov rax, [rdi]`, `mov [rdi], rsi` and `jmp rdi`, each with `vmmcall` behind it.
const PROGRAMS: [(u64, u64); 3] =
    [(CODE, 0xd901_0f07_8b48), (CODE + 8, 0xd901_0f37_8948), (CODE + 16, 0xd9_010f_e7ff)];
/// `vmmcall`, for a page that is executed.
pub const CALL: u64 = 0xd9_010f;

pub const EXIT_CALL: u64 = 0x81;

const fn fault(what: &'static str, in_leaf: bool, set: u64, clear: u64) -> Fault {
    Fault { what, in_leaf, set, clear }
}

/// 5.4: present, write, user, no execute.
pub const FAULTS: [Fault; 8] = [
    fault("a leaf keeps the right to write", true, 1 << 1, 0),
    fault("a leaf keeps the right to execute", true, 0, 1 << 63),
    fault("a leaf is not for users", true, 0, 1 << 2),
    fault("a leaf's address is off by a leaf", true, LOWEST_ADDRESS, 0),
    fault("a leaf has a reserved bit", true, 1 << 51, 0),
    fault("a leaf is dirty before it is written", true, DIRTY, 0),
    fault("a table lacks the right to write", false, 0, 1 << 1),
    fault("a table is accessed always", false, ACCESSED, 0),
];

/// An action of the guest, at a linear address that equals the physical one.
#[derive(Clone, Copy)]
pub enum Does {
    Read(u64),
    Write(u64, u64),
    Execute(u64),
}

/// The exit of the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Exit {
    pub code: u64,
    pub info: [u64; 2],
    pub rax: u64,
}

/// A virtual CPU, of one CPU at a time.
pub struct Vcpu {
    vmcb: Memory<4096>,
    host: Memory<4096>,
}

pub static VCPUS: [Vcpu; 2] = [const { Vcpu { vmcb: Memory::new(), host: Memory::new() } }; 2];

/// The guest's linear address [`WIDE`] is its physical address 2^50, in tables of five levels.
pub const WIDE: u64 = 5 << 30;
pub const WIDE_AT: u64 = 1 << 50;

/// Writes the guest's code and its tables, an identity map of 1 GiB by pages of 2 MiB, to its
/// memory.
pub fn prepare<const BYTES: usize>(memory: &Memory<BYTES>) {
    memory.write(GUEST_TABLES, (GUEST_TABLES + 0x1000) | 3);
    memory.write(GUEST_TABLES + 0x1000, (GUEST_TABLES + 0x2000) | 3);
    (0..512).for_each(|n| memory.write(GUEST_TABLES + 0x2000 + 8 * n, n << 21 | 0x83));
    memory.write(GUEST_TABLES + 0x1000 + 8 * (WIDE >> 30), WIDE_AT | 0x83);
    PROGRAMS.into_iter().for_each(|(at, bytes)| memory.write(at, bytes));
}

/// Returns the format that the CPU walks, or says why there is none.
pub fn format(says: bool) -> Option<Tree> {
    let (features, sizes, svm) =
        (__cpuid(0x8000_0001), __cpuid(0x8000_0008).eax, __cpuid(0x8000_000a).edx);
    let (disabled, cr4): (u32, u64);
    // SAFETY: VM_CR, which a CPU with SVM has, and a register.
    unsafe {
        asm!("rdmsr", in("ecx") 0xc001_0114u32, out("eax") disabled, out("edx") _);
        asm!("mov {}, cr4", out(reg) cr4);
    }
    if disabled >> 4 & 1 == 1 {
        let _ = writeln!(Serial, "the firmware has disabled SVM (VM_CR.SVMDIS)");
        return None;
    }
    match Npt::from_cpuid(features.edx, sizes, svm) {
        Ok(format) => {
            // The tables have as many levels as the host's own.
            let format = Npt { five_levels: cr4 >> 12 & 1 == 1, ..format };
            if says {
                let _ = writeln!(Serial, "{format:?}");
            }
            Some(format)
        }
        Err(missing) => {
            let _ = writeln!(Serial, "{missing}");
            None
        }
    }
}

/// Returns whether a nested page fault at `gpa` stopped the guest.
pub fn refused(exit: &Exit, does: Does, why: Why, gpa: u64) -> bool {
    let (access, bits) = match does {
        _ if why == Why::Walk => (Access::Write, WRITE),
        Does::Read(_) => (Access::Read, 0),
        Does::Write(..) => (Access::Write, WRITE),
        Does::Execute(_) => (Access::Execute, FETCH),
    };
    let error = USER
        | bits
        | match why {
            Why::Nothing => FINAL,
            Why::Right => FINAL | PRESENT,
            Why::Walk => GUEST_WALK | PRESENT,
        };
    let fault = NestedPageFault::decode(exit.code, exit.info[0], exit.info[1]);
    let fault = fault.and_then(|fault| fault.fault());
    exit.info == [error, gpa] && fault == Some((Gpa(gpa), access))
}

/// Turns SVM off.
pub fn off() {
    // SAFETY: no guest runs.
    unsafe {
        asm!("rdmsr", "and eax, 0xffffefff", "wrmsr", in("ecx") 0xc000_0080u32, out("eax") _,
            out("edx") _);
    }
}

impl Vcpu {
    /// Turns SVM on, and makes the VMCB of a guest in long mode with these tables.
    pub fn create(&self, root: &GuestRoot<Tree>) {
        let (vmcb, host) = (&self.vmcb, self.host.hpa());
        // SAFETY: EFER.SVME, which the CPU has, and NXE. MSR VM_HSAVE_PA: nothing else uses the
        // page.
        unsafe {
            asm!("rdmsr", "or eax, 0x1800", "wrmsr", in("ecx") 0xc000_0080u32, out("eax") _,
                out("edx") _);
            asm!("wrmsr", in("ecx") 0xc001_0117u32, in("eax") host as u32,
                in("edx") (host >> 32) as u32);
        }
        vmcb.clear();
        // All exceptions; HLT and shutdown; VMRUN and VMMCALL.
        vmcb.write(0x008, 0xffff_ffff | (1 << 24 | 1 << 31) << 32);
        vmcb.write(0x010, 0b11);
        vmcb.write(0x090, 1); // NP_ENABLE
        vmcb.write(0x0b0, root.ncr3());
        // ES, CS, SS, DS: attributes and limit; CS is of 64 bits.
        for (at, attributes) in [(0x400, 0xc93), (0x410, 0xa9b), (0x420, 0xc93), (0x430, 0xc93)] {
            vmcb.write(at, 0xffff_ffff << 32 | attributes << 16 | 8);
        }
        vmcb.write(0x4d0, 0x1d00); // EFER: SVME, NXE, LMA, LME
        vmcb.write(0x548, 0x20); // CR4.PAE
        vmcb.write(0x550, GUEST_TABLES); // CR3
        vmcb.write(0x558, 0x8001_0011); // CR0: PG, WP, ET, PE
        vmcb.write(0x560, 0x400); // DR7
        vmcb.write(0x568, 0xffff_0ff0); // DR6
        vmcb.write(0x570, 2); // RFLAGS
        vmcb.write(0x668, 0x0007_0406_0007_0406); // G_PAT
    }

    /// Runs the guest until it stops.
    pub fn run(&self, does: Does, flush: bool) -> Exit {
        let (program, at, value) = match does {
            Does::Read(at) => (PROGRAMS[0].0, at, 0),
            Does::Write(at, value) => (PROGRAMS[1].0, at, value),
            Does::Execute(at) => (PROGRAMS[2].0, at, 0),
        };
        self.enter(program, at, value, flush)
    }

    /// Runs the guest at `program`, with these values of RDI and RSI.
    pub fn enter(&self, program: u64, rdi: u64, rsi: u64, flush: bool) -> Exit {
        let vmcb = &self.vmcb;
        // ASID 1; TLB control: nothing, or all.
        vmcb.write(0x058, 1 | u64::from(flush) << 32);
        vmcb.write(0x578, program);
        vmcb.write(0x5f8, 0);
        let interrupts: u64;
        // SAFETY: SVM is on, the VMCB and the page of the host's state are filled in. The guest
        // changes RAX alone, which the exit restores; its memory is what the nested tables map,
        // none of it this program's. Interrupts wait; the stack pointer is back where it was.
        unsafe {
            asm!("pushfq", "pop {}", "cli", out(reg) interrupts);
            asm!(
                ".byte 0x0f, 0x01, 0xd8", // vmrun
                ".byte 0x0f, 0x01, 0xdc", // stgi
                inout("rax") vmcb.hpa() => _, in("rdi") rdi, in("rsi") rsi
            );
            if interrupts >> 9 & 1 == 1 {
                asm!("sti");
            }
        }
        Exit {
            code: vmcb.read(0x070),
            info: [vmcb.read(0x078), vmcb.read(0x080)],
            rax: vmcb.read(0x5f8),
        }
    }
}
