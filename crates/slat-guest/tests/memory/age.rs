//! Ageing, by guest and by host addresses.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, AgeOptions, Gpa, PageSize, TableBits};
use slat_guest::*;

const CLEAR: AgeOptions =
    AgeOptions { clear: true, table_bits: TableBits::Ignored, flush_tlb: true };
const TEST: AgeOptions = AgeOptions { clear: false, ..CLEAR };

fn pages(bitmap: &[u64]) -> Vec<u64> {
    let set = |page: &u64| bitmap[*page as usize / 64] >> (page % 64) & 1 == 1;
    (0..bitmap.len() as u64 * 64).filter(set).collect()
}

on_all! {
    fn young_pages_are_those_used_since_they_were_aged<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        for page in 0..512 {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
        }
        let mut young = [0; 8];
        let aged = vcpu.worker().age(range(BASE, M2), None, &mut young, CLEAR).unwrap();
        assert_eq!((aged.young, aged.unanswered), (512, 0));
        for page in [5, 63, 64, 300] {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Read).unwrap();
        }
        for how in [TEST, TEST, CLEAR] {
            let mut young = [0; 8];
            vcpu.worker().age(range(BASE, M2), None, &mut young, how).unwrap();
            assert_eq!(pages(&young), [5, 63, 64, 300]);
        }
        let mut young = [0; 8];
        vcpu.worker().age(range(BASE, M2), None, &mut young, TEST).unwrap();
        assert_eq!(young, [0; 8]);
        assert!(machine.finish().is_empty());
    }

    fn a_fault_of_an_aged_page_marks_it_and_says_so<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        for access in [Access::Read, Access::Write] {
            let mut young = [0];
            vcpu.worker().age(range(BASE, K4), None, &mut young, CLEAR).unwrap();
            assert_eq!(vcpu.fault(Gpa(BASE), access), Outcome::MadeAccessed);
            young = [0];
            let aged = vcpu.worker().age(range(BASE, K4), None, &mut young, TEST).unwrap();
            assert_eq!((aged.young, young), (1, [1]));
            assert_eq!(vcpu.fault(Gpa(BASE), access), Outcome::Spurious);
        }
        assert!(machine.finish().is_empty());
    }

    fn only_the_pages_selected_are_asked_about<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        for page in 0..200 {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
        }
        let start = BASE + 3 * K4;
        let selected = [0b11 << 62, 0b111, 1 << 63];
        let mut young = [0; 3];
        let some = range(start, 192 * K4);
        vcpu.worker().age(some, Some(&selected), &mut young, CLEAR).unwrap();
        assert_eq!(pages(&young), [62, 63, 64, 65, 66, 191]);
        let mut young = [0; 3];
        vcpu.worker().age(some, None, &mut young, TEST).unwrap();
        assert_eq!(pages(&young).len(), 192 - 6, "the others were not cleared");
    }

    fn host_addresses_find_every_slot_that_has_them<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        // The same memory in a second memslot, from its 100th page on.
        let twin = MemslotSpec {
            id: MemslotId(1),
            gpa: Gpa(BASE + G1 + 7 * K4),
            host: Hva(HOST + 100 * K4),
            bytes: 200 * K4,
            ..memslot(M2)
        };
        vcpu.worker().set_memslot(twin).unwrap();
        attempt::<C>(&machine, &mut vcpu, BASE + 99 * K4, Access::Read).unwrap();
        attempt::<C>(&machine, &mut vcpu, BASE + 130 * K4, Access::Read).unwrap();
        attempt::<C>(&machine, &mut vcpu, BASE + G1 + 57 * K4, Access::Read).unwrap();
        let mut young = [0; 2];
        let host = host_range(HOST + 90 * K4, 100 * K4);
        vcpu.worker().age_host(host, None, &mut young, TEST).unwrap();
        assert_eq!(pages(&young), [9, 40, 60]);
        let mut young = [0; 2];
        let selected = [1 << 60 | 1 << 40 | 1 << 41, 0];
        vcpu.worker().age_host(host, Some(&selected), &mut young, CLEAR).unwrap();
        assert_eq!(pages(&young), [40, 60]);
        let mut young = [0; 2];
        vcpu.worker().age_host(host, None, &mut young, TEST).unwrap();
        assert_eq!(pages(&young), [9]);
    }

    /// Two guests use the same pages. One is aged as a whole, the other in pieces, in any order, by
    /// guest or host addresses, some of them twice.
    fn any_partition_of_a_range_answers_as_the_whole_does<C: Case>() {
        for seed in crate::seed::seeds(6) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let size = [PageSize::SIZE_4K, PageSize::SIZE_2M][rng.usize(..2)];
            let config = Config { contiguous: rng.bool(), ..config() };
            with_guest!(C, config, memslot(2 * M2), size => machine, ram, guest, vcpu);
            with_guest!(C, config, memslot(2 * M2), size => other, its_ram, its_guest, its_vcpu);
            for _ in 0..6 {
                for _ in 0..rng.u8(..40) {
                    let access = [Access::Read, Access::Write, Access::Execute][rng.usize(..3)];
                    let gpa = BASE + rng.u64(..1024) * K4;
                    attempt::<C>(&machine, &mut vcpu, gpa, access).unwrap();
                    attempt::<C>(&other, &mut its_vcpu, gpa, access).unwrap();
                }
                let how = AgeOptions { clear: rng.u8(..3) != 0, ..CLEAR };
                let (mut whole, mut pieces) = ([0; 16], [0; 16]);
                let aged = vcpu.worker().age(range(BASE, 2 * M2), None, &mut whole, how).unwrap();
                let mut cuts: Vec<u64> = (0..rng.u8(..12)).map(|_| rng.u64(..1024)).collect();
                cuts.extend([0, 1024]);
                cuts.sort_unstable();
                let mut parts: Vec<_> = cuts.windows(2).map(|cut| (cut[0], cut[1])).collect();
                parts.retain(|(first, end)| first != end);
                rng.shuffle(&mut parts);
                let mut young = 0;
                for (first, end) in parts {
                    let (mut found, count) = ([0; 16], end - first);
                    let worker = its_vcpu.worker();
                    let aged = if rng.bool() {
                        let part = range(BASE + first * K4, count * K4);
                        worker.age(part, None, &mut found, how).unwrap()
                    } else {
                        let part = host_range(HOST + first * K4, count * K4);
                        worker.age_host(part, None, &mut found, how).unwrap()
                    };
                    assert_eq!(aged.unanswered, 0);
                    young += aged.young;
                    let found = pages(&found);
                    assert!(found.iter().all(|page| *page < count));
                    for page in found.iter().map(|page| first + page) {
                        pieces[page as usize / 64] |= 1 << (page % 64);
                    }
                }
                assert_eq!(pages(&pieces), pages(&whole), "SLAT_SEED={seed}");
                assert_eq!(young, aged.young);
            }
        }
    }

    fn bad_requests_say_why<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        let worker = vcpu.worker();
        let short = worker.age(range(BASE, M2), None, &mut [0; 7], TEST).unwrap_err();
        assert!(short.to_string().contains("7 words"), "{short}");
        let short = worker.age(range(BASE, M2), Some(&[0; 7]), &mut [0; 8], TEST).unwrap_err();
        assert!(short.to_string().contains("7 words"), "{short}");
        let odd = worker.age_host(host_range(HOST + 5, K4), None, &mut [0; 8], TEST);
        assert_eq!(odd, Err(AgeError::Unaligned));
    }
}
