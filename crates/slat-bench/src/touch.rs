//! Hardware that walks tables: it sets the accessed bit of every entry on its way.

use crate::arena::Arena;
use anyhow::bail;
use slat::format::Kind;
use slat::{Format, Gpa, Platform, Pte, Tables};
use std::sync::atomic::{AtomicU64, Ordering};

/// Reads at `gpa`: marks the leaf and all tables above it as accessed.
///
/// # Errors
/// Nothing is mapped there.
pub fn touch<F: Format>(
    tables: &Tables<'_, F, Arena>,
    arena: &Arena,
    gpa: Gpa,
) -> anyhow::Result<()> {
    let geometry = tables.geometry();
    let (mut level, mut table) = (geometry.root_level, tables.root());
    let mut entries = geometry.root_entries;
    loop {
        let index = (gpa.0 >> F::shift(level)) as usize & (entries - 1);
        // SAFETY: a table in use has more than `index` entries, and it stays while the tables are
        // borrowed, because no thread retires one here.
        let slot: &Pte = unsafe { arena.entries(table).add(index).as_ref() };
        let raw = slot.load();
        let (bit, next) = match F::kind(raw, level) {
            Kind::Table => (F::TABLE_ACCESSED, Some(F::table_address(raw))),
            Kind::Leaf => (F::ACCESSED, None),
            kind => bail!("{gpa} is {kind:?}"),
        };
        if raw & bit != bit {
            // SAFETY: a `Pte` is one atomic word.
            let word = unsafe { &*std::ptr::from_ref(slot).cast::<AtomicU64>() };
            word.fetch_or(bit, Ordering::AcqRel);
        }
        let Some(next) = next else { return Ok(()) };
        (table, entries, level) = (next, F::entries(level - 1), level - 1);
    }
}
