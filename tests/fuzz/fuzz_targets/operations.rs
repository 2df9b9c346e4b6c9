//! Turns bytes into a history of operations and of the guest's accesses on one of the real formats,
//! and compares it with a flat model, which has the host address, rights and state of each page.
//!
//! `cargo xtask fuzz 60`. A history that fails is kept in `tests/fuzz/artifacts/operations`;
//! `cargo +nightly fuzz run operations <file>` runs it again.
#![no_main]

mod machine;
mod model;

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use machine::Machine;
use model::Model;
use slat::format::arm64::Arm64;
use slat::format::ept::Ept1G;
use slat::*;

fuzz_target!(|data: &[u8]| {
    // Bytes that run out end the history.
    let _ = play(&mut Unstructured::new(data));
});

fn play(input: &mut Unstructured<'_>) -> Result<()> {
    match input.arbitrary::<u8>()? % 4 {
        0 => history::<Arm64<12>>(input, Arm64 { hardware_dirty: true, ..Default::default() }),
        1 => history::<Arm64<14>>(input, Arm64 { hardware_dirty: true, ..Default::default() }),
        2 => history::<Arm64<16>>(input, Arm64 { hardware_dirty: true, ..Default::default() }),
        _ => history::<Ept1G>(input, Ept1G::default()),
    }
}

/// Bits of a guest address: three levels at least.
const BITS: u32 = 44;

struct Input<'i, 'b, F> {
    bytes: &'i mut Unstructured<'b>,
    format: core::marker::PhantomData<F>,
}

impl<F: Format> Input<'_, '_, F> {
    fn of<T: Copy>(&mut self, choices: &[T]) -> Result<T> {
        self.bytes.choose(choices).copied()
    }

    fn size(&mut self) -> Result<PageSize> {
        let level = self.bytes.int_in_range(0..=u32::from(F::LARGEST_LEAF))?;
        Ok(PageSize::from_bytes(1 << (F::PAGE_SHIFT + F::INDEX_BITS * level)).unwrap())
    }

    /// Chooses a page near one of a few boundaries, so that operations meet.
    fn page(&mut self) -> Result<u64> {
        let block = 1 << (F::PAGE_SHIFT + F::INDEX_BITS);
        let base = self.of(&[0, block, 2 * block, block << F::INDEX_BITS])?;
        let offset = self.of(&[0, 1, 2, 7, 8, (1 << F::INDEX_BITS) - 1])?;
        Ok(base + (offset << F::PAGE_SHIFT))
    }

    fn range(&mut self) -> Result<GpaRange> {
        let start = self.page()?;
        let size = match self.bytes.int_in_range(0..=3)? {
            0 => 1 << F::PAGE_SHIFT,
            1 => self.bytes.int_in_range(1..=20u64)? << F::PAGE_SHIFT,
            2 => 1 << (F::PAGE_SHIFT + F::INDEX_BITS),
            _ => self.size()?.bytes(),
        };
        let start = if self.bytes.arbitrary()? { start / size * size } else { start };
        Ok(GpaRange::new(Gpa(start), size).unwrap())
    }

    fn attributes(&mut self) -> Result<Attributes> {
        let clean = Attributes { accessed: false, dirty: false, ..Attributes::RAM };
        self.of(&[
            Attributes::RAM,
            clean,
            Attributes { write: false, dirty: false, ..Attributes::RAM },
            Attributes { software: Software::A, execute: Execute::None, ..Attributes::RAM },
        ])
    }
}

fn history<F: Format>(bytes: &mut Unstructured<'_>, format: F) -> Result<()> {
    let bbm = if bytes.arbitrary()? { BreakBeforeMake::Always } else { BreakBeforeMake::Never };
    let machine = Machine::new(bbm);
    let tables = Tables::new(format, Vmid(1), BITS, &machine).unwrap();
    let mut input = Input::<F> { bytes, format: core::marker::PhantomData };
    let mut model = Model::default();
    let mut participant = Participant::register(&machine).unwrap();
    let mut ended = Ok(());
    for step in 1.. {
        if step > 64 || ended.is_err() {
            break;
        }
        let mut guard = tables.enter(&mut participant).unwrap();
        ended = one(&mut input, &machine, &tables, &mut guard, &mut model);
        if step % 8 == 0 || ended.is_err() {
            model.compare(&guard, BITS);
        }
        guard.complete();
        drop(guard);
        tables.reclaim();
    }
    drop(participant);
    // SAFETY: the only CPU is `Machine::access`, which has returned.
    unsafe { tables.deactivate() }.destroy();
    assert_eq!(machine.live(), 0, "frames that were not given back");
    Ok(())
}

fn one<'p, F: Format>(
    input: &mut Input<'_, '_, F>,
    machine: &'p Machine,
    tables: &Tables<'p, F, Machine>,
    guard: &mut Guard<'_, 'p, F, Machine>,
    model: &mut Model,
) -> Result<()> {
    let kind = input.bytes.int_in_range(0..=12u8)?;
    let at = input.range()?;
    let mut frames = [const { None }; 8];
    let mut cache = TableCache::<F, _>::new(machine, &mut frames);
    cache.fill(input.bytes.int_in_range(0..=5)?).unwrap();
    let mut bitmap = vec![0; ((at.size() >> F::PAGE_SHIFT) as usize).div_ceil(64)];
    match kind {
        0 | 1 => {
            let host = input.of(&[0, 1 << 40, (1 << 40) + (1 << F::PAGE_SHIFT)])?;
            let (attributes, size) = (input.attributes()?, input.size()?);
            let hpa = Hpa(host + at.start().0);
            let result = guard.map(at, hpa, attributes, size, &mut cache);
            model.mapped(at, hpa, attributes, &result);
        }
        2 | 3 => {
            let mut storage = [const { Place::EMPTY }; 16];
            let room = input.bytes.int_in_range(0..=16)?;
            let mut removals = Removals::new(tables, &mut storage[..room]);
            let result = guard.unmap(at, &mut removals);
            let removed: Vec<_> = removals.complete().collect();
            model.unmapped(at, &result, &removed);
        }
        4 | 5 => {
            let subtrees = kind == 5;
            let result =
                if subtrees { guard.write_protect_subtrees(at) } else { guard.write_protect(at) };
            model.subtrees |= subtrees;
            model.changed(at, &result, |attributes| attributes.write = false);
        }
        6 => {
            let access = input.of(&[Access::Read, Access::Write, Access::Execute])?;
            let whole = model::leaves_of(guard, at);
            let result = guard.relax(at, access).map(slat::Granted::elsewhere);
            // A read covers whole blocks.
            let at = if access == Access::Read { whole } else { at };
            model.changed(at, &result, |attributes| {
                attributes.accessed = true;
                match access {
                    Access::Write => (attributes.write, attributes.dirty) = (true, true),
                    Access::Read => {}
                    fetch => attributes.execute = attributes.execute.with(fetch),
                }
            });
        }
        7 => match guard.split(at, input.size()?, &mut cache).map_err(|halted| halted.why) {
            Ok(_) | Err(SplitError::CacheEmpty) => {}
            Err(error) => panic!("{error}"),
        },
        8 => {
            guard.collapse(at, input.size()?).unwrap();
            model.merge(guard, at);
        }
        9 => {
            let whole = model::leaves_within(guard, at);
            let skip = input.of(&[Skip::Nothing, Skip::Exact])?;
            let how = Ageing { clear: true, skip, fresh: input.bytes.arbitrary()? };
            let mut unanswered = vec![0; bitmap.len()];
            let mut ages = Ages { young: &mut bitmap, unanswered: &mut unanswered };
            guard.age(at, &mut ages, how).unwrap();
            assert!(unanswered.iter().all(|word| *word == 0), "nobody is in the way");
            model.named(at, F::PAGE_SHIFT, &bitmap, |attributes| attributes.accessed);
            // A block that the range cuts stays young.
            whole.into_iter().for_each(|leaf| model.each(leaf, |state| state.accessed = false));
        }
        10 => {
            let result = guard.harvest(at, &mut bitmap);
            if result.is_ok() {
                model.named(at, F::PAGE_SHIFT, &bitmap, |attributes| attributes.dirty);
            }
            model.changed(at, &result, |attributes| attributes.dirty = false);
        }
        11 => {
            let host = input.of(&[0, 1 << 40])?;
            let (attributes, size) = (input.attributes()?, input.size()?);
            if let Ok(reservation) = guard.reserve(at.start(), size, &mut cache) {
                let at = reservation.range();
                let hpa = Hpa(host + at.start().0);
                let bytes = reservation.commit(hpa, attributes).unwrap();
                assert_eq!(bytes, Some(at.size()), "nobody took the reservation away");
                model.mapped(at, hpa, attributes, &Ok(at.size()));
            }
        }
        _ => {
            let write = input.bytes.arbitrary()?;
            if let Some(leaf) = machine.access(tables, at.start().0, write) {
                model.each(leaf, |attributes| {
                    attributes.accessed = true;
                    attributes.dirty |= write;
                });
            }
        }
    }
    Ok(())
}
