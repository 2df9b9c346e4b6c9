//! One vCPU: VMXON, a VMCS, and the guest's code. SDM 3C, appendix B, has the fields.

use super::machine::{Memory, Serial};
use super::platform::{Fault, LOWEST_ADDRESS, Why};
use core::arch::x86_64::__cpuid;
use core::arch::{asm, global_asm};
use core::fmt::Write;
use core::sync::atomic::{AtomicBool, Ordering};
use slat::format::ept::fault::Exit as Decoded;
use slat::format::ept::{Ept, Ept1G};
use slat::{Access, Gpa, GuestRoot};

global_asm!(include_str!("enter.s"));

/// Address of the guest's own tables and code in its memory.
pub const GUEST_TABLES: u64 = 0x1000;
const CODE: u64 = 0x4000;
/// `mov rax, [rdi]`, `mov [rdi], rsi` and `jmp rdi`, each with `vmcall` behind it.
const PROGRAMS: [(u64, u64); 3] =
    [(CODE, 0xc101_0f07_8b48), (CODE + 8, 0xc101_0f37_8948), (CODE + 16, 0xc1_010f_e7ff)];
/// `vmcall`, for a page that is executed.
pub const CALL: u64 = 0xc1_010f;

pub const EXIT_CALL: u64 = 18;
pub const EXIT_VIOLATION: u64 = 48;
pub const EXIT_MISCONFIGURATION: u64 = 49;

pub type Tree = Ept1G;
/// Accessed in a leaf or a table; dirty in a leaf.
pub const ACCESSED: u64 = 1 << 8;
pub const DIRTY: u64 = 1 << 9;
/// The exit qualification: the access; the rights that the entries give; a linear address, and its
/// translation instead of a walk to it.
const READS: u64 = 1 << 0;
const WRITES: u64 = 1 << 1;
const FETCHES: u64 = 1 << 2;
const RIGHTS: [u64; 3] = [1 << 3, 1 << 4, 1 << 5];
const LINEAR: u64 = 1 << 7;
const FINAL: u64 = 1 << 8;
/// CPUs may report more than these.
const BASIC: u64 = 0x1bf;

const fn fault(what: &'static str, in_leaf: bool, set: u64, clear: u64) -> Fault {
    Fault { what, in_leaf, set, clear }
}

/// "Format of an EPT Page-Table Entry": rights 2:0, memory type 5:3.
pub const FAULTS: [Fault; 8] = [
    fault("a leaf keeps the right to write", true, 1 << 1, 0),
    fault("a leaf keeps the right to execute", true, 1 << 2, 0),
    fault("a leaf has a reserved memory type", true, 1 << 3, 1 << 5),
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
    pub qualification: u64,
    pub gpa: u64,
    pub rax: u64,
}

/// A virtual CPU, of one CPU at a time.
pub struct Vcpu {
    vmxon: Memory<4096>,
    vmcs: Memory<4096>,
    log: Memory<4096>,
    launched: AtomicBool,
}

pub static VCPUS: [Vcpu; 2] = [const {
    Vcpu {
        vmxon: Memory::new(),
        vmcs: Memory::new(),
        log: Memory::new(),
        launched: AtomicBool::new(false),
    }
}; 2];

unsafe extern "sysv64" {
    fn enter(registers: *mut [u64; 3], launched: u64) -> u64;
}

pub fn rdmsr(number: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the MSRs read here are those of any CPU with VMX.
    unsafe { asm!("rdmsr", in("ecx") number, out("eax") low, out("edx") high) };
    u64::from(high) << 32 | u64::from(low)
}

fn vmwrite(field: u64, value: u64) {
    let failed: u8;
    // SAFETY: a field of the current VMCS, which only the guest and exits obey.
    unsafe {
        asm!("vmwrite {}, {}", "setbe {}", in(reg) field, in(reg) value, out(reg_byte) failed);
    }
    assert!(failed == 0, "no field {field:#x}");
}

fn vmread(field: u64) -> u64 {
    let value;
    // SAFETY: reads a field.
    unsafe { asm!("vmread {}, {}", out(reg) value, in(reg) field) };
    value
}

/// INVEPT, of the tables in use.
fn invept() {
    let descriptor = [vmread(0x201a), 0];
    let failed: u8;
    // SAFETY: VMX is on; only cached translations are dropped.
    unsafe {
        asm!("invept {}, [{}]", "setbe {}", in(reg) 1u64, in(reg) &descriptor,
            out(reg_byte) failed);
    }
    assert!(failed == 0, "INVEPT refuses {descriptor:x?}");
}

/// Returns the format that the CPU walks, or says why there is none.
pub fn format(says: bool) -> Option<Tree> {
    if rdmsr(0x3a) & 5 == 1 {
        let _ = writeln!(Serial, "the firmware has disabled VMX (IA32_FEATURE_CONTROL)");
        return None;
    }
    match Ept::from_capabilities(rdmsr(0x48c), __cpuid(0x8000_0008).eax & 0xff) {
        Ok(format) => {
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

/// Returns whether an EPT violation at `gpa` stopped the guest.
pub fn refused(exit: &Exit, does: Does, why: Why, gpa: u64) -> bool {
    let (access, bit, lacks) = match does {
        _ if why == Why::Walk => (Access::Write, READS | WRITES, 1),
        Does::Read(_) => (Access::Read, READS, 0),
        Does::Write(..) => (Access::Write, WRITES, 1),
        Does::Execute(_) => (Access::Execute, FETCHES, 2),
    };
    let all = RIGHTS.iter().sum::<u64>();
    let expected = LINEAR
        | bit
        | match why {
            Why::Nothing => FINAL,
            Why::Right => FINAL | all & !RIGHTS[lacks],
            Why::Walk => all & !RIGHTS[lacks],
        };
    let mut found = exit.qualification & BASIC;
    if why == Why::Walk {
        // Bochs says of a guest's walk that it writes, and not that it reads; the manual, both.
        found |= READS;
    }
    let Some(Decoded::Violation(it)) =
        Decoded::decode(exit.code as u32, exit.qualification, exit.gpa)
    else {
        return false;
    };
    let decoded = (it.gpa, it.access, it.is_mapped(false), it.walk);
    let wanted = (Gpa(gpa), access, why != Why::Nothing, why == Why::Walk);
    found == expected && exit.gpa == gpa && decoded == wanted
}

/// Writes the guest's code and its tables, an identity map of 1 GiB by pages of 2 MiB, to its
/// memory; its address 4 GiB too.
pub fn prepare<const BYTES: usize>(memory: &Memory<BYTES>) {
    memory.write(GUEST_TABLES, (GUEST_TABLES + 0x1000) | 7);
    memory.write(GUEST_TABLES + 0x1000, (GUEST_TABLES + 0x2000) | 7);
    memory.write(GUEST_TABLES + 0x1000 + 8 * 4, 4 << 30 | 0x87);
    (0..512).for_each(|n| memory.write(GUEST_TABLES + 0x2000 + 8 * n, n << 21 | 0x87));
    PROGRAMS.into_iter().for_each(|(at, bytes)| memory.write(at, bytes));
}

/// Returns the controls wanted, and those that the CPU demands.
fn control(msr: u32, wanted: u64) -> u64 {
    let allowed = rdmsr(msr);
    let possible = (wanted | allowed & 0xffff_ffff) & (allowed >> 32);
    assert!(possible & wanted == wanted, "MSR {msr:#x}: no {wanted:#x}");
    possible
}

/// Page-modification logging, if the CPU has it.
fn logs() -> u64 {
    rdmsr(0x48b) >> 32 & 1 << 17
}

/// Turns VMX off.
pub fn off() {
    // SAFETY: no guest runs.
    unsafe {
        asm!("vmxoff");
        asm!("mov {0}, cr4", "and {0}, {1}", "mov cr4, {0}", out(reg) _, const !0x2000i32);
    }
}

impl Vcpu {
    /// Turns VMX on.
    fn on(&self) {
        let revision = rdmsr(0x480) & 0x7fff_ffff;
        self.vmxon.write(0, revision);
        self.vmcs.write(0, revision);
        let (at, failed) = (self.vmxon.hpa(), &mut 0u8);
        // SAFETY: CR4.VMXE and CR0.NE, which VMXON demands; IA32_FEATURE_CONTROL, if it is not
        // locked; the region has the CPU's revision, and nothing else uses it.
        unsafe {
            asm!("mov {0}, cr4", "or {0}, 0x2000", "mov cr4, {0}", out(reg) _);
            asm!("mov {0}, cr0", "or {0}, 0x20", "mov cr0, {0}", out(reg) _);
            if rdmsr(0x3a) & 1 == 0 {
                asm!("wrmsr", in("ecx") 0x3a, in("eax") 5, in("edx") 0);
            }
            asm!("vmxon [{}]", "setbe {}", in(reg) &at, out(reg_byte) *failed);
        }
        assert!(*failed == 0, "no VMXON");
    }

    /// Turns VMX on, and makes the VMCS of a guest in long mode with these tables.
    pub fn create(&self, root: &GuestRoot<Tree>) {
        self.on();
        let at = self.vmcs.hpa();
        // SAFETY: the region has the CPU's revision, and nothing else uses it.
        unsafe { asm!("vmclear [{0}]", "vmptrld [{0}]", in(reg) &at) };
        self.launched.store(false, Ordering::Relaxed);
        let controls = if rdmsr(0x480) >> 55 & 1 == 1 { 0x48d } else { 0x481 };
        vmwrite(0x4000, control(controls, 0));
        vmwrite(0x4002, control(controls + 1, 1 << 7 | 1 << 31)); // HLT; secondary controls
        // EPT, and VPID where the CPU has it: entries then stay over exits.
        let vpid = rdmsr(0x48b) >> 32 & 1 << 5;
        let log = if root.format.accessed_dirty { logs() } else { 0 };
        vmwrite(0x401e, control(0x48b, 1 << 1 | vpid | log));
        if log != 0 {
            vmwrite(0x200e, self.log.hpa());
        }
        if vpid != 0 {
            vmwrite(0, 1);
        }
        vmwrite(0x400c, control(controls + 2, 1 << 9)); // a host of 64 bits
        vmwrite(0x4012, control(controls + 3, 1 << 9)); // a guest of 64 bits
        for field in [0x4004, 0x4006, 0x4008, 0x400a, 0x400e, 0x4010, 0x4014, 0x4016, 0x401c] {
            vmwrite(field, 0);
        }
        vmwrite(0x2800, !0); // no VMCS to link
        vmwrite(0x201a, root.eptp());
        guest();
        host();
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

    /// Returns the pages that the CPU logged in the last run as becoming dirty (PML), if it can.
    pub fn logged(&self) -> Option<impl Iterator<Item = u64>> {
        let next = (logs() != 0).then(|| vmread(0x812))?;
        Some((next + 1..512).map(|n| self.log.read(8 * n)))
    }

    /// Runs the guest at `program`, with these values of RDI and RSI.
    pub fn enter(&self, program: u64, rdi: u64, rsi: u64, flush: bool) -> Exit {
        if flush {
            invept();
        }
        vmwrite(0x681e, program);
        if logs() != 0 {
            vmwrite(0x812, 511);
        }
        let mut registers = [rdi, rsi, 0];
        let launched = self.launched.swap(true, Ordering::Relaxed);
        let interrupts: u64;
        let mut tables = [[0; 10]; 2];
        // SAFETY: the VMCS is filled in, and `enter` keeps what the ABI asks for; the limits of GDT
        // and IDT, which an exit widens, are put back. The guest's memory
        // is what its tables map; it writes none of this program's. Interrupts wait.
        let failed = unsafe {
            asm!("pushfq", "pop {}", "cli", out(reg) interrupts);
            asm!("sgdt [{}]", "sidt [{}]", in(reg) &mut tables[0], in(reg) &mut tables[1]);
            let failed = enter(&mut registers, launched.into());
            asm!("lgdt [{}]", "lidt [{}]", in(reg) &tables[0], in(reg) &tables[1]);
            if interrupts >> 9 & 1 == 1 {
                asm!("sti");
            }
            failed
        };
        assert!(failed == 0, "no VM entry: error {}", vmread(0x4400));
        let [code, qualification, gpa] = [0x4402, 0x6400, 0x2400].map(vmread);
        Exit { code, qualification, gpa, rax: registers[2] }
    }
}

fn guest() {
    // ES, CS, SS, DS, FS, GS, LDTR, TR: selector and rights.
    let data = (0x10, 0xc093);
    let segments = [data, (8, 0xa09b), data, data, data, data, (0, 0x10000), (0x18, 0x8b)];
    for (n, (selector, rights)) in (0..).step_by(2).zip(segments) {
        vmwrite(0x800 + n, selector);
        vmwrite(0x4800 + n, if selector == 0x18 { 0x67 } else { 0xffff_ffff });
        vmwrite(0x4814 + n, rights);
        vmwrite(0x6806 + n, 0);
    }
    let zero = [0x4810, 0x4812, 0x4824, 0x4826, 0x482a, 0x6816, 0x6818, 0x681c, 0x6822, 0x6824];
    let masks = [0x6826, 0x2802, 0x6000, 0x6002, 0x6004, 0x6006];
    zero.into_iter().chain(masks).for_each(|field| vmwrite(field, 0));
    vmwrite(0x6800, 0x8001_0031); // CR0: PG, WP, NE, ET, PE
    vmwrite(0x6802, GUEST_TABLES); // CR3
    vmwrite(0x6804, 0x2020); // CR4: VMXE, PAE
    vmwrite(0x681a, 0x400); // DR7
    vmwrite(0x6820, 2); // RFLAGS
}

fn host() {
    let (cr0, cr3, cr4, cs, ss): (u64, u64, u64, u64, u64);
    let (mut descriptors, mut interrupts) = ([0; 10], [0; 10]);
    // SAFETY: reads registers.
    unsafe {
        asm!("mov {:r}, cs", "mov {:r}, ss", out(reg) cs, out(reg) ss);
        asm!("sgdt [{}]", "sidt [{}]", in(reg) &mut descriptors, in(reg) &mut interrupts);
        asm!("mov {}, cr0", "mov {}, cr3", "mov {}, cr4", out(reg) cr0, out(reg) cr3, out(reg) cr4);
    }
    [(0x6c00, cr0), (0x6c02, cr3), (0x6c04, cr4)]
        .into_iter()
        .for_each(|(field, value)| vmwrite(field, value));
    // An exit wants a task, and reads no descriptor of it. Firmware would load one within its GDT.
    for (n, selector) in (0..).step_by(2).zip([ss, cs, ss, ss, 0, 0, 0xfff8]) {
        vmwrite(0xc00 + n, selector);
    }
    [0x6c06, 0x6c08, 0x6c0a, 0x6c10, 0x6c12, 0x4c00]
        .into_iter()
        .for_each(|field| vmwrite(field, 0));
    let base =
        |table: [u8; 10]| table[2..].iter().rev().fold(0, |at, &byte| at << 8 | u64::from(byte));
    vmwrite(0x6c0c, base(descriptors));
    vmwrite(0x6c0e, base(interrupts));
}
