//! One thread works while another does, on real tables: results hold whatever the other thread
//! does.
#![cfg(all(not(loom), target_os = "linux"))]

use slat::format::ept::Ept1G;
use slat::{Access, AgeOptions, Gpa, GpaRange, Hpa, Memory, PageSize, TableBits, Vmid};
use slat_guest::*;
use slat_sim::Ept;
use slat_sim::fast::FastMachine;
use std::sync::atomic::{AtomicBool, Ordering};

const BASE: u64 = 1 << 32;
const HOST: u64 = 1 << 40;
const K4: u64 = 4096;
const M2: u64 = 2 << 20;
const TEST: AgeOptions =
    AgeOptions { clear: false, table_bits: TableBits::Ignored, flush_tlb: false };

struct OnePiece(u64);

impl Backing for OnePiece {
    fn page(&self, host: Hva, _: Access) -> Result<Page, NoPage> {
        let hpa = Hpa(self.0 + (host.0 - HOST));
        let block = PageSize::SIZE_2M;
        Ok(Page { hpa, block, write: true, execute: true, memory: Memory::Normal })
    }
}

type TheGuest<'p> = Guest<'p, Ept1G, FastMachine<Ept>, OnePiece>;
type TheWorker<'w> = Worker<'w, Ept1G, FastMachine<Ept>, OnePiece>;

fn memslot(log_dirty: bool) -> MemslotSpec {
    let (gpa, host) = (Gpa(BASE), Hva(HOST));
    MemslotSpec { log_dirty, ..MemslotSpec::new(MemslotId(0), gpa, M2, host) }
}

fn all() -> GpaRange {
    GpaRange::new(Gpa(BASE), M2).unwrap()
}

/// Makes a guest whose memory was all used, and runs `look` repeatedly while another thread runs
/// `other`.
fn beside(
    rounds: u32,
    mut other: impl FnMut(&mut TheWorker<'_>) + Send,
    mut look: impl FnMut(&mut TheWorker<'_>),
) {
    let machine = FastMachine::new(Ept::default(), 2, 4 * M2, 32 << 20).unwrap();
    let ram = OnePiece(machine.memory_base().0);
    let config = Config::new(1, PageSize::SIZE_2M);
    let guest: TheGuest<'_> =
        Guest::new(Ept1G::default(), Vmid(7), 39, &machine, ram, config).unwrap();
    let mut vcpu = Vcpu::new(&guest, 0).unwrap();
    vcpu.worker().set_memslot(memslot(false)).unwrap();
    assert!(matches!(vcpu.fault(Gpa(BASE), Access::Write), Outcome::Mapped(PageSize::SIZE_2M)));
    let mut worker = Worker::new(&guest).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                other(&mut worker);
            }
        });
        (0..rounds).for_each(|_| look(vcpu.worker()));
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_used_page_is_not_called_old_while_its_log_is_switched() {
    let switch = |worker: &mut TheWorker<'_>| {
        worker.set_memslot(memslot(true)).unwrap();
        worker.set_memslot(memslot(false)).unwrap();
    };
    beside(50_000, switch, |worker| {
        let mut young = [0];
        let host = HvaRange { start: Hva(HOST), bytes: K4 };
        let aged = worker.age_host(host, None, &mut young, TEST).unwrap();
        assert_eq!(aged.young, u64::from(young[0].count_ones()));
        assert_eq!((young[0], aged.unanswered), (1 - aged.unanswered, 1 - young[0]));
    });
}

/// Another thread holds entries for a moment: the slow path looks again, and its result is
/// reported.
#[test]
fn nor_while_its_block_is_split_and_put_together() {
    let turns = |worker: &mut TheWorker<'_>| {
        let report = EagerSplit::new(all(), PageSize::SIZE_4K).run(worker, || false);
        match report.stopped {
            None => assert_eq!(worker.collapse(all(), PageSize::SIZE_2M), M2),
            // The other thread, inside, keeps unlinked tables: while it does not run, there may be
            // no free frames.
            Some(SplitStop::OutOfFrames { .. }) => std::thread::yield_now(),
            Some(other) => panic!("{other:?}"),
        }
    };
    let mut slow = 0;
    beside(30_000, turns, |worker| {
        let mut young = [0; 8];
        let aged = worker.age(all(), None, &mut young, TEST).unwrap();
        let found: u64 = young.iter().map(|bits| u64::from(bits.count_ones())).sum();
        assert_eq!(aged.young, found);
        assert_eq!(aged.young + aged.unanswered, 512, "every page is young, or without an answer");
        slow = worker.guest().stats().totals.ageing_slow;
    });
    assert!(slow > 0, "the slow path was taken");
}

/// Each use is reported once, by the scan that comes first to the page; both scan in pieces.
#[test]
fn no_use_is_lost_between_scans_in_pieces() {
    let clear = AgeOptions { clear: true, ..TEST };
    let piece = |first: u64| GpaRange::new(Gpa(BASE + first * K4), 100 * K4).unwrap();
    let told = [const { std::sync::atomic::AtomicU64::new(0) }; 2];
    let scan = |who: usize, worker: &mut TheWorker<'_>| {
        for first in [50, 150, 250, 350] {
            let aged = worker.age(piece(first), None, &mut [0; 2], clear).unwrap();
            told[who].fetch_add(aged.young, Ordering::Relaxed);
        }
    };
    beside(2_000, |worker| scan(0, worker), |worker| scan(1, worker));
    let told: u64 = told.iter().map(|told| told.load(Ordering::Relaxed)).sum();
    assert_eq!(told, 400, "of a block that was used once");
}
