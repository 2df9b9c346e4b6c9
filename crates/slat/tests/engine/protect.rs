//! Rights that are set to an exact value.

use crate::common::Event;
use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::hardware::ept::Ept;
use crate::common::hardware::riscv::Hart;
use crate::common::stage::{CLEAN, K, M, RAM, host, on_stage, range, refused};
use crate::common::world::GuardOf;
use slat::format::AttributeError;
use slat::format::arm64::Arm64K4;
use slat::{Attributes, ChangeError, Execute, Gpa, Hpa, PageSize, Rights, Software};

const PAGE: PageSize = PageSize::SIZE_4K;
const NONE: Rights = Rights { read: false, write: false, execute: Execute::None };

fn attributes<H: Hardware>(guard: &GuardOf<'_, '_, H>, gpa: u64) -> Attributes {
    guard.translate(Gpa(gpa)).unwrap().unwrap().attributes
}

fn with(attributes: Attributes, Rights { read, write, execute }: Rights) -> Attributes {
    Attributes { read, write, execute, ..attributes }
}

/// From any rights to any others: the leaf has exactly those, and nothing else changes.
fn to_and_fro<H: Hardware>(format: H::Format, all: &[Rights], marks: bool) {
    on_stage::<H>((format, 40, 8), |_, guard, cache| {
        let page = range(4 * K, 4 * K);
        for software in [Software::NONE, Software::B] {
            let how = Attributes { software, write: false, ..CLEAN };
            guard.map(page, Hpa(8 * K), how, PAGE, cache).unwrap();
            let mut dirty = false;
            for (from, to) in all.iter().flat_map(|from| all.iter().map(move |to| (*from, *to))) {
                guard.protect(page, from).unwrap();
                dirty |= from.write && !marks;
                let had = with(Attributes { dirty, ..how }, from);
                assert_eq!(attributes::<H>(guard, 4 * K), had);
                guard.invalidate();
                let changed = if from == to { 0 } else { 4 * K };
                assert_eq!(guard.protect(page, to), Ok(changed), "{from:?} to {to:?}");
                assert_eq!(guard.pending_invalidation().is_some(), changed != 0);
                dirty |= to.write && !marks;
                assert_eq!(attributes::<H>(guard, 4 * K), with(Attributes { dirty, ..how }, to));
                assert_eq!(host::<H>(guard, 4 * K), Some(Hpa(8 * K)));
            }
            crate::common::unmap(guard, page);
        }
    });
}

#[test]
fn a_leaf_gets_exactly_the_set_rights_and_keeps_all_else() {
    let rights = |read: &'static [bool], write: &'static [bool], levels: &'static [Execute]| {
        let of = move |read: bool, write: bool| {
            levels.iter().map(move |&execute| Rights { read, write, execute })
        };
        let all =
            read.iter().flat_map(move |&read| write.iter().flat_map(move |&write| of(read, write)));
        all.collect::<Vec<_>>()
    };
    const BOTH: [bool; 2] = [false, true];
    const LEVELS: [Execute; 4] = [Execute::None, Execute::All, Execute::User, Execute::Kernel];
    for hardware_dirty in BOTH {
        let format = Arm64K4 { hardware_dirty, split_execute: true, ..Default::default() };
        to_and_fro::<Arm<12>>(format, &rights(&BOTH, &BOTH, &LEVELS), hardware_dirty);
    }
    to_and_fro::<Ept<true>>(Default::default(), &rights(&[true], &BOTH, &LEVELS[..2]), true);
    // The right to write requires the right to read.
    let mut all = rights(&[true], &BOTH, &LEVELS[..2]);
    all.extend(rights(&[false], &[false], &LEVELS[..2]));
    #[cfg(feature = "every-format")]
    to_and_fro::<Hart<true>>(Default::default(), &all, true);
}

#[test]
fn rights_a_format_cannot_express_are_refused_without_a_change() {
    on_stage::<Ept<true>>((Default::default(), 40, 8), |_, guard, cache| {
        let page = range(0, 4 * K);
        guard.map(page, Hpa(0), RAM, PAGE, cache).unwrap();
        let (refresh, user) = (guard.counts(), Rights { execute: Execute::User, ..Rights::ALL });
        for (rights, reason) in
            [(NONE, AttributeError::NeedsRead), (user, AttributeError::ExecuteNeedsSplitRights)]
        {
            let said = refused(guard.protect(page, rights), 0, ChangeError::Attributes(reason));
            assert!(said.contains(&reason.to_string()), "{said}");
        }
        assert_eq!(guard.counts(), refresh);
        refused(
            guard.protect(range(1 << 40, 4 * K), Rights::ALL),
            1 << 40,
            guard.write_protect(range(1 << 40, 4 * K)).unwrap_err().reason,
        );
    });
    on_stage::<Ept<true>>((Default::default(), 40, 8), |_, guard, cache| {
        guard.map(range(2 * M, 2 * M), Hpa(0), RAM, PageSize::SIZE_2M, cache).unwrap();
        guard.invalidate();
        let cuts = ChangeError::CutsBlock { size: PageSize::SIZE_2M };
        refused(guard.protect(range(2 * M, 4 * K), Rights::READ), 2 * M, cuts);
        let counts = guard.counts();
        refused(guard.protect(range(2 * M, M), Rights::ALL), 2 * M, cuts);
        assert_eq!(guard.counts().entries_written, counts.entries_written);
        assert_eq!(attributes::<Ept<true>>(guard, 2 * M), RAM);
    });
}

#[test]
fn memory_is_made_coherent_only_where_execute_is_given() {
    let format = Arm64K4 { split_execute: true, ..Default::default() };
    on_stage::<Arm<12>>((format, 40, 8), |_, guard, cache| {
        let (page, platform) = (range(0, 4 * K), guard.platform());
        guard.map(page, Hpa(0), RAM, PAGE, cache).unwrap();
        let mut maintained = |execute| {
            platform.take_events();
            guard.protect(page, Rights { execute, ..Rights::ALL }).unwrap();
            let events = platform.take_events().into_iter();
            events.filter(|event| matches!(event, Event::Maintain { .. })).count()
        };
        assert_eq!(maintained(Execute::None), 0, "taken");
        assert_eq!(maintained(Execute::User), 1);
        assert_eq!(maintained(Execute::User), 0, "it has it");
        assert_eq!(maintained(Execute::Kernel), 1, "another level has it");
    });
}
