//! The ioctls that kvm-ioctls lacks, or that it cannot do without an allocation a call.
//!
//! Those with an argument are declared as changing user memory. For `KVM_GET_DIRTY_LOG` that is not
//! a formality: its request code says `_IOW`, as if only the kernel read, and the kernel writes
//! through a pointer inside the argument. A compiler told otherwise may keep the old bitmap.

use crate::bitmap::DirtyBitmap;
use kvm_bindings::{
    KVMIO, kvm_clear_dirty_log, kvm_clear_dirty_log__bindgen_ty_1 as ClearBitmap, kvm_dirty_log,
    kvm_dirty_log__bindgen_ty_1 as GetBitmap,
};
use rustix::fd::{AsFd, FromRawFd, OwnedFd};
use rustix::io;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};
use std::ffi::c_void;
use std::ops::Range;

const GROUP: u8 = KVMIO as u8;
const GET_DIRTY_LOG: Opcode = opcode::write::<kvm_dirty_log>(GROUP, 0x42);
const CLEAR_DIRTY_LOG: Opcode = opcode::read_write::<kvm_clear_dirty_log>(GROUP, 0xc0);
const RESET_DIRTY_RINGS: Opcode = opcode::none(GROUP, 0xc7);
const GET_STATS_FD: Opcode = opcode::none(GROUP, 0xce);

/// An ioctl whose argument is a `T` and whose answer is 0 or an error.
struct Plain<const REQUEST: Opcode, T>(T);

// SAFETY:
// - the input is a pointer to a `T`, which is what REQUEST was made from in this file;
// - there is no output to cast, so no pointer is followed after the call;
// - REQUEST is the kernel's number, made by the same macro;
// - the call is safe to make if the pointers inside the `T` are, which the callers below see to;
// - it is declared mutating.
unsafe impl<const REQUEST: Opcode, T> Ioctl for Plain<REQUEST, T> {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        REQUEST
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut self.0).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> io::Result<()> {
        Ok(())
    }
}

/// `KVM_GET_STATS_FD`: no argument, answers with a new file descriptor.
struct GetStatsFd;

// SAFETY:
// - the call takes no argument, and a null pointer is passed;
// - the output is the return value, a descriptor that the kernel just made for the caller;
// - the request code is the kernel's number;
// - the call makes a descriptor and does nothing else;
// - it is declared mutating.
unsafe impl Ioctl for GetStatsFd {
    type Output = OwnedFd;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        GET_STATS_FD
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> io::Result<OwnedFd> {
        // SAFETY: by the contract of this function the call succeeded, so `out` is an open
        // descriptor; the kernel just made it, so nobody else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

/// `KVM_RESET_DIRTY_RINGS`: no argument, answers with a count.
struct ResetDirtyRings;

// SAFETY:
// - the call takes no argument, and a null pointer is passed;
// - the output is the return value, a number, and no pointer is followed;
// - the request code is the kernel's number;
// - the call resets entries of the rings, which are accessed by atomics alone;
// - it is declared mutating.
unsafe impl Ioctl for ResetDirtyRings {
    type Output = u64;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        RESET_DIRTY_RINGS
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> io::Result<u64> {
        u64::try_from(out).map_err(|_| io::Errno::INVAL)
    }
}

/// Fetches the dirty log of a slot of `pages` pages into the bits from `at` on (api.rst,
/// `KVM_GET_DIRTY_LOG`). `EINVAL` if the bitmap does not hold that many, or if `at` is no multiple
/// of 64.
///
/// # Safety
/// `vm` is a KVM VM, and `slot` has at most `pages` pages of the host's page size: the kernel
/// writes a bit for each of them.
pub(crate) unsafe fn get_dirty_log(
    vm: impl AsFd,
    slot: u32,
    at: u64,
    pages: u64,
    log: &mut DirtyBitmap,
) -> io::Result<()> {
    let words = words(at, pages, log.words().len())?;
    let dirty_bitmap = log.words_mut()[words].as_mut_ptr().cast();
    let argument =
        kvm_dirty_log { slot, padding1: 0, __bindgen_anon_1: GetBitmap { dirty_bitmap } };
    // SAFETY: the kernel writes whole 64-bit words for all pages of the slot, and by the
    // contract of this function those are no more than the words cut out above. They are
    // exclusively borrowed.
    unsafe { ioctl(vm, Plain::<GET_DIRTY_LOG, _>(argument)) }
}

/// The words of a bitmap of `len` words for `pages` pages from bit `at` on.
fn words(at: u64, pages: u64, len: usize) -> io::Result<Range<usize>> {
    let end = (at / 64).checked_add(pages.div_ceil(64)).ok_or(io::Errno::INVAL)?;
    match usize::try_from(end) {
        Ok(end) if at.is_multiple_of(64) && end <= len => Ok((at / 64) as usize..end),
        _ => Err(io::Errno::INVAL),
    }
}

/// Clears, in the kernel, `pages` pages from `first` of the slot on whose bits are set in `log`
/// from bit `at` on, and write-protects those pages again (api.rst, `KVM_CLEAR_DIRTY_LOG`).
///
/// The kernel wants `first` to be a multiple of 64, and `pages` too unless it ends the slot.
///
/// # Safety
/// `vm` is a KVM VM.
pub(crate) unsafe fn clear_dirty_log(
    vm: impl AsFd,
    slot: u32,
    first: u64,
    at: u64,
    pages: u32,
    log: &DirtyBitmap,
) -> io::Result<()> {
    let words = &log.words()[words(at, pages.into(), log.words().len())?];
    let argument = kvm_clear_dirty_log {
        slot,
        num_pages: pages,
        first_page: first,
        __bindgen_anon_1: ClearBitmap { dirty_bitmap: words.as_ptr().cast_mut().cast() },
    };
    // SAFETY: the kernel reads one bit for each of `pages` pages, in whole words, which were cut
    // out above; it never writes the bitmap, so that a shared borrow will do.
    unsafe { ioctl(vm, Plain::<CLEAR_DIRTY_LOG, _>(argument)) }
}

/// Takes back what was harvested from the dirty rings of all vCPUs, and write-protects those pages
/// again (api.rst, `KVM_RESET_DIRTY_RINGS`). Answers with how many entries; a signal ends it early.
///
/// # Safety
/// `vm` is a KVM VM.
pub(crate) unsafe fn reset_dirty_rings(vm: impl AsFd) -> io::Result<u64> {
    // SAFETY: the call takes no argument, and by the contract of this function `vm` knows it.
    unsafe { ioctl(vm, ResetDirtyRings) }
}

/// Opens the binary statistics of a VM or a vCPU (api.rst, `KVM_GET_STATS_FD`).
///
/// # Safety
/// `fd` is a KVM VM or vCPU.
pub(crate) unsafe fn get_stats_fd(fd: impl AsFd) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no argument, and by the contract of this function `fd` knows it.
    unsafe { ioctl(fd, GetStatsFd) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_codes_are_those_of_the_kernels_header() {
        assert_eq!(GET_DIRTY_LOG, 0x4010_ae42);
        assert_eq!(CLEAR_DIRTY_LOG, 0xc018_aec0);
        assert_eq!(RESET_DIRTY_RINGS, 0xaec7);
        assert_eq!(GET_STATS_FD, 0xaece);
    }

    #[test]
    fn a_clear_that_the_bitmap_does_not_cover_never_reaches_the_kernel() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let log = DirtyBitmap::new(128);
        let clear = |first, pages| {
            // SAFETY: not a VM, on purpose: /dev/null answers any ioctl with ENOTTY and reads
            // nothing, so that the contract's reason, the bitmap, is not in danger.
            unsafe { clear_dirty_log(&null, 0, 0, first, pages, &log) }
        };
        assert_eq!(clear(0, 129), Err(io::Errno::INVAL));
        assert_eq!(clear(64, 65), Err(io::Errno::INVAL));
        assert_eq!(clear(192, 0), Err(io::Errno::INVAL));
        assert_eq!(clear(1, 64), Err(io::Errno::INVAL));
        assert_eq!(clear(!63, u32::MAX), Err(io::Errno::INVAL));
        assert_eq!(clear(64, 64), Err(io::Errno::NOTTY));
    }
}
