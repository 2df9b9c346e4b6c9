//! What programs for different machines share.

use slat::format::Kind;
use slat::{Format, Platform, Tables};

/// Returns the address of the entry at the end of the walk for `gpa`; `read` reads one.
pub fn last_entry<F: Format, P: Platform>(
    tables: &Tables<'_, F, P>,
    gpa: u64,
    read: impl Fn(u64) -> u64,
) -> u64 {
    let geometry = tables.geometry();
    let (mut table, mut ptes) = (tables.root(), geometry.root_entries as u64);
    for level in (0..=geometry.root_level).rev() {
        let pte = table.0 + 8 * ((gpa >> F::shift(level)) % ptes);
        if F::kind(read(pte), level) != Kind::Table {
            return pte;
        }
        let bits = if level == 1 { F::LAST_INDEX_BITS } else { F::INDEX_BITS };
        (table, ptes) = (F::table_address(read(pte)), 1 << bits);
    }
    unreachable!("no table is at level 0")
}
