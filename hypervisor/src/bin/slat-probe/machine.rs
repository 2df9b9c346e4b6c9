//! The machine that the probes use: the serial line, exceptions, and calls of the hypervisor.

use core::arch::{asm, global_asm};
use core::fmt;
use slat_hypervisor::layout::{DISTRIBUTOR, UART, redistributors};

global_asm!(include_str!("start.s"));

/// Registers of an exception, in the order in which `start.s` stores them.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct ExceptionFrame {
    pub esr: u64,
    pub far: u64,
    /// Address at which it was taken.
    pub elr: u64,
    pub spsr: u64,
    /// Offset of the entry in the vector table.
    pub vector: u64,
    /// DAIF in the handler.
    pub daif: u64,
}

impl ExceptionFrame {
    /// Returns the exception class, which is 0 for an undefined instruction.
    pub const fn class(&self) -> u64 {
        self.esr >> 26 & 0x3f
    }

    /// Returns the instruction-specific syndrome.
    pub const fn iss(&self) -> u64 {
        self.esr & 0x1ff_ffff
    }
}

/// A function of `start.s` that calls no other.
type Body = unsafe extern "C" fn(u64) -> u64;

unsafe extern "C" {
    fn attempt(body: Body, argument: u64, caught: *mut ExceptionFrame) -> u64;
    fn load(address: u64) -> u64;
    fn store(address: u64) -> u64;
    fn jump(address: u64) -> u64;
    fn undefined(_: u64) -> u64;
    fn read_hcr(_: u64) -> u64;
    fn translated(address: u64) -> u64;
}

/// An access or instruction that a probe attempts.
#[derive(Clone, Copy, Debug)]
pub enum Attempt {
    Load(u64),
    Store(u64),
    Fetch(u64),
    /// A fetch with the MMU on.
    Translated(u64),
    Undefined,
    /// Reads HCR_EL2, which only EL2 may do.
    ReadHcr,
}

impl Attempt {
    /// Does it. Returns the exception, if there was one.
    pub fn catch(self) -> Option<ExceptionFrame> {
        const NONE: u64 = u64::MAX;
        let mut caught = ExceptionFrame { vector: NONE, ..ExceptionFrame::default() };
        let (body, argument): (Body, u64) = match self {
            Self::Load(address) => (load, address),
            Self::Store(address) => (store, address),
            Self::Fetch(address) => (jump, address),
            Self::Translated(address) => (translated, address),
            Self::Undefined => (undefined, 0),
            Self::ReadHcr => (read_hcr, 0),
        };
        // SAFETY: `caught` is as long as what the vectors store, and outlives the call. The
        // addresses are the probes' constants: none is memory of this program, which only a store
        // could change.
        unsafe { attempt(body, argument, &raw mut caught) };
        (caught.vector != NONE).then_some(caught)
    }

    /// Returns the address of the instruction that takes the exception.
    pub fn place(self) -> u64 {
        match self {
            Self::Load(_) => load as *const () as u64,
            Self::Store(_) => store as *const () as u64,
            Self::Fetch(address) | Self::Translated(address) => address,
            Self::Undefined => undefined as *const () as u64,
            Self::ReadHcr => read_hcr as *const () as u64,
        }
    }
}

/// The instruction of a call to the hypervisor.
#[derive(Clone, Copy, Debug)]
pub enum Conduit {
    Hvc,
    /// HVC with an immediate that has no meaning.
    Hvc77,
    Smc,
}

/// The result of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    pub value: i64,
    /// Whether the next instructions were executed, each of them once, and x4 to x17 are unchanged.
    pub kept: bool,
}

/// Values of x4 to x17, which a call must keep.
const KEPT: [u64; 14] = {
    let mut values = [0; 14];
    let mut at = 0;
    while at < values.len() {
        values[at] = 0x0101_0101_0101_0101 * (at as u64 + 4);
        at += 1;
    }
    values
};

/// Calls the hypervisor.
pub fn call(conduit: Conduit, function: u32, arguments: [u64; 3]) -> Answer {
    let [one, two, three] = arguments;
    let mut x = KEPT;
    let mut value = u64::from(function);
    let mut went_on = 0u64;
    macro_rules! by {
        ($instruction:literal) => {
            // SAFETY: the registers that the hypervisor may change, x0 to x3, are named as outputs.
            // So are x4 to x17, which it must keep, to see whether it does. No function that the
            // probes call changes memory.
            unsafe {
                asm!(
                    $instruction,
                    "add {went_on}, {went_on}, #1",
                    "add {went_on}, {went_on}, #2",
                    went_on = inout(reg) went_on,
                    inout("x0") value, inout("x1") one => _, inout("x2") two => _,
                    inout("x3") three => _,
                    inout("x4") x[0], inout("x5") x[1], inout("x6") x[2], inout("x7") x[3],
                    inout("x8") x[4], inout("x9") x[5], inout("x10") x[6], inout("x11") x[7],
                    inout("x12") x[8], inout("x13") x[9], inout("x14") x[10], inout("x15") x[11],
                    inout("x16") x[12], inout("x17") x[13],
                    options(nostack),
                )
            }
        };
    }
    match conduit {
        Conduit::Hvc => by!("hvc #0"),
        Conduit::Hvc77 => by!("hvc #77"),
        Conduit::Smc => by!("smc #0"),
    }
    Answer { value: value as i64, kept: went_on == 3 && x == KEPT }
}

/// Switches the guest off.
pub fn system_off() -> ! {
    const SYSTEM_OFF: u32 = 0x8400_0008;
    call(Conduit::Hvc, SYSTEM_OFF, [0; 3]);
    say!("probe: wrong: SYSTEM_OFF came back");
    spin()
}

/// Loops forever without leaving the guest.
pub fn spin() -> ! {
    // SAFETY: it does nothing.
    unsafe { asm!("2: b 2b", options(noreturn, nostack)) }
}

/// Enables the software-generated interrupt 0 on CPU 0. It ends a wait, although it stays masked.
pub fn enable_interrupt() {
    let redistributor = redistributors(1).base;
    let own_interrupts = redistributor + 0x1_0000;
    for (register, value) in [
        // GICD_CTLR: group 1, routing by affinity. GICR_WAKER: awake.
        (DISTRIBUTOR.base, 1 << 4 | 1 << 1),
        (redistributor + 0x14, 0),
        // GICR_IGROUPR0, GICR_IPRIORITYR0, GICR_ISENABLER0.
        (own_interrupts + 0x80, u32::MAX),
        (own_interrupts + 0x400, 0),
        (own_interrupts + 0x100, 1),
    ] {
        // SAFETY: registers of the devices that the hypervisor gives its guest there.
        unsafe { (register as *mut u32).write_volatile(value) }
    }
    // SAFETY: interrupts stay masked. ICC_SRE_EL1, ICC_PMR_EL1, ICC_IGRPEN1_EL1.
    unsafe {
        asm!(
            "msr s3_0_c12_c12_5, {seven}",
            "isb",
            "msr s3_0_c4_c6_0, {all}",
            "msr s3_0_c12_c12_7, {one}",
            "isb",
            seven = in(reg) 7u64, all = in(reg) 0xffu64, one = in(reg) 1u64,
            options(nostack),
        );
    }
}

/// Waits forever for interrupts, which are masked.
pub fn wait() -> ! {
    // SAFETY: it does nothing.
    unsafe { asm!("2: wfi", "b 2b", options(noreturn, nostack)) }
}

/// The serial line, a PL011.
pub struct Console;

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        const DATA: u64 = UART.base;
        const FLAGS: *const u32 = (UART.base + 0x18) as *const u32;
        const FULL: u32 = 1 << 5;
        for byte in text.bytes() {
            // SAFETY: registers of the device that the hypervisor gives its guest there.
            unsafe {
                while FLAGS.read_volatile() & FULL != 0 {}
                (DATA as *mut u32).write_volatile(byte.into());
            }
        }
        Ok(())
    }
}

macro_rules! say {
    ($($arguments:tt)*) => {{
        use core::fmt::Write as _;
        _ = writeln!($crate::machine::Console, $($arguments)*);
    }};
}
pub(crate) use say;

/// Ends the guest after an exception outside of an attempt.
#[unsafe(no_mangle)]
extern "C" fn unexpected(esr: u64, far: u64, elr: u64) -> ! {
    say!("probe: wrong: an exception at {elr:#x}: ESR {esr:#x} FAR {far:#x}");
    system_off()
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    say!("probe: wrong: {info}");
    system_off()
}
