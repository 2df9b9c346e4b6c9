//! Logs for which hardware writes the addresses of pages that it marks dirty into a buffer: Intel's
//! page modification log, Arm's FEAT_HDBSS.
//!
//! # Invariant
//! With [`Config::log_buffers`](crate::Config::log_buffers): if a page's leaf is marked dirty, the
//! page is in the bitmap, or in a vCPU's buffer.
//! 1. Hardware writes the address when it sets the mark, and nothing while the mark is set.
//! 2. A fault that marks a leaf sets the bit itself.
//! 3. A clear takes the bit first, then the mark, and completes the TLB invalidation.
//!
//! So the log is read without a walk, after the buffers have been taken
//! ([`Worker::log_addresses`]). After a vCPU's buffer is taken, the log has what that vCPU wrote
//! before.

use crate::backing::Backing;
use crate::host::Host;
use crate::worker::Worker;
use slat::{Format, Gpa};

/// The number of entries of an Intel page modification log, which is one page.
pub const PML_ENTRIES: usize = 512;

/// Returns the addresses in an Intel page modification log, each with the number of bytes that were
/// marked.
///
/// `index` is the guest-state field "PML index": the index of the next entry, counting down from
/// 511; below 0 it is 0xffff, and the log is full. The VMM calls this at each exit of the vCPU, or
/// at the exit for a full log, and sets the index to 511 before the vCPU runs again.
pub fn pml_addresses(log: &[u64; PML_ENTRIES], index: u16) -> impl Iterator<Item = (Gpa, u64)> {
    // Hardware's order: from the entry that it wrote first.
    let first = match usize::from(index) {
        index if index < PML_ENTRIES => index + 1,
        _ => 0,
    };
    log[first..].iter().rev().map(|entry| (Gpa(entry & !0xfff), 1 << 12))
}

/// Returns the addresses in a buffer of Arm's FEAT_HDBSS, each with the number of bytes that
/// hardware marked there, by the granule of `F`. The buffer has `index` entries
/// (HDBSSPROD_EL2.INDEX; an index beyond the buffer counts as its end). Entries that are not valid,
/// or whose level has no leaves, are left out.
pub fn hdbss_addresses<F: Format>(
    buffer: &[u64],
    index: usize,
) -> impl Iterator<Item = (Gpa, u64)> {
    let valid = |entry: &&u64| **entry & 1 != 0;
    buffer[..index.min(buffer.len())].iter().filter(valid).filter_map(|entry| {
        // The level, counted from the root; the last is 3.
        let level = (entry >> 1 & 0b111) as u8;
        let above = 3u8.checked_sub(level).filter(|&above| above <= F::LARGEST_LEAF)?;
        let bytes = F::size(above).bytes();
        Some((Gpa(entry & 0x00ff_ffff_ffff_f000 & !(bytes - 1)), bytes))
    })
}

impl<F: Format, H: Host, B: Backing> Worker<'_, F, H, B> {
    /// Adds addresses that hardware wrote into a buffer ([`pml_addresses`], [`hdbss_addresses`]) to
    /// the log; returns the number of those in memslots that log. Other addresses are ignored, even
    /// if the guest does not have them.
    pub fn log_addresses(&mut self, written: impl IntoIterator<Item = (Gpa, u64)>) -> u64 {
        self.look(|view| {
            let mut logged = 0;
            for (gpa, bytes) in written {
                let memslot =
                    view.at(gpa).and_then(|memslot| Some((memslot, memslot.log.as_ref()?)));
                if let Some((memslot, log)) = memslot {
                    let page = gpa.0 & !(F::size(0).bytes() - 1);
                    log.mark::<F>(&memslot.spec, page, bytes);
                    logged += 1;
                }
            }
            logged
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use slat::format::arm64::{Arm64K4, Arm64K64};

    #[test]
    fn a_page_modification_log_is_read_from_its_index_on() {
        let mut log = [0; PML_ENTRIES];
        (log[511], log[510]) = (0x1000, 0x5000);
        let read =
            |index| pml_addresses(&log, index).map(|(gpa, _)| gpa.0).collect::<std::vec::Vec<_>>();
        assert_eq!(read(511), []);
        assert_eq!(read(509), [0x1000, 0x5000]);
        // Full: the index has counted below 0. Whatever the index, nothing beyond the log is read.
        for index in [0xffff, 512, 0x8000] {
            assert_eq!(read(index).len(), 512);
        }
    }

    #[test]
    fn a_dirty_state_buffer_names_pages_and_blocks() {
        let entry = |ipa: u64, level: u64| ipa | level << 1 | 1;
        let not_valid = entry(0x3000, 3) & !1;
        let buffer = [entry(0x1000, 3), entry(0x4020_0000, 2), not_valid, entry(0x5000, 4), 0];
        let all: std::vec::Vec<_> = hdbss_addresses::<Arm64K4>(&buffer, 99).collect();
        assert_eq!(all, [(Gpa(0x1000), 1 << 12), (Gpa(0x4020_0000), 2 << 20)]);
        assert_eq!(hdbss_addresses::<Arm64K4>(&buffer, 1).count(), 1);
        let coarse: std::vec::Vec<_> =
            hdbss_addresses::<Arm64K64>(&[entry(0x1_0000, 3)], 1).collect();
        assert_eq!(coarse, [(Gpa(0x1_0000), 64 << 10)]);
    }
}
