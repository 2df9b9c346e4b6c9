//! Cases of EPT alone: hardware's answer to each bit of an entry, flipped.

use crate::cases::{BLOCK, Fixture, GuardOf, MEMORY, READ, range};
use crate::cpu::{Does, EXIT_CALL, EXIT_MISCONFIGURATION, EXIT_VIOLATION, GUEST_TABLES, Tree};
use crate::machine::{Machine, Serial, TABLES};
use core::fmt::Write;
use slat::{Access, Attributes, Hpa, PageSize, TableCache};

/// What the CPU says: `.` as before, `d` other data, `v` violation, `m` misconfiguration. Bit 63
/// comes first; the CPU has 40 bits of physical address. The engine's mark, its software bits and
/// the bits of features that are off are ignored, all reserved bits are not. With `-` a table would
/// be some other memory of this program, in which the CPU would set marks: no flip.
const MAPS: [(&str, u64, usize, &str); 5] = [
    ("page", READ, 3, "............mmmmmmmmmmmmdddddddddddddddddddddddddddd......m.m..m"),
    ("block of 2m", BLOCK, 2, "............mmmmmmmmmmmmdddddddddddddddddddmmmmmmmm.....m.m.m..m"),
    ("block of 1g", 4 << 30, 1, "............mmmmmmmmmmmmddddddddddmmmmmmmmmmmmmmmmm.....m.m.m..m"),
    ("table of pages", READ, 2, "............mmmmmmmmmmmmmmmmmmmmmmmmmm--------------....mmmmmvvm"),
    ("table of 2m", BLOCK, 1, "............mmmmmmmmmmmmmmmmmmmmmmmmmm--------------....mmmmmvvm"),
];
/// Answers to memory types 0 to 7 and to rights 0 to 7 (XWR) of a page that is read.
const TYPES: &str = "..mm...m";
const RIGHTS: &str = "v.m.v.m.";

pub fn cases<'p>(
    fixture: &mut Fixture<'p>,
    guest: &mut GuardOf<'_, 'p>,
    cache: &mut TableCache<'p, Tree, Machine>,
) {
    let gib = range(4 << 30, 1 << 30);
    cache.fill(16).expect("frames");
    guest.map(gib, Hpa(0), Attributes::RAM, PageSize::SIZE_1G, cache).expect("frames");
    for pages in [range(READ, 1 << 12), range(GUEST_TABLES, 0x3000), range(BLOCK, 2 << 20)] {
        guest.relax(pages, Access::Write).expect("mapped").flush_local();
    }
    MEMORY.write(READ + 0x18, 0x5678);
    MEMORY.write(BLOCK + 0x18, 0x9abc);
    for (entry, gpa, level, expected) in MAPS {
        let _ = write!(Serial, "{entry}: each bit flipped: ");
        let flipped = (0..64).rev().map(|bit| (0, 1 << bit));
        answers(fixture, entry, gpa, level, flipped, expected);
    }
    let _ = write!(Serial, "memory types: ");
    answers(fixture, "memory types", READ, 3, (0..8).map(|kind| (0b111 << 3, kind << 3)), TYPES);
    let _ = write!(Serial, "rights: ");
    answers(fixture, "rights", READ, 3, (0..8).map(|rights| (0b111, rights)), RIGHTS);
}

/// Checks what the CPU says of a read if bits of an entry are cleared, and then others flipped.
fn answers(
    fixture: &mut Fixture<'_>,
    what: &str,
    gpa: u64,
    level: usize,
    changes: impl Iterator<Item = (u64, u64)>,
    expected: &str,
) {
    let read = |fixture: &Fixture<'_>| {
        fixture.machine.set_stale();
        fixture.run(Does::Read(gpa + 0x18))
    };
    let before = read(fixture);
    let (at, _) = fixture.machine.entries(fixture.root, gpa).nth(level).expect("an entry");
    let at = at - TABLES.hpa();
    let mut wanted = expected.chars();
    let mut right = before.code == EXIT_CALL;
    for (clear, flip) in changes {
        let answer = wanted.next();
        if answer == Some('-') {
            continue;
        }
        // With its marks as they are now.
        let entry = TABLES.read(at);
        TABLES.write(at, entry & !clear ^ flip);
        let exit = read(fixture);
        TABLES.write(at, entry);
        let found = match exit.code {
            EXIT_CALL if exit.rax == before.rax => '.',
            EXIT_CALL => 'd',
            EXIT_VIOLATION => 'v',
            EXIT_MISCONFIGURATION => 'm',
            _ => '?',
        };
        right &= answer == Some(found);
        let _ = write!(Serial, "{found}");
    }
    let _ = writeln!(Serial);
    fixture.machine.set_stale();
    fixture.says(what, right);
}
