//! Where the program's pages are in the guest's physical memory, and that they stay there; which
//! CPU a thread runs on.

use crate::memory::{Memory, PAGE};
use anyhow::{Context, ensure};
use std::fs::{self, File};
use std::mem::zeroed;
use std::os::unix::fs::FileExt;

/// In pages of which size a program's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// The smallest.
    Small,
    /// Huge pages, where the kernel has them.
    Huge,
}

/// Asks the kernel to keep the memory where it is, in pages of that size. What it will not keep is
/// found out by who looks again.
pub fn keep(memory: &Memory, size: Size) {
    // SAFETY: advice about, and a lock of, a mapping that is this program's.
    unsafe {
        let (base, bytes) = (memory.page(0).cast(), memory.pages() * PAGE);
        let advice = match size {
            Size::Small => libc::MADV_NOHUGEPAGE,
            Size::Huge => libc::MADV_HUGEPAGE,
        };
        libc::madvise(base, bytes, advice);
        libc::mlock(base, bytes);
    }
    // Not there in kernels that move no pages.
    let _ = fs::write("/proc/sys/vm/compact_unevictable_allowed", "0");
}

/// The number of the page frame of each of its pages (Linux: admin-guide/mm/pagemap.rst).
///
/// # Errors
/// The kernel does not tell.
pub fn frames(memory: &Memory) -> anyhow::Result<Vec<u32>> {
    const PRESENT: u64 = 1 << 63;
    const FRAME: u64 = (1 << 55) - 1;
    let map = File::open("/proc/self/pagemap").context("cannot open /proc/self/pagemap")?;
    let mut entries = vec![0; memory.pages() * 8];
    let first = memory.page(0) as usize / PAGE;
    map.read_exact_at(&mut entries, first as u64 * 8).context("cannot read the page map")?;
    let entries = entries.chunks_exact(8).map(|entry| {
        let entry = u64::from_ne_bytes(entry.try_into().context("eight bytes are eight bytes")?);
        let frame = entry & FRAME;
        ensure!(entry & PRESENT != 0 && frame != 0, "the kernel tells no frame: {entry:#x}");
        u32::try_from(frame).with_context(|| format!("page frame {frame:#x}"))
    });
    entries.collect()
}

/// Keeps this thread on a CPU, if there is one of that number.
pub fn on_cpu(cpu: usize) {
    // SAFETY: a set of CPUs is made of integers, for which zero is a value; the kernel reads it.
    unsafe {
        let mut set: libc::cpu_set_t = zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_kept_has_frames_that_differ_where_the_kernel_tells() {
        let memory = Memory::new(1).unwrap();
        for page in 0..memory.pages() {
            memory.word(page, 0).store(1, std::sync::atomic::Ordering::Relaxed);
        }
        keep(&memory, Size::Small);
        // Without the privilege all frames are 0, which is an error.
        let Ok(mut frames) = frames(&memory) else { return };
        frames.sort_unstable();
        frames.dedup();
        assert_eq!(frames.len(), memory.pages());
    }
}
