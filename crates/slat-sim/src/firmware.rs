//! How a platform serves the engine on each architecture, instruction by instruction. Tests replace
//! parts of it to have them done wrongly.

use crate::arch::{Arm, Ept, Npt, Power, RiscV};
use crate::instruction::{Barrier, Tlbi};
use crate::machine::{Firmware, HasFirmware, Machine};
use slat::format::arm64::id::Granule;
use slat::format::arm64::tlbi::{self as sequencer, Instruction, Sequence};
use slat::format::power::tlbie::{Instruction as PowerInstruction, Tlbie};
use slat::format::riscv::hfence::{Hfence, Instruction as RiscVInstruction};
use slat::{Gpa, Hpa, Invalidation, Maintenance};

/// Executes what the engine's own sequencer gives; maintains caches by `dc` and `ic`.
pub const ARM: Firmware<Arm> = Firmware {
    publish: publish_arm,
    invalidate: invalidate_arm,
    invalidate_local: invalidate_local_arm,
    maintain: maintain_arm,
    resume: |_, _, _| (),
};

/// Executes INVEPT for the guest on each CPU.
pub const EPT: Firmware<Ept> = Firmware {
    publish: |_| (),
    invalidate: invalidate_ept,
    invalidate_local: |_, _| unreachable!("a fault forgets"),
    maintain: |_, _, _, _| (),
    resume: |_, _, _| (),
};

/// Makes each CPU exit, and flushes the guest's ASID when it enters again.
pub const NPT: Firmware<Npt> = Firmware {
    publish: |_| (),
    invalidate: invalidate_npt,
    invalidate_local: |_, _| unreachable!("a fault forgets"),
    maintain: |_, _, _, _| (),
    resume: |_, _, _| (),
};

/// Executes fences of stores; HFENCE.GVMA for the guest on each hart, and on a hart that faulted;
/// FENCE.I.
pub const RISCV: Firmware<RiscV> = Firmware {
    publish: Machine::fence,
    invalidate: invalidate_riscv,
    invalidate_local: invalidate_local_riscv,
    maintain: maintain_riscv,
    resume: resume_riscv,
};

/// Executes what the engine's operands of `tlbie` say; maintains caches by `dcbf` and `icbi`.
pub const POWER: Firmware<Power> = Firmware {
    publish: Machine::<Power>::ptesync,
    invalidate: invalidate_power,
    invalidate_local: |_, _| unreachable!("a fault forgets"),
    maintain: maintain_power,
    resume: |_, _, _| (),
};

macro_rules! has_firmware {
    ($($arch:ident: $firmware:ident;)*) => {$(
        impl HasFirmware for $arch {
            const FIRMWARE: Firmware<Self> = $firmware;
        }
    )*};
}
has_firmware! {
    Arm: ARM;
    Ept: EPT;
    Npt: NPT;
    Power: POWER;
    RiscV: RISCV;
}

fn publish_arm(machine: &Machine<Arm>) {
    machine.dsb(Barrier::Ishst);
}

fn invalidate_arm(machine: &Machine<Arm>, what: &Invalidation) {
    machine.vttbr(what.vmid);
    machine.sequence(what).for_each(|instruction| machine.execute(instruction));
}

fn invalidate_local_arm(machine: &Machine<Arm>, what: &Invalidation) {
    machine.vttbr(what.vmid);
    machine.sequencer().local().sequence(what).for_each(|instruction| machine.execute(instruction));
}

impl Machine<Arm> {
    /// Returns the instructions that the engine's sequencer gives for `what` on these CPUs.
    pub fn sequence(&self, what: &Invalidation) -> Sequence {
        self.sequencer().sequence(what)
    }

    fn sequencer(&self) -> sequencer::Tlbi {
        let arch = self.arch();
        sequencer::Tlbi {
            ttl: arch.ttl,
            range_instructions: arch.range_instructions,
            lpa2: arch.lpa2,
            address_bits: if arch.lpa2 || arch.lpa { 52 } else { 48 },
            repeat: arch.repeats_tlbi,
            ..sequencer::Tlbi::new(Granule::of_shift(arch.granule))
        }
    }

    /// Executes an instruction.
    pub fn execute(&self, instruction: Instruction) {
        use Instruction::*;
        match instruction {
            DsbIshst => self.dsb(Barrier::Ishst),
            DsbIsh => self.dsb(Barrier::Ish),
            DsbNshst => self.dsb(Barrier::Nshst),
            DsbNsh => self.dsb(Barrier::Nsh),
            Isb => self.isb(),
            Ipas2e1is(x) => self.tlbi(Tlbi::Ipas2e1is, x),
            Ipas2le1is(x) => self.tlbi(Tlbi::Ipas2le1is, x),
            Ripas2e1is(x) => self.tlbi(Tlbi::Ripas2e1is, x),
            Ripas2le1is(x) => self.tlbi(Tlbi::Ripas2le1is, x),
            Vmalle1is => self.tlbi(Tlbi::Vmalle1is, 0),
            Vmalls12e1is => self.tlbi(Tlbi::Vmalls12e1is, 0),
            Ipas2e1(x) => self.tlbi(Tlbi::Ipas2e1, x),
            Ipas2le1(x) => self.tlbi(Tlbi::Ipas2le1, x),
            Ripas2e1(x) => self.tlbi(Tlbi::Ripas2e1, x),
            Ripas2le1(x) => self.tlbi(Tlbi::Ripas2le1, x),
            Vmalle1 => self.tlbi(Tlbi::Vmalle1, 0),
            Vmalls12e1 => self.tlbi(Tlbi::Vmalls12e1, 0),
        }
    }
}

fn maintain_arm(machine: &Machine<Arm>, memory: Hpa, bytes: u64, what: Maintenance) {
    let arch = machine.arch();
    if !arch.forced_write_back {
        machine.clean(memory, bytes);
    }
    if what == Maintenance::Instructions && !arch.coherent_instructions {
        machine.invalidate_instructions(memory, bytes);
    }
}

fn invalidate_ept(machine: &Machine<Ept>, what: &Invalidation) {
    for cpu in 0..machine.cpus() {
        machine.invept(cpu, Some(what.vmid));
    }
}

fn invalidate_power(machine: &Machine<Power>, what: &Invalidation) {
    for instruction in Tlbie::default().sequence(what) {
        match instruction {
            PowerInstruction::TlbLocal(_) | PowerInstruction::AllLocal(_) => unreachable!(),
            PowerInstruction::Ptesync => machine.ptesync(),
            PowerInstruction::Tlb(x) => machine.tlbie(x.rb, x.rs, 0),
            PowerInstruction::All(x) => machine.tlbie(x.rb, x.rs, 2),
            PowerInstruction::Eieio => machine.eieio(),
            PowerInstruction::Tlbsync => machine.tlbsync(),
        }
    }
}

fn maintain_power(machine: &Machine<Power>, memory: Hpa, bytes: u64, what: Maintenance) {
    machine.clean(memory, bytes);
    if what == Maintenance::Instructions {
        machine.invalidate_instructions(memory, bytes);
    }
}

fn invalidate_npt(machine: &Machine<Npt>, what: &Invalidation) {
    for cpu in 0..machine.cpus() {
        machine.flush_asid(cpu, what.vmid);
    }
}

fn invalidate_riscv(machine: &Machine<RiscV>, what: &Invalidation) {
    machine.fence();
    (0..machine.cpus()).for_each(|hart| hfence(machine, hart, what));
}

fn hfence(machine: &Machine<RiscV>, hart: usize, what: &Invalidation) {
    for instruction in Hfence::default().sequence(what) {
        if let RiscVInstruction::HfenceGvma(x) = instruction {
            machine.hfence_gvma(hart, x.rs1, x.rs2);
        }
    }
}

fn invalidate_local_riscv(machine: &Machine<RiscV>, what: &Invalidation) {
    let hart = machine.issuer();
    hfence(machine, hart, what);
}

/// The hart may also have cached as invalid an entry above the page that links a table now. Only a
/// fence without an address orders that. With Svvptc, only older rights of a leaf can be left.
fn resume_riscv(machine: &Machine<RiscV>, hart: usize, gpa: Gpa) {
    let address = machine.arch().svvptc.then_some(gpa.0 >> 2);
    machine.hfence_gvma(hart, address, None);
}

fn maintain_riscv(machine: &Machine<RiscV>, memory: Hpa, bytes: u64, what: Maintenance) {
    if what == Maintenance::Instructions {
        machine.invalidate_instructions(memory, bytes);
    }
}
