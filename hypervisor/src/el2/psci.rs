//! Power states of CPUs (PSCI, DEN 0022): calls to the firmware, and those calls that the
//! hypervisor offers to the guest.

use super::cpu::start_secondary;
use super::guest::Hypervisor;
use smccc::Smc;
use smccc::psci::{self, error};

/// Switches the machine off.
pub fn system_off() -> ! {
    _ = psci::system_off::<Smc>();
    unreachable!("a machine that is off");
}

/// Starts a CPU in `secondary`, with its number as argument.
pub fn start(cpu: u64) -> Result<(), psci::Error> {
    psci::cpu_on::<Smc>(cpu, start_secondary as *const () as u64, cpu)
}

/// Switches this CPU off.
pub fn cpu_off() -> ! {
    let failed = psci::cpu_off::<Smc>();
    unreachable!("a CPU that is off: {failed:?}");
}

/// Returns whether the CPU of a vCPU is on.
pub fn is_on(cpu: u64) -> bool {
    let state = psci::affinity_info::<Smc>(cpu, psci::LowestAffinityLevel::All);
    state.is_ok_and(|state| state != psci::AffinityState::Off)
}

/// Result of a call, for the vCPU that made it.
pub enum Answer {
    /// The value that the guest gets in x0.
    Value(i64),
    /// The vCPU is switched off.
    Off,
    /// The guest ends.
    End(&'static str),
}

/// Bit of a function identifier that says that its arguments have 64 bits.
const WIDE: u64 = 1 << 30;

/// Handles the call in these registers. An unknown function, of PSCI or not, returns NOT_SUPPORTED,
/// as the SMC Calling Convention requires for a service that is missing.
pub fn call(hypervisor: &Hypervisor, x: &[u64; 31]) -> Answer {
    let function = x[0] as u32;
    let mask = if x[0] & WIDE != 0 { u64::MAX } else { u32::MAX.into() };
    let (target, entry, context) = (x[1] & mask, x[2] & mask, x[3] & mask);
    let value = match function {
        psci::PSCI_VERSION => 0x1_0001,
        psci::PSCI_MIGRATE_INFO_TYPE => 2,
        psci::PSCI_FEATURES => match target as u32 {
            psci::PSCI_VERSION
            | psci::PSCI_FEATURES
            | psci::PSCI_CPU_OFF
            | psci::PSCI_CPU_ON_32
            | psci::PSCI_CPU_ON_64
            | psci::PSCI_AFFINITY_INFO_32
            | psci::PSCI_AFFINITY_INFO_64
            | psci::PSCI_MIGRATE_INFO_TYPE
            | psci::PSCI_SYSTEM_OFF
            | psci::PSCI_SYSTEM_RESET => error::SUCCESS.into(),
            _ => error::NOT_SUPPORTED.into(),
        },
        psci::PSCI_CPU_ON_32 | psci::PSCI_CPU_ON_64 => cpu_on(hypervisor, target, entry, context),
        psci::PSCI_CPU_OFF => return Answer::Off,
        psci::PSCI_AFFINITY_INFO_32 | psci::PSCI_AFFINITY_INFO_64 => {
            match target < hypervisor.options.vcpus && x[2] & mask == 0 {
                // Only the firmware knows when the CPU is off and can be switched on again.
                true => match psci::affinity_info::<Smc>(target, psci::LowestAffinityLevel::All) {
                    Ok(state) => state as i64,
                    Err(error) => error.into(),
                },
                false => error::INVALID_PARAMETERS.into(),
            }
        }
        psci::PSCI_SYSTEM_OFF => return Answer::End("it switched itself off"),
        psci::PSCI_SYSTEM_RESET => return Answer::End("it reset itself"),
        _ => error::NOT_SUPPORTED.into(),
    };
    Answer::Value(value)
}

/// Switches vCPU `target` on at `entry`. The number of a vCPU is the Aff0 of its CPU.
fn cpu_on(hypervisor: &Hypervisor, target: u64, entry: u64, context: u64) -> i64 {
    let Some(start_at) = hypervisor.vcpus.get(target as usize) else {
        return error::INVALID_PARAMETERS.into();
    };
    // Set before the CPU is on. If the CPU is on already, it does not read this value.
    let before = start_at.replace(entry, context);
    match start(target) {
        Ok(()) => error::SUCCESS.into(),
        Err(error) => {
            start_at.restore(before);
            error.into()
        }
    }
}
