//! Access to a page of a device's registers.

use crate::guarded::{self, BusError};
use anyhow::{Context, bail, ensure};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::ptr;

/// A page of physical addresses, mapped as device memory.
#[derive(Debug)]
pub struct Device {
    base: *mut u8,
    /// Size of the page, which the kernel decides.
    size: usize,
    /// Offset in the page of the address that was asked for.
    offset: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and lasts until the process ends.
unsafe impl Send for Device {}

impl Device {
    /// Maps the page that has a physical address.
    ///
    /// # Errors
    /// Returns an error if the machine is not arm64, or if the kernel gives no access: it has no
    /// /dev/mem, or the address is in RAM or in a device that has a driver.
    pub fn open(address: u64) -> anyhow::Result<Self> {
        if cfg!(not(target_arch = "aarch64")) {
            bail!("device memory is reached on arm64 only");
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_SYNC);
        let file = options.open("/dev/mem").context("cannot open /dev/mem")?;
        // SAFETY: the call only returns a constant of the system.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let size = u64::try_from(size).context("the kernel does not say how large pages are")?;
        let start = libc::off_t::try_from(address & !(size - 1));
        let start = start.with_context(|| format!("{address:#x} is no physical address"))?;
        // SAFETY: this is a new mapping, which has no memory of a Rust object. The file may be
        // closed afterwards.
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

    /// Loads the 4 bytes at an offset.
    pub fn load(&self, offset: usize) -> Result<u32, BusError> {
        // SAFETY:
        // 1. The page is mapped for reading until the process ends.
        // 2. `register` has checked the alignment.
        unsafe { guarded::load(self.register(offset)) }
    }

    /// Stores 4 bytes at an offset.
    pub fn store(&self, offset: usize, value: u32) -> Result<(), BusError> {
        // SAFETY:
        // 1. The page is mapped for writing until the process ends.
        // 2. `register` has checked the alignment.
        // 3. The mapping has no Rust object.
        unsafe { guarded::store(self.register(offset), value) }
    }

    fn register(&self, offset: usize) -> *mut u32 {
        let at = self.offset + offset;
        assert!(at.is_multiple_of(4) && at + 4 <= self.size, "{at:#x}");
        // SAFETY: inside the mapping, as was just checked.
        unsafe { self.base.add(at).cast() }
    }
}
