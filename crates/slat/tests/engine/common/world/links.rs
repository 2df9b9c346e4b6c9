//! Which tables are linked and unlinked, found from the trees before and after.

use super::super::hardware::{Hardware, Run, Table, Tree};

/// Adds the tables around `at`, the lowest first, that an unmap of a range leaves empty.
pub fn retire_around(
    tree: &Tree,
    (start, end): (u64, u64),
    at: u64,
    retired: &mut Vec<(u64, u64)>,
) {
    let around = |table: &&Table| table.start <= at && at < table.end;
    let mut tables: Vec<_> = tree.tables.values().filter(around).collect();
    tables.sort_by_key(|table| table.height);
    for table in tables {
        let range = (table.start, table.end);
        if retired.contains(&range) {
            continue;
        }
        let below = tree
            .tables
            .values()
            .filter(|below| below.height < table.height && below.within(table.start, table.end));
        let bare = below.map(|below| (below.start, below.end)).all(|it| retired.contains(&it));
        let kept = |run: Run| run.start < start || end < run.end;
        if !bare || tree.within(table.start, table.end).any(kept) {
            return;
        }
        retired.push(range);
    }
}

/// Returns the number of entries of new tables, and the ranges of those new tables that are linked
/// in entries that existed before.
pub fn filled<H: Hardware>(before: &Tree, after: &Tree) -> (u64, Vec<(u64, u64)>) {
    let new = after.tables.iter().filter(|(hpa, _)| !before.tables.contains_key(hpa));
    let new: Vec<_> = new.map(|(_, table)| *table).collect();
    let ptes = new.iter().map(|table| H::entries(table.height - 1) as u64).sum();
    let inner = |table: &&Table| {
        new.iter().any(|t| t.height > table.height && table.within(t.start, t.end))
    };
    let highest = new.iter().filter(|table| !inner(table));
    (ptes, highest.map(|table| (table.start, table.end)).collect())
}

/// Returns the parts of some ranges that lie in another.
pub fn clipped(ranges: &[(u64, u64)], (start, end): (u64, u64)) -> Vec<(u64, u64)> {
    let parts = ranges.iter().map(|&(from, to)| (from.max(start), to.min(end)));
    parts.filter(|(from, to)| from < to).collect()
}
