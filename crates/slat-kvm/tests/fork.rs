//! Guests of one image.

mod common;

use common::kvm_or_skip;
use slat_kvm::guest::Shape;
use slat_kvm::image::Image;
use slat_kvm::scenario::fork::{Config, Report, Way, each, run};
use slat_kvm::scenario::visits::Visits;
use slat_kvm::{Error, Setting};
use std::sync::atomic::AtomicBool;

const GUESTS: u32 = 4;

fn forked(way: Way, guests: u32, stop: bool) -> Result<Report, Error> {
    let image = Image::new(&std::env::temp_dir(), 8 << 20).unwrap();
    let config = Config {
        shape: Shape { memory: 8 << 20, ..Shape::default() },
        way,
        guests,
        visits: Visits { accesses: 50, writes: 20, seed: 1, pattern: None },
    };
    let on_event = &mut |_: slat_kvm::Event<'_>| ();
    run(&config, &image, Setting { stop: &AtomicBool::new(stop), pin: &[], on_event })
}

#[test]
fn guests_share_the_pages_that_they_do_not_write() {
    if kvm_or_skip().is_none() {
        return;
    }
    for way in [Way::Private, Way::Memfd, Way::Ksm] {
        let report = match forked(way, GUESTS, false) {
            Err(error) if error.is_missing_feature() => {
                eprintln!("skipped, {way:?}: {error}");
                continue;
            }
            report => report.unwrap(),
        };
        assert_eq!(report.guests.len() as u32, GUESTS);
        let each = each(&report).unwrap();
        match way {
            Way::Memfd => assert!((each - 8.0).abs() < 0.1, "{each}"),
            // A tenth is written, and a share of what any guest touched is added.
            Way::Private => assert!((0.7..4.0).contains(&each), "{each}"),
            // A tenth is written, and a quarter of the rest is added.
            Way::Ksm if report.merged => assert!((2.0..6.0).contains(&each), "{each}"),
            Way::Ksm => eprintln!("the kernel did not merge in time"),
        }
    }
}

#[test]
fn a_fork_that_is_stopped_ends_and_one_of_no_guests_is_refused() {
    if kvm_or_skip().is_none() {
        return;
    }
    assert!(matches!(forked(Way::Private, 3, true), Err(Error::Stopped)));
    assert!(matches!(forked(Way::Private, 0, false), Err(Error::Invalid { .. })));
}
