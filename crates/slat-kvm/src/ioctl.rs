//! The ioctls of dirty logging that kvm-ioctls lacks, as traits on its types.
//!
//! The module uses nothing else of this crate. It needs only the dependencies of kvm-ioctls
//! (kvm-bindings, libc, vmm-sys-util) and returns its [`Error`], which holds an errno. So it could
//! move into kvm-ioctls unchanged, with the methods of the traits as methods of the types.
//!
//! kvm-ioctls 0.25.1 has:
//!
//! - [`VmFd::get_dirty_log`], which returns a new vector and trusts the size that the caller gives.
//!   [`VmDirtyLog::get_dirty_log_into`] writes into the caller's words.
//! - `Cap::DirtyLogRing`, to check for the capability.
//! - [`VmFd::enable_cap`] and [`VmFd::check_extension_raw`], which take the number of any
//!   capability. The methods here call them.
//!
//! It lacks:
//!
//! - `KVM_CLEAR_DIRTY_LOG`: [`VmDirtyLog::clear_dirty_log`];
//! - `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`: [`VmDirtyLog::enable_manual_dirty_log_protect`];
//! - `KVM_CAP_DIRTY_LOG_RING_ACQ_REL`, and a method that enables it or `KVM_CAP_DIRTY_LOG_RING`:
//!   [`VmDirtyLog::enable_dirty_log_ring`];
//! - `KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP`: [`VmDirtyLog::enable_dirty_log_ring_bitmap`];
//! - a vCPU's ring: [`VcpuDirtyRing::map_dirty_ring`], [`DirtyRing`];
//! - `KVM_RESET_DIRTY_RINGS`: [`VmDirtyLog::reset_dirty_rings`];
//! - `KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE`: [`VmDirtyLog::set_eager_split_chunk_size`];
//! - `KVM_GET_STATS_FD`: [`BinaryStats::get_stats_fd`].
//!
//! # Units
//!
//! A page is a page of the host. A bitmap has one bit per page: bit `i` of the words, counted from
//! the lowest bit of the first word, is page `i`. A `slot` is a memslot's number, with the address
//! space in bits 31:16 where KVM has several.
//!
//! "api.rst" is the kernel's Documentation/virt/kvm/api.rst.

mod ring;

pub use kvm_ioctls::Error;
pub use ring::{DirtyPage, DirtyRing, EntryState};

use kvm_bindings::{
    KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL,
    KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, kvm_clear_dirty_log,
    kvm_clear_dirty_log__bindgen_ty_1 as ClearBitmap, kvm_dirty_log,
    kvm_dirty_log__bindgen_ty_1 as GetBitmap, kvm_enable_cap,
};
use kvm_ioctls::{VcpuFd, VmFd};
use request::{KVM_CLEAR_DIRTY_LOG, KVM_GET_DIRTY_LOG, KVM_GET_STATS_FD, KVM_RESET_DIRTY_RINGS};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use vmm_sys_util::ioctl::{ioctl, ioctl_with_ref};

/// Request codes of the ioctls.
mod request {
    use kvm_bindings::{KVMIO, kvm_clear_dirty_log, kvm_dirty_log};
    use vmm_sys_util::{ioctl_io_nr, ioctl_iow_nr, ioctl_iowr_nr};

    ioctl_iow_nr!(KVM_GET_DIRTY_LOG, KVMIO, 0x42, kvm_dirty_log);
    ioctl_iowr_nr!(KVM_CLEAR_DIRTY_LOG, KVMIO, 0xc0, kvm_clear_dirty_log);
    ioctl_io_nr!(KVM_RESET_DIRTY_RINGS, KVMIO, 0xc7);
    ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);
}

/// The result of a call.
pub type Result<T> = std::result::Result<T, Error>;

/// The capability that enables dirty rings on this architecture. On x86, whose memory ordering
/// needs no explicit acquire and release, `KVM_CAP_DIRTY_LOG_RING` is sufficient, and kernels
/// before 6.1 have no other. Other architectures have `KVM_CAP_DIRTY_LOG_RING_ACQ_REL` only.
/// [`DirtyRing`] meets the requirements of both.
const RING: u32 = match cfg!(target_arch = "x86_64") {
    true => KVM_CAP_DIRTY_LOG_RING,
    false => KVM_CAP_DIRTY_LOG_RING_ACQ_REL,
};

/// The dirty log of a VM, as a bitmap per memslot or as a ring per vCPU.
pub trait VmDirtyLog {
    /// Fetches the dirty log of a slot into `bitmap` (api.rst, `KVM_GET_DIRTY_LOG`).
    ///
    /// The kernel writes whole words, as many as cover the slot's pages, and leaves the words after
    /// them unchanged. Bits past the slot's end in the last word are 0. The call also clears the
    /// log and write-protects its pages, unless [`VmDirtyLog::enable_manual_dirty_log_protect`] was
    /// called.
    ///
    /// # Safety
    /// The slot has at most as many pages as `bitmap` has bits: the kernel does not know the length
    /// of the bitmap.
    ///
    /// # Errors
    /// `EINVAL` if no slot can have this number, `ENOENT` if the slot does not exist or is not
    /// logged, `ENXIO` if the VM has rings and no bitmap.
    unsafe fn get_dirty_log_into(&self, slot: u32, bitmap: &mut [u64]) -> Result<()>;

    /// Clears pages of a slot's log, and write-protects the pages that were in the log (api.rst,
    /// `KVM_CLEAR_DIRTY_LOG`). It clears those of the `pages` pages from `first_page` on whose bits
    /// are set in `bitmap`; bit 0 is `first_page`.
    ///
    /// The caller reads a page's contents only after this call: a write before the call need not be
    /// logged again.
    ///
    /// # Errors
    /// `EINVAL` if `bitmap` has fewer than `pages` bits, if `first_page` is no multiple of 64, if
    /// the range leaves the slot, or if `pages` is no multiple of 64 and does not end the slot;
    /// `ENOENT` and `ENXIO` as [`VmDirtyLog::get_dirty_log_into`].
    fn clear_dirty_log(&self, slot: u32, first_page: u64, pages: u32, bitmap: &[u64])
    -> Result<()>;

    /// Makes `KVM_GET_DIRTY_LOG` only copy the log, so that [`VmDirtyLog::clear_dirty_log`] clears
    /// and write-protects it in pieces (api.rst, `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`).
    ///
    /// `flags` is `KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE`, or that with
    /// `KVM_DIRTY_LOG_INITIALLY_SET`: then the log of a slot starts with all bits set and no page
    /// write-protected. 0 disables manual protect. The call applies to all slots at once, except
    /// that a log that has already started keeps its bits.
    ///
    /// # Errors
    /// `EINVAL` for flags that this kernel lacks. [`VmFd::check_extension_raw`] returns those that
    /// it has.
    fn enable_manual_dirty_log_protect(&self, flags: u32) -> Result<()>;

    /// Returns the size of the largest ring that a vCPU can have, in bytes, or 0 where KVM has no
    /// rings (api.rst, `KVM_CAP_DIRTY_LOG_RING`). An entry has 16 bytes.
    fn max_dirty_ring_bytes(&self) -> u32;

    /// Gives each vCPU that is made after this call a ring of `bytes` bytes (api.rst,
    /// `KVM_CAP_DIRTY_LOG_RING`, `KVM_CAP_DIRTY_LOG_RING_ACQ_REL`). It succeeds once per VM.
    ///
    /// # Errors
    /// `EINVAL` if `bytes` is no power of two, less than a page, or less than the entries that KVM
    /// reserves for a vCPU's exit; if the VM has a vCPU or has rings; or if KVM has no rings.
    /// `E2BIG` for more than [`VmDirtyLog::max_dirty_ring_bytes`].
    fn enable_dirty_log_ring(&self, bytes: u32) -> Result<()>;

    /// Keeps a bitmap of each slot in addition to the rings, for pages that KVM dirties without a
    /// vCPU (api.rst, `KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP`). The caller enables the rings first.
    ///
    /// # Errors
    /// `EINVAL` if this KVM dirties no such page (x86), if the VM has no rings, or if it has a
    /// slot.
    fn enable_dirty_log_ring_bitmap(&self) -> Result<()>;

    /// Resets all harvested entries of all vCPUs' rings: makes them empty, and write-protects their
    /// pages again (api.rst, `KVM_RESET_DIRTY_RINGS`). Returns the number of entries reset.
    ///
    /// The caller reads a page's contents only after this call: a write before the call need not be
    /// recorded again. The call resets entries that this or another thread harvested before it. A
    /// signal may end it early, with fewer entries than were harvested, or with 0. A caller that
    /// harvested more calls it again.
    ///
    /// # Errors
    /// `EINVAL` if the VM has no rings.
    fn reset_dirty_rings(&self) -> Result<u32>;

    /// Sets the chunk size in bytes by which KVM splits huge pages ahead of faults, when a slot's
    /// log starts or is cleared (api.rst, `KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE`). 0, the default,
    /// disables the splitting. A larger chunk takes more memory in advance.
    ///
    /// # Errors
    /// `EINVAL` if `bytes` is neither 0 nor one of the bits of `KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES`,
    /// if the VM has a slot, or if the architecture is not arm64.
    fn set_eager_split_chunk_size(&self, bytes: u64) -> Result<()>;
}

/// The dirty ring of a vCPU.
pub trait VcpuDirtyRing {
    /// Maps the ring of the vCPU (api.rst, `KVM_CAP_DIRTY_LOG_RING`). The mapping keeps the vCPU
    /// alive, even if its descriptor is closed.
    ///
    /// A ring has one reader: two mappings of the same ring would both harvest from its first
    /// entry.
    ///
    /// # Safety
    /// `bytes` is the value with which [`VmDirtyLog::enable_dirty_log_ring`] succeeded before the
    /// vCPU was made. The kernel accepts a longer mapping, but an access beyond the ring raises
    /// `SIGBUS`.
    ///
    /// # Errors
    /// `EINVAL` if `bytes` is no power of two, or less than an entry; `ENOTSUP` if kvm-bindings
    /// does not know the offset of the rings on this architecture (0.14.2: riscv64); `ENOMEM` if
    /// the process has no address space left.
    unsafe fn map_dirty_ring(&self, bytes: u32) -> Result<DirtyRing>;
}

/// Statistics of a VM or a vCPU.
pub trait BinaryStats {
    /// Opens the binary statistics, a file that is read at offsets (api.rst, `KVM_GET_STATS_FD`).
    ///
    /// # Errors
    /// `ENOTTY` if KVM has none (`KVM_CAP_BINARY_STATS_FD`), `EMFILE` or `ENFILE` if no descriptor
    /// is free.
    fn get_stats_fd(&self) -> Result<File>;
}

impl VmDirtyLog for VmFd {
    unsafe fn get_dirty_log_into(&self, slot: u32, bitmap: &mut [u64]) -> Result<()> {
        let dirty_bitmap = bitmap.as_mut_ptr().cast();
        let argument =
            kvm_dirty_log { slot, padding1: 0, __bindgen_anon_1: GetBitmap { dirty_bitmap } };
        // SAFETY:
        // - the descriptor is a VM's, by its type, and it is open;
        // - the request takes a `kvm_dirty_log`, which the kernel reads and does not write;
        // - through the pointer in it, the kernel writes one bit for each page of the slot, in
        //   whole words. `bitmap` has as many, by the contract of this function. The words are
        //   borrowed exclusively, and the pointer was made from that borrow;
        // - the result is checked.
        checked(unsafe { ioctl_with_ref(self, KVM_GET_DIRTY_LOG(), &argument) }).map(drop)
    }

    fn clear_dirty_log(
        &self,
        slot: u32,
        first_page: u64,
        pages: u32,
        bitmap: &[u64],
    ) -> Result<()> {
        if bitmap.len() < pages.div_ceil(64) as usize {
            return Err(Error::new(libc::EINVAL));
        }
        let dirty_bitmap = bitmap.as_ptr().cast_mut().cast();
        let argument = kvm_clear_dirty_log {
            slot,
            num_pages: pages,
            first_page,
            __bindgen_anon_1: ClearBitmap { dirty_bitmap },
        };
        // SAFETY:
        // - the descriptor is a VM's, by its type, and it is open;
        // - the request takes a `kvm_clear_dirty_log`, which the kernel reads and does not write,
        //   although the request's code says that it may;
        // - through the pointer in it, the kernel reads one bit for each of `pages` pages, in whole
        //   words, and writes nothing. `bitmap` has as many, as checked above, and is borrowed;
        // - the result is checked.
        checked(unsafe { ioctl_with_ref(self, KVM_CLEAR_DIRTY_LOG(), &argument) }).map(drop)
    }

    fn enable_manual_dirty_log_protect(&self, flags: u32) -> Result<()> {
        enable(self, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, flags.into())
    }

    fn max_dirty_ring_bytes(&self) -> u32 {
        // A negative result is the error of a kernel that does not know the capability check.
        self.check_extension_raw(RING.into()).max(0) as u32
    }

    fn enable_dirty_log_ring(&self, bytes: u32) -> Result<()> {
        enable(self, RING, bytes.into())
    }

    fn enable_dirty_log_ring_bitmap(&self) -> Result<()> {
        enable(self, KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP, 0)
    }

    fn reset_dirty_rings(&self) -> Result<u32> {
        // SAFETY:
        // - the descriptor is a VM's, by its type, and it is open;
        // - the request takes no argument. The only memory of this process that the kernel writes
        //   is the entries of rings, and `DirtyRing` accesses them by the rules of its module;
        // - the result is checked.
        checked(unsafe { ioctl(self, KVM_RESET_DIRTY_RINGS()) })
    }

    fn set_eager_split_chunk_size(&self, bytes: u64) -> Result<()> {
        enable(self, KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, bytes)
    }
}

impl VcpuDirtyRing for VcpuFd {
    unsafe fn map_dirty_ring(&self, bytes: u32) -> Result<DirtyRing> {
        // SAFETY: `self` is a vCPU, by its type. `bytes` is the size of its ring, by the contract
        // of this function.
        unsafe { DirtyRing::map(self, bytes) }
    }
}

impl BinaryStats for VmFd {
    fn get_stats_fd(&self) -> Result<File> {
        // SAFETY: `self` is a VM, by its type.
        unsafe { stats_of(self) }
    }
}

impl BinaryStats for VcpuFd {
    fn get_stats_fd(&self) -> Result<File> {
        // SAFETY: `self` is a vCPU, by its type.
        unsafe { stats_of(self) }
    }
}

/// # Safety
/// `fd` is a VM or a vCPU.
unsafe fn stats_of(fd: &impl AsRawFd) -> Result<File> {
    // SAFETY:
    // - the descriptor is a VM's or a vCPU's, by the contract of this function, and it is open;
    // - the request takes no argument, and writes no memory of this process;
    // - the result is checked.
    let made = checked(unsafe { ioctl(fd, KVM_GET_STATS_FD()) })?;
    // SAFETY: the call succeeded, so its result is an open descriptor that the kernel made for this
    // call. It has no other owner.
    Ok(unsafe { File::from_raw_fd(made as i32) })
}

/// Converts the result of a call, where a negative value is an error.
fn checked(answer: i32) -> Result<u32> {
    u32::try_from(answer).map_err(|_| Error::last())
}

fn enable(vm: &VmFd, cap: u32, argument: u64) -> Result<()> {
    vm.enable_cap(&kvm_enable_cap { cap, args: [argument, 0, 0, 0], ..Default::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_codes_are_those_of_the_kernels_header() {
        assert_eq!(KVM_GET_DIRTY_LOG(), 0x4010_ae42);
        assert_eq!(KVM_CLEAR_DIRTY_LOG(), 0xc018_aec0);
        assert_eq!(KVM_RESET_DIRTY_RINGS(), 0xaec7);
        assert_eq!(KVM_GET_STATS_FD(), 0xaece);
    }
}
