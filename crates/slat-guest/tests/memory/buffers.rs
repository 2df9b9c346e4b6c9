//! Logs in which hardware writes addresses have exactly the pages that were written.

use crate::fixture::*;
use slat::{Access, Format, PageSize};
use slat_guest::*;
use slat_sim::{Fault, Machine};
use std::collections::BTreeSet;

const PAGES: u64 = 1024;

fn buffered() -> Config {
    Config { logging: Logging::Hardware, log_buffers: true, ..config() }
}

/// The function that adds a vCPU's buffer to the log at an exit.
type Take<C> = fn(&Machine<<C as Case>::A>, &mut TheWorker<'_, C>, usize) -> u64;

fn take_pml<C: Case>(machine: &Machine<C::A>, worker: &mut TheWorker<'_, C>, cpu: usize) -> u64 {
    let (log, index) = machine.cpu(cpu).take_pml();
    worker.log_addresses(pml_addresses(&log, index))
}

fn take_hdbss<C: Case>(machine: &Machine<C::A>, worker: &mut TheWorker<'_, C>, cpu: usize) -> u64 {
    let (buffer, index) = machine.cpu(cpu).take_hdbss();
    worker.log_addresses(hdbss_addresses::<C::F>(&buffer, index))
}

/// The vCPU writes to the page; it exits if its buffer is full.
fn write<C: Case>(machine: &Machine<C::A>, vcpu: &mut TheVcpu<'_, C>, gpa: u64, take: Take<C>) {
    let cpu = usize::from(vcpu.id());
    machine.here(cpu);
    for _ in 0..32 {
        match machine.cpu(cpu).write(gpa) {
            Ok(_) => return,
            Err(Fault::LogFull) => assert_ne!(take(machine, vcpu.worker(), cpu), 0),
            Err(_) => _ = vcpu.fault(slat::Gpa(gpa & !(K4 - 1)), Access::Write),
        }
    }
    panic!("no progress at {gpa:#x}");
}

fn exact<C: Case>(room_for: usize, take: Take<C>, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let machine = C::machine(2).random(seed);
    give_all::<C>(&machine);
    let ram = Ram::from(C::FIRST_HPA);
    ram.populate(HOST, PAGES * K4, [PageSize::SIZE_4K, PageSize::SIZE_2M][rng.usize(..2)]);
    let eager = [None, Some(PageSize::SIZE_4K)][rng.usize(..2)];
    let guest = guest::<C>(&machine, &ram, Config { eager_split: eager, ..buffered() });
    let mut vcpus = [Vcpu::new(&guest, 0).unwrap(), Vcpu::new(&guest, 1).unwrap()];
    vcpus[0].worker().set_memslot(memslot(PAGES * K4)).unwrap();
    for (cpu, vcpu) in vcpus.iter().enumerate() {
        machine.cpu(cpu).load(VMID, vcpu.root());
        machine.cpu(cpu).log_marks(room_for);
    }
    // Some of the memory is mapped, and written, before the log begins.
    for _ in 0..40 {
        let (cpu, page) = (rng.usize(..2), rng.u64(..PAGES));
        write::<C>(&machine, &mut vcpus[cpu], BASE + page * K4, take);
    }
    vcpus[0].worker().set_memslot(logged(PAGES * K4)).unwrap();
    // Addresses in the buffers at this point are of earlier writes.
    (0..2).for_each(|cpu| _ = take(&machine, vcpus[0].worker(), cpu));
    let mut bits = vec![0; PAGES as usize / 64];
    vcpus[0].worker().take_log(MemslotId(0), &mut bits).unwrap();
    for round in 0..3 {
        let mut written = BTreeSet::new();
        for _ in 0..rng.u64(..120) {
            let (cpu, page) = (rng.usize(..2), rng.u64(..PAGES));
            match rng.u8(..8) {
                0 => _ = attempt::<C>(&machine, &mut vcpus[cpu], BASE + page * K4, Access::Read),
                1 => {
                    let host = host_range(HOST + page * K4, K4);
                    drop(vcpus[0].worker().invalidate(host, |_| {}));
                }
                _ => {
                    write::<C>(&machine, &mut vcpus[cpu], BASE + page * K4, take);
                    written.insert(page);
                }
            }
        }
        (0..2).for_each(|cpu| _ = take(&machine, vcpus[0].worker(), cpu));
        let before = guest.stats().totals.entries_read;
        vcpus[0].worker().read_log(MemslotId(0), &mut bits).unwrap();
        assert_eq!(guest.stats().totals.entries_read, before, "no walk");
        let logged: BTreeSet<_> =
            (0..PAGES).filter(|page| bits[*page as usize / 64] >> (page % 64) & 1 == 1).collect();
        assert_eq!(logged, written, "round {round}, seed {seed}");
        vcpus[0].worker().clear_log(MemslotId(0), 0, PAGES, &bits).unwrap();
    }
    let found: Vec<_> = machine.finish().iter().map(ToString::to_string).collect();
    assert_eq!(found, [""; 0], "seed {seed}");
}

#[test]
fn a_log_of_intels_has_exactly_the_pages_that_were_written() {
    crate::seed::seeds(2).for_each(|seed| exact::<Intel>(PML_ENTRIES, take_pml::<Intel>, seed));
}

#[test]
fn a_log_of_arms_has_exactly_the_pages_that_were_written() {
    for seed in crate::seed::seeds(2) {
        exact::<ArmDirty>(64, take_hdbss::<ArmDirty>, seed);
        exact::<ArmBreaks>(64, take_hdbss::<ArmBreaks>, seed);
    }
}

#[cfg(feature = "every-format")]
#[test]
fn so_has_one_of_arms_with_feat_lpa2() {
    crate::seed::seeds(2).for_each(|seed| exact::<ArmLpa2>(64, take_hdbss::<ArmLpa2>, seed));
}

#[test]
fn addresses_that_no_slot_has_are_passed_over() {
    let machine = Intel::machine(1);
    let ram = Ram::new();
    let guest = guest::<Intel>(&machine, &ram, buffered());
    let mut worker = Worker::new(&guest).unwrap();
    worker.set_memslot(logged(M2)).unwrap();
    let page = <Intel as Case>::F::size(0).bytes();
    let wild = [0, BASE - 1, BASE + M2, !0xfff, BASE + 0x123];
    let addresses = wild.map(|gpa| (slat::Gpa(gpa), page));
    assert_eq!(worker.log_addresses(addresses), 1);
    let huge = [(slat::Gpa(BASE + M2 - K4), u64::MAX)];
    assert_eq!(worker.log_addresses(huge), 1);
    let mut bits = [0; 8];
    worker.read_log(MemslotId(0), &mut bits).unwrap();
    // A page is logged whole, wherever in it an address points.
    assert_eq!((bits[0], bits[7]), (1, 1 << 63));
}

#[test]
fn buffers_go_with_hardwares_marks() {
    let machine = Intel::machine(1);
    let config = Config { log_buffers: true, ..config() };
    let refused = Guest::new(Intel::format(), VMID, BITS, &machine, Ram::new(), config);
    assert_eq!(refused.map(drop).unwrap_err(), GuestError::BuffersNeedHardware);
}
