//! The kernel's counters of a VM or a vCPU, in binary form (api.rst, `KVM_GET_STATS_FD`).
//!
//! They explain a measured time: faults, exits, instructions that the kernel interpreted, tables
//! that it zapped. Their names differ by architecture and release, so they are read from the file
//! and none is assumed to exist.

use crate::Error;
use crate::ioctl::BinaryStats;
use kvm_bindings::{
    KVM_STATS_TYPE_CUMULATIVE, KVM_STATS_TYPE_INSTANT, KVM_STATS_TYPE_MASK, kvm_stats_header,
};
use rustix::io::{Errno, pread};
use std::collections::BTreeMap;
use std::fs::File;
use std::mem::size_of;
use std::os::fd::{AsFd, BorrowedFd};

/// Bytes of `struct kvm_stats_desc` before the name.
const DESC_LEN: usize = 16;

/// Limits that no kernel exceeds: bytes of a name, number of names, and words of values.
const MOST_NAME: u32 = 1 << 10;
const MOST_FIELDS: u32 = 1 << 12;
const MOST_WORDS: usize = 1 << 20;

/// Changes of counters between two readings, by name. Counters that did not change are left out.
///
/// The change of a count of existing things, such as `pages_2m`, can be negative.
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
    /// Index in the data block, in 64-bit words.
    index: usize,
}

/// Values of all counters at one moment. Only the first read into it allocates.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    bytes: Vec<u8>,
}

impl Stats {
    /// Opens the statistics of a VM or a vCPU.
    ///
    /// # Errors
    /// [`Error::Os`] if the kernel has none (before 5.14), or if another process made the VM;
    /// [`Error::Invalid`] as for [`Stats::from_file`].
    pub fn open(of: &impl BinaryStats) -> Result<Self, Error> {
        Self::from_file(of.get_stats_fd().map_err(Error::os("KVM_GET_STATS_FD"))?)
    }

    /// Wraps a statistics file that is already open, such as a descriptor of another process.
    ///
    /// The file keeps KVM's data of the VM, and so its counters, alive until this is dropped.
    ///
    /// # Errors
    /// [`Error::Os`] if the file cannot be read, [`Error::Invalid`] if its header is not one of
    /// KVM's.
    pub fn from_file(fd: File) -> Result<Self, Error> {
        let mut header = [0; size_of::<kvm_stats_header>()];
        read_all(&fd, &mut header, 0)?;
        let word = |i: usize| u32::from_ne_bytes(std::array::from_fn(|j| header[4 * i + j]));
        // Order of struct kvm_stats_header: flags, name_size, num_desc, id_offset, desc_offset,
        // data_offset.
        let [name_size, count, desc_offset, data_offset] = [1, 2, 4, 5].map(word);
        // A file that is not KVM's could give sizes that exceed any memory.
        if name_size > MOST_NAME || count > MOST_FIELDS {
            let value = format!("of {count} names of {name_size} bytes");
            return Err(Error::invalid("statistics file", value, "must be one of KVM's"));
        }
        let stride = DESC_LEN + name_size as usize;
        let mut descs = vec![0; stride * count as usize];
        read_all(&fd, &mut descs, u64::from(desc_offset))?;
        let fields: Vec<Field> = descs.chunks_exact(stride).filter_map(field).collect();
        let words = fields.iter().map(|field| field.index + 1).max().unwrap_or(0);
        if words > MOST_WORDS {
            return Err(Error::invalid("statistics file", words, "words must be one of KVM's"));
        }
        Ok(Self { fd, data_offset: u64::from(data_offset), data_len: words * 8, fields })
    }

    /// Reads all counters into `into`.
    ///
    /// # Errors
    /// [`Error::Os`] if the file cannot be read.
    pub fn read(&self, into: &mut Reading) -> Result<(), Error> {
        into.bytes.resize(self.data_len, 0);
        read_all(&self.fd, &mut into.bytes, self.data_offset)
    }

    /// Returns a reading in which all counters are 0, for a vCPU that was made after the first
    /// reading.
    pub fn zero(&self) -> Reading {
        Reading { bytes: vec![0; self.data_len] }
    }

    /// Returns the changes from one reading to a later one.
    pub fn changes(&self, before: &Reading, after: &Reading) -> Changes {
        let changed = self.fields.iter().filter_map(|field| {
            let change = after.word(field.index)?.wrapping_sub(before.word(field.index)?) as i64;
            (change != 0).then(|| (field.name.clone(), change))
        });
        changed.collect()
    }

    /// Returns the names of the counters that this kernel has.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.fields.iter().map(|field| &*field.name)
    }

    /// Returns the value of a counter, if this kernel has it.
    pub fn value(&self, reading: &Reading, name: &str) -> Option<u64> {
        reading.word(self.fields.iter().find(|field| field.name == name)?.index)
    }
}

impl AsFd for Stats {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Reading {
    fn word(&self, index: usize) -> Option<u64> {
        let bytes = self.bytes.chunks_exact(8).nth(index)?;
        Some(u64::from_ne_bytes(bytes.try_into().ok()?))
    }
}

/// Parses a descriptor. Returns `None` for histograms, peaks and unknown types.
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

    /// Makes a file in KVM's format, with one counter and its value.
    fn file(names: u32, count: u32, offset: u32) -> File {
        use std::io::Write;
        let mut file = tempfile::tempfile().unwrap();
        let desc = desc(KVM_STATS_TYPE_CUMULATIVE, 1, offset, "pf_taken");
        let data = 24 + desc.len() as u32;
        [0, names, count, 0, 24, data].iter().for_each(|word: &u32| {
            file.write_all(&word.to_ne_bytes()).unwrap();
        });
        file.write_all(&desc).unwrap();
        file.write_all(&77u64.to_ne_bytes()).unwrap();
        file
    }

    #[test]
    fn a_stats_file_opened_elsewhere_is_read_and_a_foreign_one_not() {
        let stats = Stats::from_file(file(48, 1, 0)).unwrap();
        let mut reading = Reading::default();
        stats.read(&mut reading).unwrap();
        assert_eq!(stats.value(&reading, "pf_taken"), Some(77));
        assert_eq!(stats.value(&reading, "exits"), None);
        assert_eq!(stats.names().collect::<Vec<_>>(), ["pf_taken"]);
        for (names, count, offset) in [(u32::MAX, 1, 0), (48, u32::MAX, 0), (48, 1, u32::MAX - 7)] {
            let refused = Stats::from_file(file(names, count, offset));
            assert!(matches!(refused, Err(Error::Invalid { .. })), "{names} {count} {offset}");
        }
        assert!(Stats::from_file(tempfile::tempfile().unwrap()).is_err());
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
