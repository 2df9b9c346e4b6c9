//! Finds the page frames of the program's memory, keeps the pages there, and keeps threads on CPUs.

use crate::memory::{Memory, PAGE};
use anyhow::{Context, ensure};
use std::fs::{self, File};
use std::mem::zeroed;
use std::os::unix::fs::FileExt;

/// Size of the pages that the kernel is to use for a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// The kernel's smallest pages.
    Small,
    /// Huge pages, if the kernel has them.
    Huge,
}

/// Asks the kernel to keep the memory at its page frames, in pages of that size. The kernel may
/// move pages nevertheless, so a job compares [`frames`] at its end.
pub fn keep(memory: &Memory, size: Size) {
    // SAFETY: the calls advise on and lock a mapping of this program, and change no content.
    unsafe {
        let (base, bytes) = (memory.page(0).cast(), memory.pages() * PAGE);
        let advice = match size {
            Size::Small => libc::MADV_NOHUGEPAGE,
            Size::Huge => libc::MADV_HUGEPAGE,
        };
        libc::madvise(base, bytes, advice);
        libc::mlock(base, bytes);
    }
    // Kernels without compaction do not have this file.
    let _ = fs::write("/proc/sys/vm/compact_unevictable_allowed", "0");
}

/// Returns the number of the page frame of each page (Linux: admin-guide/mm/pagemap.rst).
///
/// # Errors
/// Returns an error if the kernel does not tell, as without CAP_SYS_ADMIN.
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

/// Keeps this thread on a CPU, if there is a CPU of that number.
pub fn on_cpu(cpu: usize) {
    // SAFETY: a set of CPUs consists of integers, for which zero is a valid value, and the kernel
    // only reads it.
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
    fn kept_memory_has_distinct_frames_if_the_kernel_reports_them() {
        let memory = Memory::new(1).unwrap();
        for page in 0..memory.pages() {
            memory.word(page, 0).store(1, std::sync::atomic::Ordering::Relaxed);
        }
        keep(&memory, Size::Small);
        // Without CAP_SYS_ADMIN all frames are 0, which `frames` returns as an error.
        let Ok(mut frames) = frames(&memory) else { return };
        frames.sort_unstable();
        frames.dedup();
        assert_eq!(frames.len(), memory.pages());
    }
}
