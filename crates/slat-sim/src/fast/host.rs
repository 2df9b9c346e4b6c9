//! The host's access to guest memory.

use super::FastMachine;
use crate::arch::Arch;
use rustix::mm::Advice;
use slat::Hpa;
use std::io;
use std::sync::atomic::Ordering::Relaxed;

impl<A: Arch> FastMachine<A> {
    /// Returns where guest memory begins: a multiple of 1 GiB.
    pub const fn memory_base(&self) -> Hpa {
        Hpa(self.space.memory().start)
    }

    /// Returns the number of bytes of guest memory: a multiple of 2 MiB.
    pub const fn memory_bytes(&self) -> u64 {
        self.space.memory().end - self.space.memory().start
    }

    /// Loads a word of guest memory.
    ///
    /// # Panics
    /// If `hpa` is not a word of guest memory.
    pub fn read_host(&self, hpa: Hpa) -> u64 {
        self.space.words(hpa.0, 8)[0].load(Relaxed)
    }

    /// Stores to a word of guest memory.
    ///
    /// # Panics
    /// If `hpa` is not a word of guest memory.
    pub fn write_host(&self, hpa: Hpa, value: u64) {
        self.space.words(hpa.0, 8)[0].store(value, Relaxed);
    }

    /// Returns the address of guest memory in this process, for instructions that do not change
    /// memory.
    ///
    /// # Panics
    /// If the range is not whole words of guest memory.
    pub fn address(&self, hpa: Hpa, bytes: u64) -> *const u8 {
        self.space.words(hpa.0, bytes).as_ptr().cast()
    }

    /// Copies guest memory from `hpa` to `to`, word by word, even while others write to it.
    ///
    /// # Panics
    /// If the range is not whole words of guest memory.
    pub fn copy_out(&self, hpa: Hpa, to: &mut [u8]) {
        let words = self.space.words(hpa.0, to.len() as u64);
        for (to, word) in to.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.load(Relaxed).to_ne_bytes());
        }
    }

    /// Copies `from` to guest memory at `hpa`, word by word, even while others read it.
    ///
    /// # Panics
    /// If the range is not whole words of guest memory.
    pub fn copy_in(&self, hpa: Hpa, from: &[u8]) {
        let words = self.space.words(hpa.0, from.len() as u64);
        for (from, word) in from.as_chunks::<8>().0.iter().zip(words) {
            word.store(u64::from_ne_bytes(*from), Relaxed);
        }
    }

    /// Gives guest memory back to the host. It reads as zero afterwards.
    ///
    /// # Errors
    /// The error of the host.
    ///
    /// # Panics
    /// If the range is not whole pages of guest memory.
    pub fn discard(&self, hpa: Hpa, bytes: u64) -> io::Result<()> {
        self.space.advise(hpa.0, bytes, Advice::LinuxDontNeed)
    }

    /// Makes the host allocate guest memory now, rather than when it is first touched.
    ///
    /// # Errors
    /// The error of the host; kernels before 5.14 do not support this.
    ///
    /// # Panics
    /// If the range is not whole pages of guest memory.
    pub fn populate(&self, hpa: Hpa, bytes: u64) -> io::Result<()> {
        self.space.advise(hpa.0, bytes, Advice::LinuxPopulateWrite)
    }

    /// Asks the host to back guest memory by huge pages, or not to.
    ///
    /// # Errors
    /// The host does not support huge pages.
    pub fn set_huge_pages(&self, wanted: bool) -> io::Result<()> {
        let advice = if wanted { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        self.space.advise(self.memory_base().0, self.memory_bytes(), advice)
    }
}

impl<A: Arch> slat_guest::Host for FastMachine<A> {
    /// Returns nanoseconds since the machine was created.
    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn wait(&self) {
        std::thread::yield_now();
    }
}
