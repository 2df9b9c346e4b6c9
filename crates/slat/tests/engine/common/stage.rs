//! Tables, a cache and guards for tests of single calls, on any format.

use super::hardware::Hardware;
use super::world::{CacheOf, GuardOf, TablesOf, cache, check_sizes};
use super::{TestPlatform, destroy};
use slat::format::{arm64::Arm64, ept::Ept};
use slat::{
    AddressSpace, AgeBitmaps, AgeCounts, AgeOptions, Attributes, BreakBeforeMake, ChangeError,
    Format, Gpa, GpaRange, Guard, Hpa, Interruption, LocalFlush, OpCounts, Relax, TableBits, Vmid,
};
use std::fmt::{Debug, Display};
use std::sync::atomic::Ordering::SeqCst;

pub const K: u64 = 1 << 10;
pub const M: u64 = 1 << 20;
pub const G: u64 = 1 << 30;
pub const RAM: Attributes = Attributes::RAM;
pub const CLEAN: Attributes = Attributes { accessed: false, dirty: false, ..RAM };
pub const EXACT: AgeOptions =
    AgeOptions { clear: true, table_bits: TableBits::Exact, flush_tlb: false };
pub const BBM: [BreakBeforeMake; 3] =
    [BreakBeforeMake::Always, BreakBeforeMake::ConflictHandled, BreakBeforeMake::Never];

pub fn arm<const G: u32, const WIDE: bool>() -> Arm64<G, WIDE> {
    Arm64 { hardware_dirty: true, ..Default::default() }
}

pub fn ept<const HUGE_1G: bool>() -> Ept<HUGE_1G> {
    Ept { output_bits: 48, ..Default::default() }
}

pub fn range(start: u64, size: u64) -> GpaRange {
    GpaRange::new(Gpa(start), size).unwrap()
}

/// An empty guest, and a cache of `frames` frames. It checks afterwards that no frame is missing,
/// and that the guard has counted all leaves that are there.
pub fn on_stage<H: Hardware>(
    stage: (H::Format, u32, usize),
    run: impl for<'t, 'p> FnOnce(&'t TablesOf<'p, H>, &mut GuardOf<'t, 'p, H>, &mut CacheOf<'_, H>),
) {
    on_stage_of::<H>(BreakBeforeMake::Always, stage, run);
}

/// As [`on_stage`], on CPUs that demand so much.
pub fn on_stage_of<H: Hardware>(
    bbm: BreakBeforeMake,
    stage: (H::Format, u32, usize),
    run: impl for<'t, 'p> FnOnce(&'t TablesOf<'p, H>, &mut GuardOf<'t, 'p, H>, &mut CacheOf<'_, H>),
) {
    on_stage_uncounted::<H>(bbm, stage, |tables, guard, cache| {
        run(tables, guard, cache);
        check_sizes::<H>(&H::of(tables).tree(guard.platform()), *guard.leaf_delta());
    });
}

/// As [`on_stage_of`], where the guard does not count all leaves.
pub fn on_stage_uncounted<H: Hardware>(
    bbm: BreakBeforeMake,
    (format, bits, frames): (H::Format, u32, usize),
    run: impl for<'t, 'p> FnOnce(&'t TablesOf<'p, H>, &mut GuardOf<'t, 'p, H>, &mut CacheOf<'_, H>),
) {
    let platform = TestPlatform::new(bbm);
    let platform = &platform;
    let tables = TablesOf::<H>::new(format, Vmid(1), bits, platform).unwrap();
    let mut storage = Vec::new();
    let mut reader = platform.register();
    {
        let mut cache = cache::<H>(platform, &mut storage, frames);
        let mut guard = tables.enter(&mut reader).unwrap();
        run(&tables, &mut guard, &mut cache);
    }
    drop(reader);
    destroy(tables);
    assert_eq!(platform.live(), 0, "frames leaked");
}

/// An empty address space, which gives all frames back afterwards.
pub fn on_space<F: Format>(
    bbm: BreakBeforeMake,
    format: F,
    run: impl FnOnce(&TestPlatform, &mut AddressSpace<'_, F, TestPlatform>),
) {
    let platform = TestPlatform::new(bbm);
    let mut space = AddressSpace::new(format, Vmid(3), 40, &platform).unwrap();
    run(&platform, &mut space);
    // SAFETY: no machine has the root.
    unsafe { space.destroy() };
    assert_eq!(platform.live(), 0);
}

/// Checks that a call was refused at that address for that reason; returns the message.
#[track_caller]
pub fn refused<R, E: Debug + PartialEq + Display>(
    result: Result<R, Interruption<E>>,
    at: u64,
    reason: E,
) -> String {
    let stopped = result.err().expect("accepted");
    assert_eq!(stopped, Interruption { at: Gpa(at), reason });
    stopped.to_string()
}

/// Checks that the guard's operations have changed nothing.
#[track_caller]
pub fn idle<H: Hardware>(guard: &GuardOf<'_, '_, H>) {
    let entries_read = guard.counts().entries_read;
    assert_eq!(guard.counts(), OpCounts { entries_read, ..OpCounts::NONE });
    assert_eq!(guard.pending_invalidation(), None);
}

#[track_caller]
pub fn says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
}

/// Relaxes on a CPU that did not fault.
pub fn relax<F: Format>(
    guard: &mut Guard<'_, '_, F, TestPlatform>,
    at: GpaRange,
    what: impl Into<Relax>,
) -> Result<u64, Interruption<ChangeError>> {
    guard.relax(at, what).map(LocalFlush::not_needed_here)
}

/// Returns whether a right was given, on a CPU that did not fault.
pub fn given<F: Format, E>(
    result: Result<LocalFlush<'_, '_, F, TestPlatform>, E>,
) -> Result<bool, E> {
    result.map(|given| given.not_needed_here() != 0)
}

/// Ages; returns the counts, and the first word of both bitmaps.
pub fn age<F: Format>(
    guard: &mut Guard<'_, '_, F, TestPlatform>,
    at: GpaRange,
    how: AgeOptions,
) -> (AgeCounts, [u64; 2]) {
    let mut bits = [(); 2].map(|()| vec![0; (at.size() >> F::PAGE_SHIFT).div_ceil(64) as usize]);
    let [young, unanswered] = &mut bits;
    let aged = guard.age(at, &mut AgeBitmaps { young, unanswered }, how).unwrap();
    (aged, bits.map(|bits| bits[0]))
}

/// Does `work` while another thread holds the entries for these addresses: they are what `held`
/// makes of them.
#[track_caller]
pub fn holding<H: Hardware, R>(
    (hardware, platform): (H, &TestPlatform),
    places: impl IntoIterator<Item = u64>,
    held: impl Fn(u64) -> u64,
    work: impl FnOnce() -> R,
) -> R {
    let hold = |at| {
        let pte = hardware.pte(platform, at).0;
        let raw = pte.load(SeqCst);
        pte.store(held(raw), SeqCst);
        (at, pte, raw)
    };
    let all: Vec<_> = places.into_iter().map(hold).collect();
    let result = work();
    for (at, pte, raw) in all {
        assert_eq!(
            pte.swap(raw, SeqCst),
            held(raw),
            "somebody else's entry at {at:#x} was changed"
        );
    }
    result
}

/// Returns the host address that `gpa` translates to, if it is mapped.
#[track_caller]
pub fn host<H: Hardware>(guard: &GuardOf<'_, '_, H>, gpa: u64) -> Option<Hpa> {
    guard.translate(Gpa(gpa)).unwrap().map(|found| found.hpa)
}
