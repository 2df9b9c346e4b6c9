//! The hypervisor proper: from the first instruction to the guest's end.

mod age;
mod control;
mod cpu;
mod devicetree;
mod fork;
mod guest;
mod inject;
mod manager;
mod memory;
mod migrate;
mod moves;
mod platform;
mod private;
mod psci;
mod report;
mod restore;
mod stalls;
mod sysreg;
mod vcpu;

use guest::Hypervisor;
use report::say;

/// The CPU that QEMU starts: prepares everything, starts the manager, and runs the guest's first
/// vCPU, or its own once that is switched on.
#[unsafe(no_mangle)]
extern "C" fn boot() -> ! {
    memory::init();
    let hypervisor = match Hypervisor::new() {
        Ok(hypervisor) => hypervisor,
        Err(why) => {
            say!("{why}");
            psci::system_off()
        }
    };
    let manager = hypervisor.options.vcpus;
    if let Err(why) = psci::start(manager) {
        say!("the manager's CPU does not start: {why:?}; give QEMU -smp {}", manager + 1);
        psci::system_off();
    }
    let first = hypervisor.options.first;
    if first != 0 {
        if let Err(why) = psci::start(first) {
            say!("CPU {first} does not start: {why:?}");
            psci::system_off();
        }
        psci::cpu_off();
    }
    vcpu::run(hypervisor, 0)
}

/// A CPU that was started: the manager's, or that of a vCPU.
#[unsafe(no_mangle)]
extern "C" fn secondary(cpu: u64) -> ! {
    let hypervisor = guest::the();
    if cpu == hypervisor.options.vcpus {
        manager::run(hypervisor)
    }
    vcpu::run(hypervisor, cpu)
}

/// An exception of the hypervisor's own.
#[unsafe(no_mangle)]
extern "C" fn broken(vector: u64) -> ! {
    let (esr, elr, far) = cpu::own_exception();
    say!("the hypervisor broke: vector {vector}, ESR {esr:#x}, ELR {elr:#x}, FAR {far:#x}");
    psci::system_off()
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    say!("the hypervisor broke: {info}");
    psci::system_off()
}
