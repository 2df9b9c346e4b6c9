//! Userfaultfd: this process resolves the faults of a memory, or hears of them
//! (admin-guide/mm/userfaultfd.rst).

use crate::Error;
use crate::memory::HostMemory;
use rustix::io::Errno;
use rustix::mm::{UserfaultfdFlags, userfaultfd};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

// Request codes of `<linux/userfaultfd.h>`.
const API: u64 = 0xc018_aa3f;
pub(crate) const REGISTER: u64 = 0xc020_aa00;
pub(crate) const UNREGISTER: u64 = 0x8010_aa01;
pub(crate) const WAKE: u64 = 0x8010_aa02;
pub(crate) const COPY: u64 = 0xc028_aa03;
pub(crate) const ZEROPAGE: u64 = 0xc020_aa04;
pub(crate) const WRITE_PROTECT: u64 = 0xc018_aa06;
pub(crate) const CONTINUE: u64 = 0xc020_aa07;
/// `USERFAULTFD_IOC_NEW` of `/dev/userfaultfd`.
const NEW: u64 = 0xaa00;

/// Faults on pages that are not there.
pub(crate) const MISSING: u64 = 1;
/// Writes to pages that are write-protected.
pub(crate) const WP: u64 = 2;
/// Faults on pages that the file of a shared mapping has, and the mapping does not map.
pub(crate) const MINOR: u64 = 4;

/// Flags of a fault: a write to a protected page, and [`MINOR`].
pub(crate) const FAULT_WP: u64 = 2;
pub(crate) const FAULT_MINOR: u64 = 4;

/// Features that a kernel may lack.
pub(crate) mod feature {
    pub const WP: u64 = 1;
    pub const MISSING_HUGETLBFS: u64 = 1 << 4;
    pub const MISSING_SHMEM: u64 = 1 << 5;
    pub const MINOR_HUGETLBFS: u64 = 1 << 9;
    pub const MINOR_SHMEM: u64 = 1 << 10;
    /// The kernel resolves writes by itself, and pagemap tells which pages were written.
    pub const WP_ASYNC: u64 = 1 << 15;
    pub const WP_SHMEM: u64 = 1 << 12;
    pub const WP_UNPOPULATED: u64 = 1 << 13;
}

/// Largest number of words of a request's structure.
const WORDS: usize = 5;

/// A userfaultfd.
#[derive(Debug)]
pub(crate) struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    /// Opens a userfaultfd that hears of the kernel's own faults, as KVM's are, too.
    ///
    /// # Errors
    /// [`Error::NoUserfaultfd`] if this process may not, or the kernel lacks one of `features`.
    pub fn open(features: u64) -> Result<Self, Error> {
        Ok(Self::told(features)?.0)
    }

    /// Returns the features that the kernel has.
    ///
    /// # Errors
    /// [`Error::NoUserfaultfd`] if this process may not.
    pub fn features() -> Result<u64, Error> {
        Ok(Self::told(0)?.1)
    }

    fn told(features: u64) -> Result<(Self, u64), Error> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // SAFETY: only memory of this crate's own guests is registered, which is accessed by
        // atomic operations alone; whoever registers it answers its faults.
        let opened = unsafe { userfaultfd(flags) };
        let fd = match opened {
            Ok(fd) => fd,
            Err(refused) => Self::of_device(flags.bits())
                .ok_or_else(|| Error::NoUserfaultfd { why: refused.to_string() })?,
        };
        let uffd = Self { fd };
        // Version 0xaa, the features, and space for the kernel's requests.
        let mut words = [0xaa, features, 0, 0, 0];
        uffd.call(API, &mut words).map_err(|answer| Error::NoUserfaultfd {
            why: format!("the kernel lacks a feature ({answer})"),
        })?;
        Ok((uffd, words[1]))
    }

    fn of_device(flags: u32) -> Option<OwnedFd> {
        let device = File::options().read(true).write(true).open("/dev/userfaultfd").ok()?;
        // SAFETY: the request takes flags by value, and returns a new descriptor or -1.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), NEW as _, flags) };
        // SAFETY: the descriptor is new, so that nothing else owns it.
        (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Makes a request of this module.
    pub fn call(&self, request: u64, words: &mut [u64; WORDS]) -> Result<(), Errno> {
        // SAFETY: each request of this module reads and writes a structure of at most five words.
        // Addresses among them are of mappings that their owner keeps while this is called; the
        // kernel reads and writes their contents as it does for a fault.
        let done = unsafe { libc::ioctl(self.fd.as_raw_fd(), request as _, words.as_mut_ptr()) };
        match done {
            0 => Ok(()),
            _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        }
    }

    /// Registers a memory for some kinds of faults.
    pub fn register(&self, memory: &HostMemory, kinds: u64) -> Result<(), Error> {
        self.call(REGISTER, &mut [memory.host_address(), memory.len(), kinds, 0, 0])
            .map_err(Error::os("UFFDIO_REGISTER"))
    }

    /// Ends [`Uffd::register`], and wakes all that wait for a fault to be resolved.
    pub fn unregister(&self, memory: &HostMemory) {
        // The call fails only if the memory is not registered, which is what was asked for.
        let _ = self.call(UNREGISTER, &mut [memory.host_address(), memory.len(), 0, 0, 0]);
    }

    /// Fills pages of `to` that are not there with those at the same place of `from`.
    pub fn copy(&self, from: &HostMemory, to: &HostMemory, range: Range<u64>) -> Result<(), Error> {
        let source = from.host_address() + range.start;
        self.copy_from(source, to, range)
    }

    /// Fills pages of `to` that are not there with `bytes`, which are as many as the range has.
    pub fn copy_bytes(
        &self,
        bytes: &[u8],
        to: &HostMemory,
        range: Range<u64>,
    ) -> Result<(), Error> {
        let range = range.start..range.end.min(range.start + bytes.len() as u64);
        self.copy_from(bytes.as_ptr().expose_provenance() as u64, to, range)
    }

    fn copy_from(&self, source: u64, to: &HostMemory, range: Range<u64>) -> Result<(), Error> {
        let first = range.start;
        self.piecewise(range, "UFFDIO_COPY", COPY, 4, |at, len| {
            [to.host_address() + at, source + (at - first), len, 0, 0]
        })
    }

    /// Maps pages that the file of a mapping has.
    pub fn go_on(&self, memory: &HostMemory, range: Range<u64>) -> Result<(), Error> {
        self.piecewise(range, "UFFDIO_CONTINUE", CONTINUE, 3, |at, len| {
            [memory.host_address() + at, len, 0, 0, 0]
        })
    }

    /// Write-protects pages, or ends that and wakes who waits.
    pub fn protect(&self, memory: &HostMemory, range: Range<u64>, on: bool) -> Result<(), Error> {
        let start = memory.host_address() + range.start;
        loop {
            let mut words = [start, range.end - range.start, on.into(), 0, 0];
            match self.call(WRITE_PROTECT, &mut words) {
                Err(Errno::AGAIN) => {}
                other => return other.map_err(Error::os("UFFDIO_WRITEPROTECT")),
            }
        }
    }

    /// Calls a request that resolves faults until it has done all of the range. The word `done`
    /// has the bytes that one call did. Pages that are there already are left as they are.
    fn piecewise(
        &self,
        range: Range<u64>,
        name: &'static str,
        request: u64,
        done: usize,
        words: impl Fn(u64, u64) -> [u64; WORDS],
    ) -> Result<(), Error> {
        let page = rustix::param::page_size() as u64;
        let mut at = range.start;
        while at < range.end {
            let mut words = words(at, range.end - at);
            match self.call(request, &mut words) {
                Ok(()) => break,
                Err(_) if words[done].cast_signed() > 0 => at += words[done],
                Err(Errno::EXIST) => at += page,
                // The layout of the address space is changing.
                Err(Errno::AGAIN) => {}
                Err(answer) => return Err(Error::os(name)(answer)),
            }
        }
        Ok(())
    }

    /// Takes one fault, and returns the address of its page. Returns `None` if there is none now.
    pub fn take(&self) -> Result<Option<u64>, Error> {
        Ok(self.fault()?.map(|(_, page)| page))
    }

    /// The same, with the flags of the fault before the address.
    pub fn fault(&self) -> Result<Option<(u64, u64)>, Error> {
        let mut event = [0u8; 32];
        match rustix::io::read(&self.fd, &mut event) {
            Ok(32) => {
                let words = event.as_chunks::<8>().0;
                let [flags, address] = [1, 2].map(|word| u64::from_ne_bytes(words[word]));
                Ok(Some((flags, address & !(rustix::param::page_size() as u64 - 1))))
            }
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(answer) => Err(Error::os("read of a userfaultfd")(answer)),
        }
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backing;

    #[test]
    fn pages_are_copied_beside_those_that_are_there() {
        let uffd = match Uffd::open(0) {
            Ok(uffd) => uffd,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        let [from, to] = [0, 0].map(|_| HostMemory::new(1 << 20, Backing::Small).unwrap());
        (0..256).for_each(|page| from.write(page * 4096, page + 1).unwrap());
        to.write(3 * 4096, 99).unwrap();
        uffd.register(&to, MISSING).unwrap();
        uffd.copy(&from, &to, 0..1 << 20).unwrap();
        for page in 0..256 {
            let expected = if page == 3 { 99 } else { page + 1 };
            assert_eq!(to.read(page * 4096), Some(expected), "page {page}");
        }
        assert_eq!(uffd.take().unwrap(), None);
        uffd.unregister(&to);
    }
}
