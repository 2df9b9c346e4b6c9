//! How long each operation waits for a thread that never comes back.

use crate::common::hardware::Hardware;
use crate::common::stage::{self, G, K, M, RAM, ept, holding, on_stage, range, refused};
use crate::common::world::{CacheOf, GuardOf};
use crate::common::{Moment, TestPlatform};
use slat::{
    Access, AddressSpace, AgeOptions, Attributes, BreakBeforeMake, Contention, Format, Gpa,
    GpaRange, Hpa, LocalFlush, Owner, PageSize, Pages, Relax, Rights, Software, SplitError,
    TableBits, TableCache, UnmapEntry, Vmid,
};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;
/// The turns that one call may wait.
const PATIENCE: u64 = 1 << 12;

fn all() -> GpaRange {
    range(2 * M, 2 * M)
}

const HELD: u64 = 2 * M;

fn page() -> GpaRange {
    range(HELD, 4 * K)
}

fn pages(bits: &[u64; 8]) -> Pages<'_> {
    Pages { start: Gpa(2 * M), bits }
}

fn granted<H: Hardware, E>(result: Result<LocalFlush<'_, '_, H::Format, TestPlatform>, E>) {
    let _ = result.map(LocalFlush::not_needed_here);
}

type Call<H> = for<'t, 'p> fn(&mut GuardOf<'t, 'p, H>, &mut CacheOf<'_, H>);

fn age<H: Hardware>(guard: &mut GuardOf<'_, '_, H>, clear: bool, skip: TableBits) {
    stage::age(guard, all(), AgeOptions { clear, table_bits: skip, flush_tlb: false });
}

fn unmap<H: Hardware>(guard: &mut GuardOf<'_, '_, H>, at: GpaRange) {
    let mut places = [UnmapEntry::EMPTY; 4];
    let mut batch = guard.unmap_batch(&mut places);
    let _ = guard.unmap(at, &mut batch);
    batch.complete().for_each(drop);
}

/// Every operation of a guard, on a table whose first entries are held.
#[rustfmt::skip]
fn calls<H: Hardware>() -> Vec<(&'static str, Call<H>)> {
    vec![
        ("map", |g, c| { let _ = g.map(all(), Hpa(0), RAM, PAGE, c); }),
        ("map of a page", |g, c| { let _ = g.map(page(), Hpa(0), RAM, PAGE, c); }),
        ("map_contiguous", |g, c| { let _ = g.map_contiguous(all(), Hpa(0), RAM, PAGE, c); }),
        ("reserve", |g, c| { let _ = g.reserve(Gpa(HELD), PAGE, c); }),
        ("reserve_contiguous", |g, c| { let _ = g.reserve_contiguous(Gpa(HELD), PAGE, c); }),
        ("set_owner", |g, c| { let _ = g.set_owner(all(), None, Owner::new(1), c); }),
        ("owner", |g, _| { let _ = g.owner(Gpa(HELD)); }),
        ("translate", |g, _| { let _ = g.translate(Gpa(HELD)); }),
        ("descriptor", |g, _| { let _ = g.descriptor(Gpa(HELD)); }),
        ("leaves", |g, _| { let _ = g.leaves(all()).unwrap().count(); }),
        ("dump", |g, _| { let _ = g.dump().to_string(); }),
        ("flush", |g, _| { let _ = g.clean_caches(all()); }),
        ("write_protect", |g, _| { let _ = g.write_protect(all()); }),
        ("write_protect of a page", |g, _| { let _ = g.write_protect(page()); }),
        ("write_protect_pages", |g, _| { let _ = g.write_protect_pages(&pages(&[!5; 8])); }),
        ("execute_protect", |g, _| { let _ = g.execute_protect(all()); }),
        ("protect", |g, _| { let _ = g.protect(all(), Rights::READ); }),
        ("protect, writable", |g, _| { let _ = g.protect(all(), Rights::ALL); }),
        ("relax, read", |g, _| granted::<H, _>(g.relax(all(), Access::Read))),
        ("relax, write", |g, _| granted::<H, _>(g.relax(all(), Access::Write))),
        ("relax, fetch", |g, _| granted::<H, _>(g.relax(all(), Access::Execute))),
        ("relax of a page, read", |g, _| granted::<H, _>(g.relax(page(), Access::Read))),
        ("relax of a page, write", |g, _| granted::<H, _>(g.relax(page(), Access::Write))),
        ("relax of a page, fetch", |g, _| granted::<H, _>(g.relax(page(), Access::Execute))),
        ("relax, only if", |g, _| {
            granted::<H, _>(g.relax(all(), Relax::new(Access::Write).only_if(Software::NONE)));
        }),
        ("relax of a page behind", |g, _| {
            granted::<H, _>(g.relax(range(4 * M - 4 * K, 4 * K), Access::Write));
        }),
        ("grant_write", |g, _| granted::<H, _>(g.grant_write(Gpa(HELD), Hpa(0), Software::NONE))),
        ("relax, unmarked", |g, _| {
            granted::<H, _>(g.relax(all(), Relax::new(Access::Write).unmarked()));
        }),
        ("relax for a fetch, unmarked", |g, _| {
            granted::<H, _>(g.relax(all(), Relax::new(Access::Execute).unmarked()));
        }),
        ("set_software", |g, _| { let _ = g.set_software(all(), Software::A, Software::NONE); }),
        ("clean", |g, _| { let _ = g.clean(all()); }),
        ("clean_pages", |g, _| { let _ = g.clean_pages(&pages(&[!5; 8])); }),
        ("harvest", |g, _| { let _ = g.harvest(all(), &mut [0; 8]); }),
        ("age, every leaf", |g, _| age::<H>(g, true, TableBits::Ignored)),
        ("age, exact", |g, _| age::<H>(g, true, TableBits::Exact)),
        ("age, test", |g, _| age::<H>(g, false, TableBits::Exact)),
        ("age_leaf", |g, _| { let _ = g.age_leaf(Gpa(HELD), true); }),
        ("split", |g, c| { let _ = g.split(all(), PAGE, c); }),
        ("split_to_execute", |g, c| {
            granted::<H, _>(g.split_to_execute(page(), c, Access::Execute, Software::NONE));
        }),
        ("collapse", |g, _| { let _ = g.collapse(range(0, 8 * M), BLOCK); }),
        ("unfold", |g, _| { let _ = g.unfold(all()); }),
        ("prune", |g, _| { let _ = g.prune(all()); }),
        ("replace", |g, _| {
            let _ = g.replace(all(), Hpa(0), Hpa(G), Attributes { write: false, ..RAM });
        }),
        ("replace, writable", |g, _| {
            let other = Attributes { execute: slat::Execute::None, ..RAM };
            let _ = g.replace(all(), Hpa(0), Hpa(0), other);
        }),
        ("unmap", |g, _| unmap::<H>(g, all())),
        ("unmap of a page", |g, _| unmap::<H>(g, page())),
    ]
}

/// What stands in the way: entries of pages from 2m on, each replaced by what `held` makes of it,
/// and of other tables of pages one each; or the entry of a block at 2m.
#[derive(Clone, Copy)]
struct Way<H: Hardware> {
    name: &'static str,
    held: fn(u64) -> u64,
    size: PageSize,
    count: u64,
    hardware: std::marker::PhantomData<H>,
}

/// Each operation, beside each holder that never comes back.
fn an_operation_waits_one_patience_for_an_absent_holder<H: Hardware>() {
    let way = |name, held, size, count| Way::<H> {
        name,
        held,
        size,
        count,
        hardware: std::marker::PhantomData,
    };
    let retired: fn(u64) -> u64 = |_| H::Format::retired(Hpa(0));
    let ways = [
        way("frozen", |_| H::MARK, PAGE, 64),
        way("sealed", |raw| raw | H::MARK, PAGE, 64),
        way("retired", retired, PAGE, 64),
        way("all retired", retired, PAGE, 512),
        way("a frozen block", |_| H::MARK, BLOCK, 1),
        way("a sealed block", |raw| raw | H::MARK, BLOCK, 1),
    ];
    for way in ways {
        for (name, call) in calls::<H>() {
            on_stage::<H>((H::usual(), 40, 16), |tables, guard, cache| {
                let four = range(0, 8 * M);
                let size = if way.size == BLOCK { BLOCK } else { PAGE };
                guard.map(four, Hpa(0), RAM, size, cache).unwrap();
                let hardware = H::of(tables);
                let places = (0..way.count).map(|page| 2 * M + page * 4 * K);
                let others = [0, 4 * M, 6 * M].into_iter().filter(|_| way.size == PAGE);
                let looks = Arc::new(AtomicU64::new(0));
                let seen = looks.clone();
                let before = guard.counts().entries_read;
                holding((hardware, guard.platform()), places.chain(others), way.held, || {
                    guard.platform().entered(Some(Box::new(move |_, _| {
                        seen.fetch_add(1, SeqCst);
                    })));
                    call(guard, cache);
                    guard.platform().entered(None);
                });
                let read = guard.counts().entries_read - before;
                // A turn reads at most the way to the entry, four tables, and a child; tables
                // become accessed on the same way. A look-up, which counts no entries, follows
                // three links. Two bounds in a row would be beyond this.
                let (read, looks) = (read, looks.load(SeqCst));
                let links = if read == 0 { 3 } else { 7 };
                let said = format!("{name}, {}: {read} entries, {looks} tables", way.name);
                assert!(
                    read <= 5 * PATIENCE + 512 && looks <= links * PATIENCE + 10 * 512,
                    "{said}"
                );
            });
        }
    }
}

on!(an_operation_waits_one_patience_for_an_absent_holder);

/// A leaf of one table is held, and the entry behind that table.
fn a_collapse_waits_one_patience_for_leaves_and_links_together<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 16), |tables, guard, cache| {
        guard.map(range(0, 2 * M), Hpa(0), RAM, PAGE, cache).unwrap();
        guard.map(all(), Hpa(2 * M), RAM, BLOCK, cache).unwrap();
        let hardware = H::of(tables);
        // Each turn of a walk reads the entry again.
        let before = guard.counts().entries_read;
        let of = (hardware, guard.platform());
        holding(
            of,
            [4 * K],
            |raw| raw | H::MARK,
            || {
                holding(
                    of,
                    [2 * M],
                    |_| H::MARK,
                    || refused(guard.collapse(range(0, 4 * M), BLOCK), 0, SplitError::Contended),
                )
            },
        );
        let read = guard.counts().entries_read - before;
        assert!(read < PATIENCE / 2, "{read} entries, after all turns were waited for a leaf");
        assert_eq!(guard.collapse(range(0, 4 * M), BLOCK), Ok(2 * M));
    });
}
on!(a_collapse_waits_one_patience_for_leaves_and_links_together);

#[test]
fn a_query_ends_while_a_mapping_of_that_address_is_told() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let space = AddressSpace::new(ept::<true>(), Vmid(1), 40, &platform).unwrap();
    let mut storage = [const { None }; 4];
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(4).unwrap();
    let mut guard = space.enter();
    let reserved = guard.reserve(Gpa(2 * M), PAGE, &mut cache).unwrap();
    let told = reserved.commit_told(Hpa(M), RAM, || {
        assert_eq!(space.query(Gpa(2 * M)), None);
        let contended = Contention { at: Gpa(2 * M) };
        assert_eq!(space.translate(Gpa(2 * M)), Err(contended));
        Ok::<(), ()>(())
    });
    assert_eq!(told, Ok(Ok(Some(4 * K))));
    assert_eq!(space.translate(Gpa(2 * M)).unwrap().unwrap().hpa, Hpa(M));
    drop((guard, cache));
    // SAFETY: no machine has the root.
    unsafe { space.destroy() };
}

/// An invalidation that interrupts other CPUs ends when each has served it. One of them handles an
/// exit with interrupts off, and asks for the address whose leaf stands broken meanwhile.
#[test]
fn a_query_with_interrupts_off_does_not_stop_an_invalidation() {
    // The hook outlives all borrows.
    let platform: &'static _ = Box::leak(Box::new(TestPlatform::new(BreakBeforeMake::Never)));
    let mut space = AddressSpace::new(ept::<true>(), Vmid(1), 40, platform).unwrap();
    let (page, read) = (range(2 * M, 4 * K), Attributes { write: false, ..RAM });
    space.map(page, Hpa(0), read, PAGE).unwrap();
    let space: &'static _ = Box::leak(Box::new(space));
    let asked = Rc::new(Cell::new(0));
    let asks = asked.clone();
    platform.meanwhile(Some(Box::new(move |_, moment| {
        if moment == Moment::Invalidating {
            assert!(space.translate(Gpa(2 * M)).is_err());
            asks.set(asks.get() + 1);
        }
    })));
    space.enter().replace(page, Hpa(0), Hpa(M), read).unwrap();
    platform.meanwhile(None);
    assert_eq!((asked.get(), space.query(Gpa(2 * M)).unwrap().hpa), (1, Hpa(M)));
}
