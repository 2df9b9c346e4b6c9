//! Incremental snapshots of guests, in each way that this host has.

mod common;

use common::kvm_or_skip;
use slat_kvm::guest::Shape;
use slat_kvm::scenario::snapshot::{Config, Report, Way, run};
use slat_kvm::scenario::visits::Visits;
use slat_kvm::{Backing, Error, Setting};
use std::sync::atomic::AtomicBool;

const ALL: [Way; 6] =
    [Way::Log, Way::Ring, Way::UffdWp, Way::PagemapScan, Way::SoftDirty, Way::Mincore];

fn taken(way: Way, backing: Backing, stop: bool) -> Result<Report, Error> {
    let shape = Shape { memory: 16 << 20, backing, vcpus: 2, mode: way.mode(), ..Shape::default() };
    let visits = Visits { accesses: 50, writes: 50, seed: 1, pattern: None };
    let config = Config { shape, way, epochs: 3, visits };
    let on_event = &mut |_: slat_kvm::Event<'_>| ();
    run(&config, Setting { stop: &AtomicBool::new(stop), pin: &[], on_event })
}

#[test]
fn each_way_reports_what_the_guest_wrote_and_mincore_all() {
    if kvm_or_skip().is_none() {
        return;
    }
    let mut counted = Vec::new();
    for backing in [Backing::Small, Backing::Thp, Backing::Memfd] {
        for way in ALL {
            let report = match taken(way, backing, false) {
                Ok(report) => report,
                Err(error) if error.is_missing_feature() => {
                    eprintln!("skipped, {way:?} on {backing}: {error}");
                    continue;
                }
                Err(error) => panic!("{way:?} on {backing}: {error}"),
            };
            assert_eq!((report.missed, report.compared), (0, 4096), "{way:?} on {backing}");
            match way {
                Way::Mincore => assert_eq!(report.reported, 3 * 4096),
                // KVM maps a page that is only read as writable, and logs it, where it had dropped
                // the page's mapping: of a huge page that it split, or for other reasons of its
                // own. Other ways may tell a huge page as a whole.
                Way::Log | Way::Ring => {}
                _ if backing == Backing::Thp => {}
                _ => assert_eq!(report.surplus, 0, "{way:?} on {backing}"),
            }
            counted.push(report.written);
        }
    }
    // The guest's work is the same in each way.
    assert!(counted.windows(2).all(|pair| pair[0] == pair[1]), "{counted:?}");
}

#[test]
fn a_snapshot_that_is_stopped_ends() {
    if kvm_or_skip().is_none() {
        return;
    }
    for way in ALL {
        match taken(way, Backing::Small, true) {
            Err(Error::Stopped) => {}
            Err(error) if error.is_missing_feature() => {}
            other => panic!("{way:?}: {other:?}"),
        }
    }
}
