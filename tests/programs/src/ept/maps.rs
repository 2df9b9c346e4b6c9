//! Cases of EPT alone: hardware's answer to each bit of an entry, flipped.

use super::cases::{BLOCK, Fixture, GuardOf, MEMORY, READ, range};
use super::cpu::{
    Does, EXIT_CALL, EXIT_MISCONFIGURATION, EXIT_VIOLATION, GUEST_TABLES, Tree, rdmsr,
};
use super::machine::Serial;
use super::platform::{Machine, TABLES};
use core::fmt::Write;
use slat::{Access, Attributes, Hpa, PageSize, TableCache};

/// What the CPU says: `.` as before, `d` other data, `v` violation, `m` misconfiguration. Bit 63
/// comes first. Of `a` and `t`, bits of an address, those that the CPU lacks are reserved. Of `a`
/// the others read other memory, which only a program that owns all memory may do; with those of
/// `t` a table would be some other memory, in which the CPU would set marks: no flip. The engine's
/// mark, its software bits and the bits of features that are off are ignored, all reserved bits are
/// not; `?` is the one that Bochs ignores in blocks, against the manual.
const MAPS: [(&str, u64, usize, &str); 5] = [
    ("page", READ, 0, "............aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa......m.m..m"),
    ("block of 2m", BLOCK, 1, "............aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaammmmmmmm?....m.m.m..m"),
    ("block of 1g", GIB, 2, "............aaaaaaaaaaaaaaaaaaaaaammmmmmmmmmmmmmmmm?....m.m.m..m"),
    ("table of pages", READ, 1, "............tttttttttttttttttttttttttttttttttttttttt....mmmmmvvm"),
    ("table of 2m", BLOCK, 2, "............tttttttttttttttttttttttttttttttttttttttt....mmmmmvvm"),
];
/// Answers to memory types 0 to 7 of a page that is read.
const TYPES: &str = "..mm...m";
/// Where the guest has a block of 1 GiB, in which its memory is.
const GIB: u64 = 4 << 30;

pub fn cases<'p>(
    fixture: &mut Fixture<'p>,
    guest: &mut GuardOf<'_, 'p>,
    cache: &mut TableCache<'p, Tree, Machine>,
) {
    let (at, inside) = (MEMORY.hpa() >> 30 << 30, MEMORY.hpa() & ((1 << 30) - 1));
    cache.fill(16).expect("frames");
    let gib = range(GIB, 1 << 30);
    guest.map(gib, Hpa(at), Attributes::RAM, PageSize::SIZE_1G, cache).expect("frames");
    for pages in [range(READ, 1 << 12), range(GUEST_TABLES, 0x3000), range(BLOCK, 2 << 20)] {
        guest.relax(pages, Access::Write).expect("mapped").flush_local();
    }
    guest.clean(range(READ, 1 << 12)).expect("mapped");
    guest.invalidate();
    for (what, expected) in [("a cleaned page is logged at its write", 1), ("and once", 0)] {
        let exit = fixture.run(Does::Write(READ, 1));
        if let Some(log) = fixture.vcpu.logged() {
            let count = log.filter(|&page| page == READ).count();
            fixture.says(what, exit.code == EXIT_CALL && count == expected);
        }
    }
    MEMORY.write(READ + 0x18, 0x5678);
    MEMORY.write(BLOCK + 0x18, 0x9abc);
    for (entry, gpa, level, expected) in MAPS {
        let _ = write!(Serial, "{entry}: each bit flipped: ");
        let flipped = (0..64).rev().map(|bit| (0, 1 << bit));
        let at = if gpa == GIB { GIB + inside + READ } else { gpa };
        answers(fixture, entry, at, level, flipped, expected);
    }
    let _ = write!(Serial, "memory types: ");
    answers(fixture, "memory types", READ, 0, (0..8).map(|kind| (0b111 << 3, kind << 3)), TYPES);
    let _ = write!(Serial, "rights: ");
    // Rights 0 to 7 (XWR): to execute alone is a capability.
    let rights = if rdmsr(0x48c) & 1 == 1 { "v.m.v.m." } else { "v.m.m.m." };
    answers(fixture, "rights", READ, 0, (0..8).map(|rights| (0b111, rights)), rights);
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
    let entry = fixture.entries(gpa).nth(fixture.levels - 1 - level);
    let at = entry.expect("an entry").0 - TABLES.hpa();
    let bits = fixture.address_bits;
    let mut right = before.code == EXIT_CALL && expected.len() >= 8;
    for ((clear, flip), answer) in changes.zip(expected.chars()) {
        let answer = match answer {
            'a' | 't' if flip >> bits != 0 => 'm',
            'a' if cfg!(target_os = "none") => 'd',
            'a' | 't' => continue,
            answer => answer,
        };
        let is_free = answer == '?';
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
        right &= answer == found || is_free && matches!(found, '.' | 'm');
        let _ = write!(Serial, "{found}");
    }
    let _ = writeln!(Serial);
    fixture.machine.set_stale();
    fixture.says(what, right);
}
