//! Guests that run on before their memory is there.

mod common;

use common::kvm_or_skip;
use slat_kvm::guest::Shape;
use slat_kvm::image::Image;
use slat_kvm::scenario::postcopy::{Config, Link, Report, Way, run};
use slat_kvm::scenario::visits::Visits;
use slat_kvm::{Error, Setting};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

fn config(way: Way) -> Config {
    Config {
        shape: Shape { memory: 16 << 20, vcpus: 2, ..Shape::default() },
        way,
        visits: Visits { accesses: 25, writes: 50, seed: 1, pattern: None },
        per_second: 20_000.0,
        link: Link { rate: 100e6, delay: Duration::from_millis(2), queue: 64 << 10 },
        max_downtime: Duration::from_millis(100),
        max_rounds: 30,
    }
}

fn moved(config: &Config, stop: bool) -> Result<Report, Error> {
    let image = Image::new(&std::env::temp_dir(), 16 << 20).unwrap();
    let on_event = &mut |_: slat_kvm::Event<'_>| ();
    run(config, &image, Setting { stop: &AtomicBool::new(stop), pin: &[], on_event })
}

#[test]
fn a_remote_fault_waits_for_the_link_and_each_page_comes_right() {
    if kvm_or_skip().is_none() {
        return;
    }
    let report = match moved(&config(Way::PostCopy), false) {
        Err(error) if error.is_missing_feature() => return eprintln!("skipped: {error}"),
        report => report.unwrap(),
    };
    assert!(!report.asked.is_empty() && report.times.stalls.len() == report.asked.len());
    // The request and the page take 2 ms each. A page that was on its way already comes earlier.
    assert!(report.times.stall(0.5).unwrap() >= 0.004, "{:?}", report.times.stall(0.5));
    assert!(report.all_there >= 0.16, "16 MiB at 100 MB/s: {}", report.all_there);
    assert_eq!(report.bytes, 16 << 20);
}

#[test]
fn precopy_of_the_same_guest_stops_it_and_asks_for_nothing() {
    if kvm_or_skip().is_none() {
        return;
    }
    let report = moved(&config(Way::PreCopy), false).unwrap();
    assert!(report.stopped > 0.0 && report.bytes >= 16 << 20 && report.asked.is_empty());
}

#[test]
fn a_stopped_move_ends_and_an_impossible_one_is_refused() {
    if kvm_or_skip().is_none() {
        return;
    }
    for way in [Way::PreCopy, Way::PostCopy] {
        match moved(&config(way), true) {
            Err(Error::Stopped) => {}
            Err(error) if error.is_missing_feature() => {}
            other => panic!("{way:?}: {other:?}"),
        }
    }
    let link = Link { rate: 0.0, ..config(Way::PostCopy).link };
    let none = moved(&Config { link, ..config(Way::PostCopy) }, false);
    assert!(matches!(none, Err(Error::Invalid { .. })));
}
