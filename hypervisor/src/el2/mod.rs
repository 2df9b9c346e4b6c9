//! The hypervisor on the machine, from the first instruction to the guest's end.

mod age;
mod control;
mod cpu;
mod devicetree;
mod execute;
mod fork;
mod guest;
mod inject;
mod keeper;
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

/// Entry of the CPU that QEMU starts. It prepares everything and starts the manager's CPU. Then it
/// runs vCPU 0 if that boots the guest; otherwise it starts the CPU of the first vCPU and switches
/// itself off, until the guest switches vCPU 0 on.
#[unsafe(no_mangle)]
extern "C" fn boot() -> ! {
    memory::init();
    let hypervisor = match Hypervisor::new() {
        Ok(hypervisor) => hypervisor,
        Err(reason) => {
            say!("{reason}");
            psci::system_off()
        }
    };
    let manager = hypervisor.options.vcpus;
    if let Err(reason) = psci::start(manager) {
        say!("the manager's CPU does not start: {reason:?}; give QEMU -smp {}", manager + 1);
        psci::system_off();
    }
    let first = hypervisor.options.first;
    if first != 0 {
        if let Err(reason) = psci::start(first) {
            say!("CPU {first} does not start: {reason:?}");
            psci::system_off();
        }
        psci::cpu_off();
    }
    vcpu::run(hypervisor, 0)
}

/// Entry of all other CPUs: the manager's, and those of vCPUs.
#[unsafe(no_mangle)]
extern "C" fn secondary(cpu: u64) -> ! {
    let hypervisor = guest::the();
    if cpu == hypervisor.options.vcpus {
        manager::run(hypervisor)
    }
    vcpu::run(hypervisor, cpu)
}

/// Handler of exceptions that the hypervisor itself takes at EL2; it ends the machine.
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
