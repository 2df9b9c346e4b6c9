//! The kernel's counters of a VM or a vCPU, in binary form (api.rst, `KVM_GET_STATS_FD`).
//!
//! A time says how long; these say why: faults, exits, instructions that the kernel interpreted,
//! tables that it threw away. Names are the kernel's and differ by architecture and release, so
//! they are read from the file and none is taken for granted.

use crate::Error;
use crate::ioctl::BinaryStats;
use kvm_bindings::{
    KVM_STATS_TYPE_CUMULATIVE, KVM_STATS_TYPE_INSTANT, KVM_STATS_TYPE_MASK, kvm_stats_header,
};
use rustix::io::{Errno, pread};
use std::collections::BTreeMap;
use std::fs::File;
use std::mem::size_of;

/// Bytes of `struct kvm_stats_desc` before the name.
const DESC_LEN: usize = 16;

/// What a counter did between two readings: name and difference, those that changed.
///
/// The difference of a count of things that exist, such as `pages_2m`, can be negative.
pub type Changes = BTreeMap<String, i64>;

/// An open statistics file.
#[derive(Debug)]
pub struct Stats {
    fd: File,
    data_offset: u64,
    data_len: usize,
    fields: Vec<Field>,
}

#[derive(Debug, PartialEq, Eq)]
struct Field {
    name: String,
    /// In 64-bit words from the start of the data block.
    index: usize,
}

/// Values of all counters at one moment. Only the first reading into it allocates.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    bytes: Vec<u8>,
}

impl Stats {
    /// Opens the statistics of a VM or a vCPU.
    pub(crate) fn open(of: &impl BinaryStats) -> Result<Self, Error> {
        let fd = of.get_stats_fd().map_err(Error::os("KVM_GET_STATS_FD"))?;
        let mut header = [0; size_of::<kvm_stats_header>()];
        read_all(&fd, &mut header, 0)?;
        let word = |i: usize| u32::from_ne_bytes(std::array::from_fn(|j| header[4 * i + j]));
        // Order of struct kvm_stats_header: flags, name_size, num_desc, id_offset, desc_offset,
        // data_offset.
        let [name_size, count, desc_offset, data_offset] = [1, 2, 4, 5].map(word);
        let stride = DESC_LEN + name_size as usize;
        let mut descs = vec![0; stride * count as usize];
        read_all(&fd, &mut descs, u64::from(desc_offset))?;
        let fields: Vec<Field> = descs.chunks_exact(stride).filter_map(field).collect();
        let words = fields.iter().map(|field| field.index + 1).max().unwrap_or(0);
        Ok(Self { fd, data_offset: u64::from(data_offset), data_len: words * 8, fields })
    }

    /// Reads all counters.
    ///
    /// # Errors
    /// [`Error::Os`] if the file cannot be read.
    pub fn read(&self, into: &mut Reading) -> Result<(), Error> {
        into.bytes.resize(self.data_len, 0);
        read_all(&self.fd, &mut into.bytes, self.data_offset)
    }

    /// What changed from one reading to a later one.
    pub fn changes(&self, before: &Reading, after: &Reading) -> Changes {
        let changed = self.fields.iter().filter_map(|field| {
            let change = after.word(field.index)?.wrapping_sub(before.word(field.index)?) as i64;
            (change != 0).then(|| (field.name.clone(), change))
        });
        changed.collect()
    }

    /// The value of one counter, if this kernel has it.
    pub fn value(&self, reading: &Reading, name: &str) -> Option<u64> {
        reading.word(self.fields.iter().find(|field| field.name == name)?.index)
    }
}

impl Reading {
    fn word(&self, index: usize) -> Option<u64> {
        let bytes = self.bytes.chunks_exact(8).nth(index)?;
        Some(u64::from_ne_bytes(bytes.try_into().ok()?))
    }
}

/// Reads a descriptor: a single counter, or nothing for histograms, peaks and what is unknown.
fn field(desc: &[u8]) -> Option<Field> {
    // Order of struct kvm_stats_desc: flags u32, exponent s16, size u16, offset u32,
    // bucket_size u32, name.
    let flags = u32::from_ne_bytes(desc.get(0..4)?.try_into().ok()?);
    let size = u16::from_ne_bytes(desc.get(6..8)?.try_into().ok()?);
    let offset = u32::from_ne_bytes(desc.get(8..12)?.try_into().ok()?) as usize;
    let name = desc.get(DESC_LEN..)?.split(|&byte| byte == 0).next()?;
    let counts =
        matches!(flags & KVM_STATS_TYPE_MASK, KVM_STATS_TYPE_CUMULATIVE | KVM_STATS_TYPE_INSTANT);
    (counts && size == 1 && offset.is_multiple_of(8))
        .then(|| Field { name: String::from_utf8_lossy(name).into_owned(), index: offset / 8 })
}

fn read_all(fd: &File, mut into: &mut [u8], mut offset: u64) -> Result<(), Error> {
    while !into.is_empty() {
        match pread(fd, &mut *into, offset) {
            Ok(0) => return Err(Error::os("KVM statistics")(Errno::NODATA)),
            Ok(read) => {
                into = &mut into[read..];
                offset += read as u64;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(Error::os("KVM statistics")(error)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desc(flags: u32, size: u16, offset: u32, name: &str) -> Vec<u8> {
        let mut bytes = flags.to_ne_bytes().to_vec();
        bytes.extend(0i16.to_ne_bytes());
        bytes.extend(size.to_ne_bytes());
        bytes.extend(offset.to_ne_bytes());
        bytes.extend(0u32.to_ne_bytes());
        bytes.extend(name.as_bytes());
        bytes.resize(DESC_LEN + 48, 0);
        bytes
    }

    #[test]
    fn single_counters_are_read_and_histograms_left_out() {
        let counter = field(&desc(KVM_STATS_TYPE_CUMULATIVE, 1, 24, "pf_taken"));
        assert_eq!(counter, Some(Field { name: "pf_taken".into(), index: 3 }));
        let level = field(&desc(KVM_STATS_TYPE_INSTANT, 1, 8, "pages_4k"));
        assert_eq!(level, Some(Field { name: "pages_4k".into(), index: 1 }));
        assert_eq!(field(&desc(kvm_bindings::KVM_STATS_TYPE_LOG_HIST, 32, 0, "hist")), None);
        assert_eq!(field(&desc(KVM_STATS_TYPE_CUMULATIVE, 1, 4, "odd")), None);
    }
}
