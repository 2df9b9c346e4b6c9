//! Formats whose tables have accessed bits (EPT and NPT): ageing by the accessed bits of tables,
//! compared with the same work leaf by leaf.

use crate::arena::Arena;
use crate::contest::{Contest, ENGINE, MACHINE, Sample, pose};
use crate::fill::Stores;
use crate::fixture::{Fixture, breaks_of, counted};
use crate::format::TableFormat;
use crate::limit;
use crate::scatter::{clustered, scattered};
use crate::settings::engine::Part;
use crate::stopwatch::Stopwatch;
use crate::touch::touch;
use anyhow::ensure;
use slat::{AgeBitmaps, AgeOptions, Attributes, Format, PageSize, Reader, TableBits, Tables};
use std::hint::black_box;
use std::rc::Rc;
use std::slice::from_ref;

/// Returns contests of exact ageing of the whole guest, after it touched a hundredth of its pages.
pub fn age<'a, F: Format>(format: F, name: TableFormat, memory: u64) -> Vec<Contest<'a>> {
    let fixture = Fixture::new(format, memory);
    let contest = |of, touched: Vec<u64>, at_most: f64| {
        let touched: Rc<[u64]> = touched.into();
        let entrant = |skip| {
            let touched = touched.clone();
            let (mut young, mut unanswered) = (fixture.bitmap(), fixture.bitmap());
            move |arena: &mut Arena, check: bool| {
                let ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
                age_once(&fixture, &touched, skip, ages, arena, check)
            }
        };
        let young = touched.clone();
        pose(Part::AgeTables, name, memory, of)
            .enter("exact", ENGINE, entrant(TableBits::Exact))
            .enter("leaves", ENGINE, entrant(TableBits::Ignored))
            .enter("cas", MACHINE, move |arena, _| exchange_once(&fixture, &young, arena))
            .ratio(format!("{}, age by tables, {of}", shown(name)), &["exact"], &["leaves"])
            .at_most(at_most)
            .ratio("  exchanges of these pages alone", &["cas"], &["leaves"])
    };
    let pages = fixture.pages();
    vec![
        contest("1 % in runs of 32 MiB", clustered(pages), 0.05),
        contest("1 % scattered", scattered(pages), 1.1),
    ]
}

/// Returns the usual spelling of a format's name.
fn shown(format: TableFormat) -> String {
    format.to_string().to_uppercase()
}

/// Returns tables in which only the pages of `pages`, and the tables above them, are accessed.
fn aged<'a, F: Format>(
    fixture: &Fixture<F>,
    pages: &[u64],
    ages: &mut AgeBitmaps<'_>,
    arena: &'a Arena,
) -> anyhow::Result<Tables<'a, F, Arena>> {
    let old = Attributes { accessed: false, ..Attributes::RAM };
    let tables = fixture.live(arena, PageSize::SIZE_4K, old)?;
    let mut reader = Reader::register(arena)?;
    let mut guard = tables.enter(&mut reader)?;
    let how = AgeOptions { clear: true, table_bits: TableBits::Exact, flush_tlb: false };
    let aged = guard.age(fixture.range(), ages, how)?;
    ensure!(aged.young == 0, "{} pages are young before the guest ran", aged.young);
    drop(guard);
    for &page in pages {
        touch(&tables, arena, fixture.page(page).start())?;
    }
    Ok(tables)
}

/// Returns the arena without tables, set up for a format.
fn emptied<F: Format>(arena: &mut Arena) -> &Arena {
    arena.begin(breaks_of::<F>(), Stores::Plain)
}

fn age_once<F: Format>(
    fixture: &Fixture<F>,
    touched: &[u64],
    skip: TableBits,
    mut ages: AgeBitmaps<'_>,
    arena: &mut Arena,
    check: bool,
) -> anyhow::Result<Sample> {
    let arena = emptied::<F>(arena);
    let tables = aged(fixture, touched, &mut ages, arena)?;
    ages.young.fill(0);
    ages.unanswered.fill(0);
    let mut reader = Reader::register(arena)?;
    let before = arena.invalidations();
    let watch = Stopwatch::start();
    let mut guard = tables.enter(&mut reader)?;
    let aged = guard.age(
        fixture.range(),
        &mut ages,
        AgeOptions { clear: true, table_bits: skip, flush_tlb: false },
    )?;
    let counts = guard.counts();
    guard.invalidate();
    drop(guard);
    let seconds = watch.seconds();
    let invalidations = arena.invalidations() - before;
    ensure!(
        (aged.young, aged.unanswered) == (touched.len() as u64, 0),
        "{aged:?} after {} pages were touched",
        touched.len()
    );
    if check {
        let named = |page: &u64| ages.young[(page / 64) as usize] >> (page % 64) & 1 == 1;
        ensure!(touched.iter().all(named), "a page that was touched is not young");
        let mut guard = tables.enter(&mut reader)?;
        let how = AgeOptions { clear: false, table_bits: TableBits::Ignored, flush_tlb: false };
        let left = guard.age(fixture.range(), &mut ages, how)?;
        ensure!(left.young == 0, "pages are young after they were aged");
    }
    Ok(Sample { seconds, counts: counted(counts, invalidations) })
}

/// The least that ageing by tables has to do: exchanges the entry of each page that was touched.
fn exchange_once<F: Format>(
    fixture: &Fixture<F>,
    touched: &[u64],
    arena: &mut Arena,
) -> anyhow::Result<Sample> {
    let arena = emptied::<F>(arena);
    let (mut young, mut unanswered) = (fixture.bitmap(), fixture.bitmap());
    let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
    let tables = aged(fixture, touched, &mut ages, arena)?;
    let ptes = fixture.entries(&tables, arena);
    let table = ptes.first().map_or(1, |table| table.len() as u64);
    let watch = Stopwatch::start();
    for page in touched {
        let (table, index) = (page / table, page % table);
        black_box(limit::exchange(from_ref(&ptes[table as usize][index as usize])));
    }
    Ok(Sample { seconds: watch.seconds(), counts: vec![("entries", touched.len() as u64)] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat::format::ept::Ept1G;
    use slat::{Access, BreakBeforeMake, GpaRange};

    /// Returns the entries on the way to a page, from the root.
    fn path(tables: &Tables<'_, Ept1G, Arena>, arena: &Arena, page: GpaRange) -> Vec<u64> {
        use slat::format::Kind;
        use slat::{Format, Platform};
        let (mut table, mut level) = (tables.root(), tables.geometry().root_level);
        let mut entries = tables.geometry().root_entries;
        let mut found = Vec::new();
        loop {
            let index = (page.start().0 >> Ept1G::shift(level)) as usize & (entries - 1);
            // SAFETY: as in `touch`.
            let raw = unsafe { arena.entries(table).add(index).as_ref() }.load();
            found.push(raw);
            if Ept1G::kind(raw, level) != Kind::Table {
                return found;
            }
            (table, entries) = (Ept1G::table_address(raw), 512);
            level -= 1;
        }
    }

    #[test]
    fn hardware_and_a_fault_leave_the_same_marks() {
        let fixture = Fixture::new(Ept1G::default(), 1 << 30);
        let mut arena = Arena::new(16 << 20, 4096, BreakBeforeMake::Never).unwrap();
        let pages = [0, 511, 512, 70_000];
        let mut after = Vec::new();
        for by_hardware in [true, false] {
            arena.reset();
            let (mut young, mut unanswered) = (fixture.bitmap(), fixture.bitmap());
            let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
            let tables = aged(&fixture, &[], &mut ages, &arena).unwrap();
            let mut reader = Reader::register(&arena).unwrap();
            let clean = path(&tables, &arena, fixture.page(0));
            // The root's entry covers more than the guest; below it, no table is accessed.
            assert!(clean[1..].iter().all(|raw| raw & (1 << 8) == 0), "{clean:x?}");
            for page in pages {
                if by_hardware {
                    touch(&tables, &arena, fixture.page(page).start()).unwrap();
                } else {
                    let mut guard = tables.enter(&mut reader).unwrap();
                    guard
                        .relax(fixture.page(page), Access::Read)
                        .map(slat::LocalFlush::not_needed_here)
                        .unwrap();
                }
            }
            let other = pages.map(|page| fixture.page(page + 1));
            let all = pages.map(|page| fixture.page(page)).into_iter().chain(other);
            let paths: Vec<_> = all.map(|page| path(&tables, &arena, page)).collect();
            assert!(paths[..4].iter().flatten().all(|raw| raw & (1 << 8) != 0), "{paths:x?}");
            after.push(paths);
        }
        assert_eq!(after[0], after[1]);
    }
}
