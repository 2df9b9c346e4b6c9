//! Clears take the words of a log table by table: in each, exactly the pages that are named, and
//! blocks only where a page of them is named.

use crate::fixture::*;
use crate::watched::WatchedMachine;
use crate::{on_all, with_guest};
use slat::{Access, Gpa, PageSize};
use slat_guest::*;
use slat_sim::{Machine, Moment};
use std::sync::mpsc;

const SLOT: MemslotId = MemslotId(0);

/// A memslot that begins `pages` pages behind the beginning of a block, and ends with `end`.
fn from(pages: u64, end: u64) -> MemslotSpec {
    let offset = pages * K4;
    MemslotSpec { gpa: Gpa(BASE + offset), host: Hva(HOST + offset), ..memslot(end - offset) }
}

fn by_marks(initially_set: bool) -> Config {
    Config { logging: Logging::Hardware, initially_set, ..config() }
}

fn writable<C: Case>(vcpu: &mut TheVcpu<'_, C>, gpa: u64) -> bool {
    vcpu.worker().translate(Gpa(gpa)).unwrap().unwrap().attributes.write
}

fn write<C: Case>(machine: &Machine<C::A>, vcpu: &mut TheVcpu<'_, C>, gpas: &[u64]) {
    for &gpa in gpas {
        attempt::<C>(machine, vcpu, gpa, Access::Write).unwrap();
    }
}

#[test]
fn a_clear_goes_on_behind_its_first_chunk() {
    let machine = Intel::machine(1);
    let guest = guest::<Intel>(&machine, &Ram::new(), config());
    let mut worker = Worker::new(&guest).unwrap();
    let pages = 1 << 16;
    worker.set_memslot(logged(pages * K4)).unwrap();
    worker.mark_written(range(BASE + 5 * K4, K4));
    worker.mark_written(range(BASE + (pages - 1) * K4, K4));
    let mut bits = vec![u64::MAX; pages as usize / 64];
    assert_eq!(worker.clear_log(SLOT, 0, pages, &bits).unwrap().pages, 2);
    assert_eq!(worker.read_log(SLOT, &mut bits), Ok(0));
}

on_all! {
    fn a_clear_counts_each_block_that_it_splits_once<C: Case>() {
        let (initially_set, eager_split) = (true, Some(PageSize::SIZE_4K));
        let config = Config { initially_set, eager_split, ..config() };
        with_guest!(C, config, memslot(2 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        write::<C>(&machine, &mut vcpu, &[BASE, BASE + M2]);
        vcpu.worker().set_memslot(logged(2 * M2)).unwrap();
        let cleared = vcpu.worker().clear_log(SLOT, 0, 1024, &[u64::MAX; 16]);
        assert_eq!(cleared, Ok(ClearCounts { pages: 1024, split: 2 * M2, whole: 0 }));
        assert!(machine.finish().is_empty());
    }

    fn a_clear_of_many_words_reads_a_table_once<C: Case>() {
        let config = Config { eager_split: Some(PageSize::SIZE_4K), ..config() };
        with_guest!(C, config, logged(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        let all: Vec<_> = (0..512).map(|page| BASE + page * K4).collect();
        write::<C>(&machine, &mut vcpu, &all);
        // Eight pages of one word, and one page of each of eight words.
        let one = [0x0101_0101_0101_0101, 0, 0, 0, 0, 0, 0, 0];
        let read = [one, [2; 8]].map(|words| {
            let before = guest.stats().totals.entries_read;
            assert_eq!(vcpu.worker().clear_log(SLOT, 0, 512, &words).unwrap().pages, 8);
            guest.stats().totals.entries_read - before
        });
        assert_eq!(read[0], read[1]);
    }

    fn dirty_bits_are_taken_by_tables_at_any_start_of_the_memslot<C: Case>() {
        if !C::HARDWARE_DIRTY {
            return;
        }
        let spec = from(256, 2 * M2);
        with_guest!(C, by_marks(true), spec, PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let block = BASE + M2;
        write::<C>(&machine, &mut vcpu, &[block - 2 * K4, block - K4, block]);
        vcpu.worker().set_memslot(MemslotSpec { log_dirty: true, ..spec }).unwrap();
        // The last page but one of the first table, and the first page of the block behind it.
        let cleared = vcpu.worker().clear_log(SLOT, 192, 128, &[1 << 62, 1]);
        assert_eq!(cleared, Ok(ClearCounts { pages: 2, split: 0, whole: M2 }));
        let left = [block - 2 * K4, block - K4, block].map(|gpa| writable::<C>(&mut vcpu, gpa));
        assert_eq!(left, [true, true, false], "a clean page's mark is hardware's");
        assert!(machine.finish().is_empty());
    }

    fn a_clear_of_a_tables_last_pages_leaves_the_block_behind_it<C: Case>() {
        if !C::HARDWARE_DIRTY {
            return;
        }
        let spec = memslot(2 * M2);
        with_guest!(C, by_marks(true), spec, PageSize::SIZE_2M => machine, ram, guest, vcpu);
        ram.populate(HOST, M2, PageSize::SIZE_4K);
        write::<C>(&machine, &mut vcpu, &[BASE + 448 * K4, BASE + M2]);
        vcpu.worker().set_memslot(logged(2 * M2)).unwrap();
        let cleared = vcpu.worker().clear_log(SLOT, 0, 512, &[0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(cleared, Ok(ClearCounts { pages: 1, split: 0, whole: 0 }));
        assert!(writable::<C>(&mut vcpu, BASE + M2));
        assert!(machine.finish().is_empty());
    }

    /// A word of the log has pages of two tables.
    fn a_clear_of_a_block_leaves_the_pages_in_front_of_it<C: Case>() {
        if !C::HARDWARE_DIRTY {
            return;
        }
        let spec = from(5, 2 * M2);
        with_guest!(C, by_marks(true), spec, PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let block = BASE + M2;
        write::<C>(&machine, &mut vcpu, &[BASE + 100 * K4, block - 2 * K4, block]);
        vcpu.worker().set_memslot(MemslotSpec { log_dirty: true, ..spec }).unwrap();
        // Page 508 is the block's second.
        let cleared = vcpu.worker().clear_log(SLOT, 0, 512, &[0, 0, 0, 0, 0, 0, 0, 1 << 60]);
        assert_eq!(cleared, Ok(ClearCounts { pages: 1, split: 0, whole: M2 }));
        let gpas = [BASE + 100 * K4, block - 2 * K4, block];
        assert_eq!(gpas.map(|gpa| writable::<C>(&mut vcpu, gpa)), [true, true, false]);
        assert!(machine.finish().is_empty());
    }

    /// As above, where the word names a page on either side: the page between them is not named.
    fn a_clear_of_a_block_and_a_page_keeps_the_mark_between_them<C: Case>() {
        if !C::HARDWARE_DIRTY {
            return;
        }
        let spec = from(5, 2 * M2);
        with_guest!(C, by_marks(false), spec, PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let block = BASE + M2;
        write::<C>(&machine, &mut vcpu, &[block - 2 * K4, block - K4, block]);
        vcpu.worker().set_memslot(MemslotSpec { log_dirty: true, ..spec }).unwrap();
        write::<C>(&machine, &mut vcpu, &[block - K4]);
        vcpu.worker().mark_written(range(block - 2 * K4, K4));
        vcpu.worker().mark_written(range(block + K4, K4));
        let cleared = vcpu.worker().clear_log(SLOT, 448, 64, &[1 << 57 | 1 << 60]).unwrap();
        assert_eq!(cleared.pages, 2);
        let mut bits = [0; 16];
        assert_eq!(vcpu.worker().read_log(SLOT, &mut bits), Ok(1));
        assert_eq!(bits[7], 1 << 58);
        assert!(machine.finish().is_empty());
    }
}

/// A block is being broken while the clear looks for what may have been written.
#[test]
fn a_clear_that_finds_a_broken_block_by_marks_reports_it() {
    let spec = memslot(M2);
    with_guest!(ArmBreaks, by_marks(true), spec, PageSize::SIZE_2M => machine, ram, guest, vcpu);
    write::<ArmBreaks>(&machine, &mut vcpu, &[BASE]);
    vcpu.worker().set_memslot(logged(M2)).unwrap();
    let mut other = Worker::new(&guest).unwrap();
    let mut cleared = None;
    let clear = |_: &_, moment| {
        if moment == Moment::Invalidate && cleared.is_none() {
            cleared = Some(other.clear_log(SLOT, 0, 64, &[1 << 9]));
        }
    };
    let split = EagerSplit::new(range(BASE, M2), PageSize::SIZE_4K);
    let report = beside(&machine, clear, || split.run(vcpu.worker(), || false));
    assert_eq!(report.split, M2);
    assert!(matches!(cleared, Some(Err(LogError::Contended { .. }))), "{cleared:?}");
    assert_eq!(vcpu.worker().read_log(SLOT, &mut [0; 8]), Ok(512));
    assert!(machine.finish().is_empty());
}

type WatchedGuest<'p> =
    Guest<'p, <ArmPlain as Case>::F, WatchedMachine<<ArmPlain as Case>::A>, Ram>;

/// Makes a guest with two written blocks, whose log has all pages, on a machine that breaks blocks.
macro_rules! with_watched {
    ($machine:ident, $guest:ident, $vcpu:ident) => {
        let $machine = WatchedMachine::new(ArmPlain::machine(1));
        give_all::<ArmPlain>(&$machine.machine);
        let ram = Ram::new();
        ram.populate(HOST, 2 * M2, PageSize::SIZE_2M);
        let (initially_set, eager_split) = (true, Some(PageSize::SIZE_4K));
        let config = Config { initially_set, eager_split, ..config() };
        let $guest: WatchedGuest<'_> =
            Guest::new(ArmPlain::format(), VMID, BITS, &$machine, ram, config).unwrap();
        let mut $vcpu = Vcpu::new(&$guest, 0).unwrap();
        $vcpu.worker().set_memslot(memslot(2 * M2)).unwrap();
        for block in 0..2 {
            let outcome = $vcpu.fault(Gpa(BASE + block * M2), Access::Write);
            assert_eq!(outcome, Outcome::Mapped(PageSize::SIZE_2M));
        }
        $vcpu.worker().set_memslot(logged(2 * M2)).unwrap();
    };
}

#[test]
fn a_clear_reports_its_split_at_the_first_page_it_names() {
    with_watched!(machine, guest, vcpu);
    machine.take_events();
    vcpu.worker().clear_log(SLOT, 512, 64, &[1]).unwrap();
    let split = Event::Split { at: Gpa(BASE + M2), bytes: M2 };
    assert_eq!(machine.take_events(), [split]);
}

#[test]
fn a_clear_waits_for_a_thread_that_breaks_a_block() {
    with_watched!(machine, guest, vcpu);
    let mut splitter = Worker::new(&guest).unwrap();
    let (reached, is_reached) = mpsc::channel();
    let (go, gone_on) = mpsc::channel::<()>();
    let (done, is_done) = mpsc::channel();
    machine.machine.meanwhile(move |_, moment| {
        if moment == Moment::Invalidate && reached.send(()).is_ok() {
            _ = gone_on.recv();
        }
    });
    let cleared = std::thread::scope(|threads| {
        threads.spawn(move || {
            let split = EagerSplit::new(range(BASE, M2), PageSize::SIZE_4K);
            let report = split.run(&mut splitter, || false);
            done.send(report.split).unwrap();
        });
        is_reached.recv().unwrap();
        drop(is_reached);
        *machine.wait.lock().unwrap() = Some(Box::new(move || {
            if go.send(()).is_ok() {
                assert_eq!(is_done.recv(), Ok(M2));
            }
        }));
        let cleared = vcpu.worker().clear_log(SLOT, 0, 64, &[1]);
        // Whatever happened, the other thread goes on.
        *machine.wait.lock().unwrap() = None;
        cleared
    });
    machine.machine.undisturbed();
    assert_eq!(cleared, Ok(ClearCounts { pages: 1, split: 0, whole: 0 }));
}
