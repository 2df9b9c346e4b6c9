//! What dirty logging takes and kvm-ioctls lacks, as traits on its own types.
//!
//! The module knows nothing of this crate. It needs what kvm-ioctls needs (kvm-bindings, libc,
//! vmm-sys-util), answers with its [`Error`], which holds an errno, and could be offered to it as
//! it stands: the methods of the traits become those of the types.
//!
//! What kvm-ioctls 0.25.1 has:
//!
//! - [`VmFd::get_dirty_log`], which answers with a new vector and believes the size that it is
//!   told. [`VmDirtyLog::get_dirty_log_into`] writes into words of the caller's.
//! - `Cap::DirtyLogRing`, a name to ask for.
//! - [`VmFd::enable_cap`] and [`VmFd::check_extension_raw`], which take the number of any
//!   capability. The methods here call them.
//!
//! What it lacks:
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
//! A page is one of the host's. A bitmap has one bit a page: bit `i` of the words, counted from the
//! lowest bit of the first, is page `i`. A `slot` is a memslot's number, with the address space in
//! bits 31:16 where KVM has several.
//!
//! Sections of the kernel's Documentation/virt/kvm/api.rst are named as "api.rst".

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

/// Request codes.
mod request {
    use kvm_bindings::{KVMIO, kvm_clear_dirty_log, kvm_dirty_log};
    use vmm_sys_util::{ioctl_io_nr, ioctl_iow_nr, ioctl_iowr_nr};

    ioctl_iow_nr!(KVM_GET_DIRTY_LOG, KVMIO, 0x42, kvm_dirty_log);
    ioctl_iowr_nr!(KVM_CLEAR_DIRTY_LOG, KVMIO, 0xc0, kvm_clear_dirty_log);
    ioctl_io_nr!(KVM_RESET_DIRTY_RINGS, KVMIO, 0xc7);
    ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);
}

/// What a call answers.
pub type Result<T> = std::result::Result<T, Error>;

/// The capability by which this architecture's rings are enabled. x86 orders its accesses so that
/// `KVM_CAP_DIRTY_LOG_RING` is right there, which kernels before 6.1 have alone; others have
/// `KVM_CAP_DIRTY_LOG_RING_ACQ_REL` alone. What user space does with a [`DirtyRing`] fits both.
const RING: u32 = match cfg!(target_arch = "x86_64") {
    true => KVM_CAP_DIRTY_LOG_RING,
    false => KVM_CAP_DIRTY_LOG_RING_ACQ_REL,
};

/// The dirty log of a VM, as a bitmap a memslot or as a ring a vCPU.
pub trait VmDirtyLog {
    /// Fetches the dirty log of a slot into `bitmap` (api.rst, `KVM_GET_DIRTY_LOG`).
    ///
    /// It writes whole words, as many as the slot's pages take, and no word behind them. Bits of
    /// the last word past the slot's end are 0. The kernel clears the log and protects the pages
    /// again, unless [`VmDirtyLog::enable_manual_dirty_log_protect`] was called.
    ///
    /// # Safety
    /// The slot has at most as many pages as `bitmap` has bits: the kernel is not told where the
    /// bitmap ends.
    ///
    /// # Errors
    /// `EINVAL` if there can be no slot of this number, `ENOENT` if there is none or if it is not
    /// logged, `ENXIO` if the VM has rings and no bitmap.
    unsafe fn get_dirty_log_into(&self, slot: u32, bitmap: &mut [u64]) -> Result<()>;

    /// Takes pages out of the log of a slot, and protects those again that this took out (api.rst,
    /// `KVM_CLEAR_DIRTY_LOG`): of the `pages` pages from `first_page` on those whose bits are set
    /// in `bitmap`, where bit 0 is `first_page`.
    ///
    /// What a page holds may be read only after this call: a write before it need not be logged
    /// again.
    ///
    /// # Errors
    /// `EINVAL` if `bitmap` has fewer than `pages` bits, if `first_page` is no multiple of 64, if
    /// the range leaves the slot, or if `pages` is no multiple of 64 and does not end the slot;
    /// `ENOENT` and `ENXIO` as [`VmDirtyLog::get_dirty_log_into`].
    fn clear_dirty_log(&self, slot: u32, first_page: u64, pages: u32, bitmap: &[u64])
    -> Result<()>;

    /// Lets `KVM_GET_DIRTY_LOG` copy the log and do no more, so that
    /// [`VmDirtyLog::clear_dirty_log`] clears and protects in pieces (api.rst,
    /// `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`).
    ///
    /// `flags` is `KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE`, alone or with
    /// `KVM_DIRTY_LOG_INITIALLY_SET`: the log of a slot starts full and with nothing protected. 0
    /// takes it back. It holds for all slots at once, but for how a log starts: one that has
    /// started keeps what it has.
    ///
    /// # Errors
    /// `EINVAL` for flags that this kernel lacks: it has those that
    /// [`VmFd::check_extension_raw`] answers with.
    fn enable_manual_dirty_log_protect(&self, flags: u32) -> Result<()>;

    /// Bytes of the largest ring that a vCPU can have, 0 where KVM has none (api.rst,
    /// `KVM_CAP_DIRTY_LOG_RING`). An entry has 16 bytes.
    fn max_dirty_ring_bytes(&self) -> u32;

    /// Gives each vCPU that is made from now on a ring of `bytes` bytes (api.rst,
    /// `KVM_CAP_DIRTY_LOG_RING`, `KVM_CAP_DIRTY_LOG_RING_ACQ_REL`). It can be done once.
    ///
    /// # Errors
    /// `EINVAL` if `bytes` is no power of two, less than a page, or less than the entries that KVM
    /// keeps free for a vCPU's exit; if the VM has a vCPU, if it has rings, or if KVM has none.
    /// `E2BIG` for more than [`VmDirtyLog::max_dirty_ring_bytes`].
    fn enable_dirty_log_ring(&self, bytes: u32) -> Result<()>;

    /// Keeps a bitmap of each slot beside the rings, for pages that KVM dirties without a vCPU
    /// (api.rst, `KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP`). It is enabled after the rings.
    ///
    /// # Errors
    /// `EINVAL` if this KVM dirties no such page (x86), if the VM has no rings, or if it has a
    /// slot.
    fn enable_dirty_log_ring_bitmap(&self) -> Result<()>;

    /// Makes entries that were harvested, of all vCPUs' rings, empty, and protects their pages
    /// again (api.rst, `KVM_RESET_DIRTY_RINGS`). Answers with how many entries.
    ///
    /// What a page holds may be read only after this call: a write before it need not be named
    /// again.
    /// It takes entries whose harvest happened before the call, on this thread or on another.
    /// A signal may end it early, with fewer entries than were harvested, or with 0: who harvested
    /// more calls again.
    ///
    /// # Errors
    /// `EINVAL` if the VM has no rings.
    fn reset_dirty_rings(&self) -> Result<u32>;

    /// Splits huge pages ahead of faults, when a slot's log starts or is cleared, `bytes` at a time
    /// (api.rst, `KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE`). 0, which is the default, splits none.
    /// Larger chunks take more memory ahead.
    ///
    /// # Errors
    /// `EINVAL` if `bytes` is not one of the sizes whose sum `KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES` is
    /// (a bit is a size), if the VM has a slot, or if the architecture is not arm64.
    fn set_eager_split_chunk_size(&self, bytes: u64) -> Result<()>;
}

/// The dirty ring of a vCPU.
pub trait VcpuDirtyRing {
    /// Maps the ring of the vCPU (api.rst, `KVM_CAP_DIRTY_LOG_RING`). The mapping keeps the vCPU,
    /// even if its descriptor is closed.
    ///
    /// A ring has one reader: two mappings of one ring would each harvest from its first entry.
    ///
    /// # Safety
    /// `bytes` is what [`VmDirtyLog::enable_dirty_log_ring`] was called with, successfully, before
    /// the vCPU was made. The kernel maps what it has not, and an access to that is a `SIGBUS`.
    ///
    /// # Errors
    /// `EINVAL` if `bytes` is no power of two, or less than an entry; `ENOTSUP` if kvm-bindings
    /// does not know where this architecture has its rings (0.14.2: riscv64); `ENOMEM` if the
    /// process has no room.
    unsafe fn map_dirty_ring(&self, bytes: u32) -> Result<DirtyRing>;
}

/// A VM or a vCPU, both of which have statistics.
pub trait BinaryStats {
    /// Opens the binary statistics, a file to be read at offsets (api.rst, `KVM_GET_STATS_FD`).
    ///
    /// # Errors
    /// `ENOTTY` if KVM has none (`KVM_CAP_BINARY_STATS_FD`), `EMFILE` or `ENFILE` if there is no
    /// descriptor left.
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
        // - the kernel writes one bit for each page of the slot, in whole words, through the
        //   pointer in it: no more than `bitmap` has, by the contract of this function. The words
        //   are borrowed exclusively, and the pointer was made from that borrow;
        // - the answer is looked at.
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
        // - the request takes a `kvm_clear_dirty_log`, which the kernel reads and, whatever the
        //   direction in the request's code, does not write;
        // - the kernel reads one bit for each of `pages` pages, in whole words, through the pointer
        //   in it: `bitmap` has as many, see above, and is borrowed. It is never written;
        // - the answer is looked at.
        checked(unsafe { ioctl_with_ref(self, KVM_CLEAR_DIRTY_LOG(), &argument) }).map(drop)
    }

    fn enable_manual_dirty_log_protect(&self, flags: u32) -> Result<()> {
        enable(self, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, flags.into())
    }

    fn max_dirty_ring_bytes(&self) -> u32 {
        // Negative is an error, of a kernel that lacks the question.
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
        // - the request takes no argument. Of this process's memory the kernel writes the entries
        //   of rings alone, which `DirtyRing` accesses as the kernel's contract wants it;
        // - the answer is looked at.
        checked(unsafe { ioctl(self, KVM_RESET_DIRTY_RINGS()) })
    }

    fn set_eager_split_chunk_size(&self, bytes: u64) -> Result<()> {
        enable(self, KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, bytes)
    }
}

impl VcpuDirtyRing for VcpuFd {
    unsafe fn map_dirty_ring(&self, bytes: u32) -> Result<DirtyRing> {
        // SAFETY: a vCPU, by its type; the size is right by the contract of this function, which is
        // the same.
        unsafe { DirtyRing::map(self, bytes) }
    }
}

impl BinaryStats for VmFd {
    fn get_stats_fd(&self) -> Result<File> {
        // SAFETY: a VM, by its type.
        unsafe { stats_of(self) }
    }
}

impl BinaryStats for VcpuFd {
    fn get_stats_fd(&self) -> Result<File> {
        // SAFETY: a vCPU, by its type.
        unsafe { stats_of(self) }
    }
}

/// # Safety
/// `fd` is a VM or a vCPU.
unsafe fn stats_of(fd: &impl AsRawFd) -> Result<File> {
    // SAFETY:
    // - the descriptor is a VM's or a vCPU's, by the contract of this function, and it is open;
    // - the request takes no argument, and writes no memory of this process;
    // - the answer is looked at.
    let made = checked(unsafe { ioctl(fd, KVM_GET_STATS_FD()) })?;
    // SAFETY: the call succeeded, so its answer is a descriptor that is open, and that the kernel
    // made for this call: nobody else owns it.
    Ok(unsafe { File::from_raw_fd(made as i32) })
}

/// What a call answered, where negative is an error.
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
