//! Guests with less memory than they use.

mod common;

use common::kvm_or_skip;
use slat_kvm::guest::Shape;
use slat_kvm::scenario::reclaim::{Config, Report, Store, Way, run};
use slat_kvm::{Error, Setting};
use std::sync::atomic::AtomicBool;

fn config(way: Way, store: Store) -> Config {
    Config {
        shape: Shape { memory: 4 << 20, ..Shape::default() },
        way,
        store,
        allowed: 50,
        accesses: 200,
        writes: 20,
        hot: (20, 80),
        seed: 1,
    }
}

fn reclaimed(config: &Config, stop: bool) -> Result<Report, Error> {
    let on_event = &mut |_: slat_kvm::Event<'_>| ();
    let setting = Setting { stop: &AtomicBool::new(stop), pin: &[], on_event };
    run(config, &std::env::temp_dir(), setting)
}

#[test]
fn each_page_that_was_taken_away_comes_back_as_it_was() {
    if kvm_or_skip().is_none() {
        return;
    }
    for store in [Store::File, Store::Swap] {
        for way in [Way::Pageout, Way::Limit, Way::MemoryReclaim, Way::Balloon, Way::Damon] {
            if way == Way::Limit && slat_kvm::cgroup::may_kill() {
                continue;
            }
            let report = match reclaimed(&config(way, store), false) {
                Ok(report) => report,
                Err(error) if error.is_missing_feature() => {
                    eprintln!("skipped, {way:?} to {store:?}: {error}");
                    continue;
                }
                // A file has its contents, and a user without root makes no control group.
                Err(Error::Invalid { .. }) if way == Way::Balloon => continue,
                Err(Error::Os { call, .. }) if call.contains("cgroup") => continue,
                Err(error) => panic!("{way:?} to {store:?}: {error}"),
            };
            let faults = report.faults.unwrap();
            assert_eq!(report.times.at.len(), 2 * 1024, "{way:?} to {store:?}");
            if way != Way::Damon {
                // The disk's pace decides how many pages of a file are clean, and can leave.
                assert!(faults[0] + faults[1] > 0, "{way:?} to {store:?}: {faults:?}");
            }
        }
    }
}

#[test]
fn the_trace_is_what_the_guest_does() {
    let config = config(Way::Pageout, Store::File);
    let trace: Vec<_> = config.trace().collect();
    assert_eq!(trace.len(), 2 * 1024);
    assert_eq!(trace.iter().filter(|(_, written)| *written).count(), 2 * 1024 / 5);
    assert!(trace.iter().filter(|(page, _)| *page < 204).count() > 1500);
}

#[test]
fn a_stopped_reclaim_ends_and_one_of_nothing_is_refused() {
    if kvm_or_skip().is_none() {
        return;
    }
    let file = config(Way::Pageout, Store::File);
    assert!(matches!(reclaimed(&file, true), Err(Error::Stopped)));
    let none = reclaimed(&Config { allowed: 0, ..file }, false);
    assert!(matches!(none, Err(Error::Invalid { .. })));
}
