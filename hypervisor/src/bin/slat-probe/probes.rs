//! The probes, by name:
//!
//! - `absent`: loads from and stores to addresses where nothing is.
//! - `fetch`: executes from a device, and from addresses where nothing is.
//! - `call`: calls functions that are not defined, and PSCI with wrong arguments.
//! - `undefined`: writes trapped registers, and executes undefined instructions.
//! - `loop`: takes an exception whose handler is at an address where nothing is.
//! - `vectors`: takes an exception whose handler is at the end of all addresses, where nothing is.
//! - `last`: makes a call at the end of all addresses, so that it returns to address 0.
//! - `poll`: faults repeatedly at one address, but makes progress.
//! - `spin`: never leaves the guest. The hypervisor's time limit ends it.
//! - `idle`: waits for an interrupt, which the hypervisor sends at its time limit.
//! - `wait`: waits, and no interrupt is enabled; the time limit ends it.

use crate::machine::{
    Answer, Attempt, Conduit, call, enable_interrupt, say, spin, system_off, wait,
};
use core::arch::asm;
use slat_hypervisor::layout::{GUEST_RAM, UART};
use slat_hypervisor::progress::PATIENCE;

/// Addresses where nothing is: below the guest's RAM, above it, and at the end of 39 bits.
const BELOW: u64 = 0x2000_0000;
const ABOVE: u64 = 0xa000_0000;
const END: u64 = 0x7f_ffff_fff8;

#[repr(align(4096))]
struct Table([u64; 512]);

/// Stage-1 tables of the probe `last`: the root, and the table of the last GiB.
static mut TABLES: [Table; 2] = [const { Table([0; 512]) }; 2];

/// Returns the last aligned address that the CPU can have, by ID_AA64MMFR0_EL1.PARange: 40 bits on
/// cortex-a76, 52 on max.
fn highest() -> u64 {
    let mmfr0: u64;
    // SAFETY: reads an ID register.
    unsafe { asm!("mrs {}, id_aa64mmfr0_el1", out(reg) mmfr0, options(nomem, nostack)) }
    let bits = [32, 36, 40, 42, 44, 48, 52][(mmfr0 & 0xf).min(6) as usize];
    (1 << bits) - 8
}

/// A probe, and the number of wrong results.
struct Probe {
    name: &'static str,
    wrong: u32,
    /// Number of vCPUs, which is also the number of the manager's CPU.
    vcpus: u64,
}

/// The first function in Rust; `start.s` calls it.
#[unsafe(no_mangle)]
extern "C" fn probe(tree: *const u8) -> ! {
    // SAFETY: the hypervisor puts a device tree there, as the boot protocol of arm64 requires, and
    // nothing writes to it.
    let tree = unsafe { fdt::Fdt::from_ptr(tree) }.expect("x0 is a device tree");
    let words = tree.chosen().bootargs().unwrap_or_default();
    let name = words.split_whitespace().find_map(|word| word.strip_prefix("probe="));
    let vcpus = tree.cpus().count() as u64;
    let mut probe = Probe { name: name.unwrap_or_default(), wrong: 0, vcpus };
    match probe.name {
        "absent" => probe.absent(),
        "fetch" => probe.fetch(),
        "call" => probe.call(),
        "undefined" => probe.undefined(),
        "loop" => probe.unhandled(BELOW),
        "vectors" => probe.unhandled(u64::MAX),
        "last" => probe.last(),
        "poll" => probe.poll(),
        "spin" => {
            say!("probe: spin");
            spin()
        }
        "idle" => {
            say!("probe: idle");
            enable_interrupt();
            wait()
        }
        "wait" => {
            say!("probe: wait");
            wait()
        }
        other => probe.expect(false, format_args!("no such probe: {other:?}")),
    }
    say!("probe: {}", if probe.wrong == 0 { "right" } else { "wrong" });
    system_off()
}

impl Probe {
    /// Prints a result, and counts it if it is wrong.
    fn expect(&mut self, right: bool, what: core::fmt::Arguments<'_>) {
        say!("probe: {}: {what}{}", self.name, if right { "" } else { ": wrong" });
        self.wrong += u32::from(!right);
    }

    /// Attempts something, and expects an exception of that class and syndrome, and that `far` if
    /// it has a meaning.
    fn refused(&mut self, what: Attempt, class: u64, iss: u64, far: Option<u64>) {
        let Some(caught) = what.catch() else {
            return self.expect(false, format_args!("{what:x?} was done"));
        };
        // The exception uses the entry for EL1's own stack, with everything masked. It is taken at
        // the instruction that was attempted, from the same state.
        const OWN_STACK: u64 = 0x200;
        const MASKED: u64 = 0b1111 << 6;
        const EL1: u64 = 0b0101;
        let right = (caught.class(), caught.iss()) == (class, iss)
            && far.is_none_or(|far| caught.far == far)
            && caught.elr == what.place()
            && caught.vector == OWN_STACK
            && caught.daif == MASKED
            && caught.spsr & (MASKED | 0b1_1111) == MASKED | EL1;
        self.expect(
            right,
            format_args!(
                "{what:x?}: ESR {:#x} FAR {:#x} ELR {:#x}",
                caught.esr, caught.far, caught.elr
            ),
        );
    }

    /// Each access takes a synchronous external abort, which says whether it was a write.
    fn absent(&mut self) {
        for address in [BELOW, ABOVE, END, highest()] {
            self.refused(Attempt::Load(address), 0x25, 0x10, Some(address));
            self.refused(Attempt::Store(address), 0x25, 0x50, Some(address));
        }
    }

    /// Each fetch takes an instruction abort, because devices are not executable.
    fn fetch(&mut self) {
        for address in [UART.base, BELOW, ABOVE] {
            self.refused(Attempt::Fetch(address), 0x21, 0x10, Some(address));
        }
    }

    fn call(&mut self) {
        const UNKNOWN: u32 = 0xc600_0123;
        const VERSION: u32 = 0x8400_0000;
        const FEATURES: u32 = 0x8400_000a;
        const CPU_ON: u32 = 0xc400_0003;
        const AFFINITY_INFO: u32 = 0xc400_0004;
        const NOT_SUPPORTED: i64 = -1;
        const INVALID_PARAMETERS: i64 = -2;
        const ALREADY_ON: i64 = -4;
        let own = read_own_number();
        for (conduit, function, arguments, value) in [
            (Conduit::Hvc, UNKNOWN, [0; 3], NOT_SUPPORTED),
            (Conduit::Hvc77, VERSION, [0; 3], NOT_SUPPORTED),
            (Conduit::Smc, UNKNOWN, [0; 3], NOT_SUPPORTED),
            (Conduit::Hvc, VERSION, [0; 3], 0x1_0001),
            (Conduit::Smc, VERSION, [0; 3], 0x1_0001),
            (Conduit::Hvc, FEATURES, [UNKNOWN.into(), 0, 0], NOT_SUPPORTED),
            (Conduit::Hvc, FEATURES, [CPU_ON.into(), 0, 0], 0),
            // The manager's CPU, a number that no CPU has, and a number with additional bits.
            (Conduit::Hvc, CPU_ON, [self.vcpus, BELOW, 0], INVALID_PARAMETERS),
            (Conduit::Hvc, CPU_ON, [u64::MAX, BELOW, 0], INVALID_PARAMETERS),
            (Conduit::Hvc, CPU_ON, [1 << 32 | own, BELOW, 0], INVALID_PARAMETERS),
            (Conduit::Hvc, CPU_ON, [own, BELOW, 0], ALREADY_ON),
            (Conduit::Hvc, AFFINITY_INFO, [own, 0, 0], 0),
            (Conduit::Hvc, AFFINITY_INFO, [self.vcpus, 0, 0], INVALID_PARAMETERS),
            (Conduit::Hvc, AFFINITY_INFO, [own, 1, 0], INVALID_PARAMETERS),
        ] {
            let answer = call(conduit, function, arguments);
            let kept = if answer.kept { "" } else { ", but registers are lost" };
            self.expect(
                answer == Answer { value, kept: true },
                format_args!("{conduit:?} {function:#x} {arguments:x?}: {:#x}{kept}", answer.value),
            );
        }
    }

    fn undefined(&mut self) {
        // While caches are off, writes of these registers leave the guest, and reads do not.
        macro_rules! written {
            ($($name:literal $value:expr,)*) => {
                $({
                    let value: u64 = $value;
                    let (before, after): (u64, u64);
                    // SAFETY: with the MMU off nothing depends on the register, and its value is
                    // restored.
                    unsafe {
                        asm!(
                            concat!("mrs {before}, ", $name),
                            concat!("msr ", $name, ", {value}"),
                            "isb",
                            concat!("mrs {after}, ", $name),
                            concat!("msr ", $name, ", {before}"),
                            "isb",
                            before = out(reg) before,
                            after = out(reg) after,
                            value = in(reg) value,
                            options(nostack),
                        );
                    }
                    self.expect(
                        after == value,
                        format_args!(
                            "{}: {value:#x} written, {after:#x} read, {before:#x} before",
                            $name
                        ),
                    );
                })*
            };
        }
        written! {
            "contextidr_el1" 0x1234_5678,
            "ttbr0_el1" 0x4321_0000,
            "ttbr1_el1" 0x4322_0000,
            "mair_el1" 0xff44_0c04,
            "tcr_el1" 0x19,
            "esr_el1" 0x5600_0001,
            "far_el1" 0xffff_0000_1234_5678,
        }
        // A write from XZR writes 0.
        let read: u64;
        // SAFETY: as above; the register identifies software for debuggers.
        unsafe {
            asm!(
                "msr contextidr_el1, {seven}", "msr contextidr_el1, xzr", "isb",
                "mrs {read}, contextidr_el1",
                seven = in(reg) 7u64, read = out(reg) read, options(nostack),
            );
        }
        self.expect(read == 0, format_args!("contextidr_el1: XZR written, {read:#x} read"));
        // SAFETY: DC CISW of a line that may not exist. Memory keeps its content, because no data
        // of this program is in a cache.
        unsafe { asm!("dc cisw, xzr", "dsb sy", options(nostack)) }
        self.expect(true, format_args!("dc cisw: done"));
        self.refused(Attempt::Undefined, 0, 0, None);
        self.refused(Attempt::ReadHcr, 0, 0, None);
    }

    /// The call returns to address 0, where nothing is.
    fn last(&mut self) {
        const LAST: u64 = u64::MAX - 3;
        const SMC: u32 = 0xd400_0003;
        /// RAM that this program does not use otherwise.
        const CODE: u64 = GUEST_RAM + (4 << 20);
        const END: u64 = 2 << 20;
        const VALID: u64 = 1 << 0;
        const TABLE: u64 = 1 << 1;
        const NORMAL: u64 = 1 << 2;
        const ACCESSED: u64 = 1 << 10;
        let tables = &raw mut TABLES;
        // SAFETY: nothing else uses the tables, or the last word of that block. All memory is
        // mapped at its own address; of the second mapping only `LAST` is used.
        unsafe {
            let [first, second] = &mut *tables;
            first.0[0] = VALID | ACCESSED;
            first.0[1] = GUEST_RAM | VALID | NORMAL | ACCESSED;
            first.0[511] = &raw const *second as u64 | VALID | TABLE;
            second.0[511] = CODE | VALID | NORMAL | ACCESSED;
            ((CODE + END - 4) as *mut u32).write_volatile(SMC);
            // Both halves have 39 bits and a granule of 4K. Memory attributes are device, and
            // normal without caches.
            asm!(
                "msr tcr_el1, {tcr}", "msr mair_el1, {mair}",
                "msr ttbr0_el1, {root}", "msr ttbr1_el1, {root}",
                "dsb sy", "ic iallu", "dsb sy", "isb",
                tcr = in(reg) 0b10u64 << 30 | 25 << 16 | 25,
                mair = in(reg) 0x4400u64,
                root = in(reg) tables,
                options(nostack),
            );
        }
        let caught = Attempt::Translated(LAST).catch().unwrap_or_default();
        self.expect(
            (caught.class(), caught.iss(), caught.elr, caught.far) == (0x21, 0x10, 0, 0),
            format_args!(
                "SMC at {LAST:#x}, then: ESR {:#x} FAR {:#x} ELR {:#x}",
                caught.esr, caught.far, caught.elr
            ),
        );
    }

    /// Faults more often than the hypervisor tolerates without progress.
    fn poll(&mut self) {
        let times = 2 * PATIENCE;
        let caught = (0..times).filter_map(|_| Attempt::Load(BELOW).catch()).count();
        self.expect(
            caught == times as usize,
            format_args!("{caught} exceptions of {times} at {BELOW:#x}"),
        );
    }

    /// Takes an exception whose handler is absent, so that each exception causes another, forever.
    fn unhandled(&mut self, vectors: u64) {
        say!("probe: {}", self.name);
        // SAFETY: the register only says where exceptions are taken. The next exception is that of
        // the load below, which does not return; without it, nothing below takes one.
        unsafe { asm!("msr vbar_el1, {}", "isb", in(reg) vectors, options(nostack)) }
        let done = Attempt::Load(ABOVE).catch().is_none();
        self.expect(false, format_args!("it went on; the load was done: {done}"));
    }
}

/// Returns the number of this CPU, which is its Aff0.
fn read_own_number() -> u64 {
    let mpidr: u64;
    // SAFETY: reading changes nothing.
    unsafe { asm!("mrs {}, mpidr_el1", out(reg) mpidr, options(nomem, nostack)) }
    mpidr & 0xff
}
