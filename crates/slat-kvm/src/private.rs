//! Private memory of a guest: a guest_memfd, and which guest pages are private.
//!
//! A VM of the type `KVM_X86_SW_PROTECTED_VM` has it without any encryption: an access to a private
//! page reaches the file, which nobody maps, and an access to a shared one the host's memory.

use crate::Error;
use kvm_bindings::{
    KVM_CAP_GUEST_MEMFD, KVM_MEM_GUEST_MEMFD, kvm_create_guest_memfd, kvm_userspace_memory_region,
    kvm_userspace_memory_region2,
};
use kvm_ioctls::{Kvm, VmFd};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd};

/// `KVM_X86_SW_PROTECTED_VM`.
pub(crate) const VM_TYPE: u64 = 1;

/// Returns why this KVM has no VMs whose memory the host converts, if it has none.
pub(crate) fn check(kvm: &Kvm) -> Result<(), String> {
    const KVM_CAP_VM_TYPES: u64 = 235;
    if kvm.check_extension_raw(KVM_CAP_GUEST_MEMFD.into()) <= 0 {
        return Err("this KVM has no guest_memfd".to_owned());
    }
    let types = match cfg!(target_arch = "x86_64") {
        true => kvm.check_extension_raw(KVM_CAP_VM_TYPES),
        false => 0,
    };
    match types & 1 << VM_TYPE {
        0 => Err("this KVM has guest_memfd, and no VMs that convert it without encryption \
                  (CONFIG_KVM_SW_PROTECTED_VM)"
            .to_owned()),
        _ => Ok(()),
    }
}

/// The private memory of a VM.
#[derive(Debug)]
pub(crate) struct Private(File);

impl Private {
    /// Makes private memory of as many bytes as the host's memory of the guest has.
    pub fn new(vm: &VmFd, size: u64) -> Result<Self, Error> {
        let file = kvm_create_guest_memfd { size, ..Default::default() };
        let fd = vm.create_guest_memfd(file).map_err(Error::os("KVM_CREATE_GUEST_MEMFD"))?;
        // SAFETY: the kernel made the descriptor for this call.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// Places a memslot that has private memory from `offset` on beside the host's.
    ///
    /// # Safety
    /// As [`VmFd::set_user_memory_region`].
    pub unsafe fn place(
        &self,
        vm: &VmFd,
        region: kvm_userspace_memory_region,
        offset: u64,
    ) -> Result<(), Error> {
        let region = kvm_userspace_memory_region2 {
            slot: region.slot,
            flags: region.flags | KVM_MEM_GUEST_MEMFD,
            guest_phys_addr: region.guest_phys_addr,
            memory_size: region.memory_size,
            userspace_addr: region.userspace_addr,
            guest_memfd_offset: offset,
            guest_memfd: self.0.as_raw_fd() as u32,
            ..Default::default()
        };
        // SAFETY: by the caller's promise. The VM holds the file as long as it needs it.
        unsafe { vm.set_user_memory_region2(region) }
            .map_err(Error::os("KVM_SET_USER_MEMORY_REGION2"))
    }

    /// Punches a hole: the memory is given back, and holds zeroes.
    pub fn punch(&self, range: Range<u64>) -> Result<(), Error> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (from, len) = (range.start as libc::off_t, (range.end - range.start) as libc::off_t);
        // SAFETY: the call takes a descriptor and numbers. No Rust code can access the memory.
        match unsafe { libc::fallocate(self.0.as_raw_fd(), mode, from, len) } {
            0 => Ok(()),
            _ => Err(Error::os("fallocate of a guest_memfd")(std::io::Error::last_os_error())),
        }
    }
}

/// Makes guest memory private or shared.
#[cfg(target_arch = "x86_64")]
pub(crate) fn convert(vm: &VmFd, address: u64, size: u64, private: bool) -> Result<(), Error> {
    let attributes =
        if private { u64::from(kvm_bindings::KVM_MEMORY_ATTRIBUTE_PRIVATE) } else { 0 };
    let range =
        kvm_bindings::kvm_memory_attributes { address, size, attributes, ..Default::default() };
    vm.set_memory_attributes(range).map_err(Error::os("KVM_SET_MEMORY_ATTRIBUTES"))
}

/// As [`check()`] said, there is none.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn convert(_: &VmFd, _: u64, _: u64, _: bool) -> Result<(), Error> {
    Err(Error::os("KVM_SET_MEMORY_ATTRIBUTES")(rustix::io::Errno::NOSYS))
}
