//! Operations on a guest's tables, for all entrants.

use crate::settings::peers::Caches;
use serde_json::{Map, Value, json};
use slat::PageSize;
use slat_lab::size::Size;

/// An operation on all of a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Maps each page by a fault.
    Map,
    /// Unmaps all memory.
    Unmap,
    /// Splits, as when logging is enabled.
    Split,
    /// Write-protects, then splits: all of enabling the log.
    Enable,
    /// Write-protects writable memory.
    Protect,
    /// Write-protects memory that is already protected.
    ProtectAgain,
    /// Clears a log whose words all have this value: write-protects the pages that it names.
    Clear(u64),
    /// Clears a log of all pages, and splits their blocks: the log of a guest whose pages are
    /// initially all dirty.
    ClearSplit,
    /// Ages young memory.
    AgeYoung,
    /// Ages old memory.
    AgeOld,
    /// Ages young memory, page by page.
    AgeEach,
    /// Handles a write fault on each protected page.
    Relax,
    /// Looks up random addresses.
    Lookup,
    /// Cleans the caches of mapped memory.
    Flush,
    /// Maps in inactive tables, which no CPU walks.
    BuildInactive,
    /// Write-protects in inactive tables.
    ProtectInactive,
}

/// Number of addresses that one turn looks up.
pub const LOOKUPS: usize = 1 << 20;

/// A word of a log that names four pages, far apart.
pub const SPARSE: u64 = 1 << 3 | 1 << 19 | 1 << 34 | 1 << 50;

impl Op {
    /// Returns its name in results.
    pub fn name(self) -> String {
        match self {
            Self::Map => "map page by page".to_owned(),
            Self::Unmap => "unmap".to_owned(),
            Self::Split => "split".to_owned(),
            Self::Enable => "protect and split".to_owned(),
            Self::Protect => "write-protect".to_owned(),
            Self::ProtectAgain => "write-protect, protected".to_owned(),
            Self::Clear(u64::MAX) => "clear the log, all dirty".to_owned(),
            Self::Clear(word) => format!("clear the log, {} of 64", word.count_ones()),
            Self::ClearSplit => "clear the log and split".to_owned(),
            Self::AgeYoung => "age, all young".to_owned(),
            Self::AgeOld => "age, all old".to_owned(),
            Self::AgeEach => "age page by page".to_owned(),
            Self::Relax => "allow writing page by page".to_owned(),
            Self::Lookup => "look up".to_owned(),
            Self::Flush => "flush".to_owned(),
            Self::BuildInactive => "inactive: map a range".to_owned(),
            Self::ProtectInactive => "inactive: write-protect".to_owned(),
        }
    }

    /// Returns whether Linux's walk differs where it shares the tables. Faults always share them;
    /// unmapping stores, shared or not; and a walk that changes nothing needs no compare-and-swap.
    pub fn differs_if_shared(self) -> bool {
        self.splits()
            || matches!(
                self,
                Self::Protect
                    | Self::ProtectAgain
                    | Self::Clear(_)
                    | Self::AgeYoung
                    | Self::AgeOld
                    | Self::AgeEach
            )
    }

    /// Returns whether the operation splits.
    pub fn splits(self) -> bool {
        matches!(self, Self::Split | Self::Enable | Self::ClearSplit)
    }
}

/// An operation, and the tables that it finds.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// The operation.
    pub op: Op,
    /// Bytes of memory.
    pub memory: u64,
    /// Size of the leaves that it finds.
    pub leaf: PageSize,
    /// Size of the smallest page.
    pub page: PageSize,
}

impl Work {
    /// Returns the number of pages of the memory, or of other pieces that the operation counts.
    pub fn pieces(&self) -> u64 {
        match self.op {
            Op::Lookup => LOOKUPS as u64,
            _ => self.memory / self.page.bytes(),
        }
    }

    /// Returns whether stage 2 forces the memory type: only a CPU without that feature flushes.
    pub fn fwb(&self, setting: &Setting) -> bool {
        setting.fwb && self.op != Op::Flush
    }

    /// Returns whether the operation splits and finds nothing to split.
    pub fn is_split_already(&self) -> bool {
        self.op.splits() && self.leaf == self.page
    }

    /// Returns the title that is shown to the user.
    pub fn title(&self) -> String {
        format!("{}, {} pages, {}", self.op.name(), self.leaf, Size(self.memory))
    }

    /// Returns the parameters that all of its results have.
    pub fn params(&self, setting: &Setting) -> Map<String, Value> {
        let params = [
            ("operation", json!(self.op.name())),
            ("memory", json!(self.memory)),
            ("backing", json!(self.leaf.to_string())),
            ("granule", json!(self.page.bytes())),
            ("pieces", json!(self.pieces())),
            ("chunk_size", json!(setting.chunk)),
            ("fwb", json!(self.fwb(setting))),
            ("caches", json!(setting.caches.to_string())),
        ];
        params.map(|(name, value)| (name.to_owned(), value)).into_iter().collect()
    }

    /// Returns the bytes of tables that map all memory by pages, with room for full caches.
    pub fn table_bytes(&self) -> u64 {
        // A table is one page, and has an eighth as many entries as the page has bytes.
        let pages = self.memory / self.page.bytes() * 8;
        pages + pages / (self.page.bytes() / 8) + 520 * self.page.bytes() + (8 << 20)
    }
}

/// Settings of all operations of a run.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Bytes that Linux splits at a time.
    pub chunk: u64,
    /// Whether stage 2 forces the memory type.
    pub fwb: bool,
    /// Where the tables are when an operation begins.
    pub caches: Caches,
}
