//! The case of NPT alone: an address beyond four levels.

use super::cases::{Fixture, GuardOf, MEMORY, range};
use super::cpu::{CODE, Does, EXIT_CALL, Tree, WIDE, WIDE_AT};
use super::platform::Machine;
use slat::{Attributes, Hpa, PageSize, TableCache};

pub fn cases<'p>(
    fixture: &mut Fixture<'p>,
    guest: &mut GuardOf<'_, 'p>,
    cache: &mut TableCache<'p, Tree, Machine>,
) {
    if fixture.levels < 5 || fixture.address_bits <= 50 {
        return;
    }
    cache.fill(8).expect("frames");
    let page = range(WIDE_AT, 4096);
    let at = Hpa(MEMORY.hpa() + CODE);
    guest.map(page, at, Attributes::RAM, PageSize::SIZE_4K, cache).expect("frames");
    let exit = fixture.run(Does::Read(WIDE));
    let right = exit.code == EXIT_CALL && exit.rax == MEMORY.read(CODE);
    fixture.says("an address of 51 bits is read", right);
    let exit = fixture.run(Does::Read(WIDE + 4096));
    let right = exit.code != EXIT_CALL && exit.info[1] == WIDE_AT + 4096;
    fixture.says("the page behind it faults", right);
}
