//! A page of physical addresses that is a device's.

use crate::guarded::{self, BusError};
use anyhow::{Context, bail, ensure};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::ptr;

/// A page of physical memory, mapped as a device's.
#[derive(Debug)]
pub struct Device {
    base: *mut u8,
    /// The kernel's pages have a size of its own choice.
    size: usize,
    /// Where in the page the address is that was asked for.
    offset: usize,
}

// SAFETY: the mapping is no thread's own, and lasts until the process ends.
unsafe impl Send for Device {}

impl Device {
    /// Maps the page that a physical address is in.
    ///
    /// # Errors
    /// The machine is not arm64, or the kernel gives no access: it has no /dev/mem, or the address
    /// is that of RAM, or of a device with a driver.
    pub fn open(address: u64) -> anyhow::Result<Self> {
        if cfg!(not(target_arch = "aarch64")) {
            bail!("device memory is reached on arm64 only");
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_SYNC);
        let file = options.open("/dev/mem").context("cannot open /dev/mem")?;
        // SAFETY: it only answers a question.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let size = u64::try_from(size).context("the kernel does not say how large pages are")?;
        let start = libc::off_t::try_from(address & !(size - 1));
        let start = start.with_context(|| format!("{address:#x} is no physical address"))?;
        // SAFETY: a new mapping, of no memory that Rust knows of; the file may be closed
        // afterwards.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                start,
            )
        };
        ensure!(
            base != libc::MAP_FAILED,
            "cannot map {address:#x} of /dev/mem: {}",
            io::Error::last_os_error()
        );
        let offset = (address & (size - 1)) as usize;
        Ok(Self { base: base.cast(), size: size as usize, offset })
    }

    /// The 4 bytes at an offset.
    pub fn load(&self, offset: usize) -> Result<u32, BusError> {
        // SAFETY: the register is mapped until the process ends.
        unsafe { guarded::load(self.register(offset)) }
    }

    /// Stores 4 bytes at an offset.
    pub fn store(&self, offset: usize, value: u32) -> Result<(), BusError> {
        // SAFETY: the register is mapped until the process ends, and no memory of Rust's.
        unsafe { guarded::store(self.register(offset), value) }
    }

    fn register(&self, offset: usize) -> *mut u32 {
        let at = self.offset + offset;
        assert!(at.is_multiple_of(4) && at + 4 <= self.size, "{at:#x}");
        // SAFETY: inside the mapping, as was just checked.
        unsafe { self.base.add(at).cast() }
    }
}
