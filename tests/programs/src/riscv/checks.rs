//! Claims about RISC-V's tables alone, and the common ones.

use crate::claims::{Bits, Claims, Cpu, Does, Fault, M2, Outcome, Why, judge, range};
use crate::machine::{CALL, FREE, Guest, IS_SPIKE, Line, Machine, end, load_root, say, write_code};
use crate::second;
use core::sync::atomic::Ordering::Relaxed;
use slat::format::riscv::{Mode, RiscV};
use slat::{Access, Attributes, Execute, PageSize, Reader, TableCache, Tables, Vmid};

const K4: u64 = 4 << 10;
const G1: u64 = 1 << 30;
const VMID: Vmid = Vmid(5);
/// The guest's code, a block of data and pages of data, in host memory.
const CODE: u64 = FREE;
const BLOCK: u64 = FREE + M2;
const PAGES: u64 = FREE + 3 * M2;

#[unsafe(no_mangle)]
extern "C" fn boot(architecture: u64) -> ! {
    IS_SPIKE.store(architecture == 5, Relaxed);
    let machine = Machine::new();
    let modes = [(Mode::Sv39x4, "Sv39x4"), (Mode::Sv48x4, "Sv48x4"), (Mode::Sv57x4, "Sv57x4")];
    let wrong: u32 = modes
        .into_iter()
        .map(|(mode, name)| judge::<Hart<'_>>(Line, |fault| check(mode, name, &machine, fault)))
        .sum();
    let is_seen = second::run(&machine);
    say!("{wrong} wrong");
    end(wrong == 0 && is_seen)
}

struct Hart<'p>(&'p Machine, Guest);

impl Cpu for Hart<'_> {
    type Format = RiscV;
    type Platform = Machine;
    const SAYS_WHY: bool = false;
    const CALL: u64 = CALL;
    const FAULTS: &'static [Fault] = &[
        ("a leaf is invalid", Bits::Clear(1)),
        ("a leaf is not for users", Bits::Clear(1 << 4)),
        ("a leaf keeps the right to write", Bits::Set(1 << 2)),
        ("a leaf keeps the right to execute", Bits::Set(1 << 3)),
        ("a leaf has a reserved bit", Bits::Set(1 << 54)),
        ("a leaf is dirty before", Bits::Set(1 << 7)),
        ("a leaf's address is off by a leaf", Bits::Address),
    ];
    const ADDRESS_SHIFT: u32 = 2;

    fn run(&self, does: Does) -> Outcome {
        self.1.run(does)
    }

    fn write_code(&self, hpa: u64) {
        write_code(hpa);
    }

    fn forget(&self) {
        self.0.fence(VMID);
    }
}

/// Runs the checks in tables of the mode. The guest uses the upper end of its addresses: every
/// index is above 0, and the root's is above 1535.
fn check(mode: Mode, name: &'static str, machine: &Machine, fault: Option<Fault>) -> u32 {
    let format = RiscV { widest: Mode::Sv57x4, ..Default::default() };
    let bits = mode.address_bits();
    let before = machine.live.get();
    let tables = Tables::new(format, VMID, bits, machine).expect("memory for the root");
    let hgatp = tables.guest_root().hgatp().expect("a value");
    let held = load_root(hgatp);
    let guest = Guest { code: (1 << bits) - M2 };
    let mut storage = [const { None }; 16];
    let mut reader = Reader::register(machine).expect("the only one");
    let mut wrong = {
        let mut claims = Claims {
            cpu: Hart(machine, guest),
            tables: &tables,
            guard: tables.enter(&mut reader).expect("the machine's own tables"),
            cache: TableCache::new(machine, &mut storage),
            out: Line,
            name,
            at: guest.code - 8 * M2,
            pages: PAGES,
            block: BLOCK,
            wrong: 0,
            fault,
            marked_by_faults: 0,
        };
        claims.is("hgatp holds what it is given", held, hgatp);
        write_code(CODE);
        let code = Attributes { write: false, dirty: false, ..Attributes::RAM };
        claims.map(guest.code, K4, CODE, code);
        claims.check();
        if fault.is_none() {
            let beyond = Does::Load(1 << bits);
            let found = guest.run(beyond);
            claims.is("what the mode does not reach faults", found, refused(beyond));
            rights(&mut claims, guest);
        }
        claims.wrong
    };
    drop(reader);
    load_root(0);
    // SAFETY: the only hart has just unloaded the root.
    unsafe { tables.deactivate() }.destroy();
    if machine.live.get() != before {
        say!("wrong {name}: frames are lost");
        wrong += 1;
    }
    wrong
}

fn refused(does: Does) -> Outcome {
    Claims::<Hart<'_>, Line>::refused(does, Why::Other)
}

/// Checks a block that may be executed alone, or nothing, and one of 1 GiB.
fn rights(claims: &mut Claims<'_, '_, Hart<'_>, Line>, guest: Guest) {
    // The guest's code under another address: without R, W and X it would be a table.
    let at = guest.code - 2 * M2;
    let (block, call) = (range(at, M2), at + CALL);
    let all = [Does::Load(call), Does::Store(call, 1), Does::Jump(call)];
    claims.map(at, M2, CODE, Attributes { read: false, write: false, ..Attributes::RAM });
    let found = all.map(|does| guest.run(does));
    let expected = [refused(all[0]), refused(all[1]), Ok(0)];
    claims.is("a block may be executed alone", found, expected);
    claims.guard.execute_protect(block).expect("a block");
    claims.guard.invalidate();
    claims.is(
        "a block without rights is for nothing",
        all.map(|does| guest.run(does)),
        all.map(refused),
    );
    claims.guard.relax(block, Access::Execute).expect("a block").flush_local();
    let found = all.map(|does| guest.run(does));
    claims.is("executable again, and no more", found, expected);
    // RAM begins at a multiple of 1 GiB, and so does this.
    let at = (guest.code & !(G1 - 1)) - G1;
    let data = Attributes { write: false, execute: Execute::None, ..Attributes::RAM };
    claims.map(at, G1, FREE & !(G1 - 1), data);
    let found = (claims.size(at), guest.run(Does::Load(at + PAGES % G1 + 8)));
    claims.is("1g is one leaf", found, (Some(PageSize::SIZE_1G), Ok(0x1234)));
}
