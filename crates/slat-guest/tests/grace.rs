//! What a guest waits for is its own.
#![cfg(all(not(loom), target_os = "linux"))]

use slat::format::ept::Ept1G;
use slat::{Access, Gpa, Hpa, Memory, PageSize, Vmid};
use slat_guest::*;
use slat_sim::Ept;
use slat_sim::fast::FastMachine;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

const BASE: u64 = 1 << 32;
const HOST: u64 = 1 << 40;
const M2: u64 = 2 << 20;

/// Says that it was asked, then waits until it may answer.
struct Slow {
    base: u64,
    gate: Option<(SyncSender<()>, Mutex<Receiver<()>>)>,
}

impl Backing for Slow {
    fn page(&self, host: Hva, _: Access) -> Result<Page, NoPage> {
        if let Some((asked, may_answer)) = &self.gate {
            asked.send(()).unwrap();
            may_answer.lock().unwrap().recv().unwrap();
        }
        let (hpa, block) = (Hpa(self.base + (host.0 - HOST)), PageSize::SIZE_4K);
        Ok(Page { hpa, block, write: true, execute: true, memory: Memory::Normal })
    }
}

fn slot(bytes: u64) -> SlotSpec {
    let (gpa, host) = (Gpa(BASE), Hva(HOST));
    SlotSpec::new(SlotId(0), gpa, bytes, host)
}

#[test]
fn a_fault_that_waits_for_its_backing_holds_up_no_other_guests_slots() {
    let machine = FastMachine::new(Ept::default(), 2, 4 * M2, 32 << 20).unwrap();
    let base = machine.memory_base().0;
    let (asked, was_asked) = sync_channel(1);
    let (answer, may_answer) = sync_channel(1);
    // Pages, so that the backing is asked once.
    let config = Config::new(1, PageSize::SIZE_4K);
    let new = |vmid, gate| {
        let backing = Slow { base, gate };
        Guest::new(Ept1G::default(), Vmid(vmid), 39, &machine, backing, config).unwrap()
    };
    let slow = new(1, Some((asked, Mutex::new(may_answer))));
    let fast = new(2, None);
    let mut rooms = [const { [const { None }; TABLE_PAGES] }; 2];
    let [one, two] = &mut rooms;
    let mut vcpu = Vcpu::new(&slow, 0, one).unwrap();
    vcpu.worker().set_slot(slot(M2)).unwrap();
    let mut worker = Worker::new(&fast, two).unwrap();
    std::thread::scope(|scope| {
        let fault = scope.spawn(move || vcpu.fault(Gpa(BASE), Access::Write));
        was_asked.recv().unwrap();
        let (done, is_done) = sync_channel(1);
        let change = scope.spawn(move || {
            worker.set_slot(slot(M2)).unwrap();
            worker.set_slot(SlotSpec { bytes: 0, ..slot(M2) }).unwrap();
            done.send(()).unwrap();
        });
        let in_time = is_done.recv_timeout(Duration::from_secs(20));
        answer.send(()).unwrap();
        change.join().unwrap();
        assert!(matches!(fault.join().unwrap(), Outcome::Mapped(_)));
        assert_eq!(in_time, Ok(()), "a change of slots that waited for another guest's fault");
    });
}
