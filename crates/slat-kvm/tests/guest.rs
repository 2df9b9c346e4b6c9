//! The guest by itself: what the ioctls mean, and that a fault would be seen.

mod common;

use common::kvm_or_skip;
use slat_kvm::bitmap::{DirtyBitmap, Missing};
use slat_kvm::dirty_log::Mode;
use slat_kvm::guest::{Guest, Vcpu};
use slat_kvm::write_pass::{PAGES_PER_RUN, WritePass};
use slat_kvm::{Backing, Error};
use std::sync::atomic::AtomicBool;

const MEMORY: u64 = 8 << 20;
static GO_ON: AtomicBool = AtomicBool::new(false);

fn guest(mode: Mode) -> Option<(Guest, Vec<Vcpu>)> {
    let host = kvm_or_skip()?;
    if let Err(error) = mode.check(&host) {
        eprintln!("skipped: {error}");
        return None;
    }
    Some(Guest::new(MEMORY, Backing::Small, 2, mode).unwrap())
}

fn write(vcpu: &mut Vcpu, pass: WritePass) -> u64 {
    vcpu.load(pass).unwrap();
    vcpu.run(&GO_ON).unwrap()
}

fn get(guest: &Guest) -> DirtyBitmap {
    let mut log = DirtyBitmap::new(guest.pages());
    guest.get_dirty_log(&mut log).unwrap();
    log
}

fn written(vcpus: &[Vcpu], pass: WritePass, pages: u64) -> DirtyBitmap {
    let mut written = DirtyBitmap::new(pages);
    for vcpu in vcpus {
        for page in (0..vcpu.pages()).filter(|&page| pass.writes(page)) {
            written.insert(vcpu.first_page() + page);
        }
    }
    written
}

#[test]
fn a_get_clears_the_log_in_legacy_mode() {
    let Some((guest, mut vcpus)) = guest(Mode::Legacy) else { return };
    let pass = WritePass::new(1, 40).unwrap();
    guest.start_log().unwrap();
    vcpus.iter_mut().for_each(|vcpu| assert!(write(vcpu, pass) > 0));
    assert_eq!(get(&guest), written(&vcpus, pass, guest.pages()));
    assert_eq!(get(&guest).count(), 0);
}

#[test]
fn only_a_clear_clears_in_manual_mode_and_only_its_pages() {
    let Some((guest, mut vcpus)) = guest(Mode::Manual) else { return };
    let pass = WritePass::new(1, 40).unwrap();
    guest.start_log().unwrap();
    vcpus.iter_mut().for_each(|vcpu| assert!(write(vcpu, pass) > 0));
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
    let pass = WritePass::new(1, 7).unwrap();
    vcpus.iter_mut().for_each(|vcpu| assert!(write(vcpu, pass) > 0));
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

/// The kernel's log is right here, and the guest wrote less than the check is told: to the check,
/// the same as a kernel that lost the pages of one vCPU.
#[test]
fn pages_missing_from_a_real_log_are_found() {
    let Some((guest, mut vcpus)) = guest(Mode::Manual) else { return };
    let pass = WritePass::new(1, 100).unwrap();
    guest.start_log().unwrap();
    write(&mut vcpus[0], pass);
    let log = get(&guest);
    assert!(log.check(&written(&vcpus[..1], pass, guest.pages())).is_ok());
    let all = written(&vcpus, pass, guest.pages());
    let lost = Missing { first: vcpus[1].first_page(), count: vcpus[1].pages() };
    assert_eq!(log.check(&all), Err(lost));
}

#[test]
fn a_page_that_lost_its_stamp_is_found() {
    let Some((guest, mut vcpus)) = guest(Mode::Manual) else { return };
    let [first, second] = [1, 2].map(|round| WritePass::new(round, 100).unwrap());
    vcpus.iter_mut().for_each(|vcpu| assert!(write(vcpu, first) > 0));
    let pages = guest.pages();
    (0..pages).for_each(|page| guest.check_stamp(page, first).unwrap());
    assert!(matches!(guest.check_stamp(3, second), Err(Error::WrongStamp { page: 3, .. })));
    assert!(guest.check_stamp(pages, first).is_err());
    guest.memory().write(5 * 4096, 0).unwrap();
    assert!(matches!(guest.check_stamp(5, first), Err(Error::WrongStamp { page: 5, .. })));
    guest.check_stamp(6, first).unwrap();
}

#[test]
fn a_vcpu_stops_in_the_middle_of_its_pass() {
    if kvm_or_skip().is_none() {
        return;
    }
    let bytes = 2 * PAGES_PER_RUN * 4096;
    let (guest, mut vcpus) = Guest::new(bytes, Backing::Thp, 1, Mode::Legacy).unwrap();
    let pass = WritePass::new(1, 100).unwrap();
    vcpus[0].load(pass).unwrap();
    let stopped = vcpus[0].run(&AtomicBool::new(true));
    assert!(matches!(stopped, Err(Error::Stopped)), "{stopped:?}");
    assert!(guest.check_stamp(guest.pages() - 1, pass).is_err());
    assert_eq!(write(&mut vcpus[0], pass), guest.pages(), "and can run again");
    guest.check_stamp(guest.pages() - 1, pass).unwrap();
}

#[test]
fn vcpus_keep_their_memory_when_the_guest_is_dropped() {
    let Some((guest, mut vcpus)) = guest(Mode::Legacy) else { return };
    drop(guest);
    assert_eq!(write(&mut vcpus[1], WritePass::new(1, 100).unwrap()), MEMORY / 4096 / 2);
}
