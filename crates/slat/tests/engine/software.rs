//! Software bits: those that each format has, in leaves of every size, and how they are set in
//! place.

use crate::common::hardware::arm::{self, Arm};
use crate::common::hardware::ept::{self, Ept};
use crate::common::hardware::npt::{self, Npt};
use crate::common::hardware::{Descriptor, Hardware, Leaf};
use crate::common::stage::{CLEAN, RAM, host, idle, on_stage, range, refused, says};
use crate::common::world::GuardOf;
use slat::format::{AttributeError, Kind};
use slat::{
    Access, AgeBitmaps, AgeOptions, Attributes, ChangeError, Format, Gpa, Hpa, MapError, PageSize,
    Relax, Software, TableBits,
};

const EXACT: AgeOptions = AgeOptions { clear: true, table_bits: TableBits::Exact, flush_tlb: true };

fn of<H: Hardware>(guard: &GuardOf<'_, '_, H>, gpa: u64) -> Software {
    guard.translate(Gpa(gpa)).unwrap().unwrap().attributes.software
}

fn size(bytes: u64) -> PageSize {
    PageSize::from_bytes(bytes).unwrap()
}

fn each<H: Hardware>() -> impl Iterator<Item = Software> {
    (0..H::SOFTWARE_BITS).map(Software::bit)
}

fn lacks<H: Hardware>() -> Option<(Software, AttributeError)> {
    let first = (H::SOFTWARE_BITS as usize) < Software::MOST;
    let first = first.then(|| Software::bit(H::SOFTWARE_BITS))?;
    Some((first, H::lacks(first).unwrap()))
}

/// Makes a test for hardware of every kind, with every size of leaf.
macro_rules! on_every_format {
    ($test:ident) => {
        on!($test; npt, riscv, radix_64k, radix_4k, arm_16k_lpa2, arm_64k);
    };
}

fn hardware_ignores_each_software_bit_in_leaves_of_every_size<H: Hardware>() {
    let format = H::usual();
    on_stage::<H>((format, 40, 8), |tables, _, _| {
        let hardware = H::of(tables);
        let places = H::Format::SOFTWARE;
        assert_eq!(H::Format::SOFTWARE_BITS, H::SOFTWARE_BITS);
        assert!(places[H::SOFTWARE_BITS as usize..].iter().all(|mask| *mask == 0));
        for height in 0..H::SIZES {
            let level = height as u8;
            let (hpa, plain) = (Hpa(H::size(height)), format.encode(RAM).unwrap());
            let leaf = |raw| match hardware.decode(raw, height) {
                Descriptor::Leaf(leaf) => leaf,
                other => panic!("{raw:#x} at {height}: {other:?}"),
            };
            let base = leaf(H::Format::leaf(plain, level, hpa));
            for number in 0..1u16 << H::SOFTWARE_BITS {
                let software = Software::from_bits(number as u8);
                let bits = format.encode(Attributes { software, ..RAM }).unwrap();
                let raw = H::Format::leaf(bits, level, hpa);
                let own = Attributes { software, ..base.own };
                assert_eq!(leaf(raw), Leaf { own, ..base }, "{raw:#x}: hardware looks at it");
                assert_eq!(format.decode(raw, level), own);
                assert_eq!(H::Format::kind(raw, level), Kind::Leaf);
                assert_eq!(H::Format::kind(raw | H::MARK, level), Kind::Sealed);
                assert_eq!(H::Format::leaf_address(raw, level), hpa);
                assert_eq!(H::Format::attribute_bits(raw, level), bits, "children inherit them");
            }
        }
        if let Some((software, reason)) = lacks::<H>() {
            assert_eq!(format.encode(Attributes { software, ..RAM }), Err(reason));
            let both = software.union(Software::A);
            assert!(format.encode(Attributes { software: both, ..RAM }).is_err());
        }
    });
}
on_every_format!(hardware_ignores_each_software_bit_in_leaves_of_every_size);

#[test]
fn the_model_has_all_software_bits_that_each_format_has() {
    assert_eq!(arm::USERS.len(), Arm::<12>::SOFTWARE_BITS as usize);
    assert_eq!(ept::USERS.len(), Ept::<true>::SOFTWARE_BITS as usize);
    assert_eq!(npt::USERS.len(), Npt::<true>::SOFTWARE_BITS as usize);
}

fn software_bits_survive_split_ageing_protection_and_collapse<H: Hardware>() {
    let [.., large, page] = H::sizes()[..] else { unreachable!() };
    let (block, count) = (range(large, large), large / page);
    for software in each::<H>() {
        on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
            let how = Attributes { software, accessed: false, ..RAM };
            guard.map(block, Hpa(large), how, size(large), cache).unwrap();
            assert_eq!(guard.split(block, size(page), cache), Ok(large));
            guard.invalidate();
            let hardware = H::of(tables);
            let tree = hardware.tree(tables.platform());
            assert_eq!(tree.leaves(), count);
            assert!(tree.runs.iter().all(|run| run.leaf.own.software == software));
            // Ageing leaves marks in tables only.
            let mut young = vec![0; (count as usize).div_ceil(64)];
            let mut unanswered = young.clone();
            let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
            guard.age(block, &mut ages, EXACT).unwrap();
            guard.write_protect(block).unwrap();
            guard.invalidate();
            guard.relax(range(large, page), Access::Write).unwrap().not_needed_here();
            assert_eq!(of::<H>(guard, large), software);
            // With one leaf that differs, and with none.
            let last = range(2 * large - page, page);
            assert_eq!(guard.set_software(last, Software::NONE, software), Ok(page));
            guard.write_protect(block).unwrap();
            guard.clean(block).unwrap();
            guard.invalidate();
            assert_eq!(guard.collapse(block, size(large)), Ok(0), "their bits differ");
            assert_eq!(guard.set_software(last, software, Software::NONE), Ok(page));
            assert_eq!(guard.collapse(block, size(large)), Ok(large));
            assert_eq!(of::<H>(guard, 2 * large - 1), software);
            assert_eq!(H::of(tables).tree(tables.platform()).leaves(), 1);
            crate::common::unmap(guard, block);
        });
    }
}
on_every_format!(software_bits_survive_split_ageing_protection_and_collapse);

fn software_bits_change_in_place_without_an_obligation<H: Hardware>() {
    let format = H::usual();
    let page = 1 << H::PAGE;
    let last = Software::bit(H::SOFTWARE_BITS - 1);
    on_stage::<H>((format, 40, 8), |_, guard, cache| {
        let (all, two) = (range(0, 4 * page), range(page, 2 * page));
        let how = Attributes { software: Software::A, ..CLEAN };
        let how = if format.encode(how).is_ok() { how } else { Attributes { dirty: true, ..how } };
        guard.map(all, Hpa(8 * page), how, size(page), cache).unwrap();
        guard.invalidate();
        let bits = |guard: &GuardOf<'_, '_, H>| [0, 1, 2, 3].map(|n| of::<H>(guard, n * page));
        let (a, changed) = (Software::A, last.union(Software::A));
        assert_eq!(guard.set_software(two, last, Software::NONE), Ok(2 * page));
        assert_eq!(bits(guard), [a, changed, changed, a]);
        assert_eq!(guard.set_software(two, last, Software::NONE), Ok(0), "they have it");
        assert_eq!(guard.set_software(all, Software::NONE, last), Ok(2 * page));
        assert_eq!(guard.set_software(all, last, a.union(last)), Ok(4 * page), "set, if both");
        assert_eq!(bits(guard), [last; 4]);
        assert_eq!(guard.pending_invalidation(), None, "hardware ignores them");
        let now = guard.translate(Gpa(page)).unwrap().unwrap();
        assert_eq!(
            now.attributes,
            Attributes { software: last, ..how },
            "and nothing else changed"
        );
        assert_eq!(host::<H>(guard, page), Some(Hpa(9 * page)));
        // Each of the bits tells leaves apart.
        let access = Access::Read;
        assert_eq!(
            guard.relax(all, Relax::new(access).only_if(Software::A)).unwrap().not_needed_here(),
            0
        );
        assert_eq!(
            guard.relax(all, Relax::new(access).only_if(last)).unwrap().not_needed_here(),
            4 * page
        );
        let text = guard.dump().to_string();
        let number = H::SOFTWARE_BITS - 1;
        let name = if number == 1 { String::from("T ") } else { format!("S{number}") };
        says(&text, &[&name]);
    });
    let large = H::sizes()[H::SIZES as usize - 2];
    on_stage::<H>((format, 40, 8), |_, guard, cache| {
        let block = range(large, large);
        guard.map(block, Hpa(0), RAM, size(large), cache).unwrap();
        guard.invalidate();
        let counts = guard.counts();
        for part in [range(large, page), range(large, 2 * page), range(large + page, large)] {
            let reason = ChangeError::CutsBlock { size: size(large) };
            refused(guard.set_software(part, last, Software::NONE), part.start().0, reason);
            assert_eq!(guard.set_software(part, Software::NONE, last), Ok(0), "as it is already");
        }
        assert_eq!(guard.counts().entries_written, counts.entries_written);
        assert_eq!(guard.set_software(block, last, Software::NONE), Ok(large));
        assert_eq!(of::<H>(guard, large), last);
    });
}
on_every_format!(software_bits_change_in_place_without_an_obligation);

fn a_bit_that_the_format_lacks_is_refused_and_nothing_is_done<H: Hardware>() {
    let page = 1 << H::PAGE;
    let Some((software, reason)) = lacks::<H>() else { return };
    on_stage::<H>((H::usual(), 40, 8), |_, guard, cache| {
        let (at, attributes) = (range(page, page), Attributes { software, ..RAM });
        let said = refused(
            guard.map(at, Hpa(0), attributes, size(page), cache),
            page,
            MapError::Attributes(reason),
        );
        says(&said, &["software bits", &H::SOFTWARE_BITS.to_string()]);
        let reason = ChangeError::Attributes(reason);
        refused(guard.set_software(at, software, Software::NONE), page, reason);
        refused(guard.set_software(at, Software::NONE, software), page, reason);
        refused(guard.relax(at, Relax::new(Access::Write).only_if(software)), page, reason);
        refused(
            guard.relax(at, Relax::new(Access::Write).only_if(software).unmarked()),
            page,
            reason,
        );
        refused(
            guard.relax(at, Relax::new(Access::Execute).only_if(software).unmarked()),
            page,
            reason,
        );
        refused(guard.grant_write(Gpa(page), Hpa(0), software), page, reason);
        idle::<H>(guard);
        let beyond = range(1 << 40, page);
        let out = guard.write_protect(beyond).unwrap_err();
        refused(guard.set_software(beyond, Software::A, Software::B), 1 << 40, out.reason);
    });
}
on_every_format!(a_bit_that_the_format_lacks_is_refused_and_nothing_is_done);
