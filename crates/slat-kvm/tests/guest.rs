//! The guest by itself: the meaning of the ioctls, and that the checks find a fault.

mod common;

use common::kvm_or_skip;
use slat_kvm::bitmap::{DirtyBitmap, MissingPages};
use slat_kvm::guest::{Guest, Shape, Vcpu};
use slat_kvm::work::{Order, Touch, Work};
use slat_kvm::{Error, Mode};

const MEMORY: u64 = 8 << 20;

fn guest(mode: Mode) -> Option<(Guest, Vec<Vcpu>)> {
    let host = kvm_or_skip()?;
    if let Err(error) = mode.check(&host) {
        eprintln!("skipped: {error}");
        return None;
    }
    // Room for the longest list of pages.
    let shape = Shape { memory: MEMORY, vcpus: 2, mode, records: 8, ..Shape::default() };
    Some(Guest::new(&shape).unwrap())
}

fn write_share(share: u8) -> Work {
    Work { share, round: 1, ..Work::each_page(Touch::Write) }
}

fn perform(vcpu: &mut Vcpu, work: Work) -> u64 {
    vcpu.load(&work).unwrap();
    vcpu.run().unwrap()
}

fn get(guest: &Guest) -> DirtyBitmap {
    let mut log = DirtyBitmap::new(guest.pages());
    guest.get_dirty_log(&mut log).unwrap();
    log
}

fn written(vcpus: &[Vcpu], work: Work, pages: u64) -> DirtyBitmap {
    let mut written = DirtyBitmap::new(pages);
    for vcpu in vcpus {
        let part = vcpu.part();
        let steps = work.steps(vcpu.index(), part.pages).take(part.pages as usize);
        for (page, _) in steps.filter(|step| step.1 == Touch::Write) {
            written.insert(part.first + page);
        }
    }
    written
}

#[test]
fn a_get_clears_the_log_in_legacy_mode() {
    let Some((guest, mut vcpus)) = guest(Mode::Legacy) else { return };
    let pass = write_share(40);
    guest.start_log().unwrap();
    vcpus.iter_mut().for_each(|vcpu| assert!(perform(vcpu, pass) > 0));
    assert_eq!(get(&guest), written(&vcpus, pass, guest.pages()));
    assert_eq!(get(&guest).count(), 0);
}

#[test]
fn only_a_clear_clears_in_manual_mode_and_only_its_pages() {
    let Some((guest, mut vcpus)) = guest(Mode::Manual) else { return };
    let pass = write_share(40);
    guest.start_log().unwrap();
    vcpus.iter_mut().for_each(|vcpu| assert!(perform(vcpu, pass) > 0));
    let log = get(&guest);
    assert_eq!(log, written(&vcpus, pass, guest.pages()));
    assert_eq!(get(&guest), log, "a second get finds the same");

    guest.clear_dirty_log(&log, 64, 128).unwrap();
    let cleared = get(&guest);
    for page in 0..guest.pages() {
        let expected = log.contains(page) && !(64..192).contains(&page);
        assert_eq!(cleared.contains(page), expected, "page {page}");
    }
}

#[test]
fn a_log_can_start_full_and_then_holds_what_is_written() {
    let Some((guest, mut vcpus)) = guest(Mode::ManualInitiallySet) else { return };
    guest.start_log().unwrap();
    let log = get(&guest);
    assert_eq!(log.count(), guest.pages());
    guest.clear_dirty_log(&log, 0, guest.pages() as u32).unwrap();
    let pass = write_share(7);
    vcpus.iter_mut().for_each(|vcpu| assert!(perform(vcpu, pass) > 0));
    assert_eq!(get(&guest), written(&vcpus, pass, guest.pages()));
}

#[test]
fn chunks_that_the_kernel_does_not_take_are_an_error() {
    let Some((guest, _vcpus)) = guest(Mode::Manual) else { return };
    guest.start_log().unwrap();
    let log = get(&guest);
    for (first, pages) in [(1, 64), (64, 63), (guest.pages(), 64)] {
        let error = guest.clear_dirty_log(&log, first, pages).unwrap_err();
        assert!(error.to_string().contains("KVM_CLEAR_DIRTY_LOG"), "{error}");
    }
}

#[test]
fn a_bitmap_of_another_size_never_reaches_the_kernel() {
    let Some((guest, _vcpus)) = guest(Mode::Manual) else { return };
    guest.start_log().unwrap();
    let mut small = DirtyBitmap::new(guest.pages() - 1);
    assert!(matches!(guest.get_dirty_log(&mut small), Err(Error::Invalid { .. })));
}

/// The kernel's log is correct here, but one vCPU did not write the pages that the check expects.
/// To the check, this looks like a kernel that lost the pages of that vCPU.
#[test]
fn pages_missing_from_a_real_log_are_found() {
    let Some((guest, mut vcpus)) = guest(Mode::Manual) else { return };
    let pass = write_share(100);
    guest.start_log().unwrap();
    perform(&mut vcpus[0], pass);
    let log = get(&guest);
    assert!(log.check(&written(&vcpus[..1], pass, guest.pages())).is_ok());
    let all = written(&vcpus, pass, guest.pages());
    let lost = MissingPages { first: vcpus[1].part().first, count: vcpus[1].part().pages };
    assert_eq!(log.check(&all), Err(lost));
}

#[test]
fn a_page_that_lost_its_stamp_is_found() {
    let Some((guest, mut vcpus)) = guest(Mode::Manual) else { return };
    let first = guest.position(0);
    let half = guest.pages() / 2;
    assert_eq!(perform(&mut vcpus[0], write_share(100)), half);
    (0..half).for_each(|page| guest.check_stamp(page, first + page).unwrap());
    (half..2 * half).for_each(|page| assert_eq!(guest.written_by(page).unwrap(), 0));
    assert!(matches!(guest.check_stamp(3, first + 2), Err(Error::WrongStamp { page: 3, .. })));
    assert!(guest.check_stamp(2 * half, first).is_err());
    let page = guest.page_size();
    guest.memory().write(5 * page, 0).unwrap();
    assert!(matches!(guest.check_stamp(5, first + 5), Err(Error::WrongStamp { page: 5, .. })));
    guest.check_stamp(6, first + 6).unwrap();
    // A read by the guest finds a wrong stamp, too.
    guest.memory().write(7 * page + 8, 7).unwrap();
    assert_eq!(guest.misread(), 0);
    perform(&mut vcpus[0], Work::each_page(Touch::Read));
    assert_eq!(guest.misread(), 1);
}

#[test]
fn the_guest_touches_what_the_model_says_in_any_order() {
    let Some((guest, mut vcpus)) = guest(Mode::Manual) else { return };
    let orders = [
        Order::Sequential,
        Order::Random { seed: 9 },
        Order::Hot { seed: 10, percent: 5, share: 70 },
        Order::Listed { pages: &[70, 3, 3, 1_000_007, 4] },
    ];
    for order in orders {
        let work = Work { order, round: 5, ..write_share(60) };
        for vcpu in &mut vcpus {
            let (first, part) = (guest.position(vcpu.index()), vcpu.part());
            let mut last = vec![None; part.pages as usize];
            let steps = work.steps(vcpu.index(), part.pages).take(part.pages as usize);
            for (number, (page, touch)) in (first..).zip(steps) {
                if touch == Touch::Write {
                    last[page as usize] = Some(number);
                }
            }
            assert_eq!(perform(vcpu, work), part.pages);
            for (page, number) in (part.first..).zip(last) {
                let found = guest.written_by(page).unwrap();
                match number {
                    Some(number) => assert_eq!(found, number, "page {page}, {order:?}"),
                    None => assert!(found < first, "page {page}, {order:?}: {found}"),
                }
            }
        }
    }
}

#[test]
fn return_instructions_that_the_guest_wrote_can_be_called() {
    let Some((guest, mut vcpus)) = guest(Mode::Manual) else { return };
    for vcpu in &mut vcpus {
        assert_eq!(perform(vcpu, write_share(100)), guest.pages() / 2);
        assert_eq!(perform(vcpu, Work::each_page(Touch::Execute)), guest.pages() / 2);
    }
}

#[test]
fn memory_that_was_taken_away_and_put_back_is_as_it_was() {
    let Some((guest, mut vcpus)) = guest(Mode::Manual) else { return };
    let first = guest.position(1);
    perform(&mut vcpus[1], write_share(100));
    guest.unmap_all().unwrap();
    perform(&mut vcpus[1], Work::each_page(Touch::Read));
    assert_eq!(guest.misread(), 0);
    let part = vcpus[1].part();
    (0..part.pages).for_each(|page| guest.check_stamp(part.first + page, first + page).unwrap());
}

#[test]
fn endless_work_is_stopped_and_goes_on_where_it_was() {
    let Some((guest, vcpus)) = guest(Mode::Legacy) else { return };
    let mut vcpus = vcpus;
    let vcpu = &mut vcpus[0];
    vcpu.load(&Work { endless: true, ..write_share(100) }).unwrap();
    let first = guest.position(0);
    let half = guest.pages() / 2;
    let mut total = 0;
    for _ in 0..3 {
        total += std::thread::scope(|scope| {
            let before = guest.position(0);
            let run = scope.spawn(|| vcpu.run().unwrap());
            while guest.position(0) < before + half + 10 {
                std::thread::yield_now();
            }
            guest.ask_to_stop(0);
            run.join().unwrap()
        });
        assert_eq!(guest.position(0), first + total);
        let last = guest.position(0) - 1;
        guest.check_stamp((last - first) % half, last).unwrap();
        guest.go_on(0);
    }
}

#[test]
fn a_vcpu_keeps_its_pace() {
    let Some((guest, mut vcpus)) = guest(Mode::Legacy) else { return };
    let part = vcpus[0].part();
    // 2048 steps at 20,000 per second take at least a tenth of a second on any host.
    let start = std::time::Instant::now();
    perform(&mut vcpus[0], Work { per_second: Some(20_000.0), ..write_share(100) });
    let least = (part.pages - 2) as f64 / 20_000.0;
    assert!(start.elapsed().as_secs_f64() > 0.99 * least, "{:?}", start.elapsed());
    assert_eq!(guest.times(0).count(), part.pages);
}

#[test]
fn a_loaded_work_that_cannot_be_is_refused() {
    let Some((_guest, mut vcpus)) = guest(Mode::Legacy) else { return };
    assert!(matches!(vcpus[0].load(&write_share(0)), Err(Error::Invalid { .. })));
}

#[test]
fn vcpus_keep_their_memory_when_the_guest_is_dropped() {
    let Some((guest, mut vcpus)) = guest(Mode::Legacy) else { return };
    let pages = guest.pages();
    drop(guest);
    assert_eq!(perform(&mut vcpus[1], write_share(100)), pages / 2);
}

#[test]
fn a_spare_slot_is_there_until_it_is_deleted_and_no_longer() {
    let Some((guest, _vcpus)) = guest(Mode::Legacy) else { return };
    // KVM refuses to delete a slot that does not exist.
    assert!(matches!(guest.place_spare(MEMORY, None), Err(Error::Os { .. })));
    for _ in 0..2 {
        guest.place_spare(MEMORY / 2, Some(0)).unwrap();
        guest.place_spare(MEMORY / 2, Some(1)).unwrap();
        // A move cannot change the size.
        assert!(matches!(guest.place_spare(MEMORY, Some(1)), Err(Error::Os { .. })));
        guest.place_spare(MEMORY / 2, None).unwrap();
        assert!(matches!(guest.place_spare(MEMORY / 2, None), Err(Error::Os { .. })));
    }
    for (bytes, place) in [(2 * MEMORY, 0), (MEMORY, u64::MAX)] {
        let refused = guest.place_spare(bytes, Some(place));
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    }
}
