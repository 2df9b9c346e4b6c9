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
    fn pages_that_were_mapped_while_a_slot_logged_become_blocks_after_it<C: Case>() {
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

    fn a_block_that_a_write_split_and_a_fetch_used_comes_back_after_the_log<C: Case>() {
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
}
