//! Guests whose memory comes back from a file, in each way that this host has.

mod common;

use common::kvm_or_skip;
use slat_kvm::guest::Shape;
use slat_kvm::image::{Cache, Image};
use slat_kvm::phase::Phase;
use slat_kvm::scenario::restore::{Config, Report, Slow, Way, run};
use slat_kvm::scenario::visits::Visits;
use slat_kvm::{Error, Mode, Setting};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const ALL: [Way; 6] =
    [Way::Eager, Way::Private, Way::Copy, Way::CopyLarge, Way::Minor, Way::MinorHugetlb];

fn config(way: Way) -> Config {
    Config {
        shape: Shape { memory: 16 << 20, vcpus: 2, mode: Mode::Legacy, ..Shape::default() },
        way,
        cache: Cache::Warm,
        prefetch: None,
        handlers: 2,
        visits: Visits { accesses: 25, writes: 20, seed: 1, pattern: None },
        slow: None,
    }
}

fn restored(config: &Config, image: &Image) -> Result<Report, Error> {
    let on_event = &mut |_: slat_kvm::Event<'_>| ();
    run(config, image, Setting { stop: &AtomicBool::new(false), pin: &[], on_event })
}

fn image(bytes: u64) -> Image {
    Image::new(&std::env::temp_dir(), bytes).unwrap()
}

/// Returns the report, or `None` with a message if the host lacks what the way takes.
fn restored_or_skip(config: &Config, image: &Image) -> Option<Report> {
    match restored(config, image) {
        Ok(report) => Some(report),
        Err(error) if error.is_missing_feature() => {
            eprintln!("skipped, {:?}: {error}", config.way);
            None
        }
        Err(error) => panic!("{:?}: {error}", config.way),
    }
}

#[test]
fn each_way_brings_each_page_back_as_it_was() {
    if kvm_or_skip().is_none() {
        return;
    }
    let image = image(16 << 20);
    for way in ALL {
        let Some(report) = restored_or_skip(&config(way), &image) else { continue };
        assert_eq!(report.times.at.len(), 2 * 512, "{way:?}");
        assert!(report.times.at.is_sorted());
        assert!(report.phases.iter().any(|run| run.phase == Phase::Restore));
        let resident = report.resident.unwrap();
        match way {
            // A 4k page comes only if it was asked for.
            Way::Copy | Way::Minor => {
                assert_eq!(resident, report.order.len() as u64 * 4096, "{way:?}");
            }
            Way::Private => assert!(report.order.is_empty()),
            _ => assert_eq!(resident, 16 << 20, "{way:?}"),
        }
    }
}

#[test]
fn a_recorded_order_is_the_order_of_the_faults() {
    if kvm_or_skip().is_none() {
        return;
    }
    let image = image(16 << 20);
    let pages: &[u64] = &[1000, 3, 4, 2000, 3, 5, 4095, 6000];
    let mut shape = config(Way::Copy).shape;
    shape.vcpus = 1;
    let visits = Visits { pattern: Some(pages), ..config(Way::Copy).visits };
    let config = Config { shape, visits, handlers: 1, ..config(Way::Copy) };
    let Some(report) = restored_or_skip(&config, &image) else { return };
    // A page beyond the memory counts from its start again.
    assert_eq!(report.order, [1000, 3, 4, 2000, 5, 4095, 6000 - 4096]);
    assert_eq!(report.times.at.len(), pages.len());
}

#[test]
fn prefetch_of_a_recorded_order_removes_the_faults() {
    if kvm_or_skip().is_none() {
        return;
    }
    let image = image(16 << 20);
    let Some(recorded) = restored_or_skip(&config(Way::Copy), &image) else { return };
    // Two vCPUs draw 512 pages each of 2048, some twice.
    assert!((700..1024).contains(&recorded.order.len()), "{}", recorded.order.len());
    let order: std::sync::Arc<[u64]> = recorded.order.into();
    for way in [Way::Copy, Way::CopyLarge, Way::Minor] {
        let without = restored_or_skip(&config(way), &image).unwrap();
        let with = Config { prefetch: Some(order.clone()), ..config(way) };
        let with = restored_or_skip(&with, &image).unwrap();
        assert_eq!(with.order, [0; 0], "{way:?}: the handler had nothing to resolve");
        let [with, without] = [with, without].map(|report| report.faults.unwrap());
        if way != Way::CopyLarge {
            assert!(with as f64 <= 0.05 * without as f64, "{way:?}: {with} of {without}");
        }
    }
}

#[test]
fn a_slow_handler_is_found_by_the_guests_clock() {
    if kvm_or_skip().is_none() {
        return;
    }
    let image = image(16 << 20);
    // Longer than what the scheduler of a busy host takes from either thread.
    let delay = Duration::from_millis(20);
    let slow = Some(Slow { percent: 1.0, delay });
    let mut shape = config(Way::Copy).shape;
    shape.vcpus = 1;
    let visits = Visits { accesses: 100, ..config(Way::Copy).visits };
    let config = Config { shape, handlers: 1, visits, slow, ..config(Way::Copy) };
    let mut found = Vec::new();
    for _ in 0..5 {
        let Some(report) = restored_or_skip(&config, &image) else { return };
        let (pages, seconds) = report.slowed;
        assert!((10..60).contains(&pages), "{pages} of {}", report.order.len());
        let mut slower = report.times.stalls.clone();
        slower.retain(|stall| *stall >= delay.as_secs_f64());
        assert!(slower.len() as u64 >= pages, "{} of {pages}", slower.len());
        let ratio = slower[slower.len() / 2] / (seconds / pages as f64);
        // A busy host makes further pages slow, and all of them slower.
        found.push((slower.len() as f64 / pages as f64, ratio));
        if found.iter().any(|(count, each)| *count <= 1.1 && (each - 1.0).abs() <= 0.1) {
            return;
        }
    }
    panic!("pages and their times, to those of the handler: {found:?}");
}

#[test]
fn an_impossible_restore_is_refused_and_a_stopped_one_ends() {
    if kvm_or_skip().is_none() {
        return;
    }
    let image = image(16 << 20);
    let none = restored(&Config { handlers: 0, ..config(Way::Copy) }, &image);
    assert!(matches!(none, Err(Error::Invalid { .. })));
    for way in ALL {
        let on_event = &mut |_: slat_kvm::Event<'_>| ();
        let setting = Setting { stop: &AtomicBool::new(true), pin: &[], on_event };
        match run(&config(way), &image, setting) {
            Err(Error::Stopped) => {}
            Err(error) if error.is_missing_feature() => {}
            other => panic!("{way:?}: {other:?}"),
        }
    }
}
