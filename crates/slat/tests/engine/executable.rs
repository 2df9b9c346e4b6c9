//! Memory that is made coherent, all of it and no more, before the guest can fetch from it, and
//! where the host asks for it.

use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::hardware::ept::Ept;
use crate::common::hardware::grouped::GroupedArm;
use crate::common::stage::{BBM, G, K, M, RAM, on_stage, range, relax};
use crate::common::world::{VMID, cache, maintained};
use crate::common::{Event, Moment, TestPlatform, destroy, unmap};
use slat::{
    Access, Attributes, Execute, Gpa, GpaRange, Hpa, Maintenance, Memory, PageSize, Relax, Rights,
    Software, Tables,
};

const DATA: Attributes =
    Attributes { execute: Execute::None, software: Software::A, accessed: false, ..RAM };
/// The addresses of a guest's blocks, in the guest and in the host.
const AT: u64 = 4 * G;
const HOST: u64 = 32 * G;

/// Addresses from which the guest can fetch.
fn executable<H: Hardware>(hardware: H, memory: &TestPlatform) -> Vec<(u64, u64)> {
    let mut all: Vec<(u64, u64)> = Vec::new();
    let tree = hardware.tree(memory);
    for run in tree.runs.iter().filter(|run| run.leaf.own.execute == Execute::All) {
        match all.last_mut() {
            Some(last) if last.1 == run.start => last.1 = run.end,
            _ => all.push((run.start, run.end)),
        }
    }
    all
}

/// From now on, the test checks that memory is not executable while it is made coherent.
fn coherent_first<H: Hardware>(hardware: H, platform: &TestPlatform) {
    platform.meanwhile(Some(Box::new(move |platform, moment| {
        if let Moment::Maintain { hpa, bytes } = moment {
            let (start, end) = (hpa - HOST + AT, hpa - HOST + AT + bytes);
            let executable = executable(hardware, platform);
            let early = executable.iter().find(|run| run.0 < end && start < run.1);
            assert_eq!(early, None, "before it was coherent");
        }
    })));
}

/// Splits blocks of `size` into pages that may be executed where `part` lies, on each kind of CPU;
/// returns what became executable, from the first block on.
fn split<H: Hardware>(format: H::Format, size: u64, part: GpaRange, bits: Software) -> (u64, u64) {
    let mut found = Vec::new();
    for bbm in BBM {
        let platform = TestPlatform::new(bbm);
        let mut tables = Tables::new(format, VMID, 40, &platform).unwrap();
        let hardware = H::of(&tables);
        let mut storage = Vec::new();
        let mut cache = cache::<H>(&platform, &mut storage, 8);
        let mut guard = tables.enter_mut();
        let largest = slat::PageSize::from_bytes(size).unwrap();
        let blocks = range(AT, 2 * size);
        assert_eq!(guard.map(blocks, Hpa(HOST), DATA, largest, &mut cache), Ok(2 * size));
        platform.take_events();
        coherent_first(hardware, &platform);
        guard.split_to_execute(part, &mut cache, Access::Execute, bits).unwrap().not_needed_here();
        let events = platform.take_events();
        platform.meanwhile(None);
        let new = executable(hardware, &platform);
        let memory: Vec<_> = new.iter().map(|(a, b)| (a - AT + HOST, b - AT + HOST)).collect();
        assert_eq!(maintained(&events, Some(&Maintenance::Instructions)), memory);
        assert_eq!(events.last(), Some(&Event::Publish), "who faulted is to find it");
        let accessed = hardware.tree(&platform).runs.iter().any(|run| run.leaf.own.accessed);
        assert!(!accessed, "nobody has used it");
        let (start, end) = new.first().copied().unwrap_or((AT, AT));
        assert!(new.len() <= 1);
        found.push((start - AT, end - AT));
        guard.invalidate();
        drop((guard, cache));
        destroy(tables);
    }
    assert!(found.iter().all(|one| *one == found[0]), "{found:x?}");
    found[0]
}

fn a_table_is_coherent_before_its_pages_become_executable<H: Hardware>() {
    let format = H::usual();
    let whole = |size, at, bytes| split::<H>(format, size, range(AT + at, bytes), DATA.software);
    // The first page, one in the middle, the last; pages on both sides of a block's end.
    for at in [0, 1020 * K, 2044 * K] {
        assert_eq!(whole(2 * M, at, 4 * K), (0, 2 * M));
    }
    assert_eq!(whole(2 * M, 2 * M - 4 * K, 8 * K), (0, 4 * M));
    // In a large block, only the tables that the range touches; the rest stays as it was.
    assert_eq!(whole(G, 6 * M + 8 * K, 4 * K), (6 * M, 8 * M));
    assert_eq!(whole(G, 4 * M - 4 * K, 8 * K), (2 * M, 6 * M));
    assert_eq!(whole(G, G - 4 * K, 8 * K), (G - 2 * M, G + 2 * M));
    let bits = DATA.software.union(Software::B);
    let (size, part) = (2 * M, range(AT, 4 * K));
    assert_eq!(split::<H>(format, size, part, bits), (0, 0), "it lacks one of the bits");
}
on!(a_table_is_coherent_before_its_pages_become_executable);

fn exactly_the_pages_that_become_executable_are_made_coherent<H: Hardware>() {
    let platform = TestPlatform::new(slat::BreakBeforeMake::Never);
    let mut tables = Tables::new(H::usual(), VMID, 40, &platform).unwrap();
    let hardware = H::of(&tables);
    let mut storage = Vec::new();
    let mut cache = cache::<H>(&platform, &mut storage, 8);
    let mut guard = tables.enter_mut();
    // A leaf that may be executed already; one that has one bit of two; memory of a device.
    let kinds = [
        DATA,
        Attributes { execute: Execute::All, ..DATA },
        Attributes { software: Software::B, ..DATA },
        Attributes { accessed: true, ..DATA },
        Attributes { software: Software::B, ..DATA },
    ];
    let page = slat::PageSize::SIZE_4K;
    for (at, kind) in (0..).map(|page| page * 4 * K).zip(kinds) {
        guard.map(range(AT + at, 4 * K), Hpa(HOST + at), kind, page, &mut cache).unwrap();
    }
    let block = range(AT + 2 * M, 2 * M);
    let large = slat::PageSize::SIZE_2M;
    guard.map(block, Hpa(HOST + 2 * M), DATA, large, &mut cache).unwrap();
    let pieces = || {
        let events = platform.take_events();
        assert_eq!(events.last(), Some(&Event::Publish));
        maintained(&events, Some(&Maintenance::Instructions))
    };
    let at = |first: u64, end: u64| (HOST + first * 4 * K, HOST + end * 4 * K);
    platform.take_events();
    coherent_first(hardware, &platform);
    assert_eq!(
        relax(
            &mut guard,
            range(AT, 16 * K),
            Relax::new(Access::Execute).only_if(Software::A).unmarked()
        ),
        Ok(8 * K)
    );
    assert_eq!(pieces(), [at(0, 1), at(3, 4)]);
    let accessed = |gpa| guard.translate(Gpa(gpa)).unwrap().unwrap().attributes.accessed;
    assert!(!accessed(AT) && accessed(AT + 12 * K), "one was used, and the other not");
    // A use makes the leaf executable that was not, and the others accessed.
    assert_eq!(relax(&mut guard, range(AT, 16 * K), Access::Execute), Ok(12 * K));
    assert_eq!(pieces(), [at(2, 3)]);
    // A page by itself.
    assert_eq!(relax(&mut guard, range(AT + 16 * K, 4 * K), Access::Execute), Ok(4 * K));
    assert_eq!(pieces(), [at(4, 5)]);
    platform.take_events();
    assert_eq!(
        relax(&mut guard, block, Relax::new(Access::Execute).only_if(Software::B).unmarked()),
        Ok(0),
        "it lacks the bit"
    );
    assert_eq!(platform.take_events(), []);
    assert_eq!(relax(&mut guard, block, Access::Execute), Ok(2 * M));
    assert_eq!(pieces(), [at(512, 1024)], "a block as a whole");
    drop((guard, cache));
    destroy(tables);
}
on!(exactly_the_pages_that_become_executable_are_made_coherent);

#[test]
fn memory_that_is_not_cached_is_not_flushed() {
    fn flushes<H: Hardware>(format: H::Format) {
        let platform = TestPlatform::new(slat::BreakBeforeMake::Never);
        let mut tables = Tables::new(format, VMID, 40, &platform).unwrap();
        let mut storage = Vec::new();
        let mut cache = cache::<H>(&platform, &mut storage, 8);
        let mut guard = tables.enter_mut();
        let kinds = [Memory::Normal, Memory::NonCacheable, Memory::Device, Memory::DeviceStrict];
        let page = slat::PageSize::SIZE_4K;
        for (at, memory) in (0..).map(|page| page * 4 * K).zip(kinds) {
            let kind = Attributes { memory, ..RAM };
            let _ = guard.map(range(AT + at, 4 * K), Hpa(HOST + at), kind, page, &mut cache);
        }
        platform.take_events();
        assert_eq!(guard.clean_caches(range(AT, 16 * K)), Ok(4 * K));
        let events = platform.take_events();
        assert_eq!(maintained(&events, Some(&Maintenance::Data)), [(HOST, HOST + 4 * K)]);
        drop((guard, cache));
        destroy(tables);
    }
    flushes::<Arm<12>>(slat::format::arm64::Arm64 { hardware_dirty: true, ..Default::default() });
    let format =
        slat::format::ept::Ept { output_bits: 48, forced_write_back: false, ..Default::default() };
    flushes::<Ept<true>>(format);
}

fn runs_of_pages_are_coherent_before_they_become_executable<H: Hardware>() {
    for way in 0..3 {
        let platform = TestPlatform::new(slat::BreakBeforeMake::Never);
        let mut tables = Tables::new(H::usual(), VMID, 40, &platform).unwrap();
        let hardware = H::of(&tables);
        let mut storage = Vec::new();
        let mut cache = cache::<H>(&platform, &mut storage, 8);
        let mut guard = tables.enter_mut();
        let pages = range(AT, 128 * K);
        let page = slat::PageSize::SIZE_4K;
        guard.map(pages, Hpa(HOST), DATA, page, &mut cache).unwrap();
        platform.take_events();
        coherent_first(hardware, &platform);
        let changed = match way {
            0 => guard.protect(pages, Rights::ALL).unwrap(),
            1 => relax(&mut guard, pages, Access::Execute).unwrap(),
            _ => relax(
                &mut guard,
                pages,
                Relax::new(Access::Execute).only_if(DATA.software).unmarked(),
            )
            .unwrap(),
        };
        platform.meanwhile(None);
        let memory = [(HOST, HOST + 128 * K)];
        let events = platform.take_events();
        assert_eq!(maintained(&events, Some(&Maintenance::Instructions)), memory, "{way}");
        assert_eq!((changed, executable(hardware, &platform)), (128 * K, vec![(AT, AT + 128 * K)]));
        guard.invalidate();
        drop((guard, cache));
        destroy(tables);
    }
}
on!(runs_of_pages_are_coherent_before_they_become_executable);

#[test]
fn no_leaf_maps_memory_while_it_is_made_coherent() {
    type H = GroupedArm<12>;
    const PAGE: PageSize = PageSize::SIZE_4K;
    let group = 64 * K;
    on_stage::<H>((Default::default(), 40, 16), |tables, guard, cache| {
        let (platform, hardware) = (guard.platform(), H::of(tables));
        // This page keeps the table.
        guard.map(range(M, 4 * K), Hpa(M), RAM, PAGE, cache).unwrap();
        platform.take_events();
        platform.meanwhile(Some(Box::new(move |platform, moment| {
            if let Moment::Maintain { hpa, bytes } = moment {
                let runs = hardware.tree(platform).runs;
                let early = runs.iter().find(|run| {
                    let at = run.oa(run.start);
                    at < hpa + bytes && hpa < at + (run.end - run.start)
                });
                assert!(early.is_none(), "{hpa:#x} is mapped: {early:?}");
            }
        })));
        let coherent = |what: &str, start: u64, bytes: u64| {
            let events = platform.take_events();
            let found = maintained(&events, Some(&Maintenance::Instructions));
            assert_eq!(found, [(start, start + bytes)], "{what}");
            assert_eq!(events.last(), Some(&Event::Publish), "{what}");
        };
        for (bytes, largest) in [(4 * K, PAGE), (8 * K, PAGE), (2 * M, PageSize::SIZE_2M)] {
            let (to, at) = (range(8 * M, bytes), Hpa(G));
            let to = if bytes < M { range(0, bytes) } else { to };
            guard.map(to, at, RAM, largest, cache).unwrap();
            coherent("map", G, bytes);
            unmap(guard, to);
        }
        guard.map(range(4 * M, 2 * M), Hpa(G), RAM, PAGE, cache).unwrap();
        coherent("map of a table", G, 2 * M);
        unmap(guard, range(4 * M, 2 * M));
        for (folds, told) in [(false, false), (false, true), (true, false), (true, true)] {
            let reserved = match folds {
                false => guard.reserve(Gpa(0), PAGE, cache).unwrap(),
                true => guard.reserve_contiguous(Gpa(0), PAGE, cache).unwrap(),
            };
            let all = reserved.range();
            assert_eq!(all.size(), if folds { group } else { 4 * K });
            match told {
                false => reserved.commit(Hpa(G), RAM).unwrap(),
                true => reserved.commit_told(Hpa(G), RAM, || Ok::<(), ()>(())).unwrap().unwrap(),
            };
            coherent("commit", G, all.size());
            unmap(guard, all);
        }
        let read = Attributes { write: false, ..RAM };
        let uncached = Attributes { memory: Memory::NonCacheable, ..read };
        for (bytes, largest) in [(4 * K, PAGE), (32 * K, PAGE), (2 * M, PageSize::SIZE_2M)] {
            let to = range(if bytes < M { 0 } else { 8 * M }, bytes);
            guard.map(to, Hpa(G), read, largest, cache).unwrap();
            platform.take_events();
            assert_eq!(guard.replace(to, Hpa(G), Hpa(2 * G), read), Ok(bytes));
            coherent("other memory", 2 * G, bytes);
            assert_eq!(guard.replace(to, Hpa(2 * G), Hpa(2 * G), uncached), Ok(bytes));
            coherent("another type of memory", 2 * G, bytes);
            unmap(guard, to);
        }
        platform.meanwhile(None);
    });
}
