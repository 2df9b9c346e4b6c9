//! A VMM's loop that measures itself: `cargo run -p slat-kvm --example vmm`.
//!
//! A guest in real mode writes to each of its pages repeatedly, and reports each round. The host
//! takes the memory away now and then, as reclaim does, and the account shows the faults. If KVM
//! works without hardware virtualization, it emulates real mode, and the account shows that
//! instead.

#[cfg(target_arch = "x86_64")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use kvm_bindings::kvm_userspace_memory_region;
    use kvm_ioctls::{Kvm, VcpuExit};
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
    use slat_kvm::watch::own;
    use std::time::Duration;

    const MEMORY: usize = 1 << 20;
    const PAGES: usize = 0x8_0000;
    /// Writes to each page from 512 KiB to 1 MiB, and then to port 0x10.
    const CODE: [u8; 22] = [
        0xb8, 0x00, 0x80, // again: mov ax, 0x8000
        0x8e, 0xd8, // next: mov ds, ax
        0xc6, 0x06, 0x00, 0x00, 0x01, // mov byte [0], 1
        0x05, 0x00, 0x01, // add ax, 0x100: a page
        0x3d, 0x00, 0xf0, // cmp ax, 0xf000
        0x75, 0xf1, // jne next
        0xe6, 0x10, // out 0x10, al
        0xeb, 0xea, // jmp again
    ];

    let vm = Kvm::new()?.create_vm()?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: the kernel chooses the address of the mapping, so it replaces no other.
    let memory = unsafe {
        mmap_anonymous(std::ptr::null_mut(), MEMORY, ProtFlags::READ | ProtFlags::WRITE, flags)?
    };
    // SAFETY: the code fits into the mapping, and no other code accesses it yet.
    unsafe { memory.cast::<u8>().copy_from(CODE.as_ptr(), CODE.len()) };
    let region = kvm_userspace_memory_region {
        memory_size: MEMORY as u64,
        userspace_addr: memory as u64,
        ..Default::default()
    };
    // SAFETY: the mapping is as long as the region says, and stays until the process ends.
    unsafe { vm.set_user_memory_region(region)? };

    let mut vcpu = vm.create_vcpu(0)?;
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.get_regs()?;
    (regs.rip, regs.rflags) = (0, 2);
    vcpu.set_regs(&regs)?;

    // From here on is what a VMM adds to its loop.
    let mut own = own::Vcpu::new(&vcpu, Duration::from_millis(100))?;
    for round in 1..=100 {
        own.enter();
        let exit = vcpu.run();
        own.leave()?;
        match exit? {
            VcpuExit::IoOut(0x10, _) if round % 10 == 0 => {
                // SAFETY: the pages lie within the mapping, and this process accesses none of them.
                unsafe { madvise(memory.add(PAGES), MEMORY - PAGES, Advice::LinuxDontNeed)? };
            }
            VcpuExit::IoOut(0x10, _) => {}
            exit => return Err(format!("an exit that the guest does not make: {exit:?}").into()),
        }
    }
    let account = own.account()?;
    println!(
        "{} runs, {:?} in them, the longest {:?}; waited for a CPU: {:?}",
        account.runs, account.inside, account.longest, account.waited
    );
    account.statistics.iter().for_each(|(name, change)| println!("  {name:32} {change:>10}"));
    Ok(())
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    println!(
        "its guest is code for x86-64; crates/slat-kvm/src/watch/own.rs is for every architecture"
    );
}
