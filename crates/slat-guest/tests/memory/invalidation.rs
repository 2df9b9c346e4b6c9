//! Invalidations by the host, and the faults that race with them.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, Gpa, Hpa, PageSize, Vmid};
use slat_guest::*;
use slat_sim::Moment;

on_all! {
    fn an_empty_invalidation_takes_nothing_and_delays_no_fault<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        for start in [HOST, HOST + 0x10, HOST + M2 / 2] {
            let mut taken = 0;
            let nothing = host_range(start, 0);
            let held = vcpu.worker().invalidate(nothing, |part| taken += part.host.bytes);
            assert_eq!(taken, 0);
            vcpu.worker().evict(&[host_range(start, 0)], |part| taken += part.host.bytes);
            assert_eq!(taken, 0);
            attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
            drop(held);
        }
        drop(vcpu.worker().invalidate(host_range(HOST, K4), |_| {}));
        let held = vcpu.worker().invalidate(host_range(HOST + 5 * K4, 0), |_| {});
        assert_eq!(vcpu.fault(Gpa(BASE), Access::Read), Outcome::Mapped(PageSize::SIZE_2M));
        drop(held);
    }

    fn a_block_waits_for_an_invalidation_of_any_of_its_pages<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let mut worker = Worker::new(&guest).unwrap();
        for page in [0, 5, 511] {
            let held = worker.invalidate(host_range(HOST + page * K4, K4), |_| {});
            for asked in [0, 5, 300, 511] {
                let outcome = vcpu.fault(Gpa(BASE + asked * K4), Access::Read);
                assert_eq!(outcome, Outcome::Retry(Retry::Invalidated), "{page}, {asked}");
            }
            drop(held);
        }
        // An invalidation of other pages delays no fault.
        let held = worker.invalidate(host_range(HOST + M2, K4), |_| {});
        let before = worker.invalidate(host_range(HOST - K4, K4), |_| {});
        assert_eq!(vcpu.fault(Gpa(BASE), Access::Read), Outcome::Mapped(PageSize::SIZE_2M));
        drop((held, before));
    }

    fn invalidated_pages_are_unreachable_until_a_fault_maps_them<C: Case>() {
        with_guest!(C, config(), memslot(4 * M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        for page in 0..4 {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
        }
        let mut taken = Vec::new();
        let invalidation =
            vcpu.worker().invalidate(host_range(HOST + K4, 2 * K4), |part| taken.push(part));
        let [part] = taken[..] else { panic!("{taken:?}") };
        assert_eq!((part.gpa, part.host), (Gpa(BASE + K4), host_range(HOST + K4, 2 * K4)));
        assert!(part.dirty && part.accessed);
        let (old, new) = ram.migrate(HOST + K4);
        machine.take_back(Hpa(old), K4);
        let during = attempt::<C>(&machine, &mut vcpu, BASE + K4, Access::Read);
        assert_eq!(during.unwrap_err(), Outcome::Retry(Retry::Invalidated));
        attempt::<C>(&machine, &mut vcpu, BASE + 5 * K4, Access::Read).expect("another page");
        drop(invalidation);
        let (hpa, _) = attempt::<C>(&machine, &mut vcpu, BASE + K4, Access::Read).unwrap();
        assert_eq!(hpa, Hpa(new));
        assert!(machine.finish().is_empty());
    }

    fn a_block_is_taken_whole<C: Case>() {
        with_guest!(C, config(), memslot(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE + M2, Access::Write).unwrap();
        let mut taken = Vec::new();
        let page = host_range(HOST + M2 + 9 * K4, K4);
        drop(vcpu.worker().invalidate(page, |part| taken.push((part.gpa, part.host.bytes))));
        assert_eq!(taken, [(Gpa(BASE + M2), M2)]);
        machine.take_back(Hpa(ram.get(HOST + M2).unwrap().hpa), M2);
        assert!(machine.cpu(0).read(BASE + M2).is_err());
        assert!(machine.finish().is_empty());
    }

    fn more_invalidations_than_there_are_places_hold_up_all_faults<C: Case>() {
        with_guest!(C, config(), memslot(4 * M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        let mut begin = |page| vcpu.worker().invalidate(host_range(HOST + page * K4, K4), |_| {});
        let under_way: Vec<_> = (0..40).map(&mut begin).collect();
        let held = attempt::<C>(&machine, &mut vcpu, BASE + M2, Access::Read);
        assert_eq!(held.unwrap_err(), Outcome::Retry(Retry::Invalidated));
        drop(under_way);
        attempt::<C>(&machine, &mut vcpu, BASE + M2, Access::Read).unwrap();
    }

    /// At each call of the machine by the engine during a fault, at 4K and 2M, and if a table is
    /// linked meanwhile, the host invalidates the page, and ends the invalidation.
    fn no_fault_maps_what_the_host_took_away_meanwhile<C: Case>() {
        for block in [PageSize::SIZE_4K, PageSize::SIZE_2M] {
            for neighbour in [false, true] {
                for when in 0..24 {
                    race::<C>(block, neighbour, when);
                }
            }
        }
    }
}

#[test]
fn a_page_the_host_takes_between_answer_and_commit_is_unmapped() {
    // The invalidation begins, and ends, after the backing has chosen the page.
    for block in [PageSize::SIZE_4K, PageSize::SIZE_2M] {
        for bytes in [K4, M2] {
            let machine = Intel::machine(1);
            give_all::<Intel>(&machine);
            let ram = Ram::new();
            ram.populate(HOST, 4 * M2, block);
            let backing = Asked::new(&ram);
            let guest =
                Guest::new(Intel::format(), VMID, BITS, &machine, &backing, config()).unwrap();
            let mut vcpu = Vcpu::new(&guest, 0).unwrap();
            machine.cpu(0).load(VMID, vcpu.root());
            vcpu.worker().set_memslot(memslot(4 * M2)).unwrap();
            let mut other = Worker::new(&guest).unwrap();
            let take = || {
                let invalidation = other.invalidate(host_range(HOST, bytes), |_| {});
                for page in (0..bytes.max(block.bytes())).step_by(K4 as usize) {
                    let (old, _) = ram.migrate(HOST + page);
                    machine.take_back(Hpa(old), K4);
                }
                drop(invalidation);
            };
            let outcome = backing.then(0, take, || vcpu.fault(Gpa(BASE), Access::Write));
            assert_eq!(outcome, Outcome::Mapped(PageSize::SIZE_4K), "the second answer");
            let hpa = machine.cpu(0).write(BASE).unwrap();
            assert_eq!(hpa.0, ram.get(HOST).unwrap().hpa);
            assert!(machine.finish().is_empty());
        }
    }
}

fn race<C: Case>(block: PageSize, neighbour: bool, when: u32) {
    with_guest!(C, config(), memslot(4 * M2), block => machine, ram, guest, vcpu);
    if neighbour {
        // The table already exists.
        ram.change(HOST + 9 * K4, |page| page.block = PageSize::SIZE_4K);
        attempt::<C>(&machine, &mut vcpu, BASE + 9 * K4, Access::Read).unwrap();
    }
    let mut other = Worker::new(&guest).unwrap();
    let mut moments = 0;
    let takes = |machine: &slat_sim::Machine<C::A>, moment| {
        moments += u32::from(moment != Moment::Table);
        if moments != when + 1 || moment == Moment::Table {
            return;
        }
        let invalidation = other.invalidate(host_range(HOST, M2), |_| {});
        for page in 0..512 {
            let (old, _) = ram.migrate(HOST + page * K4);
            machine.take_back(Hpa(old), K4);
        }
        drop(invalidation);
    };
    let write = || attempt::<C>(&machine, &mut vcpu, BASE, Access::Write);
    let (hpa, _) = beside(&machine, takes, write).unwrap();
    let again = attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap().0;
    assert_eq!(again.0, ram.get(HOST).unwrap().hpa, "first {hpa}");
    let found: Vec<_> = machine.finish().iter().map(ToString::to_string).collect();
    assert_eq!(found, [""; 0], "{block} {neighbour} {when}");
}

/// A page stays mapped, and cannot be accessed after it was invalidated, under either VMID.
fn goes_on_by_another_vmid<C: Case>(config: Config) {
    with_guest!(C, config, memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
    let mut second = Vcpu::new(&guest, 1).unwrap();
    machine.cpu(1).load(VMID, second.root());
    let page = |page: u64| BASE + page * K4;
    for vcpu in [&mut vcpu, &mut second] {
        attempt::<C>(&machine, vcpu, page(0), Access::Write).unwrap();
        attempt::<C>(&machine, vcpu, page(1), Access::Write).unwrap();
    }
    let mut before = VMID;
    for (to, gone) in [(Vmid(8), 0), (Vmid(9), 1)] {
        assert_eq!(set_vmid::<C>(&machine, &guest, [&vcpu, &second].into_iter(), to), before);
        for vcpu in [&mut vcpu, &mut second] {
            let (_, outcomes) = attempt::<C>(&machine, vcpu, page(gone), Access::Write).unwrap();
            assert_eq!(outcomes, [], "it is there");
        }
        let memory = ram.get(HOST + gone * K4).unwrap().hpa;
        let invalidation = vcpu.worker().invalidate(host_range(HOST + gone * K4, K4), |_| {});
        machine.take_back(Hpa(memory), K4);
        for vcpu in [&mut vcpu, &mut second] {
            let held = attempt::<C>(&machine, vcpu, page(gone), Access::Read);
            assert_eq!(held, Err(Outcome::Retry(Retry::Invalidated)));
        }
        drop(invalidation);
        ram.remove(HOST + gone * K4);
        before = to;
    }
    // A change of memslots waits only for threads inside the tables.
    let gone = MemslotSpec { bytes: 0, ..memslot(M2) };
    assert_eq!(vcpu.worker().set_memslot(gone), Ok(MemslotChange::Deleted));
    assert_eq!(machine.finish().iter().map(ToString::to_string).collect::<Vec<_>>(), [""; 0]);
}

#[test]
fn so_do_vcpus_on_views_of_their_own() {
    goes_on_by_another_vmid::<ArmUncached>(Config { caches: CachePolicy::Exact, ..config() });
}

on_all! {
    fn a_guest_that_is_known_by_another_vmid_goes_on<C: Case>() {
        goes_on_by_another_vmid::<C>(config());
    }
}
