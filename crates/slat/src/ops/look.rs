//! Looking without touching: translate, iterate, dump, and flush of what is mapped.

use super::{ChangeError, folded};
use crate::addr::{Gpa, GpaRange, Hpa, PageSize};
use crate::format::{Attributes, Execute, Format, Kind, Memory, Software};
use crate::guard::Guard;
use crate::platform::{Maintenance, Platform};
use crate::tables::{Contended, Found, Halted, Tables, Translation};
use core::fmt;

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// What `gpa` translates to; `None` if nothing is mapped there.
    ///
    /// # Errors
    /// [`Contended`] if the entry, or one of its group, stands frozen: it may be about to appear or
    /// to vanish.
    #[inline(always)]
    pub fn translate(&self, gpa: Gpa) -> Result<Option<Translation>, Contended> {
        self.tables.translate(gpa)
    }

    /// The descriptor that `gpa` ends at, and the size of the part of the address space that its
    /// slot covers. For comparison with other implementations.
    pub fn descriptor(&self, gpa: Gpa) -> Option<(u64, PageSize)> {
        if gpa.0 >> self.tables.geometry().address_bits != 0 {
            return None;
        }
        let Found { raw, level, .. } = self.tables.lookup(gpa.0);
        Some((raw, F::size(level)))
    }

    /// The leaves that overlap `range`, in ascending order, each as it is when it is met.
    ///
    /// # Errors
    /// [`ChangeError::Range`]. An item is [`Contended`] where an entry stands frozen.
    pub fn leaves(&self, range: GpaRange) -> Result<Leaves<'_, F, P>, ChangeError> {
        self.tables.check(&range).map_err(ChangeError::Range)?;
        Ok(Leaves { tables: self.tables, at: range.start().0, end: range.end().0 })
    }

    /// Makes the guest's memory in `range` coherent: of all cacheable leaves that are mapped, as
    /// far as they lie in the range. Returns the bytes. For a guest that used the memory past the
    /// caches, or whose memory somebody else is to read past them.
    ///
    /// # Errors
    /// [`ChangeError::Range`]; [`ChangeError::Contended`] at a frozen entry: everything before it
    /// is done.
    pub fn flush(&mut self, range: GpaRange) -> Result<u64, Halted<ChangeError>> {
        let leaves = match self.leaves(range) {
            Ok(leaves) => leaves,
            Err(why) => return Self::halted(range.start(), why),
        };
        let mut flushed = 0;
        for leaf in leaves {
            let leaf = match leaf {
                Ok(leaf) => leaf,
                Err(Contended { at }) => return Self::halted(at, ChangeError::Contended),
            };
            if leaf.attributes.memory != Memory::Normal {
                continue;
            }
            let start = leaf.gpa.0.max(range.start().0);
            let end = (leaf.gpa.0 + leaf.size.bytes()).min(range.end().0);
            let hpa = Hpa(leaf.hpa.0 + (start - leaf.gpa.0));
            self.tables.platform.maintain(hpa, end - start, Maintenance::Data);
            flushed += end - start;
        }
        Ok(flushed)
    }

    /// The tables as text: a line for each run of neighbouring leaves that continue each other,
    /// with S and T for the first two software bits, and S2 and so on for the others.
    pub const fn dump(&self) -> Dump<'_, F, P> {
        Dump { tables: self.tables }
    }
}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// [`Guard::translate`]: the caller is inside a guard, or nobody reclaims.
    #[inline(always)]
    pub(crate) fn translate(&self, gpa: Gpa) -> Result<Option<Translation>, Contended> {
        let Some(found) = self.lookup_any(gpa.0) else { return Ok(None) };
        // Most are pages: compiled for them, whose size is a constant, and for others.
        match found.level {
            0 => self.translation(Found { level: 0, ..found }, gpa),
            _ => self.translation(found, gpa),
        }
    }

    #[inline(always)]
    fn translation(&self, found: Found, gpa: Gpa) -> Result<Option<Translation>, Contended> {
        match F::kind(found.raw, found.level) {
            Kind::Frozen | Kind::Retired => Err(Contended { at: gpa }),
            Kind::Leaf | Kind::Sealed => {
                let Leaf { hpa, size, attributes, .. } = self.leaf(found, gpa.0)?;
                let hpa = Hpa(hpa.0 | gpa.0 & (size.bytes() - 1));
                Ok(Some(Translation { hpa, size, attributes }))
            }
            Kind::Empty | Kind::Reserved | Kind::Owned | Kind::Table => Ok(None),
        }
    }

    /// The leaf, or group, that was found at `gpa`.
    #[inline(always)]
    fn leaf(&self, found: Found, gpa: u64) -> Result<Leaf, Contended> {
        let Found { raw, level, writable } = found;
        if folded::<F>(raw) {
            return self.folded_leaf(level, gpa).ok_or(Contended { at: Gpa(gpa) });
        }
        let size = F::size(level);
        let mut attributes = self.format.decode(raw, level);
        attributes.write &= writable;
        Ok(Leaf {
            gpa: Gpa(gpa & !(size.bytes() - 1)),
            hpa: F::leaf_address(raw, level),
            size,
            attributes,
        })
    }

    #[cold]
    fn folded_leaf(&self, level: u8, gpa: u64) -> Option<Leaf> {
        let group = self.group(gpa, level)?;
        let first = group.state()?;
        Some(Leaf {
            gpa: Gpa(group.start),
            hpa: F::leaf_address(first, level),
            size: PageSize::from_bytes(group.bytes())?,
            attributes: self.format.decode(first, level),
        })
    }
}

/// A page, block or group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// Its first address.
    pub gpa: Gpa,
    /// Where that points.
    pub hpa: Hpa,
    /// Its size.
    pub size: PageSize,
    /// Rights, memory type and state; the rights are those of the whole walk.
    pub attributes: Attributes,
}

/// The leaves of a range: see [`Guard::leaves`].
#[derive(Debug)]
pub struct Leaves<'g, F: Format, P: Platform> {
    tables: &'g Tables<'g, F, P>,
    at: u64,
    end: u64,
}

impl<F: Format, P: Platform> Iterator for Leaves<'_, F, P> {
    type Item = Result<Leaf, Contended>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        while self.at < self.end {
            let at = self.at;
            let found = self.tables.lookup(at);
            let level = found.level;
            self.at = ((at >> F::shift(level)) + 1) << F::shift(level);
            match F::kind(found.raw, level) {
                Kind::Leaf | Kind::Sealed => {
                    let leaf = self.tables.leaf(found, at);
                    if let Ok(leaf) = leaf {
                        self.at = leaf.gpa.0 + leaf.size.bytes();
                    }
                    return Some(leaf);
                }
                Kind::Frozen | Kind::Retired => return Some(Err(Contended { at: Gpa(at) })),
                Kind::Empty | Kind::Reserved | Kind::Owned | Kind::Table => {}
            }
        }
        None
    }
}

/// The tables as text: see [`Guard::dump`].
#[derive(Debug)]
pub struct Dump<'g, F: Format, P: Platform> {
    tables: &'g Tables<'g, F, P>,
}

impl<F: Format, P: Platform> fmt::Display for Dump<'_, F, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tables = self.tables;
        let geometry = tables.geometry();
        writeln!(
            f,
            "{}, {}-bit addresses, root at {} (level {}), VMID {}",
            F::NAME,
            geometry.address_bits,
            tables.root(),
            F::level_name(geometry.root_level),
            tables.vmid().0
        )?;
        let mut run: Option<(Leaf, u64)> = None;
        for leaf in (Leaves { tables, at: 0, end: 1 << geometry.address_bits }) {
            let leaf = match leaf {
                Ok(leaf) => leaf,
                Err(Contended { at }) => {
                    write_run(f, run.take())?;
                    writeln!(f, "{at}  being changed")?;
                    continue;
                }
            };
            match &mut run {
                Some((first, bytes))
                    if first.gpa.0 + *bytes == leaf.gpa.0
                        && first.hpa.0 + *bytes == leaf.hpa.0
                        && (first.size, first.attributes) == (leaf.size, leaf.attributes) =>
                {
                    *bytes += leaf.size.bytes();
                }
                _ => {
                    write_run(f, run.take())?;
                    run = Some((leaf, leaf.size.bytes()));
                }
            }
        }
        write_run(f, run)
    }
}

fn write_run(f: &mut fmt::Formatter<'_>, run: Option<(Leaf, u64)>) -> fmt::Result {
    let Some((first, bytes)) = run else { return Ok(()) };
    let attributes = first.attributes;
    let flag = |on: bool, flag: char| if on { flag } else { '-' };
    let software = Numbers(attributes.software.without(Software::A.union(Software::B)));
    let execute = match attributes.execute {
        Execute::None => '-',
        Execute::All => 'x',
        Execute::User => 'u',
        Execute::Kernel => 'k',
    };
    writeln!(
        f,
        "{:#014x}..{:#014x} -> {:#014x}  {:>8} x {:<4} {}{}{execute} {}{}{}{} {:?}{software}",
        first.gpa.0,
        first.gpa.0 + bytes,
        first.hpa.0,
        bytes >> first.size.shift(),
        first.size,
        flag(attributes.read, 'r'),
        flag(attributes.write, 'w'),
        flag(attributes.accessed, 'A'),
        flag(attributes.dirty, 'D'),
        flag(attributes.software.contains(Software::A), 'S'),
        flag(attributes.software.contains(Software::B), 'T'),
        attributes.memory,
    )
}

/// The numbers of software bits that have no letter.
struct Numbers(Software);

impl fmt::Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (0..Software::MOST as u8)
            .filter(|&bit| self.0.contains(Software::bit(bit)))
            .try_for_each(|bit| write!(f, " S{bit}"))
    }
}
