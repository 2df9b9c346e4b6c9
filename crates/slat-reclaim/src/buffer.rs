//! A buffer for one page, aligned to 4 KiB so that disks can be read and written without a copy.

use alloc::vec::Vec;

/// Alignment of memory that is enough for direct reads and writes of any disk, in bytes.
const ALIGN: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct Buffer(Vec<u8>);

impl Buffer {
    /// Returns the first `bytes` bytes of the buffer; their content is unspecified.
    pub fn page(&mut self, bytes: u64) -> &mut [u8] {
        let bytes = bytes as usize;
        if self.0.len() < bytes + ALIGN {
            self.0.resize(bytes + ALIGN, 0);
        }
        let start = self.0.as_ptr().align_offset(ALIGN).min(ALIGN);
        &mut self.0[start..start + bytes]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_where_disks_want_it() {
        let mut buffer = Buffer::default();
        for bytes in [4096, 65536, 16384] {
            let page = buffer.page(bytes);
            assert_eq!(page.len(), bytes as usize);
            assert!(page.as_ptr().addr().is_multiple_of(ALIGN));
        }
    }
}
