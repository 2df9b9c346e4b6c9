//! Incremental snapshots: base and epochs together are the memory, even if epochs between were
//! aborted.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, PageSize};
use slat_guest::*;
use std::collections::HashMap;

const PAGES: u64 = 512;

/// The content of the pages in each epoch.
#[derive(Default)]
struct Store(HashMap<u64, HashMap<u64, u64>>);

impl Store {
    /// Returns the memory as of an epoch.
    fn restore(&self, epochs: &Epochs, upto: u64) -> Vec<u64> {
        let of = |page| {
            let epoch = epochs.holds(page, upto).expect("a base has all pages");
            self.0[&epoch][&page]
        };
        (0..PAGES).map(of).collect()
    }
}

fn pages(bits: &[u64]) -> impl Iterator<Item = u64> {
    (0..PAGES).filter(|page| bits[*page as usize / 64] >> (page % 64) & 1 == 1)
}

on_all! {
    fn base_and_epochs_are_the_memory_regardless_of_aborted_epochs<C: Case>() {
        for logging in [Logging::Protect, Logging::Hardware] {
            if logging == Logging::Hardware && !C::HARDWARE_DIRTY {
                continue;
            }
            let seed = crate::seed::seed();
            let mut rng = fastrand::Rng::with_seed(seed);
            let config = Config { logging, ..config() };
            with_guest!(C, config, logged(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
            let (mut content, mut stamp) = (vec![0; PAGES as usize], 0);
            let (mut epochs, mut store) = (Epochs::new(MemslotId(0)), Store::default());
            let (mut before, mut aborted) = (Vec::new(), 0);
            for round in 0..24 {
                for _ in 0..rng.u64(..8) {
                    let page = rng.u64(..PAGES);
                    attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
                    stamp += 1;
                    content[page as usize] = stamp;
                }
                let epoch = epochs.begin(vcpu.worker()).unwrap();
                assert_eq!(epoch.is_base(), before.is_empty());
                if rng.u8(..3) == 0 || round == 0 {
                    aborted += 1;
                    continue;
                }
                let number = epoch.number();
                let some = pages(epoch.bitmap()).map(|page| (page, content[page as usize]));
                store.0.insert(number, some.collect());
                epoch.commit();
                before.push((number, content.clone()));
            }
            assert!(aborted > 0 && before.len() > 1);
            assert!(epochs.committed().eq(before.iter().map(|(number, _)| *number)));
            for (number, content) in &before {
                let restored = store.restore(&epochs, *number);
                assert!(restored == *content, "epoch {number}, seed {seed}");
            }
            let last = before.last().unwrap().0;
            assert!(store.0[&last].len() < PAGES as usize, "an increment");
            assert_eq!(epochs.holds(0, 0), None);
            assert_eq!(epochs.holds(PAGES, last), None);
            assert!(machine.finish().is_empty());
        }
    }

    fn another_slot_of_that_name_begins_with_a_base<C: Case>() {
        with_guest!(C, config(), logged(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        let mut epochs = Epochs::new(MemslotId(0));
        let count = |epoch: &Epoch<'_>| pages(epoch.bitmap()).count() as u64;
        let epoch = epochs.begin(vcpu.worker()).unwrap();
        assert_eq!((count(&epoch), epoch.is_base()), (PAGES, true));
        epoch.commit();
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        let epoch = epochs.begin(vcpu.worker()).unwrap();
        assert_eq!((count(&epoch), epoch.is_base()), (1, false));
        epoch.commit();
        vcpu.worker().set_memslot(memslot(M2)).unwrap();
        let missing = EpochError::Log(LogError::Missing { id: MemslotId(0) });
        assert_eq!(epochs.begin(vcpu.worker()).map(drop), Err(missing));
        // The log does not have writes of this time.
        vcpu.worker().set_memslot(logged(M2)).unwrap();
        let epoch = epochs.begin(vcpu.worker()).unwrap();
        assert_eq!((count(&epoch), epoch.is_base()), (PAGES, true));
    }

    fn snapshots_of_a_guest_with_rings_are_refused<C: Case>() {
        let config = Config { ring: Some(128), ..config() };
        with_guest!(C, config, logged(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        let _ = &machine;
        let begun = Epochs::new(MemslotId(0)).begin(vcpu.worker()).map(drop);
        assert_eq!(begun, Err(EpochError::Rings));
    }
}
