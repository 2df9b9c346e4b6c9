//! Consumers of dirty state: each has its own view of what was written. Here are single calls, on
//! every kind of format.

use crate::common::hardware::arm::Arm;
use crate::common::hardware::ept::Ept;
use crate::common::hardware::grouped::Grouped;
use crate::common::hardware::npt::Npt;
use crate::common::hardware::power::Core;
use crate::common::hardware::riscv::Hart;
use crate::common::hardware::{Access as Used, Config, Hardware};
use crate::common::stage::{CLEAN, K, M, RAM, range, refused, says};
use crate::common::world::{CacheOf, GuardOf, TablesOf, cache};
use crate::common::{TestPlatform, destroy};
use slat::{
    Access, AddressSpace, Attributes, BreakBeforeMake, ChangeError, Consumer, ConsumerError, Gpa,
    GpaRange, Hpa, PageSize, Pages, Software, Stopped, UnmapBatch, UnmapEntry, Vmid,
};
use std::collections::BTreeSet;

mod histories;

const CONFIG: Config =
    Config { forced_write_back: false, hardware_marks: true, split_execute: false };
const BITS: u32 = 40;
/// The distance of host memory from guest memory: a multiple of every block.
const HOST: u64 = 1 << 34;

/// The marks of a log and a pager: the last software bits of the format.
fn marks<H: Hardware>() -> [Software; 2] {
    [1, 2].map(|back| Software::bit(H::SOFTWARE_BITS - back))
}

/// A guest with a log and a pager, and a cache of `frames` frames.
fn with_consumers<H: Hardware>(
    bbm: BreakBeforeMake,
    body: impl for<'t, 'p> FnOnce(&mut Fixture<'_, 't, 'p, H>),
) {
    let platform = TestPlatform::new(bbm);
    let platform = &platform;
    let mut tables = TablesOf::<H>::new(H::format(&CONFIG), Vmid(1), BITS, platform).unwrap();
    let consumers = marks::<H>().map(|mark| tables.add_consumer(mark).unwrap());
    let mut storage = Vec::new();
    let mut reader = platform.register();
    {
        let cache = cache::<H>(platform, &mut storage, 300);
        let guard = tables.enter(&mut reader).unwrap();
        let hardware = H::of(&tables);
        body(&mut Fixture { platform, tables: &tables, hardware, consumers, guard, cache });
    }
    drop(reader);
    destroy(tables);
    assert_eq!(platform.live(), 0, "frames leaked");
}

/// As [`with_consumers`], on CPUs that demand a break, and on others.
fn on_both<H: Hardware>(body: impl for<'t, 'p> Fn(&mut Fixture<'_, 't, 'p, H>)) {
    for bbm in [BreakBeforeMake::Always, BreakBeforeMake::Never] {
        with_consumers::<H>(bbm, &body);
    }
}

struct Fixture<'c, 't, 'p, H: Hardware> {
    platform: &'p TestPlatform,
    tables: &'t TablesOf<'p, H>,
    hardware: H,
    consumers: [Consumer; 2],
    guard: GuardOf<'t, 'p, H>,
    cache: CacheOf<'c, H>,
}

impl<H: Hardware> Fixture<'_, '_, '_, H> {
    /// The guest writes; returns whether it could.
    fn write(&self, gpa: u64) -> bool {
        let from = self.hardware.root();
        matches!(self.hardware.access(self.platform, from, gpa, true), Used::Done { .. })
    }

    /// Returns which pages of `range` a consumer takes; `None` takes for no consumer.
    fn harvest(
        &mut self,
        whom: Option<Consumer>,
        range: GpaRange,
    ) -> Result<BTreeSet<u64>, ChangeError> {
        let page = H::size(0);
        let mut bitmap = vec![0; (range.size() / page).div_ceil(64) as usize];
        let result = match whom {
            Some(consumer) => self.guard.harvest_for(consumer, range, &mut bitmap),
            None => self.guard.harvest(range, &mut bitmap),
        };
        let named =
            (0..range.size() / page).filter(|n| bitmap[*n as usize / 64] >> (n % 64) & 1 == 1);
        let named: BTreeSet<_> = named.map(|n| range.start().0 + n * page).collect();
        assert_eq!(self.guard.pending_invalidation(), None, "completed inside");
        match result {
            Ok(count) => {
                assert_eq!(count, named.len() as u64);
                Ok(named)
            }
            Err(Stopped { at, reason }) => {
                assert_eq!((at, named.len()), (range.start(), 0));
                Err(reason)
            }
        }
    }

    fn attributes(&self, gpa: u64) -> Attributes {
        self.guard.translate(Gpa(gpa)).unwrap().unwrap().attributes
    }
}

macro_rules! on_every_format {
    ($test:ident) => {
        on!($test; npt, riscv, radix_64k);
    };
}

fn what_one_consumer_has_taken_is_dirty_for_the_other_once<H: Hardware>() {
    on_both::<H>(|fixture| {
        let page = H::size(0);
        let (all, [log, pager]) = (range(0, 4 * page), fixture.consumers);
        fixture
            .guard
            .map(all, Hpa(HOST), CLEAN, PageSize::from_bytes(page).unwrap(), &mut fixture.cache)
            .unwrap();
        assert!(fixture.write(0) && fixture.write(page));
        assert_eq!(fixture.harvest(Some(log), all), Ok([0, page].into()));
        assert_eq!(fixture.harvest(Some(log), all), Ok([].into()));
        assert!(fixture.write(page) && fixture.write(2 * page));
        assert!(!log.is_dirty(&fixture.attributes(0)) && pager.is_dirty(&fixture.attributes(0)));
        assert_eq!(fixture.harvest(Some(pager), all), Ok([0, page, 2 * page].into()));
        assert_eq!(fixture.harvest(Some(pager), all), Ok([].into()));
        assert_eq!(fixture.harvest(Some(log), all), Ok([page, 2 * page].into()));
        // Takes exactly the pages that a bitmap names.
        assert!((0..4).all(|n| fixture.write(n * page)));
        let pages = Pages { start: Gpa(0), bits: &[0b0101] };
        assert_eq!(fixture.guard.clean_pages_for(log, &pages), Ok(2 * page));
        fixture.guard.invalidate();
        assert_eq!(fixture.harvest(Some(log), all), Ok([page, 3 * page].into()));
        assert_eq!(fixture.harvest(Some(pager), all), Ok((0..4).map(|n| n * page).collect()));
    });
}
on_every_format!(what_one_consumer_has_taken_is_dirty_for_the_other_once);

fn what_is_taken_for_no_consumer_is_dirty_for_all_consumers<H: Hardware>() {
    on_both::<H>(|fixture| {
        let page = H::size(0);
        let (all, [log, pager]) = (range(0, 2 * page), fixture.consumers);
        fixture
            .guard
            .map(all, Hpa(HOST), CLEAN, PageSize::from_bytes(page).unwrap(), &mut fixture.cache)
            .unwrap();
        assert!(fixture.write(0));
        assert_eq!(fixture.harvest(None, all), Ok([0].into()));
        assert!(fixture.write(page));
        assert_eq!(fixture.guard.clean(all), Ok(page));
        fixture.guard.invalidate();
        for consumer in [log, pager] {
            let before = fixture.guard.counts().invalidations;
            assert_eq!(fixture.harvest(Some(consumer), all), Ok([0, page].into()));
            assert_eq!(fixture.guard.counts().invalidations, before + 1, "of marks alone");
        }
        assert_eq!(fixture.harvest(None, all), Ok([].into()));
    });
}
on_every_format!(what_is_taken_for_no_consumer_is_dirty_for_all_consumers);

fn a_page_that_is_taken_out_says_for_each_consumer_whether_it_is_dirty<H: Hardware>() {
    on_both::<H>(|fixture| {
        let page = H::size(0);
        let (all, [log, pager]) = (range(0, 4 * page), fixture.consumers);
        let small = PageSize::from_bytes(page).unwrap();
        fixture.guard.map(all, Hpa(HOST), CLEAN, small, &mut fixture.cache).unwrap();
        // A page that is dirty for both, for the pager, for the log, and for neither.
        assert!((0..3).all(|n| fixture.write(n * page)));
        assert_eq!(fixture.harvest(Some(log), range(page, page)).unwrap().len(), 1);
        assert_eq!(fixture.harvest(Some(pager), range(2 * page, page)).unwrap().len(), 1);
        let mut storage = [const { UnmapEntry::EMPTY }; 4];
        let mut batch = UnmapBatch::new(fixture.tables, &mut storage);
        assert_eq!(fixture.guard.unmap(all, &mut batch), Ok(4 * page));
        let told: Vec<_> = batch.complete().collect();
        let dirty = |leaf: &slat::UnmappedRun| [log, pager].map(|c| c.is_dirty(&leaf.attributes));
        let expected = [[true, true], [false, true], [true, false], [false, false]];
        assert_eq!(told.iter().map(dirty).collect::<Vec<_>>(), expected);
        // A page that comes back as it left is dirty for the same consumers.
        for leaf in &told {
            let at = range(leaf.gpa.0, leaf.bytes);
            fixture.guard.map(at, leaf.hpa, leaf.attributes, small, &mut fixture.cache).unwrap();
        }
        assert_eq!(fixture.harvest(Some(log), all), Ok([0, 2 * page].into()));
        assert_eq!(fixture.harvest(Some(pager), all), Ok([0, page].into()));
    });
}
on_every_format!(a_page_that_is_taken_out_says_for_each_consumer_whether_it_is_dirty);

fn a_mark_goes_to_all_pages_of_a_block_and_comes_back_to_it<H: Hardware>() {
    on_both::<H>(|fixture| {
        let (page, block) = (H::size(0), H::size(1));
        let (all, [log, pager]) = (range(0, block), fixture.consumers);
        let (small, large) =
            (PageSize::from_bytes(page).unwrap(), PageSize::from_bytes(block).unwrap());
        fixture.guard.map(all, Hpa(HOST), CLEAN, large, &mut fixture.cache).unwrap();
        assert!(fixture.write(3 * page));
        let every: BTreeSet<_> = (0..block / page).map(|n| n * page).collect();
        assert_eq!(fixture.harvest(Some(log), all), Ok(every.clone()));
        fixture.guard.split(range(0, page), small, &mut fixture.cache).unwrap();
        // The block is dirty as a whole; now each page is.
        assert_eq!(fixture.harvest(Some(pager), range(page, 4 * page)).unwrap().len(), 4);
        fixture.guard.write_protect(range(0, 2 * page)).unwrap();
        assert!(!fixture.write(page));
        fixture.guard.relax(range(0, 2 * page), Access::Read).unwrap().not_needed_here();
        fixture.guard.invalidate();
        assert_eq!(fixture.guard.collapse(all, large), Ok(0), "they differ in rights");
        fixture.guard.allow_write(range(0, 2 * page), Software::NONE).unwrap().not_needed_here();
        let plain = |attributes: &Attributes| attributes.software == Software::NONE;
        let collapsed = fixture.guard.collapse_where(all, large, plain);
        assert_eq!(collapsed, Ok(block), "they differ in marks alone");
        assert!(!log.is_dirty(&fixture.attributes(0)) && pager.is_dirty(&fixture.attributes(page)));
        // Leaves agree regardless of their marks.
        assert_eq!(fixture.guard.map(all, Hpa(HOST), CLEAN, large, &mut fixture.cache), Ok(0));
        let read = Attributes { write: false, ..CLEAN };
        assert_eq!(fixture.guard.replace(all, Hpa(HOST), Hpa(HOST), read), Ok(block));
        let marked = Attributes { software: marks::<H>()[1], ..read };
        let done = fixture.guard.replace(all, Hpa(HOST), Hpa(HOST), marked);
        assert_eq!(done, Ok(0), "it has the mark");
        assert_eq!(fixture.harvest(Some(log), all), Ok([].into()));
        assert_eq!(fixture.harvest(Some(pager), all), Ok(every));
    });
}
on_every_format!(a_mark_goes_to_all_pages_of_a_block_and_comes_back_to_it);

fn a_consumer_that_takes_a_mark_alone_owes_an_invalidation<H: Hardware>() {
    on_both::<H>(|fixture| {
        let page = H::size(0);
        let (all, [log, pager]) = (range(0, page), fixture.consumers);
        fixture
            .guard
            .map(all, Hpa(HOST), CLEAN, PageSize::from_bytes(page).unwrap(), &mut fixture.cache)
            .unwrap();
        assert!(fixture.write(0));
        assert_eq!(fixture.guard.clean_for(log, all), Ok(page));
        // The removals of another thread, which completes later.
        let late = fixture.guard.shootdown();
        assert_eq!(fixture.guard.clean_for(pager, all), Ok(page));
        assert_eq!(
            fixture.guard.pending_invalidation().unwrap().range,
            Some(all),
            "of the mark alone"
        );
        fixture.guard.invalidate();
        // The log has not completed: an unmapped page may have been written.
        let mut storage = [const { UnmapEntry::EMPTY }; 1];
        let mut batch = UnmapBatch::new(fixture.tables, &mut storage);
        fixture.guard.unmap(all, &mut batch).unwrap();
        assert!(batch.complete().all(|leaf| log.is_dirty(&leaf.attributes)));
        late.complete();
    });
}
on_every_format!(a_consumer_that_takes_a_mark_alone_owes_an_invalidation);

fn a_consumers_mark_is_no_bit_of_the_users<H: Hardware>() {
    on_both::<H>(|fixture| {
        let page = H::size(0);
        let all = range(0, page);
        let [log, pager] = fixture.consumers.map(Consumer::mark);
        fixture
            .guard
            .map(all, Hpa(HOST), CLEAN, PageSize::from_bytes(page).unwrap(), &mut fixture.cache)
            .unwrap();
        let before = fixture.attributes(0);
        let marks = log.union(pager);
        assert_eq!(fixture.tables.consumers(), marks);
        let reason = |given| ChangeError::Consumers { given, marks };
        let none = Software::NONE;
        let said = refused(fixture.guard.set_software(all, log, none), 0, reason(log));
        says(&said, &["marks of consumers"]);
        refused(fixture.guard.set_software(all, none, marks), 0, reason(marks));
        refused(fixture.guard.relax_where(all, Access::Write, pager), 0, reason(pager));
        refused(fixture.guard.allow_write(all, pager), 0, reason(pager));
        refused(fixture.guard.allow_execute(all, Access::Execute, log), 0, reason(log));
        refused(fixture.guard.grant_write(Gpa(0), Hpa(HOST), log), 0, reason(log));
        assert_eq!(fixture.attributes(0), before);
        if let Some(free) = (H::SOFTWARE_BITS > 2).then(|| Software::bit(0)) {
            assert_eq!(
                fixture.guard.set_software(all, free, none),
                Ok(page),
                "others are the user's"
            );
        }
    });
}
on_every_format!(a_consumers_mark_is_no_bit_of_the_users);

#[test]
fn a_consumer_is_refused_where_it_has_no_mark_of_its_own() {
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let format = Hart::<true>::format(&CONFIG);
    let mut tables = TablesOf::<Hart<true>>::new(format, Vmid(1), BITS, &platform).unwrap();
    let bits = Hart::<true>::SOFTWARE_BITS;
    let (given, both) = (Software::bit(bits), Software::A.union(Software::B));
    let refusal = tables.add_consumer(given).unwrap_err();
    assert_eq!(refusal, ConsumerError::NoSuchBit { given, bits });
    says(&refusal.to_string(), &["2 software bits", "0b100"]);
    for given in [Software::NONE, both] {
        let refusal = tables.add_consumer(given).unwrap_err();
        assert_eq!(refusal, ConsumerError::OneBit { given });
        says(&refusal.to_string(), &["one software bit"]);
    }
    assert_eq!(tables.consumers(), Software::NONE);
    let log = tables.add_consumer(Software::A).unwrap();
    let refusal = tables.add_consumer(Software::A).unwrap_err();
    assert_eq!(refusal, ConsumerError::Taken { given: Software::A });
    says(&refusal.to_string(), &["another consumer"]);

    // The consumer of other tables; here the bit belongs to the user.
    let other = TablesOf::<Hart<true>>::new(format, Vmid(2), BITS, &platform).unwrap();
    let mut reader = platform.register();
    let mut guard = other.enter(&mut reader).unwrap();
    let page = range(0, 4 * K);
    let said = refused(guard.clean_for(log, page), 0, ChangeError::ForeignConsumer);
    says(&said, &["no such consumer"]);
    refused(guard.harvest_for(log, page, &mut [0]), 0, ChangeError::ForeignConsumer);
    drop(guard);
    drop(reader);
    destroy(other);
    destroy(tables);
}

#[test]
fn an_address_space_has_consumers_as_well() {
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let format = Ept::<true>::format(&CONFIG);
    let mut space = AddressSpace::new(format, Vmid(1), BITS, &platform).unwrap();
    let [log, pager] = marks::<Ept<true>>().map(|mark| space.add_consumer(mark).unwrap());
    assert!(space.add_consumer(pager.mark()).is_err());
    let page = range(0, 4 * K);
    space.map(page, Hpa(HOST), RAM, PageSize::SIZE_4K).unwrap();
    let mut bitmap = [0];
    for consumer in [log, pager] {
        assert_eq!(space.enter().harvest_for(consumer, page, &mut bitmap), Ok(1));
        bitmap = [0];
        assert_eq!(space.enter().harvest_for(consumer, page, &mut bitmap), Ok(0));
    }
    // SAFETY: no CPU has the root loaded.
    unsafe { space.destroy() };
}

#[test]
fn what_was_cleaned_before_a_consumer_came_is_invalidated_first() {
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let format = Ept::<true>::format(&CONFIG);
    let mut tables = TablesOf::<Ept<true>>::new(format, Vmid(1), BITS, &platform).unwrap();
    let mut storage = Vec::new();
    let mut cache = cache::<Ept<true>>(&platform, &mut storage, 4);
    let page = range(0, 4 * K);
    let mut guard = tables.enter_mut();
    guard.map(page, Hpa(HOST), RAM, PageSize::SIZE_4K, &mut cache).unwrap();
    guard.clean(page).unwrap();
    drop(guard.shootdown());
    drop(guard);
    platform.take_events();
    tables.add_consumer(Software::A).unwrap();
    assert_eq!(platform.take_events().len(), 1);
    tables.add_consumer(Software::B).unwrap();
    assert_eq!(platform.take_events(), []);
    drop(cache);
    destroy(tables);
}

#[test]
fn a_group_is_unfolded_for_the_consumer_that_takes_it_and_all_of_it_is_dirty_for_the_other() {
    with_consumers::<Grouped<12>>(BreakBeforeMake::Always, |fixture| {
        let (all, [log, pager]) = (range(0, 64 * K), fixture.consumers);
        let small = PageSize::SIZE_4K;
        fixture.guard.map_contiguous(all, Hpa(HOST), CLEAN, small, &mut fixture.cache).unwrap();
        assert!(fixture.write(20 * K));
        assert_eq!(fixture.harvest(Some(log), all).unwrap().len(), 16);
        assert_eq!(fixture.harvest(Some(pager), range(0, 8 * K)).unwrap().len(), 2);
        assert_eq!(fixture.harvest(Some(pager), all).unwrap().len(), 14);
        // A group that is mapped with a mark.
        let group = range(2 * M, 64 * K);
        let marked = Attributes { software: pager.mark(), ..CLEAN };
        fixture
            .guard
            .map_contiguous(group, Hpa(HOST + 2 * M), marked, small, &mut fixture.cache)
            .unwrap();
        assert_eq!(fixture.harvest(Some(log), group), Ok([].into()));
        assert_eq!(fixture.harvest(Some(pager), group).unwrap().len(), 16);
        assert_eq!(fixture.harvest(Some(pager), group), Ok([].into()));
    });
}
