//! The memory that is mapped, by size, without a walk.

use crate::fixture::*;
use crate::with_guest;
use slat::{Access, Gpa, PageSize};
use slat_guest::*;

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;

fn sizes<C: Case>(vcpu: &mut TheVcpu<'_, C>) -> [(PageSize, u64); 2] {
    check_mapped(vcpu.worker());
    let mapped = vcpu.worker().guest().stats().mapped;
    assert_eq!(mapped.bytes(), mapped.by_size().iter().map(|(_, bytes)| bytes).sum::<u64>());
    [mapped.by_size()[0], mapped.by_size()[1]]
}

#[test]
fn mapped_sizes_follow_faults_splits_collapses_and_deletions() {
    fn case<C: Case>() {
        with_guest!(C, config(), memslot(4 * M2), BLOCK => machine, ram, guest, vcpu);
        assert_eq!(sizes::<C>(&mut vcpu), [(PAGE, 0), (BLOCK, 0)]);
        for block in 0..3 {
            attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Write).unwrap();
        }
        assert_eq!(sizes::<C>(&mut vcpu), [(PAGE, 0), (BLOCK, 3 * M2)]);
        assert_eq!(guest.stats().mapped.huge_bytes(), 3 * M2);
        let split = EagerSplit::new(range(BASE, 2 * M2), PAGE);
        assert_eq!(split.run(vcpu.worker(), || false).split, 2 * M2);
        assert_eq!(sizes::<C>(&mut vcpu), [(PAGE, 2 * M2), (BLOCK, M2)]);
        assert_eq!(guest.stats().mapped.huge_bytes(), M2);
        drop(vcpu.worker().invalidate(host_range(HOST, K4), |_| {}));
        assert_eq!(sizes::<C>(&mut vcpu), [(PAGE, 2 * M2 - K4), (BLOCK, M2)]);
        vcpu.worker().collapse(range(BASE, 4 * M2), BLOCK);
        assert_eq!(sizes::<C>(&mut vcpu), [(PAGE, M2 - K4), (BLOCK, 2 * M2)]);
        vcpu.worker().set_memslot(memslot(0)).unwrap();
        assert_eq!(sizes::<C>(&mut vcpu), [(PAGE, 0), (BLOCK, 0)]);
        assert_eq!(guest.stats().views.bytes(), 0);
    }
    case::<ArmPlain>();
    case::<ArmDirty>();
    case::<ArmBreaks>();
    case::<Intel>();
}

#[test]
fn pages_of_a_view_are_counted_apart_and_vanish_with_the_view() {
    with_guest!(ArmUncached, config(), memslot(M2), BLOCK => machine, ram, guest, vcpu);
    for page in 0..3 {
        attempt::<ArmUncached>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
    }
    let stats = guest.stats();
    assert_eq!((stats.mapped.bytes(), stats.views.bytes()), (0, 3 * K4));
    assert!(vcpu.set_caches(true).root_changed);
    let stats = guest.stats();
    assert_eq!((stats.mapped.bytes(), stats.views.bytes()), (0, 0));
    vcpu.fault(Gpa(BASE), Access::Write);
    let stats = guest.stats();
    assert_eq!((stats.mapped.bytes(), stats.views.bytes()), (M2, 0));
}
