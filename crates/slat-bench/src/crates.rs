//! The same page-table work in other crates of the field.
//!
//! A result of Slat means little without a comparison. Here, crates that a hypervisor could use
//! instead do the same work, on the same memory, in the same process: [`PEERS`] lists them, each
//! makes [`Tables`], and a benchmark compares Slat's inactive tables with these. No CPU loads any
//! of these tables, so no crate pays for invalidations.
//!
//! | operation | aarch64-paging | page_table_multiarch | x86_64 | page-table-generic |
//! |---|---|---|---|---|
//! | [`map_range`](Tables::map_range) | one call | one call | none | one call |
//! | [`map_each`](Tables::map_each) | yes | yes | yes | yes |
//! | [`protect_range`](Tables::protect_range) | one call | one call | each page | one call |
//! | [`unmap_range`](Tables::unmap_range) | one call | one call | each page, then one | one call |
//! | ... frees empty tables | those it covers whole | no | yes | yes |
//! | [`split`](Tables::split) | each block | none | none | each block |
//! | ... of the edges, when a part of a block changes | yes | no | no | protecting only |
//! | [`lookup_all`](Tables::lookup_all) | by a range walk | yes | yes | yes |
//! | out of memory | panics (refused here before) | an error | an error | an error |
//!
//! "One call" is the crate's own range call, "each page" one call per leaf with the loop here. The
//! loops are compiled with the crate's types, so a timed call is dispatched once, not per page.
//! x86-64 hosts have all four; on others, page_table_multiarch lacks the entry format used here,
//! and x86_64 is left out with it.

mod aarch64_paging;
mod generic;
mod memory;
#[cfg(target_arch = "x86_64")]
mod multiarch;
mod runs;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86_64;

pub use memory::Memory;
pub use runs::Run;

/// All crates that this host can run.
pub static PEERS: &[Peer] = &[
    aarch64_paging::PEER,
    #[cfg(target_arch = "x86_64")]
    multiarch::PEER,
    #[cfg(target_arch = "x86_64")]
    x86_64::PEER,
    generic::PEER,
];

/// A crate, and the operations that it has.
#[derive(Debug)]
pub struct Peer {
    /// Its name in the registry.
    pub name: &'static str,
    /// The version that was built.
    pub version: &'static str,
    /// Levels of its tables as they are used here.
    pub levels: u32,
    /// Guest addresses are below 1 << this.
    pub address_bits: u32,
    /// Whether it maps a range in one call.
    pub map_range: bool,
    /// How it write-protects a range.
    pub protect: Way,
    /// How it unmaps a range.
    pub unmap: Way,
    /// How it splits blocks that stay mapped, if it can.
    pub split: Option<Way>,
    /// Whether unmapping frees the tables that it empties.
    pub frees_tables: bool,
    /// Differences from Slat, which explain a ratio of results.
    pub notes: &'static str,
    new: fn(Memory) -> Result<Box<dyn Tables>, String>,
}

impl Peer {
    /// Makes empty tables in `memory`.
    ///
    /// # Errors
    /// If the memory has no room for the root.
    pub fn tables(&self, memory: Memory) -> Result<Box<dyn Tables>, String> {
        (self.new)(memory)
    }
}

/// How an operation reaches the leaves of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By one call of the crate.
    Range,
    /// By one call of the crate for each leaf.
    EachPage,
}

/// The size of the leaves to map by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaf {
    /// 4 KiB.
    Page4K,
    /// 2 MiB.
    Block2M,
}

impl Leaf {
    /// Returns the bytes that a leaf maps.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Page4K => 4 << 10,
            Self::Block2M => 2 << 20,
        }
    }
}

/// Tables of one of the crates, which no CPU has loaded.
///
/// Addresses and sizes are in bytes and multiples of the leaf's size; ranges are not empty, within
/// [`Peer::address_bits`], and host addresses below 1 << 48. All other calls are refused before the
/// crate sees them, and so are calls on which the crate would panic. After any other error a part
/// of the range may have changed. Each crate decides whether a protect or an unmap skips or refuses
/// a hole in the range.
pub trait Tables {
    /// Maps a range, readable, writable and executable, in one call of the crate.
    ///
    /// # Errors
    /// Besides bad ranges: memory ran out; something is mapped already, if the crate tells;
    /// the crate has no such call.
    fn map_range(&mut self, gpa: u64, hpa: u64, bytes: u64, leaf: Leaf) -> Result<(), String> {
        let _ = (gpa, hpa, bytes, leaf);
        Err("the crate has no call that maps a range".into())
    }

    /// As [`map_range`](Self::map_range), by one call for each leaf.
    ///
    /// # Errors
    /// As for [`map_range`](Self::map_range).
    fn map_each(&mut self, gpa: u64, hpa: u64, bytes: u64, leaf: Leaf) -> Result<(), String>;

    /// Takes the permission to write from a range.
    ///
    /// # Errors
    /// Besides bad ranges: an edge is within a block that the crate does not split; memory ran out.
    fn protect_range(&mut self, gpa: u64, bytes: u64) -> Result<(), String>;

    /// Unmaps a range.
    ///
    /// # Errors
    /// As for [`protect_range`](Self::protect_range).
    fn unmap_range(&mut self, gpa: u64, bytes: u64) -> Result<(), String>;

    /// Replaces the blocks of a range by tables of pages that map the same. The range is of whole
    /// 2 MiB blocks.
    ///
    /// # Errors
    /// Besides bad ranges: memory ran out; the crate does not split.
    fn split(&mut self, gpa: u64, bytes: u64) -> Result<(), String> {
        let _ = (gpa, bytes);
        Err("the crate does not split a block that stays mapped".into())
    }

    /// Looks up each of `addresses`; returns the sum of the host addresses, plus 1 for each
    /// writable one. The look-ups do not depend on each other. Addresses are within
    /// [`Peer::address_bits`], which not every crate tests: an address beyond may alias another.
    ///
    /// # Errors
    /// An address is not mapped.
    fn lookup_all(&self, addresses: &[u64]) -> Result<u64, String>;

    /// Returns the leaves of a range, in order, with neighbours of one kind merged. For checks: it
    /// is slow.
    ///
    /// # Errors
    /// Bad ranges.
    fn leaves(&self, gpa: u64, bytes: u64) -> Result<Vec<Run>, String>;

    /// Returns the number of free table frames.
    fn frames_left(&self) -> usize;
}

/// Refuses calls that not all of the crates refuse by themselves.
fn check(gpa: u64, bytes: u64, leaf: Leaf, address_bits: u32) -> Result<(), String> {
    let size = leaf.bytes();
    if bytes == 0 || !gpa.is_multiple_of(size) || !bytes.is_multiple_of(size) {
        return Err(format!("{bytes:#x} bytes at {gpa:#x} are not leaves of {size:#x} bytes"));
    }
    match gpa.checked_add(bytes) {
        Some(end) if end <= 1 << address_bits => Ok(()),
        _ => Err(format!("{bytes:#x} bytes at {gpa:#x} end beyond {address_bits} address bits")),
    }
}

/// As [`check`], and the host range with it.
fn check_both(gpa: u64, hpa: u64, bytes: u64, leaf: Leaf, address_bits: u32) -> Result<(), String> {
    check(gpa, bytes, leaf, address_bits)?;
    check(hpa, bytes, leaf, memory::HOST_BITS)
}

/// Returns `gpa..gpa + bytes` in steps, with the offset of each.
fn steps(gpa: u64, bytes: u64, step: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..bytes).step_by(step as usize).map(move |offset| (gpa + offset, offset))
}

/// Returns the parts in which a range is given to a crate that would otherwise choose leaves of 1
/// GiB, which [`Leaf`] does not have.
fn below_1g(gpa: u64, bytes: u64) -> impl Iterator<Item = (u64, u64, u64)> {
    const PART: u64 = 512 << 20;
    steps(gpa, bytes, PART).map(move |(at, offset)| (at, offset, PART.min(bytes - offset)))
}
