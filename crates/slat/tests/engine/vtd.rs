//! EPT tables that an IOMMU walks as well: no bit that the specification reserves is ever set, at
//! any moment that a test can observe.

use crate::common::hardware::ept::Ept;
use crate::common::stage::{K, M, RAM, on_stage_uncounted, range};
use crate::common::{TestPlatform, unmap};
use slat::format::ept::{Ept1G, vtd::Vtd};
use slat::{Attributes, BreakBeforeMake, Hpa, Interruption, PageSize, SplitError};
use std::sync::atomic::Ordering::SeqCst;

const PRESENT: u64 = 0b11;
const BLOCK: u64 = 1 << 7;
const SNP: u64 = 1 << 11;
const ADDRESS: u64 = (1 << 52) - (1 << 12);

fn shared(snoop: bool) -> Ept1G {
    Ept1G { output_bits: 48, vtd: Some(Vtd { snoop }), ..Default::default() }
}

/// Returns the number of leaves below the table at `hpa`, and checks each entry as VT-d reads it.
fn walk(platform: &TestPlatform, snoop: bool, hpa: u64, level: u8) -> usize {
    let entries = platform.table(hpa, 512).iter().map(|pte| pte.load(SeqCst));
    entries
        .filter(|raw| raw & PRESENT != 0)
        .map(|raw| {
            assert_eq!(raw >> 62 & 1, 0, "TM, or reserved: {raw:#x} at level {level}");
            if level == 0 || raw & BLOCK != 0 {
                assert_eq!(raw & SNP != 0, snoop, "{raw:#x}");
                return 1;
            }
            assert_eq!(raw & SNP, 0, "reserved in a table: {raw:#x}");
            walk(platform, snoop, raw & ADDRESS, level - 1)
        })
        .sum()
}

#[test]
fn what_an_iommu_walks_has_snp_in_leaves_and_no_mark() {
    for snoop in [false, true] {
        let stage = (shared(snoop), 40, 16);
        on_stage_uncounted::<Ept<true>>(BreakBeforeMake::Never, stage, |tables, guard, cache| {
            let platform = guard.platform();
            let leaves = || walk(platform, snoop, tables.root().0, 3);
            let (all, block, page) = (range(0, 4 * M), PageSize::SIZE_2M, PageSize::SIZE_4K);
            let clean = Attributes { dirty: false, ..RAM };
            guard.map(all, Hpa(0), clean, block, cache).unwrap();
            assert_eq!(leaves(), 2);
            guard.split(range(0, 2 * M), page, cache).unwrap();
            assert_eq!(leaves(), 513);
            // Nothing is done.
            let refused = Err(Interruption { at: slat::Gpa(0), reason: SplitError::Shared });
            platform.take_events();
            assert_eq!(guard.collapse(all, block), refused);
            assert_eq!((leaves(), platform.take_events().len()), (513, 0));
            assert!(!unmap(guard, range(0, 8 * K)).is_empty());
            assert_eq!(leaves(), 511);
        });
    }
}
