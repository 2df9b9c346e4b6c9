//! Huge pages that may not be executed are recovered, whatever has split them.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, PageSize};
use slat_guest::*;

const NEVER_HUGE: [ExecuteHuge; 3] = [ExecuteHuge::Split, ExecuteHuge::SplitPage, ExecuteHuge::Zap];

fn recover<C: Case>(vcpu: &mut TheVcpu<'_, C>) -> u64 {
    (0..3).map(|_| vcpu.worker().recover_huge_pages().bytes).sum()
}

fn blocks<C: Case>(vcpu: &mut TheVcpu<'_, C>, level: usize) -> u64 {
    vcpu.worker().leaves_by_size()[level].1
}

on_all! {
    fn pages_mapped_under_a_log_become_blocks_after_it<C: Case>() {
        for execute_huge in NEVER_HUGE {
            let config = Config { execute_huge, ..config() };
            with_guest!(C, config, logged(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
            for page in 0..512 {
                attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
            }
            vcpu.worker().set_memslot(memslot(M2)).unwrap();
            assert_eq!(recover::<C>(&mut vcpu), M2, "{execute_huge:?}");
            assert_eq!(blocks::<C>(&mut vcpu, 1), 1);
            assert!(machine.finish().is_empty());
        }
    }

    fn a_block_split_by_a_write_and_a_fetch_recovers_after_the_log<C: Case>() {
        for execute_huge in NEVER_HUGE {
            let config = Config { execute_huge, ..config() };
            with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
            attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
            vcpu.worker().set_memslot(logged(M2)).unwrap();
            attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
            attempt::<C>(&machine, &mut vcpu, BASE + K4, Access::Execute).unwrap();
            vcpu.worker().set_memslot(memslot(M2)).unwrap();
            // Some pages that were write-protected are written again.
            attempt::<C>(&machine, &mut vcpu, BASE + 7 * K4, Access::Write).unwrap();
            recover::<C>(&mut vcpu);
            assert_eq!(blocks::<C>(&mut vcpu, 1), 1, "{execute_huge:?}");
            assert!(machine.finish().is_empty());
        }
    }

    fn a_table_that_an_eager_split_made_comes_back_after_a_fetch<C: Case>() {
        for execute_huge in [ExecuteHuge::Split, ExecuteHuge::SplitPage] {
            let config = Config { execute_huge, ..config() };
            with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
            attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
            EagerSplit::new(range(BASE, M2), PageSize::SIZE_4K).run(vcpu.worker(), || false);
            attempt::<C>(&machine, &mut vcpu, BASE, Access::Execute).unwrap();
            assert_eq!(recover::<C>(&mut vcpu), M2, "{execute_huge:?}");
        }
    }

    fn the_largest_blocks_come_back_too<C: Case>() {
        for log in [false, true] {
            let config = Config { execute_huge: ExecuteHuge::Split, ..config() };
            with_guest!(C, config, memslot(G1), PageSize::SIZE_1G => machine, ram, guest, vcpu);
            attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
            if log {
                vcpu.worker().set_memslot(logged(G1)).unwrap();
                attempt::<C>(&machine, &mut vcpu, BASE + 9 * M2, Access::Write).unwrap();
                attempt::<C>(&machine, &mut vcpu, BASE + 9 * M2, Access::Execute).unwrap();
                vcpu.worker().set_memslot(memslot(G1)).unwrap();
            }
            attempt::<C>(&machine, &mut vcpu, BASE + 3 * M2, Access::Execute).unwrap();
            attempt::<C>(&machine, &mut vcpu, BASE + 5 * M2, Access::Execute).unwrap();
            recover::<C>(&mut vcpu);
            assert_eq!(blocks::<C>(&mut vcpu, 2), 1, "after a log: {log}");
            // No table is left to recover.
            assert_eq!(vcpu.worker().recover_huge_pages().left, 0);
            assert!(machine.finish().is_empty());
        }
    }

    fn no_block_comes_back_larger_than_configured<C: Case>() {
        let execute_huge = ExecuteHuge::Split;
        let config = Config { execute_huge, ..Config::new(2, PageSize::SIZE_2M) };
        with_guest!(C, config, memslot(G1), PageSize::SIZE_1G => machine, ram, guest, vcpu);
        for block in 0..512 {
            attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Read).unwrap();
        }
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Execute).unwrap();
        assert_eq!(recover::<C>(&mut vcpu), M2);
        assert_eq!(blocks::<C>(&mut vcpu, 1), 512);
    }

    fn a_table_that_cannot_be_a_block_keeps_its_rights<C: Case>() {
        let config = Config { execute_huge: ExecuteHuge::Split, ..config() };
        with_guest!(C, config, logged(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        // A table of which one page is never mapped does not become a block.
        for page in 1..512 {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Execute).unwrap();
        }
        vcpu.worker().set_memslot(memslot(M2)).unwrap();
        for _ in 0..4 {
            vcpu.worker().recover_huge_pages();
            for page in [1, 100, 511] {
                let gpa = BASE + page * K4;
                let (_, outcomes) =
                    attempt::<C>(&machine, &mut vcpu, gpa, Access::Execute).unwrap();
                assert_eq!(outcomes, [], "page {page} faults for nothing");
            }
        }
        // Nor does a table whose pages are not contiguous become a block.
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Execute).unwrap();
        let held = vcpu.worker().invalidate(host_range(HOST + 8 * K4, K4), |_| {});
        ram.migrate(HOST + 8 * K4);
        drop(held);
        attempt::<C>(&machine, &mut vcpu, BASE + 8 * K4, Access::Execute).unwrap();
        let left = (0..4).map(|_| vcpu.worker().recover_huge_pages().left).max();
        assert_eq!(left, Some(1));
        let (_, outcomes) = attempt::<C>(&machine, &mut vcpu, BASE, Access::Execute).unwrap();
        assert_eq!(outcomes, []);
    }

    fn fetched_pages_that_cannot_form_a_block_are_not_refetched<C: Case>() {
        type Change = fn(&Ram);
        let changes: [Change; 3] = [
            // Contiguous pages, at another offset in a block than the guest's.
            |ram| (0..512).for_each(|page| ram.change(HOST + page * K4, |page| page.hpa += K4)),
            |ram| ram.change(HOST + 7 * K4, |page| page.execute = false),
            |ram| ram.remove(HOST + 511 * K4),
        ];
        for change in changes {
            let config = Config { execute_huge: ExecuteHuge::Split, ..config() };
            with_guest!(C, config, logged(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
            change(&ram);
            for page in (0..512).filter(|page| *page != 7) {
                // One of them may have no memory.
                let _ = attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Execute);
            }
            attempt::<C>(&machine, &mut vcpu, BASE + 7 * K4, Access::Read).unwrap();
            vcpu.worker().set_memslot(memslot(M2)).unwrap();
            assert_eq!(recover::<C>(&mut vcpu), 0);
            let (_, outcomes) = attempt::<C>(&machine, &mut vcpu, BASE, Access::Execute).unwrap();
            assert_eq!(outcomes, []);
            assert!(machine.finish().is_empty());
        }
    }

    fn a_page_that_may_be_written_is_writable_in_the_block_too<C: Case>() {
        let config = Config { execute_huge: ExecuteHuge::Split, ..config() };
        with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Execute).unwrap();
        for page in 0..512 {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
        }
        assert_eq!(recover::<C>(&mut vcpu), M2);
        let (_, outcomes) = attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        assert_eq!(outcomes, []);
    }

    fn recovery_skips_tables_that_are_no_block_of_their_memslot<C: Case>() {
        for (bytes, largest, comes) in
            [(M2 + K4, PageSize::SIZE_1G, M2), (M2, PageSize::SIZE_4K, 0)]
        {
            let config =
                Config { execute_huge: ExecuteHuge::Split, ..Config::new(2, largest) };
            with_guest!(C, config, logged(bytes), PageSize::SIZE_2M => machine, ram, guest, vcpu);
            for page in 0..bytes / K4 {
                attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Execute).unwrap();
            }
            vcpu.worker().set_memslot(memslot(bytes)).unwrap();
            let turns = [(); 3].map(|()| vcpu.worker().recover_huge_pages());
            assert_eq!(turns.iter().map(|turn| turn.bytes).sum::<u64>(), comes);
            assert_eq!(turns.map(|turn| turn.left), [0; 3]);
            assert_eq!(blocks::<C>(&mut vcpu, 1), comes / M2);
        }
    }

    fn pages_that_may_not_be_executed_are_not_tried<C: Case>() {
        let config = Config { execute_huge: ExecuteHuge::Split, ..config() };
        with_guest!(C, config, logged(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        (0..512).for_each(|page| ram.change(HOST + page * K4, |page| page.execute = false));
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        vcpu.worker().set_memslot(memslot(M2)).unwrap();
        let left = [(); 3].map(|()| vcpu.worker().recover_huge_pages().left);
        assert_eq!(left, [0; 3]);
    }

    fn a_larger_block_comes_back_once_none_of_its_pages_is_pinned<C: Case>() {
        let config = Config { execute_huge: ExecuteHuge::Split, ..config() };
        with_guest!(C, config, memslot(G1), PageSize::SIZE_1G => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        attempt::<C>(&machine, &mut vcpu, BASE + 3 * M2, Access::Execute).unwrap();
        let pinned = vcpu.worker().pin(range(BASE + 9 * M2, K4)).unwrap();
        assert_eq!(recover::<C>(&mut vcpu), M2);
        drop(pinned);
        let turns = [(); 3].map(|()| vcpu.worker().recover_huge_pages());
        assert_eq!(turns.map(|turn| turn.left), [0; 3]);
        assert_eq!(blocks::<C>(&mut vcpu, 2), 1);
    }
}
