//! What is done to a guest's tables, whoever keeps them.

use crate::settings::peers::Caches;
use serde_json::{Map, Value, json};
use slat::PageSize;
use slat_lab::size::Size;

/// An operation on all of a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A fault that maps, for each page.
    Map,
    /// Unmaps.
    Unmap,
    /// Splits, as logging is enabled.
    Split,
    /// Write-protects, then splits: the whole of enabling.
    Enable,
    /// Write-protects what may be written.
    Protect,
    /// Write-protects what is protected.
    ProtectAgain,
    /// Clears a log whose words are all this one: protects the pages that it names.
    Clear(u64),
    /// The same of all pages, and splits what they are in: the log of a guest that began all dirty.
    ClearSplit,
    /// Ages what is young.
    AgeYoung,
    /// Ages what is old.
    AgeOld,
    /// Ages what is young, page by page.
    AgeEach,
    /// A write fault on each protected page.
    Relax,
    /// Looks random addresses up.
    Lookup,
    /// Cleans the caches of what is mapped.
    Flush,
    /// Maps in tables that no CPU has.
    BuildInactive,
    /// Write-protects in tables that no CPU has.
    ProtectInactive,
}

/// Addresses looked up in one turn.
pub const LOOKUPS: usize = 1 << 20;

/// A word of a log that names four pages, far apart.
pub const SPARSE: u64 = 1 << 3 | 1 << 19 | 1 << 34 | 1 << 50;

impl Op {
    /// What results call it.
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

    /// Whether Linux's walk is another one where it shares the tables. Faults share them always;
    /// unmapping stores, shared or not; and what changes nothing needs no exchange.
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

    /// Whether it splits.
    pub fn splits(self) -> bool {
        matches!(self, Self::Split | Self::Enable | Self::ClearSplit)
    }
}

/// An operation, and the tables that it finds.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// What is done.
    pub op: Op,
    /// To how much memory.
    pub memory: u64,
    /// The leaves that it finds.
    pub leaf: PageSize,
    /// The smallest page.
    pub page: PageSize,
}

impl Work {
    /// Pages of the memory, or what else is counted by pieces.
    pub fn pieces(&self) -> u64 {
        match self.op {
            Op::Lookup => LOOKUPS as u64,
            _ => self.memory / self.page.bytes(),
        }
    }

    /// Whether stage 2 forces the memory type: only a CPU without that flushes.
    pub fn fwb(&self, setting: &Setting) -> bool {
        setting.fwb && self.op != Op::Flush
    }

    /// Whether it splits and finds nothing to split.
    pub fn is_split_already(&self) -> bool {
        self.op.splits() && self.leaf == self.page
    }

    /// For the person waiting.
    pub fn title(&self) -> String {
        format!("{}, {} pages, {}", self.op.name(), self.leaf, Size(self.memory))
    }

    /// What its results have in common.
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

    /// Table memory, all by pages, with room for caches that are full.
    pub fn table_bytes(&self) -> u64 {
        // A table of one page has an eighth as many entries as the page has bytes.
        let pages = self.memory / self.page.bytes() * 8;
        pages + pages / (self.page.bytes() / 8) + 520 * self.page.bytes() + (8 << 20)
    }
}

/// What is the same for all operations of a run.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// How much Linux splits at a time.
    pub chunk: u64,
    /// Whether stage 2 forces the memory type.
    pub fwb: bool,
    /// Where tables are when an operation begins.
    pub caches: Caches,
}
