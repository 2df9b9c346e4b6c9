//! What a descriptor means: one file a format, bits only, no algorithm.

pub mod arm64;
#[cfg(any(test, loom))]
pub mod tiny;

use crate::addr::{Hpa, PageSize};
use core::fmt;

/// The bits of one architecture's second-stage descriptors.
///
/// A value carries what its user configured (see [`arm64::Arm64`]); everything that the walk
/// depends on is a constant, so that loops are specialised by the compiler.
///
/// Levels count upwards from 0, the level of pages. Leaves stand at levels
/// `0..=LARGEST_LEAF`, without gaps.
///
/// A slot that hardware treats as invalid and that is not zero is a *frozen* marker: it carries a
/// table's address, keeps other software out, and is bounded in time.
///
/// # Safety
/// The walk dereferences what a format calls a table. Implementations promise:
/// 1. [`Format::kind`] of 0 is [`Kind::Empty`], of [`Format::table`] at a level above 0
///    [`Kind::Table`], of [`Format::leaf`] up to `LARGEST_LEAF` [`Kind::Leaf`], of
///    [`Format::frozen`] [`Kind::Frozen`]; no slot at level 0 is a table.
/// 2. [`Format::table_address`] gives back the address that [`Format::table`] and
///    [`Format::frozen`] were given.
/// 3. [`Format::geometry`] gives a root of a power of two of slots, at level 4 at most, which
///    covers exactly `address_bits`.
/// 4. A page holds `1 << INDEX_BITS` slots at least.
pub unsafe trait Format: Copy + Send + Sync + 'static {
    /// Name of the format, as its manual's readers know it.
    const NAME: &'static str;
    /// Base-2 logarithm of the page size in bytes.
    const PAGE_SHIFT: u32;
    /// Base-2 logarithm of the slots of a table below the root.
    const INDEX_BITS: u32;
    /// The highest level at which a leaf may stand.
    const LARGEST_LEAF: u8;
    /// Bits that hardware may set in a live leaf (accessed, dirty), or that remember them.
    const STATUS: u64;

    /// Where a walk starts, for guest addresses of `address_bits`.
    ///
    /// # Errors
    /// [`GeometryError`] names the sizes that are allowed.
    fn geometry(&self, address_bits: u32) -> Result<Geometry, GeometryError>;

    /// Bits of a host physical address that a descriptor can hold.
    fn output_bits(&self) -> u32;

    /// What hardware makes of `raw` in a table at `level`.
    fn kind(raw: u64, level: u8) -> Kind;

    /// Whether all of `raws`, slots at `level`, link tables: what a walk that wants nothing below
    /// steps over.
    #[inline(always)]
    fn all_tables(raws: &[u64; RUN], level: u8) -> bool {
        raws.iter().all(|&raw| Self::kind(raw, level) == Kind::Table)
    }

    /// Attribute bits of a leaf, without address and level.
    ///
    /// # Errors
    /// [`AttributeError`] where the format, as configured, cannot express them.
    fn encode(&self, attributes: Attributes) -> Result<u64, AttributeError>;

    /// The attributes of a leaf at `level`.
    fn decode(&self, raw: u64, level: u8) -> Attributes;

    /// A leaf at `level` from attribute bits and an address aligned to its size.
    fn leaf(attribute_bits: u64, level: u8, hpa: Hpa) -> u64;

    /// The attribute bits of a leaf at `level`: what its children inherit when it is split.
    fn attribute_bits(raw: u64, level: u8) -> u64;

    /// Where the leaf `raw` at `level` points.
    fn leaf_address(raw: u64, level: u8) -> Hpa;

    /// A descriptor of the table at `hpa`.
    fn table(hpa: Hpa) -> u64;

    /// The table that `raw` (of [`Kind::Table`] or [`Kind::Frozen`]) points to.
    fn table_address(raw: u64) -> Hpa;

    /// A frozen marker that carries `hpa` (0: none).
    fn frozen(hpa: Hpa) -> u64;

    /// The leaf without the right to write, its dirty state remembered; `raw` itself if it had
    /// none.
    fn write_protected(raw: u64) -> u64;

    /// The leaf marked accessed, as a fault does it; with `write` also writable and dirty.
    fn relaxed(&self, raw: u64, write: bool) -> u64;

    /// The format's own name of `level` when the root stands at any level, for dumps.
    fn level_name(level: u8) -> i8;

    /// Base-2 logarithm of the bytes that a slot at `level` covers.
    fn shift(level: u8) -> u32 {
        Self::PAGE_SHIFT + Self::INDEX_BITS * level as u32
    }

    /// The size of a leaf at `level`.
    fn size(level: u8) -> PageSize {
        PageSize::from_shift(Self::shift(level))
    }

    /// The level of leaves of `size`, if the format has any.
    fn level_of(size: PageSize) -> Option<u8> {
        (0..=Self::LARGEST_LEAF).find(|&level| Self::size(level) == size)
    }
}

/// Slots that a walk looks at together.
pub const RUN: usize = 8;

/// What a slot holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Nothing.
    Empty,
    /// A marker: software is changing the slot, hardware finds it invalid.
    Frozen,
    /// A page or block.
    Leaf,
    /// The address of a table one level below.
    Table,
}

/// Where a walk starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Bits of a guest physical address.
    pub address_bits: u32,
    /// The level of the root's slots.
    pub root_level: u8,
    /// Slots of the root, a power of two: more than a table's where tables are concatenated.
    pub root_slots: usize,
}

impl Geometry {
    /// Bytes of the root, and its alignment: at least one page.
    pub const fn root_bytes(&self, page_shift: u32) -> usize {
        let bytes = self.root_slots * 8;
        if bytes < 1 << page_shift { 1 << page_shift } else { bytes }
    }
}

/// The width of guest addresses is not one that the format can have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GeometryError {
    /// What was asked for, in bits.
    pub address_bits: u32,
    /// The smallest width allowed, in bits.
    pub min: u32,
    /// The largest width allowed, in bits.
    pub max: u32,
    /// The format.
    pub format: &'static str,
}

impl fmt::Display for GeometryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address_bits, min, max, format } = self;
        write!(
            f,
            "{format} cannot translate {address_bits}-bit guest addresses; {min} to {max} bits are allowed"
        )
    }
}

impl core::error::Error for GeometryError {}

/// Rights, memory type and state of a leaf, in no architecture's words.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Attributes {
    /// The guest may read.
    pub read: bool,
    /// The guest may write. With `dirty` unset, the first write is to be marked by hardware.
    pub write: bool,
    /// Who may execute.
    pub execute: Execute,
    /// Memory type.
    pub memory: Memory,
    /// The leaf was used. A leaf without it faults on use where hardware does not set it.
    pub accessed: bool,
    /// The leaf was written, or may have been.
    pub dirty: bool,
    /// A bit for the engine's user; never read by hardware or the engine.
    pub software: bool,
}

impl Attributes {
    /// Normal memory that the guest may read, write and execute, as a fault maps it: accessed,
    /// dirty.
    pub const RAM: Self = Self {
        read: true,
        write: true,
        execute: Execute::All,
        memory: Memory::Normal,
        accessed: true,
        dirty: true,
        software: false,
    };
}

/// Who may execute from a leaf.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Execute {
    /// Nobody.
    None,
    /// The guest's kernel and user programs.
    All,
    /// User programs only.
    User,
    /// The guest's kernel only.
    Kernel,
}

/// Memory type of a leaf.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Memory {
    /// Write-back cacheable.
    Normal,
    /// Normal, not cacheable.
    NonCacheable,
    /// A device; early acknowledgement of writes.
    Device,
    /// A device; no early acknowledgement.
    DeviceStrict,
}

/// Attributes that the format, as configured, cannot express.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum AttributeError {
    /// A writable leaf that is not dirty, where hardware does not mark writes.
    CleanNeedsHardwareDirty,
    /// Execution for the kernel or user programs alone, where the CPU cannot tell them apart.
    ExecuteNeedsSplitRights,
}

impl fmt::Display for AttributeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CleanNeedsHardwareDirty => {
                "a writable leaf that is not dirty needs hardware that marks writes; map it dirty, \
                 or without the right to write"
            }
            Self::ExecuteNeedsSplitRights => {
                "this CPU cannot tell kernel from user execution; allow it to all or to nobody"
            }
        })
    }
}

impl core::error::Error for AttributeError {}
