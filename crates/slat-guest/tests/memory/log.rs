//! The dirty log: all ways of keeping, reading and clearing it.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, PageSize};
use slat_guest::*;
use slat_sim::Moment;

/// The configurations that log on this machine.
fn ways<C: Case>() -> impl Iterator<Item = Config> {
    let hardware = C::HARDWARE_DIRTY.then_some(Logging::Hardware);
    let eager = [None, Some(PageSize::SIZE_4K)];
    [Logging::Protect].into_iter().chain(hardware).flat_map(move |logging| {
        eager.map(|eager_split| Config { logging, eager_split, ..config() })
    })
}

fn pages(bitmap: &[u64]) -> Vec<u64> {
    let set = |page: &u64| bitmap[*page as usize / 64] >> (page % 64) & 1 == 1;
    (0..bitmap.len() as u64 * 64).filter(set).collect()
}

on_all! {
    fn the_log_names_exactly_the_pages_written_since_their_clear<C: Case>() {
        for config in ways::<C>() {
            with_guest!(C, config, memslot(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
            for page in 0..2048 {
                attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
            }
            let on = vcpu.worker().set_memslot(logged(4 * M2)).unwrap();
            let MemslotChange::LogOn(report) = on else { panic!("{on:?}") };
            let split = report.map(|report| (report.split, report.stopped));
            assert_eq!(split, config.eager_split.map(|_| (4 * M2, None)));
            let mut bits = [0; 32];
            assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(0));
            for page in [3, 700, 701, 2047] {
                attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
            }
            attempt::<C>(&machine, &mut vcpu, BASE + 9 * K4, Access::Read).unwrap();
            for _ in 0..2 {
                assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(4));
                assert_eq!(pages(&bits), [3, 700, 701, 2047], "reading clears nothing");
            }
            let cleared = vcpu.worker().clear_log(MemslotId(0), 0, 64, &[1 << 3 | 1 << 4]).unwrap();
            assert_eq!((cleared.pages, cleared.whole), (1, 0));
            let cleared = vcpu.worker().clear_log(MemslotId(0), 640, 64, &[1 << 60]).unwrap();
            assert_eq!(cleared.pages, 1);
            vcpu.worker().read_log(MemslotId(0), &mut bits).unwrap();
            assert_eq!(pages(&bits), [701, 2047]);
            // Written after the log was read, and before it was cleared: copied after that, the
            // page is clean.
            attempt::<C>(&machine, &mut vcpu, BASE + 701 * K4, Access::Write).unwrap();
            vcpu.worker().clear_log(MemslotId(0), 640, 64, &[1 << 61]).unwrap();
            assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(1));
            attempt::<C>(&machine, &mut vcpu, BASE + 701 * K4, Access::Write).unwrap();
            attempt::<C>(&machine, &mut vcpu, BASE + 3 * K4, Access::Write).unwrap();
            assert_eq!(vcpu.worker().take_log(MemslotId(0), &mut bits), Ok(3));
            assert_eq!(pages(&bits), [3, 701, 2047]);
            assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(0));
            assert!(machine.finish().is_empty());
        }
    }

    fn a_clear_protects_its_pages_and_no_others<C: Case>() {
        let eager_split = Some(PageSize::SIZE_4K);
        let config = Config { initially_set: true, eager_split, ..config() };
        with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        assert_eq!(vcpu.worker().set_memslot(logged(M2)), Ok(MemslotChange::LogOn(None)));
        let mut bits = [0; 8];
        assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(512), "initially set");
        let sparse = [1u64 << 5 | 1 << 50, 0, 1 << 7, 0, 0, 0, 0, 1 << 63];
        let cleared = vcpu.worker().clear_log(MemslotId(0), 0, 512, &sparse).unwrap();
        assert_eq!((cleared.pages, cleared.split, cleared.whole), (4, M2, 0));
        let before = guest.stats().faults(FaultKind::MadeWritable).count;
        for page in 0..512 {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
        }
        assert_eq!(guest.stats().faults(FaultKind::MadeWritable).count - before, 4);
        assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(512));
        assert!(machine.finish().is_empty());
    }

    fn a_clear_without_table_pages_protects_more_and_loses_nothing<C: Case>() {
        let eager_split = Some(PageSize::SIZE_4K);
        let config = Config { initially_set: true, eager_split, ..config() };
        with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        vcpu.worker().set_memslot(logged(M2)).unwrap();
        machine.limit(0);
        let mut poor = Worker::new(&guest).unwrap();
        let cleared = poor.clear_log(MemslotId(0), 0, 64, &[2]).unwrap();
        assert_eq!((cleared.pages, cleared.split, cleared.whole), (1, 0, M2));
        machine.limit(usize::MAX);
        let mut bits = [0; 8];
        assert_eq!(poor.read_log(MemslotId(0), &mut bits), Ok(511));
        attempt::<C>(&machine, &mut vcpu, BASE + K4, Access::Write).unwrap();
        assert_eq!(poor.read_log(MemslotId(0), &mut bits), Ok(512));
        assert!(machine.finish().is_empty());
    }

    fn the_end_of_logging_brings_huge_pages_back<C: Case>() {
        for config in ways::<C>() {
            with_guest!(C, config, memslot(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
            for block in 0..3 {
                attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Write).unwrap();
            }
            vcpu.worker().set_memslot(logged(4 * M2)).unwrap();
            for page in [1, 600, 601] {
                attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
            }
            let off = vcpu.worker().set_memslot(memslot(4 * M2)).unwrap();
            let expected = if config.eager_split.is_some() { 3 } else { 2 };
            assert_eq!(off, MemslotChange::LogOff { collapsed: expected * M2 });
            let sizes = vcpu.worker().leaves_by_size();
            assert_eq!(sizes[..2], [(PageSize::SIZE_4K, 0), (PageSize::SIZE_2M, 3)]);
            let before = guest.stats().faults(FaultKind::MadeWritable).count;
            for page in 0..1536 {
                attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
            }
            let faults = guest.stats().faults(FaultKind::MadeWritable).count - before;
            let expected = if C::HARDWARE_DIRTY { 0 } else { 3 };
            assert_eq!(faults, expected, "none, or one for each block");
            assert!(machine.finish().is_empty());
        }
    }

    fn bad_requests_are_refused_as_linux_does<C: Case>() {
        with_guest!(C, config(), logged(M2 + K4), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        let worker = vcpu.worker();
        let mut bits = [0; 9];
        let errno = |result: Result<ClearCounts, LogError>| result.map_err(|error| error.errno());
        assert_eq!(errno(worker.clear_log(MemslotId(1), 0, 64, &bits)), Err("ENOENT"));
        assert_eq!(errno(worker.clear_log(MemslotId(0), 1, 64, &bits)), Err("EINVAL"));
        assert_eq!(errno(worker.clear_log(MemslotId(0), 0, 63, &bits)), Err("EINVAL"));
        assert_eq!(errno(worker.clear_log(MemslotId(0), 0, 576, &bits)), Err("EINVAL"));
        assert_eq!(errno(worker.clear_log(MemslotId(0), 64, u64::MAX, &bits)), Err("EINVAL"));
        assert_eq!(errno(worker.clear_log(MemslotId(0), 0, 513, &bits[..8])), Err("EFAULT"));
        assert!(worker.clear_log(MemslotId(0), 0, 513, &bits).is_ok(), "it ends with the memslot");
        let beyond = worker.clear_log(MemslotId(0), 512, 1, &[u64::MAX]);
        assert!(beyond.is_ok(), "bits beyond are harmless");
        assert_eq!(
            worker.read_log(MemslotId(0), &mut bits[..8]),
            Err(LogError::Bitmap { needed: 9, given: 8 })
        );
        worker.set_memslot(memslot(M2 + K4)).unwrap();
        let off = worker.read_log(MemslotId(0), &mut bits);
        assert_eq!(off, Err(LogError::Missing { id: MemslotId(0) }));
    }

    fn a_clear_leaves_splits_to_faults_unless_configured_otherwise<C: Case>() {
        let hardware = C::HARDWARE_DIRTY.then_some(Logging::Hardware);
        for logging in [Logging::Protect].into_iter().chain(hardware) {
            let config = Config { logging, initially_set: true, ..config() };
            with_guest!(C, config, memslot(2 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
            for block in 0..2 {
                attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Write).unwrap();
            }
            vcpu.worker().set_memslot(logged(2 * M2)).unwrap();
            let cleared = vcpu.worker().clear_log(MemslotId(0), 0, 64, &[1]).unwrap();
            assert_eq!(cleared, ClearCounts { pages: 1, split: 0, whole: M2 });
            let mut bits = [0; 16];
            let left = vcpu.worker().read_log(MemslotId(0), &mut bits);
            assert_eq!(left, Ok(1023), "the others stay");
            let cleared = vcpu.worker().clear_log(MemslotId(0), 0, 1024, &bits).unwrap();
            assert_eq!((cleared.pages, cleared.split), (1023, 0));
            assert_eq!(vcpu.worker().leaves_by_size()[1], (PageSize::SIZE_2M, 2));
            for page in [3, 600] {
                let gpa = BASE + page * K4;
                let (_, outcomes) = attempt::<C>(&machine, &mut vcpu, gpa, Access::Write).unwrap();
                let split = Outcome::Split { from: PageSize::SIZE_2M };
                assert!(outcomes.contains(&split), "{page}: {outcomes:?} {logging:?}");
            }
            assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(2));
            assert_eq!(pages(&bits), [3, 600]);
            assert!(machine.finish().is_empty());
        }
    }

    fn a_clear_splits_to_the_size_that_is_asked_for<C: Case>() {
        for (to, leaves) in [(PageSize::SIZE_2M, [0, 512]), (PageSize::SIZE_4K, [512, 511])] {
            let config = Config { initially_set: true, eager_split: Some(to), ..config() };
            with_guest!(C, config, memslot(G1), PageSize::SIZE_1G => machine, ram, guest, vcpu);
            attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
            vcpu.worker().set_memslot(logged(G1)).unwrap();
            vcpu.worker().clear_log(MemslotId(0), 0, 64, &[1]).unwrap();
            let found = vcpu.worker().leaves_by_size();
            assert_eq!([found[0].1, found[1].1], leaves, "{to}");
            let mut bits = vec![0; 4096];
            assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok((1 << 18) - 1));
            // Before the next write the log has no other page.
            vcpu.worker().clear_log(MemslotId(0), 0, 1024, &bits).unwrap();
            attempt::<C>(&machine, &mut vcpu, BASE + 7 * K4, Access::Write).unwrap();
            attempt::<C>(&machine, &mut vcpu, BASE + M2, Access::Write).unwrap();
            vcpu.worker().read_log(MemslotId(0), &mut bits).unwrap();
            assert_eq!(pages(&bits[..16]), [7, 512]);
            assert!(machine.finish().is_empty());
        }
    }

    fn what_the_host_writes_is_in_the_log_if_it_says_so<C: Case>() {
        with_guest!(C, config(), logged(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        vcpu.worker().mark_written(range(BASE + 62 * K4, 5 * K4));
        let mut bits = [0; 8];
        assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(5));
        assert_eq!(pages(&bits), [62, 63, 64, 65, 66]);
    }
}

/// Hardware marks pages from then on.
fn block_faults_once<C: Case>() {
    if !C::HARDWARE_DIRTY {
        return;
    }
    let config = Config { logging: Logging::Hardware, ..config() };
    with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
    attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
    vcpu.worker().set_memslot(logged(M2)).unwrap();
    let mut outcomes = Vec::new();
    for page in (0..512).step_by(3) {
        let gpa = BASE + page * K4;
        let (_, since) = attempt::<C>(&machine, &mut vcpu, gpa, Access::Write).unwrap();
        outcomes.extend(since.into_iter().filter(|&outcome| match outcome {
            Outcome::Spurious => false,
            // Software marks the first write of a writable page.
            Outcome::MadeAccessed => C::MARKS,
            _ => true,
        }));
    }
    assert_eq!(outcomes, [Outcome::Split { from: PageSize::SIZE_2M }]);
    let mut bits = [0; 8];
    assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(171), "exactly those");
    assert!(machine.finish().is_empty());
}

on_all! {
    fn a_block_faults_once_where_hardware_logs<C: Case>() {
        block_faults_once::<C>();
    }
}

/// The CPU reads the new table's pages before they have the right to write.
#[test]
fn a_block_faults_once_where_splits_break() {
    block_faults_once::<ArmBreaks>();
}

/// While a block is broken no other thread can split it: a clear reports that, and the pages that
/// it has not done are still dirty.
#[test]
fn what_a_clear_could_not_do_is_in_the_log_still() {
    let (initially_set, eager_split) = (true, Some(PageSize::SIZE_4K));
    let config = Config { initially_set, eager_split, ..config() };
    with_guest!(ArmPlain, config, memslot(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
    for block in 0..4 {
        attempt::<ArmPlain>(&machine, &mut vcpu, BASE + block * M2, Access::Write).unwrap();
    }
    vcpu.worker().set_memslot(logged(4 * M2)).unwrap();
    let mut other = Worker::new(&guest).unwrap();
    let mut cleared = None;
    let clear = |_: &_, moment| {
        if moment == Moment::Invalidate && cleared.is_none() {
            cleared = Some(other.clear_log(MemslotId(0), 0, 2048, &[u64::MAX; 32]));
        }
    };
    // The third block is the one that is broken.
    let split = EagerSplit::new(range(BASE + 2 * M2, M2), PageSize::SIZE_4K);
    let report = beside(&machine, clear, || split.run(vcpu.worker(), || false));
    assert_eq!(report.split, M2);
    assert_eq!(cleared, Some(Err(LogError::Contended { at: slat::Gpa(BASE + 2 * M2) })));
    let mut bits = [0; 32];
    assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(1024));
    assert_eq!((bits[15], bits[16], bits[31]), (0, u64::MAX, u64::MAX));
    assert!(machine.finish().is_empty());
}

mod by_block {
    use super::*;

    fn spec(bytes: u64) -> MemslotSpec {
        MemslotSpec { log_blocks: true, ..logged(bytes) }
    }

    on_all! {
        fn a_block_is_written_and_logged_as_a_whole<C: Case>() {
            let config = Config { eager_split: Some(PageSize::SIZE_4K), ..config() };
            with_guest!(C, config, spec(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
            let read = |worker: &mut TheWorker<'_, C>| {
                let mut bits = [0; 32];
                worker.read_log(MemslotId(0), &mut bits).unwrap();
                bits
            };
            attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
            attempt::<C>(&machine, &mut vcpu, BASE + M2 + 5 * K4, Access::Write).unwrap();
            let mut second = [0; 32];
            second[8..16].fill(u64::MAX);
            assert_eq!(read(vcpu.worker()), second);
            // A clear of one page protects the block; the others are still dirty.
            let mut one = [0; 32];
            one[8] = 1;
            vcpu.worker().clear_log(MemslotId(0), 0, 2048, &one).unwrap();
            machine.protect(VMID, range(BASE + M2, M2));
            second[8] = !1;
            assert_eq!(read(vcpu.worker()), second);
            machine.unprotect(VMID, range(BASE + M2, M2));
            let again = attempt::<C>(&machine, &mut vcpu, BASE + M2 + K4, Access::Write).unwrap().1;
            assert_eq!(again.last(), Some(&Outcome::MadeWritable(PageSize::SIZE_2M)));
            second[8] = u64::MAX;
            assert_eq!(read(vcpu.worker()), second);
            assert_eq!(guest.stats().totals.split_bytes, 0);
            assert!(machine.finish().is_empty());
        }
    }

    #[test]
    fn hardwares_marks_are_not_logged_by_block() {
        let config = Config { logging: Logging::Hardware, ..config() };
        let machine = Intel::machine(1);
        let guest = guest::<Intel>(&machine, &Ram::new(), config);
        let mut worker = Worker::new(&guest).unwrap();
        assert_eq!(worker.set_memslot(spec(M2)), Err(MemslotError::LogBlocks));
    }
}

/// A clear takes 512 words at a time. On Arm the invalidation is of the addresses.
#[test]
fn the_invalidation_of_a_clear_is_of_all_its_chunks() {
    clears_chunks::<Intel>([0, 7, 32_767, 32_768, 40_000]);
    clears_chunks::<ArmPlain>([0, 7, 8, 32_768, 32_769]);
}

fn clears_chunks<C: Case>(pages: [u64; 5]) {
    let bytes = 160 << 20;
    with_guest!(C, config(), logged(bytes), PageSize::SIZE_4K => machine, ram, guest, vcpu);
    for page in pages {
        attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
    }
    let mut bits = vec![0; (bytes / K4 / 64) as usize];
    assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(5));
    let cleared = vcpu.worker().clear_log(MemslotId(0), 0, bytes / K4, &bits).unwrap();
    assert_eq!(cleared.pages, 5);
    for page in pages {
        assert!(machine.cpu(0).write(BASE + page * K4).is_err(), "page {page} is still writable");
    }
    assert!(machine.finish().is_empty());
}

/// The order of Linux's checks: the first page, the memslot, the end.
#[test]
fn an_unaligned_clear_is_refused_before_its_memslot_lookup() {
    type C = Intel;
    with_guest!(C, config(), logged(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
    let mut clear =
        |id, first, count| vcpu.worker().clear_log(MemslotId(id), first, count, &[0; 8]);
    assert_eq!(clear(9, 1, 64), Err(LogError::Unaligned));
    assert_eq!(clear(9, 64, 1), Err(LogError::Missing { id: MemslotId(9) }));
    assert_eq!(clear(0, 64, 1), Err(LogError::Unaligned));
}
