//! Rights that are given only where a leaf's own bits allow it.

use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::hardware::ept::Ept;
use crate::common::stage::{CLEAN, K, M, RAM, given, on_stage, range, refused, relax};
use slat::{Access, Attributes, ChangeError, Execute, Gpa, Hpa, PageSize, Relax, Software};

const A: Software = Software::A;
const B: Software = Software::B;
const READ_ONLY: Attributes = Attributes { write: false, ..CLEAN };

fn formats(mut test: impl FnMut(bool)) {
    [false, true].into_iter().for_each(&mut test);
}

fn attributes<H: Hardware>(
    guard: &crate::common::world::GuardOf<'_, '_, H>,
    gpa: u64,
) -> Attributes {
    guard.translate(Gpa(gpa)).unwrap().unwrap().attributes
}

fn arm(hardware_dirty: bool) -> slat::format::arm64::Arm64K4 {
    slat::format::arm64::Arm64K4 { hardware_dirty, ..Default::default() }
}

fn rights<H: Hardware>(format: H::Format, marks: bool) {
    on_stage::<H>((format, 40, 8), |_, guard, cache| {
        let page = PageSize::SIZE_4K;
        let kinds = [Software::NONE, A, B, A.union(B)];
        for (at, software) in (0..).zip(kinds) {
            let how = Attributes { software, execute: Execute::None, dirty: false, ..READ_ONLY };
            guard.map(range(at * 4 * K, 4 * K), Hpa(at * 4 * K), how, page, cache).unwrap();
        }
        let all = range(0, 16 * K);
        assert_eq!(relax(guard, all, Relax::new(Access::Write).only_if(A)), Ok(8 * K));
        let written = [0, 1, 2, 3].map(|at| attributes::<H>(guard, at * 4 * K).write);
        assert_eq!(written, [false, true, false, true]);
        assert_eq!(relax(guard, all, Relax::new(Access::Write).only_if(A)), Ok(0), "they have it");
        guard.write_protect(all).unwrap();
        guard.clean(all).unwrap();
        guard.invalidate();
        assert_eq!(
            relax(guard, all, Relax::new(Access::Write).only_if(A.union(B)).unmarked()),
            Ok(4 * K)
        );
        let last = attributes::<H>(guard, 12 * K);
        // A leaf whose writes hardware does not mark counts as written.
        assert_eq!((last.write, last.accessed, last.dirty), (true, true, !marks));
        assert_eq!(relax(guard, all, Relax::new(Access::Execute).only_if(B).unmarked()), Ok(8 * K));
        // A leaf that was not used before does not become accessed.
        let unused = Attributes { software: A, ..READ_ONLY };
        guard.map(range(M, 4 * K), Hpa(M), unused, page, cache).unwrap();
        assert_eq!(
            relax(guard, range(M, 4 * K), Relax::new(Access::Write).only_if(A).unmarked()),
            Ok(4 * K)
        );
        let given = attributes::<H>(guard, M);
        assert_eq!((given.write, given.accessed, given.dirty), (true, false, !marks));
        // A leaf that was written does not become clean.
        assert_eq!(relax(guard, range(M, 4 * K), Access::Write), Ok(4 * K));
        assert_eq!(guard.write_protect(range(M, 4 * K)), Ok(4 * K));
        guard.invalidate();
        assert_eq!(
            relax(guard, range(M, 4 * K), Relax::new(Access::Write).only_if(A).unmarked()),
            Ok(4 * K)
        );
        let given = attributes::<H>(guard, M);
        assert_eq!((given.write, given.accessed, given.dirty), (true, true, true));
        let executable = [0, 1, 2, 3].map(|at| attributes::<H>(guard, at * 4 * K));
        assert_eq!(executable.map(|a| a.execute == Execute::All), [false, false, true, true]);
        assert!(!executable[2].accessed, "nobody has used it");
        assert_eq!(guard.pending_invalidation(), None, "who gives rights owes nothing");
    });
}

#[test]
fn leaves_get_the_rights_that_their_own_bits_allow() {
    formats(|marks| rights::<Arm<12>>(arm(marks), marks));
    rights::<Ept<true>>(Default::default(), true);
}

fn granted<H: Hardware>(format: H::Format) {
    on_stage::<H>((format, 40, 8), |_, guard, cache| {
        let (page, size) = (PageSize::SIZE_4K, PageSize::SIZE_2M);
        let how = Attributes { software: B, dirty: false, ..READ_ONLY };
        guard.map(range(0, 8 * K), Hpa(16 * K), how, page, cache).unwrap();
        guard.map(range(2 * M, 2 * M), Hpa(2 * M), how, size, cache).unwrap();
        let before = [0, 4 * K, 2 * M].map(|gpa| attributes::<H>(guard, gpa));
        // There is another page, none, or a block.
        assert_eq!(given(guard.grant_write(Gpa(0), Hpa(20 * K), A)), Ok(false));
        assert_eq!(given(guard.grant_write(Gpa(8 * K), Hpa(24 * K), A)), Ok(false));
        assert_eq!(given(guard.grant_write(Gpa(2 * M), Hpa(2 * M), A)), Ok(false));
        assert_eq!(before, [0, 4 * K, 2 * M].map(|gpa| attributes::<H>(guard, gpa)));
        assert_eq!(given(guard.grant_write(Gpa(5 * K), Hpa(20 * K), A)), Ok(true));
        let now = attributes::<H>(guard, 4 * K);
        assert_eq!((now.write, now.dirty, now.software), (true, true, A.union(B)));
        assert_eq!(attributes::<H>(guard, 0), before[0], "its neighbour");
        assert_eq!(given(guard.grant_write(Gpa(4 * K), Hpa(20 * K), A)), Ok(false), "it has it");
        assert_eq!(guard.pending_invalidation(), None, "who gives rights owes nothing");
    });
}

#[test]
fn a_page_may_be_written_where_it_is_mapped_and_no_other() {
    granted::<Arm<12>>(arm(true));
    granted::<Arm<12>>(arm(false));
    granted::<Ept<true>>(Default::default());
}

fn blocks_stay_non_executable_beside_pages_and_keep_their_bits<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |_, guard, cache| {
        let how = Attributes { software: A.union(B), execute: Execute::None, ..RAM };
        let (block, size) = (range(2 * M, 2 * M), PageSize::SIZE_2M);
        guard.map(block, Hpa(2 * M), how, size, cache).unwrap();
        refused(
            relax(guard, block, Relax::new(Access::Execute).only_if(B).unmarked()),
            2 * M,
            ChangeError::CutsBlock { size },
        );
        assert_eq!(attributes::<H>(guard, 2 * M).execute, Execute::None);
        guard.split(block, PageSize::SIZE_4K, cache).unwrap();
        let page = attributes::<H>(guard, 2 * M + 4 * K);
        assert_eq!(page.software, A.union(B), "children have their block's");
        // Leaves that the closure refuses stay pages; those that it accepts become a block with
        // their bits.
        let none = |_: &Attributes| false;
        assert_eq!(guard.collapse_where(block, size, none), Ok(0));
        let kept = |leaf: &Attributes| leaf.execute == Execute::None;
        assert_eq!(guard.collapse_where(block, size, kept), Ok(2 * M));
        assert_eq!(attributes::<H>(guard, 2 * M).software, A.union(B));
    });
}
on!(blocks_stay_non_executable_beside_pages_and_keep_their_bits);

#[test]
fn what_another_may_owe_can_be_owed_as_well() {
    on_stage::<Ept<true>>((Default::default(), 40, 4), |_, guard, _| {
        assert!(guard.defer_invalidation(range(0, 4 * K + 1)).is_err());
        assert_eq!(guard.pending_invalidation(), None);
        guard.defer_invalidation(range(8 * K, 12 * K)).unwrap();
        let owed = guard.pending_invalidation().unwrap();
        assert_eq!((owed.range, owed.leaf), (Some(range(8 * K, 12 * K)), None));
        guard.invalidate();
        assert_eq!(guard.pending_invalidation(), None);
    });
}
