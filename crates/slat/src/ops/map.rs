//! Map: a range of guest memory onto host memory, by the largest leaves that fit.

use crate::addr::{Gpa, GpaRange, Hpa, Levels, PageSize, RangeError};
use crate::build::{Builder, Outside, Plan};
use crate::cache::TableCache;
use crate::format::{AttributeError, Attributes, Format, Kind};
use crate::platform::Platform;
use crate::tables::{Done, Stopped, Tables};
use crate::walk::{Entry, Flow, Tally, Visitor};
use core::fmt;

/// Why a range was not mapped, or not all of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum MapError {
    /// The range of guest addresses is not one that these tables can have.
    Range(RangeError),
    /// The host address is not a multiple of the page size, or reaches beyond what a descriptor
    /// can hold.
    HostAddress {
        /// The address.
        hpa: Hpa,
        /// The page size.
        page: PageSize,
        /// Bits of a host address.
        bits: u32,
    },
    /// The format has no leaf of that size.
    LeafSize {
        /// What was asked for.
        size: PageSize,
        /// The page size of the format.
        smallest: PageSize,
        /// Its largest block.
        largest: PageSize,
    },
    /// The format, as configured, cannot express the attributes.
    Attributes(AttributeError),
    /// The cache was filled from another platform.
    ForeignCache,
    /// Something else is mapped there.
    Occupied {
        /// The size of the leaf found.
        size: PageSize,
        /// Where it points.
        hpa: Hpa,
    },
    /// The cache ran out of table pages.
    CacheEmpty,
    /// Somebody else held an entry for too long.
    Contended,
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(error) => error.fmt(f),
            Self::HostAddress { hpa, page, bits } => write!(
                f,
                "the host address {hpa} is not a multiple of {page}, or the range from there \
                 exceeds {bits} bits"
            ),
            Self::LeafSize { size, smallest, largest } => {
                write!(
                    f,
                    "the format has no leaf of {size}; the smallest is {smallest}, the largest {largest}"
                )
            }
            Self::Attributes(error) => error.fmt(f),
            Self::ForeignCache => f.write_str("the cache's table pages are another platform's"),
            Self::Occupied { size, hpa } => {
                write!(
                    f,
                    "a {size} leaf that points elsewhere or has other attributes ({hpa}) is mapped there; unmap it first"
                )
            }
            Self::CacheEmpty => {
                f.write_str("no table page at hand; fill the cache and go on from there")
            }
            Self::Contended => {
                f.write_str("an entry is being changed by somebody else; go on from there")
            }
        }
    }
}

impl core::error::Error for MapError {}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// Maps `range` to the memory at `hpa`, with leaves of at most `largest`, as large as
    /// alignment allows.
    ///
    /// A part that is mapped already, to the same memory with the same attributes (accessed and
    /// dirty state aside), is left as it is. An empty part of the tree is built aside at the speed
    /// of memory and linked by one store. No invalidation is owed: nothing invalid is cached (on
    /// formats where it may be, the shootdown says so).
    ///
    /// A range that was unmapped is not to be mapped again before the unmap's shootdown has
    /// completed: a CPU could hold the old and the new translation at once.
    ///
    /// # Errors
    /// Nothing is done on [`MapError::Range`], [`MapError::HostAddress`], [`MapError::LeafSize`],
    /// [`MapError::Attributes`], [`MapError::ForeignCache`], and on [`MapError::Occupied`] unless
    /// the other mapping appeared while this one was being made. [`MapError::CacheEmpty`] and
    /// [`MapError::Contended`] leave everything mapped that precedes the address where it stopped.
    #[inline]
    pub fn map(
        &self,
        range: GpaRange,
        hpa: Hpa,
        attributes: Attributes,
        largest: PageSize,
        cache: &mut TableCache<'_, F, P>,
    ) -> Result<Done, Stopped<MapError>> {
        let plan = self
            .plan_map(&range, hpa, attributes, largest, cache)
            .map_err(|why| self.refused(&range, why))?;
        let mut done = self.nothing();
        // A single page cannot be half done.
        if range.size() > 1 << F::PAGE_SHIFT {
            let mut check = Check { plan, read: 0, why: MapError::Contended };
            if let Err(at) = self.walk(plan.start, plan.end, &mut check) {
                // Nothing is mapped yet: who goes on has to begin at the start.
                let at = if check.why == MapError::Contended { range.start() } else { at };
                return Err(Stopped { at, ..self.refused(&range, check.why) });
            }
            done.counts.slots_read = check.read;
        }
        let mut visitor =
            Map { tables: self, plan, cache, done, dry: None, why: MapError::Contended };
        let result = self.walk(plan.start, plan.end, &mut visitor);
        self.platform.publish();
        let Map { done, dry, why, .. } = visitor;
        match result {
            Ok(()) => Ok(done),
            Err(at) => Err(Stopped { at: dry.map_or(at, Gpa), why, done }),
        }
    }

    #[inline]
    fn plan_map(
        &self,
        range: &GpaRange,
        hpa: Hpa,
        attributes: Attributes,
        largest: PageSize,
        cache: &TableCache<'_, F, P>,
    ) -> Result<Plan, MapError> {
        self.check(range).map_err(MapError::Range)?;
        let bits = self.format.output_bits();
        let page = F::size(0);
        let end = hpa.0.checked_add(range.size());
        if hpa.0 & (page.bytes() - 1) != 0 || end.is_none_or(|end| end > 1 << bits) {
            return Err(MapError::HostAddress { hpa, page, bits });
        }
        let Some(level) = F::level_of(largest) else {
            let (smallest, most) = (F::size(0), F::size(F::LARGEST_LEAF));
            return Err(MapError::LeafSize { size: largest, smallest, largest: most });
        };
        if !cache.serves(self.platform) {
            return Err(MapError::ForeignCache);
        }
        Ok(Plan {
            bits: self.format.encode(attributes).map_err(MapError::Attributes)?,
            delta: hpa.0.wrapping_sub(range.start().0),
            start: range.start().0,
            end: range.end().0,
            largest: level,
            outside: Outside::Empty,
        })
    }
}

/// Whether the leaf `raw` translates `entry` as `plan` would.
fn agrees<F: Format>(plan: &Plan, level: u8, entry: &Entry<'_>) -> Result<(), MapError> {
    let base = entry.base::<F>(level);
    let hpa = F::leaf_address(entry.raw, level);
    let bits = F::attribute_bits(entry.raw, level);
    // The right to write may be a bit that also tells the dirty state.
    let writable = |bits| F::write_protected(bits) != bits;
    let same = (bits ^ plan.bits) & !F::STATUS == 0 && writable(bits) == writable(plan.bits);
    if hpa.0 == base.wrapping_add(plan.delta) && same {
        Ok(())
    } else {
        Err(MapError::Occupied { size: F::size(level), hpa })
    }
}

/// Looks for what is in the way, before anything is changed.
struct Check {
    plan: Plan,
    read: u64,
    why: MapError,
}

impl<'t, F: Format> Visitor<'t, F> for Check {
    const LEVELS: Levels = Levels::ALL;

    #[inline(always)]
    fn visit(&mut self, level: u8, entry: Entry<'t>, _: &mut Tally) -> Flow {
        match F::kind(entry.raw, level) {
            Kind::Leaf => match agrees::<F>(&self.plan, level, &entry) {
                Ok(()) => Flow::Next,
                Err(why) => {
                    self.why = why;
                    Flow::Stop
                }
            },
            Kind::Frozen => Flow::Wait,
            _ => Flow::Next,
        }
    }

    #[inline]
    fn settle(&mut self, _level: u8, tally: Tally) {
        self.read += tally.read;
    }
}

struct Map<'t, 'p, 'a, 'c, F: Format, P: Platform> {
    tables: &'t Tables<'p, F, P>,
    plan: Plan,
    cache: &'a mut TableCache<'c, F, P>,
    done: Done,
    /// Where the cache ran dry inside a subtree.
    dry: Option<u64>,
    why: MapError,
}

impl<'t, F: Format, P: Platform> Visitor<'t, F> for Map<'_, '_, '_, '_, F, P> {
    const LEVELS: Levels = Levels::ALL;

    #[inline(always)]
    fn visit(&mut self, level: u8, entry: Entry<'t>, tally: &mut Tally) -> Flow {
        match F::kind(entry.raw, level) {
            Kind::Empty => {}
            Kind::Leaf => {
                return match agrees::<F>(&self.plan, level, &entry) {
                    Ok(()) => Flow::Next,
                    Err(why) => self.stop(why),
                };
            }
            Kind::Frozen => return Flow::Wait,
            Kind::Table => return Flow::Again,
        }
        if level <= self.plan.largest && entry.whole::<F>(level) && self.plan.aligned::<F>(level) {
            let hpa = Hpa(entry.start.wrapping_add(self.plan.delta));
            if entry.slot.exchange(0, F::leaf(self.plan.bits, level, hpa)).is_err() {
                return Flow::Again;
            }
            tally.change(&entry);
            return Flow::Next;
        }
        self.subtree(level, &entry)
    }

    #[inline]
    fn settle(&mut self, level: u8, tally: Tally) {
        self.done.settle::<F>(level, &tally, false);
    }
}

impl<F: Format, P: Platform> Map<'_, '_, '_, '_, F, P> {
    fn stop(&mut self, why: MapError) -> Flow {
        self.why = why;
        Flow::Stop
    }

    /// Builds the tables under an empty slot aside, and links them.
    fn subtree(&mut self, level: u8, entry: &Entry<'_>) -> Flow {
        let Some(mut frame) = self.cache.take() else {
            return self.stop(MapError::CacheEmpty);
        };
        let counts = &mut self.done.counts;
        let mut builder =
            Builder { platform: self.tables.platform, cache: self.cache, counts, dry: None };
        builder.fill(&mut frame, level - 1, entry.base::<F>(level), &self.plan);
        let (dry, hpa) = (builder.dry, frame.hpa());
        if entry.slot.exchange(0, F::table(hpa)).is_err() {
            builder.recycle(frame, level - 1);
            return Flow::Again;
        }
        frame.into_hpa();
        self.done.counts.slots_written += 1;
        let mapped = dry.unwrap_or(entry.end) - entry.start;
        self.done.bytes += mapped;
        match dry {
            None => Flow::Next,
            Some(at) => {
                self.dry = Some(at);
                self.stop(MapError::CacheEmpty)
            }
        }
    }
}
