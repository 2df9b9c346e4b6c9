//! Neighbouring memslots, in the guest and in the host: no block lies in both, and a log that finds
//! such a block anyway loses nothing.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, Gpa, PageSize, Reader};
use slat_guest::*;

const HALF: u64 = M2 / 2;
const PAGE: PageSize = PageSize::SIZE_4K;

fn behind(log_dirty: bool) -> MemslotSpec {
    let (gpa, host) = (Gpa(BASE + HALF), Hva(HOST + HALF));
    MemslotSpec { id: MemslotId(1), gpa, host, log_dirty, ..memslot(HALF) }
}

fn ways<C: Case>() -> impl Iterator<Item = Config> {
    let hardware = C::HARDWARE_DIRTY.then_some(Logging::Hardware);
    let ways = [Logging::Protect].into_iter().chain(hardware);
    ways.map(|logging| Config { logging, ..config() })
}

/// Makes one block across both memslots, as a caller that has the tables can.
fn block_over_both<C: Case>(guest: &TheGuest<'_, C>) {
    let mut reader = Reader::register(guest.tables().platform()).unwrap();
    let mut guard = guest.tables().enter(&mut reader).unwrap();
    guard.write_protect(range(BASE, M2)).unwrap();
    guard.invalidate();
    let bytes = guard.collapse(range(BASE, M2), PageSize::SIZE_2M).unwrap();
    assert_eq!(bytes, M2, "the pages of both continue each other");
}

/// The block is writable, and was written.
fn written_block_over_both<C: Case>(guest: &TheGuest<'_, C>) {
    block_over_both::<C>(guest);
    let mut reader = Reader::register(guest.tables().platform()).unwrap();
    let mut guard = guest.tables().enter(&mut reader).unwrap();
    guard.relax(range(BASE, M2), Access::Write).map(slat::LocalFlush::not_needed_here).unwrap();
}

fn two_memslots<C: Case>(
    config: Config,
    logs: bool,
    body: impl FnOnce(&slat_sim::Machine<C::A>, &TheGuest<'_, C>, &mut TheVcpu<'_, C>),
) {
    let first = if logs { logged(HALF) } else { memslot(HALF) };
    with_guest!(C, config, first, PageSize::SIZE_2M => machine, ram, guest, vcpu);
    ram.populate(HOST, M2, PageSize::SIZE_2M);
    vcpu.worker().set_memslot(behind(false)).unwrap();
    for page in 0..512 {
        attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
    }
    if logs {
        vcpu.worker().take_log(MemslotId(0), &mut [0; 4]).unwrap();
    }
    body(&machine, &guest, &mut vcpu);
    assert!(machine.finish().is_empty());
}

on_all! {
    fn pages_of_two_slots_are_never_collapsed_into_one_block<C: Case>() {
        for config in ways::<C>() {
            two_memslots::<C>(config, false, |_, _, vcpu| {
                assert_eq!(vcpu.worker().collapse(range(BASE, M2), PageSize::SIZE_2M), 0);
                vcpu.worker().set_memslot(logged(HALF)).unwrap();
                vcpu.worker().set_memslot(memslot(HALF)).unwrap();
                assert_eq!(vcpu.worker().leaves_by_size()[0], (PAGE, 512));
            });
        }
    }

    /// The memory of the second memslot is elsewhere in the host, at an address that is not a
    /// multiple of the block's size: its pages are contiguous by chance.
    fn a_block_is_aligned_in_the_host_as_in_the_guest<C: Case>() {
        let odd = MemslotSpec { host: Hva(HOST + K4), ..memslot(M2) };
        with_guest!(C, config(), odd, PAGE => machine, ram, guest, vcpu);
        let first = C::FIRST_HPA.next_multiple_of(M2);
        for page in 0..512 {
            ram.change(HOST + (page + 1) * K4, |it| it.hpa = first + page * K4);
        }
        for page in 0..512 {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
        }
        assert_eq!(vcpu.worker().collapse(range(BASE, M2), PageSize::SIZE_2M), 0);
    }

    fn a_memslot_that_begins_to_log_cuts_a_block_across_its_end<C: Case>() {
        for config in ways::<C>() {
            for initially_set in [false, true] {
                let config = Config { initially_set, ..config };
                two_memslots::<C>(config, false, |machine, guest, vcpu| {
                    written_block_over_both::<C>(guest);
                    vcpu.worker().set_memslot(logged(HALF)).unwrap();
                    assert_eq!(vcpu.worker().leaves_by_size()[0], (PAGE, 512), "{config:?}");
                    let mut bits = [0; 4];
                    if initially_set {
                        vcpu.worker().take_log(MemslotId(0), &mut bits).unwrap();
                    }
                    attempt::<C>(machine, vcpu, BASE + HALF + 5 * K4, Access::Write).unwrap();
                    attempt::<C>(machine, vcpu, BASE + 3 * K4, Access::Write).unwrap();
                    assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(1));
                    assert_eq!(bits, [1 << 3, 0, 0, 0]);
                });
            }
        }
    }

    fn without_table_pages_it_unmaps_the_block<C: Case>() {
        for config in ways::<C>() {
            two_memslots::<C>(config, false, |machine, guest, vcpu| {
                written_block_over_both::<C>(guest);
                machine.limit(0);
                let mut poor = Worker::new(guest).unwrap();
                poor.set_memslot(logged(HALF)).unwrap();
                assert_eq!(poor.translate(Gpa(BASE + HALF)), Ok(None));
                machine.limit(usize::MAX);
                attempt::<C>(machine, vcpu, BASE + HALF, Access::Write).unwrap();
                attempt::<C>(machine, vcpu, BASE + HALF - K4, Access::Write).unwrap();
                let mut bits = [0; 4];
                vcpu.worker().read_log(MemslotId(0), &mut bits).unwrap();
                assert_eq!(bits[3] >> 63, 1);
                // An invalidation of the memory reports the marks of the block.
                let mut clean = 0;
                drop(vcpu.worker().invalidate(host_range(HOST, M2), |part| {
                    clean += if part.dirty { 0 } else { part.host.bytes };
                }));
                assert_eq!(clean, 0);
            });
        }
    }

    fn a_write_to_a_block_that_reaches_out_of_its_slot_splits_it<C: Case>() {
        for config in ways::<C>() {
            // In the memslot that does not log, then in the one that does.
            two_memslots::<C>(config, true, |machine, guest, vcpu| {
                block_over_both::<C>(guest);
                attempt::<C>(machine, vcpu, BASE + HALF + 5 * K4, Access::Write).unwrap();
                attempt::<C>(machine, vcpu, BASE + 3 * K4, Access::Write).unwrap();
                assert_eq!(vcpu.worker().leaves_by_size()[0], (PAGE, 512));
                let mut bits = [0; 4];
                vcpu.worker().read_log(MemslotId(0), &mut bits).unwrap();
                assert_eq!(bits[0] >> 3 & 1, 1, "{config:?}");
            });
        }
    }

    fn what_is_taken_of_such_a_block_is_in_the_log_of_each_slot<C: Case>() {
        if !C::HARDWARE_DIRTY {
            return;
        }
        let config = Config { logging: Logging::Hardware, ..config() };
        two_memslots::<C>(config, true, |_, guest, vcpu| {
            vcpu.worker().set_memslot(behind(true)).unwrap();
            written_block_over_both::<C>(guest);
            let mut taken = Vec::new();
            drop(vcpu.worker().invalidate(host_range(HOST + 3 * K4, K4), |part| taken.push(part)));
            let told = |first: u64| UnmappedPages {
                gpa: Gpa(BASE + first),
                host: host_range(HOST + first, HALF),
                dirty: true,
                accessed: true,
            };
            assert_eq!(taken, [told(0), told(HALF)], "each memslot's part as the memslot has it");
            for id in [0, 1] {
                let mut bits = [0; 4];
                assert_eq!(vcpu.worker().read_log(MemslotId(id), &mut bits), Ok(256));
                assert_eq!(bits, [u64::MAX; 4]);
            }
        });
    }

    fn a_log_is_read_and_cleared_where_such_a_block_is_in_the_way<C: Case>() {
        if !C::HARDWARE_DIRTY {
            return;
        }
        let config = Config { logging: Logging::Hardware, ..config() };
        two_memslots::<C>(config, true, |machine, guest, vcpu| {
            written_block_over_both::<C>(guest);
            let mut bits = [0; 4];
            assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(256));
            assert_eq!(vcpu.worker().clear_log(MemslotId(0), 0, 256, &bits).unwrap().pages, 256);
            attempt::<C>(machine, vcpu, BASE + HALF, Access::Write).unwrap();
            assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(0));
            attempt::<C>(machine, vcpu, BASE + 9 * K4, Access::Write).unwrap();
            assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(1));
        });
    }
}
