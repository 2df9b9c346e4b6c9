//! Accessed marks in the tables above leaves that a walk has changed.

use crate::format::{Format, Kind};
use crate::platform::Platform;
use crate::sync::agreed;
use crate::table::{self, Pte};

/// Marks a table accessed below which a leaf may have become accessed, the lowest table first.
///
/// An ageing thread clears a table's mark before it looks below. If it clears the mark before this
/// function looks, the mark is set again, and the next ageing looks below. If it clears the mark
/// later, it finds the leaf itself. The caller fences (`agreed`) between the leaf and the marks of
/// all tables above it.
#[inline(always)]
pub(super) fn touch<F: Format>(pte: &Pte, level: u8, table: u64) {
    let _ = pte.update(|raw| {
        (links::<F>(raw, level, table) && raw & F::TABLE_ACCESSED == 0)
            .then_some(raw | F::TABLE_ACCESSED)
    });
}

/// [`touch`] of the tables on the way to `gpa` from `root`, from one level down to another, if any
/// is not marked.
#[inline(always)]
pub(super) fn touch_path<F: Format, P: Platform>(
    platform: &P,
    root: &[Pte],
    (top, level): (u8, u8),
    gpa: u64,
) {
    agreed();
    let mut common = F::TABLE_ACCESSED;
    descend::<F, P>(platform, root, (top, level), gpa, |_, _, raw| common &= raw);
    if common != F::TABLE_ACCESSED {
        touch_each::<F, P>(platform, root, (top, level), gpa);
    }
}

/// [`touch_path`] where a table is not marked.
#[cold]
#[inline(never)]
pub(crate) fn touch_each<F: Format, P: Platform>(
    platform: &P,
    root: &[Pte],
    levels: (u8, u8),
    gpa: u64,
) {
    let mut above = [const { None }; 4];
    descend::<F, P>(platform, root, levels, gpa, |at, pte, raw| {
        above[at as usize - 1] = Some((pte, raw));
    });
    for (below, table) in above.iter().enumerate() {
        table.inspect(|&(pte, raw)| touch::<F>(pte, below as u8 + 1, raw));
    }
}

/// Calls `link` with the level, the entry and the value of each link on the way to `gpa` from
/// `root`, from one level down to another.
#[inline(always)]
fn descend<'t, F: Format, P: Platform>(
    platform: &'t P,
    root: &'t [Pte],
    (mut level, down): (u8, u8),
    gpa: u64,
    mut link: impl FnMut(u8, &'t Pte, u64),
) {
    let mut ptes = root;
    while level > down {
        let pte = table::pte::<F>(ptes, gpa, level);
        let raw = pte.load();
        if F::kind(raw, level) != Kind::Table {
            break;
        }
        link(level, pte, raw);
        level -= 1;
        // SAFETY: as in `one` of the walk.
        ptes = unsafe { table::entries(platform, F::table_address(raw), F::entries(level)) };
    }
}

/// Returns whether `raw` links the table that `table` links; their other bits may differ.
#[inline(always)]
pub(crate) fn links<F: Format>(raw: u64, level: u8, table: u64) -> bool {
    F::kind(raw, level) == Kind::Table && F::table_address(raw) == F::table_address(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::Hpa;

    type F = crate::format::ept::Ept<true>;

    #[test]
    fn an_entry_that_links_another_table_by_now_is_not_marked() {
        let (table, level) = (Hpa(0x5000), 1);
        let link = |hpa| F::table(hpa, level) & !F::TABLE_ACCESSED;
        let touched = |raw| {
            let pte = Pte::new(raw);
            touch::<F>(&pte, level, link(table) | F::TABLE_ACCESSED);
            pte.load()
        };
        let marked = link(table) | F::TABLE_ACCESSED;
        assert_eq!([link(table), marked].map(touched), [marked; 2]);
        // Another table, a block, nothing, and the same table as it is being retired.
        let block = F::leaf(0, level, Hpa(0)) & !F::TABLE_ACCESSED;
        for other in [link(Hpa(0x6000)), block, 0, F::retired(table)] {
            assert_eq!(touched(other), other, "{other:#x}");
        }
    }
}
