//! A fault on a page that is missing, while a thread brings the page.

use crate::fixture::*;
use loom::sync::atomic::Ordering;
use loom::thread::spawn;
use slat::{Access, BreakBeforeMake, Gpa};
use slat_guest::{Arrival, Hva, HvaRange, Outcome, Retry};

#[test]
fn no_arrival_is_lost_between_asking_and_waiting() {
    bounded("fault on a late page || arrival", 5, || {
        let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::that_goes(PAGE));
        let gone = ram.gone.as_ref().unwrap();
        gone.store(1, Ordering::SeqCst);
        let guest = guest(world, ram, config());
        worker(guest).set_memslot(slot(false)).unwrap();
        let faults = Sent(vcpu(guest));
        let thread = spawn(move || {
            let mut vcpu = faults.get();
            let outcome = vcpu.fault(Gpa(0), Access::Read);
            Sent((vcpu, outcome))
        });
        gone.store(0, Ordering::SeqCst);
        let told = guest.arrived(HvaRange { start: Hva(HOST), bytes: PAGE });
        let (mut vcpu, outcome) = thread.join().unwrap().get();
        let waits: Vec<Arrival> = vcpu.waiting().collect();
        match outcome {
            Outcome::Mapped(_) => assert!(waits.is_empty()),
            Outcome::Retry(Retry::NotYet(Some(arrival))) => {
                assert_eq!((told, &waits[..]), (1, &[arrival][..]), "it sleeps for ever");
                assert_eq!(vcpu.ready(), Some(arrival));
            }
            outcome => panic!("{outcome:?}"),
        }
    });
}
