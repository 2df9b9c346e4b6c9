//! The events that a VMM's tracing receives.

use crate::machine::*;
use slat::format::ept::Ept1G;
use slat::{Access, Gpa, GpaRange, PageSize, Vmid};
use slat_guest::*;
use std::sync::{Arc, Mutex};

#[derive(Default)]
struct EventRecorder(Mutex<Vec<(Vmid, Event)>>);

impl Events for EventRecorder {
    fn event(&self, guest: Vmid, event: Event) {
        self.0.lock().unwrap().push((guest, event));
    }
}

#[test]
fn each_service_reports_its_beginning_and_its_end() {
    let machine = CountingMachine::with(EventRecorder::default());
    let readers = Arc::new(OwnReaders::<_, 4>::new(machine.clone()));
    let (ram, config) = (OnePiece(PageSize::SIZE_2M), Config::new(1, PageSize::SIZE_2M));
    let guest = SharedGuest::new(Ept1G::default(), Vmid(5), 39, readers, ram, config).unwrap();
    let mut vcpu = guest.vcpu(0).unwrap();
    let heard = || -> Vec<Event> {
        let heard = core::mem::take(&mut *machine.events().0.lock().unwrap());
        assert!(heard.iter().all(|(guest, _)| *guest == Vmid(5)));
        let heard = heard.into_iter().map(|(_, event)| event);
        // Another test covers events of pieces.
        heard.filter(|event| !matches!(event, Event::Piece { .. })).collect()
    };
    vcpu.with(|vcpu| {
        let (all, logs) = (memslot(M2), MemslotSpec { log_dirty: true, ..memslot(M2) });
        vcpu.worker().set_memslot(all).unwrap();
        let begin = Event::MemslotBegin { before: None, after: all };
        let end = Event::MemslotEnd { id: all.id };
        assert_eq!(heard(), [begin, end]);
        vcpu.worker().set_memslot(all).unwrap();
        assert_eq!(heard(), [], "nothing changed");

        let (gpa, access) = (Gpa(BASE + 5 * K4), Access::Write);
        let outcome = vcpu.fault(gpa, access);
        let told = heard();
        assert_eq!(told[0], Event::FaultBegin { vcpu: 0, gpa, access });
        let [_, Event::FaultEnd { ticks, .. }] = told[..] else { panic!("{told:?}") };
        assert_eq!(told[1], Event::FaultEnd { vcpu: 0, gpa, outcome, ticks });
        assert_eq!(vcpu.worker().guest().stats().vcpus[0].stall().ticks, ticks);

        // A log begins; a write splits; the log ends, and the block is collapsed again.
        vcpu.worker().set_memslot(logs).unwrap();
        assert_eq!(heard(), [Event::MemslotBegin { before: Some(all), after: logs }, end]);
        assert_eq!(vcpu.fault(gpa, access), Outcome::Split { from: PageSize::SIZE_2M });
        assert_eq!(heard()[1], Event::Split { at: gpa, bytes: M2 });
        vcpu.worker().set_memslot(all).unwrap();
        let range = GpaRange::new(Gpa(BASE), M2).unwrap();
        let back = Event::Collapse { range, bytes: M2 };
        assert_eq!(heard(), [Event::MemslotBegin { before: Some(logs), after: all }, back, end]);

        // An eager split, and a split for a clear.
        EagerSplit::new(range, PageSize::SIZE_4K).run(vcpu.worker(), || false);
        assert_eq!(heard(), [Event::Split { at: Gpa(BASE), bytes: M2 }]);

        let host = HvaRange { start: Hva(HOST), bytes: 2 * K4 };
        drop(vcpu.worker().invalidate(host, |_| {}));
        let begin = Event::InvalidationBegin { host, ranges: 1 };
        assert_eq!(heard(), [begin, Event::InvalidationEnd { bytes: 2 * K4 }]);
        vcpu.worker().evict(&[], |_| {});
        assert_eq!(heard(), []);

        // A change that is refused before anything was done reports nothing.
        let gone = MemslotSpec { id: MemslotId(9), bytes: 0, ..all };
        assert!(vcpu.worker().set_memslot(gone).is_err());
        assert_eq!(heard(), []);
    });
}
