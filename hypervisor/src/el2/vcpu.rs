//! A vCPU: runs the guest, and handles its exits.

use super::cpu::{self, Left, Registers, read, write};
use super::guest::{Hypervisor, Thread};
use super::inject::{self, Injection};
use super::memory::Stage2;
use super::psci::{self, Answer};
use super::report::say;
use super::{control, sysreg};
use aarch64_cpu::registers::*;
use alloc::format;
use alloc::string::String;
use core::sync::atomic::Ordering;
use slat::format::arm64::fault::{self, Abort, Kind};
use slat::{Access, Gpa, GuestRoot};
use slat_guest::{CacheSwitch, Outcome, Refusal, Retry, Vcpu};
use slat_hypervisor::layout::CONTROL;
use slat_hypervisor::options::Trap;
use slat_hypervisor::progress::{Place, Progress};
use slat_hypervisor::syndrome::{self, Exit};

/// Processor state with which PSCI starts a CPU: EL1 on its own stack, all interrupts masked.
const START_STATE: u64 = 0b1111 << 6 | 0b0101;

/// Runs vCPU `id` on this CPU until it is switched off.
pub fn run(hypervisor: &'static Hypervisor, id: u64) -> ! {
    let reason = {
        match Vcpu::new(&hypervisor.memory, id as u16) {
            Ok(vcpu) => RunningVcpu::new(hypervisor, vcpu).run(),
            Err(error) => Some(format!("vCPU {id} cannot run: {error}")),
        }
    };
    if let Some(reason) = reason {
        hypervisor.end(reason);
    }
    psci::cpu_off()
}

struct RunningVcpu<'w> {
    hypervisor: &'static Hypervisor,
    vcpu: Thread<'w>,
    registers: Registers,
    progress: Progress,
    /// Time since which the vCPU waits for the page that it faulted on.
    waits_since: Option<u64>,
}

/// How the guest continues after an exit.
enum Next {
    Run,
    Off,
    End(String),
}

impl<'w> RunningVcpu<'w> {
    /// Prepares the vCPU at its first instruction.
    fn new(hypervisor: &'static Hypervisor, mut vcpu: Thread<'w>) -> Self {
        let (entry, context) = hypervisor.vcpus[vcpu.id() as usize].get();
        cpu::open_to_guest();
        cpu::reset_el1();
        write!("elr_el2", entry);
        write!("spsr_el2", START_STATE);
        let mut registers = Registers { x: [0; 31] };
        registers.x[0] = context;
        let switch = vcpu.reset();
        let mut running =
            Self { hypervisor, vcpu, registers, progress: Progress::default(), waits_since: None };
        running.load_root();
        running.trap(switch.trap);
        running
    }

    /// Loads the root of the tables that this vCPU uses. Under `exact`, a vCPU has tables of its
    /// own while its caches are off. Both have the same VMID, so [`load`] also invalidates what
    /// this CPU's TLB has of the other tables.
    fn load_root(&mut self) {
        load(self.hypervisor, self.vcpu.guest_root());
    }

    /// Sets HCR_EL2. `caches` says whether writes of the registers that switch caches are trapped.
    fn trap(&self, caches: bool) {
        let forced = self.hypervisor.memory.tables().format().forced_write_back;
        let caches = caches || self.hypervisor.options.trap == Trap::Always && !forced;
        HCR_EL2.write(
            HCR_EL2::VM::Enable
                + HCR_EL2::SWIO::SET
                + HCR_EL2::TSC::EnableTrapEl1SmcToEl2
                + HCR_EL2::RW::EL1IsAarch64
                + HCR_EL2::APK::DisableTrapPointerAuthKeyRegsToEl2
                + HCR_EL2::API::DisableTrapPointerAuthInstToEl2
                + HCR_EL2::TSW.val(u64::from(!forced))
                + HCR_EL2::TVM.val(caches.into())
                + HCR_EL2::FWB.val(forced.into()),
        );
        cpu::isb();
    }

    /// Runs until the vCPU is switched off or the guest has ended. Returns why, if this vCPU ends
    /// the guest.
    fn run(mut self) -> Option<String> {
        loop {
            if self.hypervisor.ended() {
                if self.hypervisor.cut_short.load(Ordering::Acquire) {
                    self.dump();
                }
                return None;
            }
            // SAFETY:
            // 1. The tables map what `guest::slots` and the backing name: the guest's memory, and
            //    the devices that are passed through.
            // 2. ELR_EL2 and SPSR_EL2 have the state at which the guest left or begins.
            let left = unsafe { cpu::run(&mut self.registers) };
            let next = match left {
                Left::Synchronous => self.synchronous(),
                left => Next::End(format!("vCPU {} left by {left:?}", self.vcpu.id())),
            };
            match next {
                Next::Run => {}
                Next::Off => return None,
                Next::End(reason) => {
                    self.dump();
                    return Some(reason);
                }
            }
        }
    }

    fn synchronous(&mut self) -> Next {
        let esr = read!("esr_el2");
        if let Some(abort) = Abort::decode(esr, read!("far_el2"), read!("hpfar_el2")) {
            return self.abort(abort);
        }
        match syndrome::decode(esr) {
            Exit::Call { smc, immediate } => {
                if smc {
                    skip();
                }
                self.call(immediate)
            }
            Exit::System(system) => {
                let value = self.registers.get(system.register);
                let switch = match sysreg::emulate(system, value) {
                    sysreg::Done::Written => None,
                    sysreg::Done::Caches(on) => Some(self.vcpu.set_caches(on)),
                    sysreg::Done::SetWay => Some(self.vcpu.set_way()),
                    sysreg::Done::Unknown => {
                        inject::take(Injection::Undefined);
                        return Next::Run;
                    }
                };
                if let Some(switch) = switch {
                    self.switched(switch);
                }
                skip();
                Next::Run
            }
            Exit::Other { class } => Next::End(format!(
                "vCPU {} left for a reason that nobody asked for: exception class {class:#x}",
                self.vcpu.id()
            )),
        }
    }

    fn switched(&mut self, switch: CacheSwitch) {
        if switch.root_changed {
            self.load_root();
        }
        self.trap(switch.trap);
    }

    fn call(&mut self, immediate: u16) -> Next {
        // The SMC Calling Convention uses the immediate 0 only. Calls with others are not defined.
        let answer = match immediate {
            0 => psci::call(self.hypervisor, &self.registers.x),
            _ => Answer::Value(smccc::psci::error::NOT_SUPPORTED.into()),
        };
        match answer {
            Answer::Value(value) => {
                self.registers.x[0] = value as u64;
                Next::Run
            }
            Answer::Off => Next::Off,
            Answer::End(reason) => {
                self.hypervisor.end(reason.into());
                Next::Off
            }
        }
    }

    fn abort(&mut self, abort: Abort) -> Next {
        let far = read!("far_el2");
        let at = (read!("elr_el2"), read!("spsr_el2"));
        match abort.kind {
            Kind::TlbConflict => {
                self.hypervisor.machine.forget_all(self.hypervisor.memory.tables().vmid());
                return Next::Run;
            }
            Kind::AddressSize | Kind::External | Kind::Other(_) => {
                inject::take(Injection::ExternalAbort {
                    fetch: abort.fetch,
                    write: abort.write,
                    far,
                });
                return Next::Run;
            }
            Kind::Translation | Kind::AccessFlag | Kind::Permission => {}
        }
        // If the guest has changed its tables since the fault, there may be no address; the guest
        // retries.
        let Some(gpa) = abort.gpa.or_else(|| translated(far)) else { return Next::Run };
        let access = abort.access();
        let begin = self.waits_since.take().unwrap_or_else(cpu::now);
        let outcome = self.vcpu.fault(gpa, access);
        match outcome {
            Outcome::Retry(_) => self.waits_since = Some(begin),
            Outcome::Mmio | Outcome::Refused(_) => {}
            _ => self.hypervisor.stalls.note(self.vcpu.id(), cpu::now() - begin),
        }
        match outcome {
            // This CPU runs nothing else, so it waits for the page.
            Outcome::Retry(Retry::Absent(Some(arrival))) => {
                while !self.vcpu.is_ready(&arrival) && !self.hypervisor.ended() {
                    cpu::relax();
                }
                while self.vcpu.ready().is_some() {}
                Next::Run
            }
            Outcome::Retry(_) | Outcome::RingFull => {
                if self.hypervisor.pause() {
                    self.load_root();
                }
                Next::Run
            }
            Outcome::Mmio if CONTROL.contains(gpa.0) && abort.transfer.is_some() => {
                let Self { hypervisor, vcpu, registers, .. } = self;
                let convert = |word| super::private::asked(vcpu.worker(), word);
                control::access(&hypervisor.control, &abort, gpa, registers, convert);
                skip();
                Next::Run
            }
            Outcome::Mmio | Outcome::Refused(Refusal::NoPage | Refusal::NotExecutable) => {
                inject::take(Injection::ExternalAbort {
                    fetch: abort.fetch,
                    write: abort.write,
                    far,
                });
                self.moved_on(far, gpa, access, at)
            }
            Outcome::Refused(reason) => {
                Next::End(format!("vCPU {}: {access:?} at {gpa}: {reason:?}", self.vcpu.id()))
            }
            _ => self.moved_on(far, gpa, access, at),
        }
    }

    /// Continues the guest, unless it faults forever. `pc` and `pstate` are those of the fault,
    /// because an injected exception may have changed the registers since.
    fn moved_on(&mut self, far: u64, gpa: Gpa, access: Access, (pc, pstate): (u64, u64)) -> Next {
        let place = Place { far, gpa: gpa.0, pc, pstate, x: self.registers.x };
        if !self.progress.faults_for_ever(place) {
            return Next::Run;
        }
        Next::End(format!(
            "vCPU {} faults for ever: {access:?} at {gpa} (virtual {far:#x})",
            self.vcpu.id()
        ))
    }

    /// Prints the registers of the vCPU. It is one message, because other vCPUs may print at the
    /// same time.
    fn dump(&self) {
        let mut rows = String::new();
        for (row, four) in self.registers.x.chunks(4).enumerate() {
            rows += &format!("\n  x{:<2} {four:016x?}", row * 4);
        }
        say!(
            "vCPU {}: pc {:#x}, pstate {:#x}, SCTLR_EL1 {:#x}, ESR_EL2 {:#x}, FAR_EL2 {:#x}, \
             HPFAR_EL2 {:#x}{rows}",
            self.vcpu.id(),
            read!("elr_el2"),
            read!("spsr_el2"),
            read!("sctlr_el1"),
            read!("esr_el2"),
            read!("far_el2"),
            read!("hpfar_el2"),
        );
    }
}

/// Loads the guest's tables on this CPU, and invalidates what its TLB has of the guest's VMID.
pub fn load(hypervisor: &Hypervisor, root: GuestRoot<Stage2>) {
    let vttbr = root.vttbr(&hypervisor.id).expect("a root below 1 TiB, and a VMID of 8 bits");
    write!("vtcr_el2", hypervisor.vtcr);
    write!("vttbr_el2", vttbr);
    cpu::isb();
    hypervisor.machine.forget_all(root.vmid);
}

/// Skips the instruction that left the guest, which may be at the end of all addresses.
fn skip() {
    write!("elr_el2", read!("elr_el2").wrapping_add(4));
}

/// Translates a virtual address of the guest by its stage 1 on this CPU, for an abort whose guest
/// physical address HPFAR_EL2 does not have.
fn translated(far: u64) -> Option<Gpa> {
    let before = read!("par_el1");
    // SAFETY: the instruction translates by the guest's stage 1, and changes only PAR_EL1, which is
    // restored below.
    unsafe {
        core::arch::asm!("at s1e1r, {}", in(reg) far, options(nostack));
    }
    cpu::isb();
    let found = read!("par_el1");
    write!("par_el1", before);
    fault::translated(far, found)
}
