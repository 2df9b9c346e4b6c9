//! Leaves with every combination of attributes, against what a manual says of them.

use slat::format::{Access, AttributeError, Format, Kind};
use slat::{Attributes, Execute, Hpa, Memory, Software};
use std::collections::BTreeSet;
use std::fmt::Debug;

#[path = "../attributes.rs"]
mod attributes;
pub use attributes::all_attributes;

/// The right after a fetch that faulted, on a CPU that tells the levels apart, or not. A fault that
/// does not tell the level leaves a leaf alone that has the right at one level.
fn fetched(before: Execute, access: Access, split: bool) -> Execute {
    let kernel = matches!(before, Execute::All | Execute::Kernel);
    let user = matches!(before, Execute::All | Execute::User);
    let none = !kernel && !user;
    let (more_kernel, more_user) = match access {
        Access::ExecuteKernel => (true, !split),
        Access::ExecuteUser => (!split, true),
        _ => (none, none),
    };
    match (kernel || more_kernel, user || more_user) {
        (true, true) => Execute::All,
        (true, false) => Execute::Kernel,
        (false, true) => Execute::User,
        (false, false) => Execute::None,
    }
}

/// What a CPU is, as far as leaves depend on it.
#[derive(Clone, Copy)]
pub struct Marks {
    /// Its leaves tell kernel from user execution.
    pub split: bool,
    /// Hardware marks writes, or faults.
    pub dirty: bool,
}

/// Checks the leaves of a format. `page` decodes a leaf at a level as hardware does, but for what
/// only the engine reads; `manual` has the same fields for attributes, an address and a size;
/// `refuses` checks why attributes are refused, if they are. Returns the number of leaves.
pub fn check_leaves<F: Format, P: PartialEq + Debug>(
    format: F,
    marks: Marks,
    page: impl Fn(u64, u8) -> P,
    manual: impl Fn(Attributes, u64, u64) -> P,
    refuses: impl Fn(Attributes, Option<AttributeError>),
) -> usize {
    let mut seen = BTreeSet::new();
    let levels = 0..=F::LARGEST_LEAF;
    for (level, a) in levels.flat_map(|level| all_attributes().map(move |a| (level, a))) {
        refuses(a, format.encode(a).err());
        let Ok(bits) = format.encode(a) else { continue };
        // The highest address: all of its bits are set.
        let place = |level| {
            let size = F::size(level).bytes();
            ((1 << format.output_bits()) - size, size)
        };
        let (hpa, size) = place(level);
        let raw = F::leaf(bits, level, Hpa(hpa));
        let is = |raw, a| assert_eq!(page(raw, level), manual(a, hpa, size), "{raw:#x}");
        is(raw, a);
        assert!(seen.insert((level, raw)), "two meanings of {raw:#x}");
        assert_eq!((format.decode(raw, level), F::leaf_address(raw, level)), (a, Hpa(hpa)));
        // Sealed: for hardware, nothing changes.
        let sealed = raw | F::MARK;
        is(sealed, a);
        assert_eq!(
            (F::kind(sealed, level), F::attribute_bits(sealed, level)),
            (Kind::Sealed, bits)
        );
        // Changes of rights that are made twice are made once.
        let protected = F::write_protected(raw);
        is(protected, Attributes { write: false, ..a });
        assert_eq!((protected & F::WRITE, F::write_protected(protected)), (0, protected));
        let data = F::execute_protected(raw);
        is(data, Attributes { execute: Execute::None, ..a });
        assert_eq!(F::execute_protected(data), data);
        for read in [a.read, !a.read] {
            let other = Attributes { read, ..a };
            if format.encode(other).is_ok() {
                let readable = F::readable(raw, read);
                is(readable, other);
                let (kind, address) = (F::kind(readable, level), F::leaf_address(readable, level));
                assert_eq!((kind, address), (Kind::Leaf, Hpa(hpa)));
            }
        }
        let used = Attributes { accessed: true, ..a };
        is(format.relaxed(raw, Access::Read), used);
        for access in [Access::Execute, Access::ExecuteKernel, Access::ExecuteUser] {
            let execute = fetched(a.execute, access, marks.split);
            is(format.relaxed(raw, access), Attributes { execute, ..used });
        }
        let written = Attributes { read: true, write: true, dirty: true, ..used };
        is(format.relaxed(raw, Access::Write), written);
        let dirty = a.dirty && a.write && !marks.dirty;
        is(format.cleaned(raw), Attributes { dirty, ..a });
        // The last child of a split, made from the attribute bits alone.
        if level > 0 {
            let (hpa, size) = place(level - 1);
            let child = F::leaf(F::attribute_bits(raw, level), level - 1, Hpa(hpa));
            assert_eq!(page(child, level - 1), manual(a, hpa, size), "{child:#x}");
        }
    }
    seen.len()
}
