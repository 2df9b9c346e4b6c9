//! Which pages of a mapping this process maps, from `/proc/self/pagemap` (pagemap.rst).

use crate::memory::HostMemory;
use std::fs::File;
use std::os::unix::fs::FileExt;

const PRESENT: u64 = 1 << 63;

/// Returns how many pages of a memory are mapped, where procfs tells.
pub(crate) fn present(memory: &HostMemory) -> Option<u64> {
    let mut pages = 0;
    entries(memory, |_, entry| pages += u64::from(entry & PRESENT != 0))?;
    Some(pages)
}

/// Calls `each` with the number and the entry of each page.
fn entries(memory: &HostMemory, mut each: impl FnMut(u64, u64)) -> Option<()> {
    let page = rustix::param::page_size() as u64;
    let map = File::open("/proc/self/pagemap").ok()?;
    let (first, pages) = (memory.host_address() / page, memory.len() / page);
    let mut bytes = vec![0; 8 << 10];
    let mut at = 0;
    while at < pages {
        let count = (pages - at).min(1 << 10);
        let part = &mut bytes[..count as usize * 8];
        map.read_exact_at(part, (first + at) * 8).ok()?;
        for (place, entry) in (at..).zip(part.as_chunks::<8>().0) {
            each(place, u64::from_ne_bytes(*entry));
        }
        at += count;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backing;

    #[test]
    fn pages_that_were_touched_are_present() {
        let memory = HostMemory::new(8 << 20, Backing::Small).unwrap();
        (0..100).for_each(|page| memory.write(page * 2 * 4096, 1).unwrap());
        assert_eq!(present(&memory), Some(100));
    }
}
