//! The ioctls of dirty logging, each tested separately on the host's KVM.

mod common;

use common::kvm_or_skip;
use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VmFd};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::param::page_size;
use slat_kvm::ioctl::{BinaryStats, EntryState, Error, VcpuDirtyRing, VmDirtyLog};

const RING_BYTES: u32 = 1 << 16;

fn vm() -> Option<VmFd> {
    kvm_or_skip()?;
    Some(Kvm::new().unwrap().create_vm().unwrap())
}

/// Makes a VM with dirty rings, or returns `None` where KVM has none.
fn vm_with_rings() -> Option<VmFd> {
    let vm = vm()?;
    if vm.max_dirty_ring_bytes() == 0 {
        eprintln!("skipped: no KVM_CAP_DIRTY_LOG_RING");
        return None;
    }
    vm.enable_dirty_log_ring(RING_BYTES).unwrap();
    Some(vm)
}

/// Makes a VM with manual protect, and a log of `pages` pages that starts full.
fn vm_with_full_log(pages: usize) -> Option<VmFd> {
    let vm = vm()?;
    let all = KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET;
    if vm.check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into()) as u32 & all != all {
        eprintln!("skipped: no KVM_DIRTY_LOG_INITIALLY_SET");
        return None;
    }
    vm.enable_manual_dirty_log_protect(all).unwrap();
    add_slot(&vm, 1, 0, pages, KVM_MEM_LOG_DIRTY_PAGES);
    Some(vm)
}

/// Adds a slot of new memory at guest page `at`, and returns the memory's address.
fn add_slot(vm: &VmFd, slot: u32, at: usize, pages: usize, flags: u32) -> *mut u8 {
    let bytes = pages * page_size();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses the address of the new mapping, so it replaces no other. It is
    // never unmapped, so it outlives every VM.
    let memory =
        unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE) }.unwrap();
    let region = kvm_userspace_memory_region {
        slot,
        flags,
        guest_phys_addr: (at * page_size()) as u64,
        memory_size: bytes as u64,
        userspace_addr: memory as u64,
    };
    // SAFETY: the mapping made above backs the slot, has its size, and is never unmapped. This
    // process has no reference into it.
    unsafe { vm.set_user_memory_region(region) }.unwrap();
    memory.cast()
}

fn errno<T>(answer: Result<T, Error>) -> Option<i32> {
    answer.err().map(Error::errno)
}

#[test]
fn a_clear_removes_exactly_the_named_pages_from_the_log() {
    let Some(vm) = vm_with_full_log(256) else { return };
    let log = || {
        let mut log = [0; 4];
        // SAFETY: the slot has 256 pages, and `log` has 256 bits.
        unsafe { vm.get_dirty_log_into(1, &mut log) }.unwrap();
        log
    };
    assert_eq!(log(), [!0; 4]);
    assert_eq!(log(), [!0; 4], "a get clears nothing");
    vm.clear_dirty_log(1, 64, 128, &[0b101, 1 << 63]).unwrap();
    assert_eq!(log(), [!0, !0b101, !(1 << 63), !0]);
    vm.clear_dirty_log(1, 0, 256, &[!0; 4]).unwrap();
    assert_eq!(log(), [0; 4]);
}

#[test]
fn a_get_writes_the_words_of_the_slot_and_none_behind_them() {
    let Some(vm) = vm_with_full_log(100) else { return };
    let mut log = [!7; 3];
    // SAFETY: the slot has 100 pages, and `log` has 192 bits.
    unsafe { vm.get_dirty_log_into(1, &mut log) }.unwrap();
    assert_eq!(log, [!0, (1 << 36) - 1, !7]);
}

#[test]
fn a_clear_beyond_its_bitmap_never_reaches_the_kernel() {
    let Some(vm) = vm() else { return };
    // This one reaches the kernel, which finds no such slot.
    assert_eq!(errno(vm.clear_dirty_log(1, 0, 128, &[0; 2])), Some(libc::ENOENT));
    assert_eq!(errno(vm.clear_dirty_log(1, 0, 129, &[0; 2])), Some(libc::EINVAL));
    assert_eq!(errno(vm.clear_dirty_log(1, 0, u32::MAX, &[])), Some(libc::EINVAL));
}

#[test]
fn a_clear_spans_multiples_of_64_pages_or_ends_at_the_memslot() {
    let Some(vm) = vm_with_full_log(100) else { return };
    let clear = |first, pages| errno(vm.clear_dirty_log(1, first, pages, &[!0; 4]));
    assert_eq!(clear(0, 64), None);
    assert_eq!(clear(64, 36), None);
    for (first, pages) in [(1, 64), (0, 63), (64, 35), (64, 37), (128, 64), (!63, 64)] {
        assert_eq!(clear(first, pages), Some(libc::EINVAL), "{pages} pages from {first} on");
    }
}

#[test]
fn a_slot_that_is_not_logged_has_no_log_to_get_or_to_clear() {
    let Some(vm) = vm() else { return };
    add_slot(&vm, 1, 0, 64, 0);
    // SAFETY: the slot has 64 pages, and the bitmap has 64 bits.
    let got = unsafe { vm.get_dirty_log_into(1, &mut [0]) };
    assert_eq!(errno(got), Some(libc::ENOENT));
    assert_eq!(errno(vm.clear_dirty_log(1, 0, 64, &[0])), Some(libc::ENOENT));
}

#[test]
fn a_flag_of_manual_protection_that_no_kernel_knows_is_refused() {
    let Some(vm) = vm() else { return };
    assert_eq!(errno(vm.enable_manual_dirty_log_protect(1 << 31)), Some(libc::EINVAL));
    // A log starts full only with manual protect.
    let alone = KVM_DIRTY_LOG_INITIALLY_SET;
    assert_eq!(errno(vm.enable_manual_dirty_log_protect(alone)), Some(libc::EINVAL));
    assert_eq!(errno(vm.enable_manual_dirty_log_protect(0)), None);
}

#[test]
fn a_ring_size_is_a_power_of_two_from_a_page_to_kvms_maximum() {
    let Some(vm) = vm() else { return };
    let most = vm.max_dirty_ring_bytes();
    let enable = |bytes| errno(vm.enable_dirty_log_ring(bytes));
    for bytes in [0, 16, page_size() as u32 / 2, RING_BYTES - 16, RING_BYTES + 16] {
        assert_eq!(enable(bytes), Some(libc::EINVAL), "{bytes} bytes");
    }
    if most != 0 {
        assert_eq!(enable(most * 2), Some(libc::E2BIG));
        assert_eq!(enable(most), None);
    }
}

#[test]
fn rings_are_enabled_once_and_before_the_first_vcpu() {
    let Some(vm) = vm_with_rings() else { return };
    assert_eq!(errno(vm.enable_dirty_log_ring(RING_BYTES)), Some(libc::EINVAL));
    let late = vm_without_rings_but_with_a_vcpu();
    assert_eq!(errno(late.enable_dirty_log_ring(RING_BYTES)), Some(libc::EINVAL));
}

fn vm_without_rings_but_with_a_vcpu() -> VmFd {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    vm.create_vcpu(0).unwrap();
    vm
}

#[test]
fn a_vm_without_rings_refuses_their_reset_and_their_bitmap() {
    let Some(vm) = vm() else { return };
    assert_eq!(errno(vm.reset_dirty_rings()), Some(libc::EINVAL));
    assert_eq!(errno(vm.enable_dirty_log_ring_bitmap()), Some(libc::EINVAL));
}

#[test]
fn with_rings_and_no_bitmap_there_is_no_log_to_get_or_to_clear() {
    let Some(vm) = vm_with_rings() else { return };
    add_slot(&vm, 1, 0, 64, KVM_MEM_LOG_DIRTY_PAGES);
    // SAFETY: the slot has 64 pages, and the bitmap has 64 bits.
    let got = unsafe { vm.get_dirty_log_into(1, &mut [0]) };
    assert_eq!(errno(got), Some(libc::ENXIO));
    assert_eq!(errno(vm.clear_dirty_log(1, 0, 64, &[0])), Some(libc::ENXIO));
}

#[test]
fn a_ring_of_a_size_that_cannot_be_is_not_mapped() {
    let Some(vm) = vm_with_rings() else { return };
    let vcpu = vm.create_vcpu(0).unwrap();
    for bytes in [0, 8, RING_BYTES - 16] {
        // SAFETY: the size is wrong on purpose. Nothing is mapped, so nothing is accessed.
        let mapped = unsafe { vcpu.map_dirty_ring(bytes) };
        assert_eq!(errno(mapped), Some(libc::EINVAL), "{bytes} bytes");
    }
}

#[test]
fn a_new_ring_is_empty_and_stays_mapped_beyond_its_vcpu() {
    let Some(vm) = vm_with_rings() else { return };
    let vcpu = vm.create_vcpu(0).unwrap();
    // SAFETY: `vm_with_rings` enabled rings of this size before the vCPU was made.
    let mut ring = unsafe { vcpu.map_dirty_ring(RING_BYTES) }.unwrap();
    assert_eq!(ring.entries(), RING_BYTES / 16);
    assert_eq!(vm.reset_dirty_rings().unwrap(), 0);
    drop((vcpu, vm));
    assert!((0..ring.entries()).all(|entry| ring.state(entry) == EntryState::Empty));
    assert_eq!(ring.harvest_next(), None);
}

#[test]
fn a_chunk_of_eager_splitting_is_a_block_of_arms() {
    let Some(vm) = vm() else { return };
    assert_eq!(errno(vm.set_eager_split_chunk_size(3 << 12)), Some(libc::EINVAL));
    let none = if cfg!(target_arch = "aarch64") { None } else { Some(libc::EINVAL) };
    assert_eq!(errno(vm.set_eager_split_chunk_size(0)), none);
}

#[test]
fn a_vm_and_its_vcpu_have_statistics_of_their_own() {
    let Some(host) = kvm_or_skip() else { return };
    let vm = vm_without_rings_but_with_a_vcpu();
    let stats = vm.get_stats_fd();
    if !host.binary_stats {
        return assert_eq!(errno(stats), Some(libc::ENOTTY));
    }
    // The data starts with the name: "kvm-" and a thread; for a vCPU also "/vcpu-" and its number.
    let name = |file: std::fs::File| {
        let mut name = [0; 48];
        let read = rustix::io::pread(&file, &mut name, 24).unwrap();
        String::from_utf8_lossy(&name[..read]).split('\0').next().unwrap().to_owned()
    };
    let of_vm = name(stats.unwrap());
    assert!(of_vm.starts_with("kvm-"), "{of_vm}");
    let of_vcpu = name(vm.create_vcpu(1).unwrap().get_stats_fd().unwrap());
    assert_eq!(of_vcpu, format!("{of_vm}/vcpu-1"));
}

/// Tests with a guest that writes, in 16-bit code.
#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use super::*;
    use kvm_ioctls::{VcpuExit, VcpuFd};
    use slat_kvm::ioctl::DirtyPage;

    /// Stores to each of CX pages from BX on, then HLT.
    const CODE: [u8; 9] = [0x88, 0x07, 0x81, 0xc3, 0x00, 0x10, 0xe2, 0xf8, 0xf4];
    /// The logged slot, whose number equals no flag of an entry, and its first page.
    const SLOT: u32 = 7;
    const FIRST: u16 = 1;

    /// Makes a vCPU. Its code is at guest address 0, in a slot that is not logged. 8 pages follow
    /// in `SLOT`, which is logged.
    fn vcpu(vm: &VmFd) -> VcpuFd {
        let code = add_slot(vm, 0, 0, 1, 0);
        // SAFETY: the slot has a page, to which no other code has access before the vCPU runs.
        unsafe { std::ptr::copy_nonoverlapping(CODE.as_ptr(), code, CODE.len()) };
        add_slot(vm, SLOT, FIRST.into(), 8, KVM_MEM_LOG_DIRTY_PAGES);
        let vcpu = vm.create_vcpu(0).unwrap();
        let mut special = vcpu.get_sregs().unwrap();
        (special.cs.base, special.cs.selector) = (0, 0);
        vcpu.set_sregs(&special).unwrap();
        vcpu
    }

    /// Makes the vCPU write to `pages` pages of the slot, from `first` on.
    fn write(vcpu: &mut VcpuFd, first: u16, pages: u16) {
        let mut registers = vcpu.get_regs().unwrap();
        registers.rip = 0;
        registers.rflags = 2;
        registers.rbx = (u64::from(FIRST) + u64::from(first)) << 12;
        registers.rcx = pages.into();
        vcpu.set_regs(&registers).unwrap();
        let exit = vcpu.run().unwrap();
        assert!(matches!(exit, VcpuExit::Hlt), "{exit:?}");
    }

    #[test]
    fn a_ring_entry_goes_empty_dirty_harvested_and_empty_again() {
        let Some(vm) = vm_with_rings() else { return };
        let mut vcpu = vcpu(&vm);
        // SAFETY: `vm_with_rings` enabled rings of this size before the vCPU was made.
        let mut ring = unsafe { vcpu.map_dirty_ring(RING_BYTES) }.unwrap();
        for round in 0..2 {
            let states = |ring: &slat_kvm::ioctl::DirtyRing| {
                [0, 1, 2, 3].map(|entry| ring.state(3 * round + entry))
            };
            use EntryState::*;
            assert_eq!(states(&ring), [Empty; 4]);
            write(&mut vcpu, 2, 3);
            assert_eq!(states(&ring), [Dirty, Dirty, Dirty, Empty]);

            let mut pages = Vec::from([ring.harvest_next().unwrap()]);
            assert_eq!(states(&ring), [Harvested, Dirty, Dirty, Empty]);
            assert_eq!(ring.harvest(|page| pages.push(page)), 2);
            assert_eq!(states(&ring), [Harvested, Harvested, Harvested, Empty]);
            pages.sort_by_key(|page| page.page);
            assert_eq!(pages, [2, 3, 4].map(|page| DirtyPage { slot: SLOT, page }));

            assert_eq!(ring.harvest_next(), None);
            assert_eq!(vm.reset_dirty_rings().unwrap(), 3);
            assert_eq!(states(&ring), [Empty; 4]);
        }
    }

    #[test]
    fn a_page_that_was_cleared_is_logged_again_when_it_is_written() {
        let Some(vm) = vm() else { return };
        vm.enable_manual_dirty_log_protect(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE).unwrap();
        let mut vcpu = vcpu(&vm);
        let log = || {
            let mut log = [0];
            // SAFETY: the slot has 8 pages, and `log` has 64 bits.
            unsafe { vm.get_dirty_log_into(SLOT, &mut log) }.unwrap();
            log[0]
        };
        assert_eq!(log(), 0);
        write(&mut vcpu, 0, 4);
        assert_eq!(log(), 0b1111);
        vm.clear_dirty_log(SLOT, 0, 8, &[0b0110]).unwrap();
        assert_eq!(log(), 0b1001);
        write(&mut vcpu, 1, 1);
        assert_eq!(log(), 0b1011);
    }
}
