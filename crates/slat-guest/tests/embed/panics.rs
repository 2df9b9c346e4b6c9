//! A panic in any callback leaves every page usable, loses no mark and no frame, and whatever was
//! under way can be done again.

use crate::machine::*;
use slat::format::ept::Ept1G;
use slat::{
    Access, BreakBeforeMake, Frame, Gpa, GpaRange, Hpa, Invalidation, Memory, PageSize, Platform,
    Pte, Readers, Vmid,
};
use slat_guest::*;
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;

thread_local! {
    /// The callback that panics, after so many calls.
    static PLAN: Cell<Option<(&'static str, u32)>> = const { Cell::new(None) };
}

/// A callback begins.
fn called(name: &str) {
    match PLAN.get() {
        Some((planned, 0)) if planned == name => {
            PLAN.set(None);
            std::panic::resume_unwind(Box::new(()));
        }
        Some((planned, calls)) if planned == name => PLAN.set(Some((planned, calls - 1))),
        _ => {}
    }
}

#[derive(Debug)]
struct Reports;

impl Events for Reports {
    fn event(&self, _: Vmid, _: Event) {
        called("event");
    }
}

/// A machine whose callbacks panic. It knows which pages devices may access, and which private
/// pages are mapped.
struct Panics {
    machine: Arc<CountingMachine>,
    private: RefCell<HashSet<u64>>,
    devices: RefCell<HashSet<u64>>,
}

fn pages(gpa: Gpa, bytes: u64) -> impl Iterator<Item = u64> {
    (gpa.0..gpa.0 + bytes).step_by(K4 as usize)
}

// SAFETY: `CountingMachine` keeps the contract.
unsafe impl Platform for Panics {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        self.machine.allocate(bytes)
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // SAFETY: as the caller promises.
        unsafe { self.machine.free(frame, bytes) }
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        self.machine.entries(table)
    }

    fn publish(&self) {}

    fn invalidate(&self, _: &Invalidation) {}

    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Never
    }

    fn readers(&self) -> &Readers {
        Platform::readers(&*self.machine)
    }
}

impl Host for Panics {
    fn now(&self) -> u64 {
        0
    }

    fn events(&self) -> impl Events {
        &Reports
    }

    fn between_pieces(&self) {
        called("between_pieces");
    }

    fn private_hooks(&self) -> &dyn PrivateHooks {
        self
    }

    fn device_tables(&self) -> &dyn DeviceTables {
        self
    }

    fn wake(&self, _: Vmid, _: u16) {
        called("wake");
    }
}

impl PrivateHooks for Panics {
    fn convert(&self, _: GpaRange, _: MemoryKind) -> Result<(), Denial> {
        called("convert");
        Ok(())
    }

    fn map(&self, leaf: PrivateLeaves) -> Result<(), Denial> {
        called("map");
        let mut private = self.private.borrow_mut();
        pages(leaf.gpa, leaf.bytes).for_each(|page| assert!(private.insert(page)));
        Ok(())
    }

    fn split(&self, _: PrivateLeaves) -> Result<(), Denial> {
        called("split");
        Ok(())
    }

    fn removed(&self, leaves: PrivateLeaves) {
        // Panics after its own work: what it did cannot be asked for again.
        let mut private = self.private.borrow_mut();
        pages(leaves.gpa, leaves.bytes).for_each(|page| assert!(private.remove(&page)));
        drop(private);
        called("removed");
    }
}

impl DeviceTables for Panics {
    fn mapped(&self, leaf: DeviceLeaf) {
        self.devices.borrow_mut().extend(pages(leaf.gpa, leaf.bytes));
        called("mapped");
    }

    fn unmapped(&self, range: GpaRange) {
        let mut devices = self.devices.borrow_mut();
        pages(range.start(), range.size()).for_each(|page| _ = devices.remove(&page));
        drop(devices);
        called("unmapped");
    }
}

/// Pages of 4 KiB that are shared for reading until a write, and blocks of private memory. One page
/// is late.
struct Memory4K {
    own: RefCell<HashSet<u64>>,
    late: Cell<bool>,
}

const LATE: u64 = HOST + 40 * K4;

impl Memory4K {
    fn answer(&self, host: Hva) -> Page {
        let write = self.own.borrow().contains(&host.0);
        let hpa = Hpa(host.0 & ((1 << 40) - 1));
        Page { hpa, block: PageSize::SIZE_4K, write, execute: true, memory: Memory::Normal }
    }
}

impl Backing for Memory4K {
    fn page(&self, host: Hva, access: Access) -> Result<Page, NoPage> {
        called("page");
        if host.0 == LATE && self.late.get() {
            return Err(NoPage::Absent);
        }
        if access == Access::Write {
            self.own.borrow_mut().insert(host.0);
        }
        Ok(self.answer(host))
    }

    fn private_page(&self, at: PrivateAt) -> Result<PrivatePage, NoPage> {
        called("private_page");
        Ok(PrivatePage { hpa: Hpa((1 << 41) + at.0), block: PageSize::SIZE_2M })
    }

    fn make_writable<R>(&self, host: Hva, grant: impl FnOnce(Page) -> R) -> Option<R> {
        called("make_writable");
        self.own.borrow_mut().insert(host.0);
        let granted = grant(self.answer(host));
        called("make_writable, after `grant`");
        Some(granted)
    }
}

const CALLBACKS: [&str; 16] = [
    "event",
    "between_pieces",
    "convert",
    "map",
    "split",
    "removed",
    "mapped",
    "unmapped",
    "wake",
    "page",
    "private_page",
    "make_writable",
    "make_writable, after `grant`",
    "taken",
    "told",
    "stop",
];

/// Calls `work`, and once more if a callback panicked in it.
fn again<R>(mut work: impl FnMut() -> R) -> R {
    catch_unwind(AssertUnwindSafe(&mut work)).unwrap_or_else(|_| work())
}

/// Uses every callback: that of a private block's split where huge pages may be executed. Returns
/// whether the planned one panicked.
fn history(execute_huge: ExecuteHuge, plan: Option<(&'static str, u32)>) -> bool {
    let machine = CountingMachine::new();
    let (private, devices) = Default::default();
    let host = Panics { machine, private, devices };
    let memory = Memory4K { own: RefCell::default(), late: Cell::new(true) };
    let config = Config::new(1, PageSize::SIZE_2M);
    let config = Config { devices: true, execute_huge, ..config };
    let guest = Guest::new(Ept1G::default(), Vmid(1), 39, &host, memory, config).unwrap();
    let mut vcpu = Vcpu::new(&guest, 0).unwrap();
    let memslot = MemslotSpec { private: Some(PrivateAt(0)), ..memslot(4 * M2) };
    let plain = MemslotSpec {
        gpa: Gpa(BASE + 4 * G1),
        id: MemslotId(1),
        private: None,
        log_dirty: true,
        host: Hva(HOST + 4 * M2),
        ..memslot
    };
    let range = |start: u64, bytes| GpaRange::new(Gpa(BASE + start), bytes).unwrap();
    let hosts = |start: u64, bytes| HvaRange { start: Hva(HOST + start), bytes };
    PLAN.set(plan);
    again(|| vcpu.worker().set_memslot(memslot)).unwrap();
    again(|| vcpu.worker().set_memslot(plain)).unwrap();
    // Pages that are written at once, and pages that are read before.
    let fault = |vcpu: &mut Vcpu<'_, _, _, _>, gpa, access| {
        let outcome = again(|| vcpu.fault(Gpa(gpa), access));
        assert!(!matches!(outcome, Outcome::Retry(Retry::Contended | Retry::Converting)));
        outcome
    };
    for page in 0..16 {
        for gpa in [BASE + page * K4, plain.gpa.0 + page * K4] {
            if page % 2 == 0 {
                fault(&mut vcpu, gpa, Access::Read);
            }
            fault(&mut vcpu, gpa, Access::Write);
        }
    }
    // All of them are in the log.
    let mut bitmap = [0; 32];
    again(|| vcpu.worker().read_log(plain.id, &mut bitmap)).unwrap();
    assert_eq!(bitmap[0] & 0xffff, 0xffff, "{plan:?}: written, and not in the log");
    // A page that is late.
    let waits = fault(&mut vcpu, BASE + 40 * K4, Access::Read);
    assert!(matches!(waits, Outcome::Retry(Retry::Absent(Some(_)))), "{plan:?}: {waits:?}");
    guest.backing().late.set(false);
    again(|| guest.arrived(hosts(40 * K4, K4)));
    assert!(vcpu.ready().is_some(), "{plan:?}: it sleeps for ever");
    fault(&mut vcpu, BASE + 40 * K4, Access::Write);
    again(|| {
        vcpu.worker().prefault(range(16 * K4, 4 * K4), Access::Read, || {
            called("stop");
            false
        })
    });
    // Each page that was written is told as dirty once at least.
    let dirty = RefCell::new(HashSet::new());
    let tell = |taken: UnmappedPages| {
        called("taken");
        if taken.dirty {
            dirty.borrow_mut().extend(pages(taken.gpa, taken.host.bytes));
        }
    };
    again(|| drop(vcpu.worker().invalidate(hosts(0, 4 * K4), tell)));
    again(|| vcpu.worker().evict(&[hosts(4 * K4, K4), hosts(6 * K4, 2 * K4)], tell));
    again(|| drop(vcpu.worker().invalidate(hosts(4 * K4, 4 * K4), tell)));
    again(|| vcpu.worker().convert(range(8 * K4, 4 * K4), MemoryKind::Private, tell)).unwrap();
    again(|| vcpu.worker().convert(range(8 * K4, 4 * K4), MemoryKind::Shared, tell)).unwrap();
    again(|| drop(vcpu.worker().invalidate(hosts(8 * K4, 8 * K4), tell)));
    for page in 0..16 {
        assert!(dirty.borrow().contains(&(BASE + page * K4)), "{plan:?}: page {page} was written");
    }
    // Private memory: a block, which one page splits, and which is invalidated.
    again(|| vcpu.worker().convert(range(M2, M2), MemoryKind::Private, tell)).unwrap();
    let quiet = MemslotSpec { log_dirty: false, ..plain };
    again(|| vcpu.worker().set_memslot(quiet)).unwrap();
    fault(&mut vcpu, BASE + M2, Access::Write);
    again(|| vcpu.worker().convert(range(M2 + K4, K4), MemoryKind::Shared, tell)).unwrap();
    let told = |_| called("told");
    let at = PrivateRange { start: PrivateAt(M2), bytes: M2 };
    again(|| drop(vcpu.worker().invalidate_private(at, told).unwrap()));
    fault(&mut vcpu, BASE + M2 + 2 * K4, Access::Write);
    // Recovery, and changes of memslots.
    again(|| vcpu.worker().recover_huge_pages());
    again(|| drop(vcpu.worker().freeze_writes(hosts(4 * M2, M2))));
    again(|| vcpu.worker().set_memslot(plain)).unwrap();
    let moved = MemslotSpec { gpa: Gpa(BASE + 8 * G1), ..plain };
    again(|| vcpu.worker().set_memslot(moved)).unwrap();
    let fired = plan.is_some() && PLAN.get().is_none();
    PLAN.set(None);
    // Every page can be used, by the vCPU and by devices.
    for page in (0..48).chain(511..520) {
        let gpa = BASE + page * K4;
        vcpu.fault(Gpa(gpa), Access::Write);
        vcpu.fault(Gpa(gpa), Access::Write);
        let leaf = vcpu.worker().translate(Gpa(gpa)).unwrap();
        assert!(leaf.is_some_and(|leaf| leaf.attributes.write), "{plan:?}: {gpa:#x}: {leaf:?}");
    }
    // All goes, and nobody else has any of it.
    for spec in vcpu.worker().memslots() {
        vcpu.worker().set_memslot(MemslotSpec { bytes: 0, ..spec }).unwrap();
    }
    assert_eq!(vcpu.worker().leaves_by_size().iter().map(|size| size.1).sum::<u64>(), 0);
    assert!(vcpu.worker().memslots().is_empty());
    assert_eq!(host.private.borrow().len(), 0, "{plan:?}: the machine keeps private pages");
    assert_eq!(host.devices.borrow().len(), 0, "{plan:?}: devices keep pages");
    drop(vcpu);
    drop(guest);
    assert_eq!(host.machine.frames(), 0, "{plan:?}: frames are leaked");
    fired
}

/// Nothing converts the pages anew, which would remove a mark that the panic left.
#[test]
fn a_panic_of_the_callers_closure_ends_a_conversion() {
    let (shared, private) = (MemoryKind::Shared, MemoryKind::Private);
    for (callback, from, to, bytes) in [
        ("convert", shared, private, K4),
        ("taken", shared, private, K4),
        ("split", private, shared, K4),
        ("removed", private, shared, M2),
    ] {
        let (private, devices) = Default::default();
        let host = Panics { machine: CountingMachine::new(), private, devices };
        let memory = Memory4K { own: RefCell::default(), late: Cell::new(false) };
        let config = Config::new(1, PageSize::SIZE_2M);
        let guest = Guest::new(Ept1G::default(), Vmid(1), 39, &host, memory, config).unwrap();
        let mut vcpu = Vcpu::new(&guest, 0).unwrap();
        let memslot = MemslotSpec { private: Some(PrivateAt(0)), ..memslot(M2) };
        vcpu.worker().set_memslot(memslot).unwrap();
        let all = GpaRange::new(Gpa(BASE), M2).unwrap();
        vcpu.worker().convert(all, from, |_| {}).unwrap();
        vcpu.fault(Gpa(BASE), Access::Write);
        PLAN.set(Some((callback, 0)));
        let page = GpaRange::new(Gpa(BASE), bytes).unwrap();
        let converts = || vcpu.worker().convert(page, to, |_| called("taken"));
        let ended = catch_unwind(AssertUnwindSafe(converts));
        assert!(ended.is_err() && PLAN.get().is_none(), "{callback} is not called");
        let outcome = vcpu.fault(Gpa(BASE), Access::Write);
        assert!(!matches!(outcome, Outcome::Retry(_)), "{outcome:?}");
    }
}

/// Frames whose methods panic.
#[derive(Debug)]
struct PanickingFrames;

impl Frames for PanickingFrames {
    fn hpa(&self, frame: u32) -> Hpa {
        called("hpa");
        Hpa(64 * G1 + u64::from(frame) * K4)
    }

    fn copy(&self, _: u32, _: u32) {
        called("copy");
    }

    fn zero(&self, _: u32) {
        called("zero");
    }

    fn freed(&self) {
        called("freed");
    }
}

/// A guest and its fork write the pages that they share, with too few frames. Returns whether the
/// planned callback panicked.
fn forks(plan: Option<(&'static str, u32)>) -> bool {
    let frames = 6;
    let shared = SharedFrames::new(PanickingFrames, PageSize::SIZE_4K, frames);
    let machine = CountingMachine::new();
    PLAN.set(plan);
    {
        let range = HvaRange { start: Hva(HOST), bytes: 4 * K4 };
        let parent = Cow::new(&shared, range).unwrap();
        let guest = Guest::new(
            Ept1G::default(),
            Vmid(1),
            39,
            &*machine,
            parent,
            Config::new(1, PageSize::SIZE_2M),
        )
        .unwrap();
        let mut vcpu = Vcpu::new(&guest, 0).unwrap();
        vcpu.worker().set_memslot(memslot(4 * K4)).unwrap();
        let mut write = |page: u64| again(|| vcpu.fault(Gpa(BASE + page * K4), Access::Write));
        (0..4).for_each(|page| assert!(matches!(write(page), Outcome::Mapped(_)), "{plan:?}"));
        let child = guest.backing().fork(vcpu.worker()).unwrap();
        let mut write = |page: u64| again(|| vcpu.fault(Gpa(BASE + page * K4), Access::Write));
        let short = [0, 1, 2].map(|page| matches!(write(page), Outcome::Retry(Retry::Absent(_))));
        assert_eq!(short, [false, false, true], "{plan:?}: two frames were free");
        // The child leaves its frames to the guest.
        _ = catch_unwind(AssertUnwindSafe(|| drop(child)));
        (2..4).for_each(|page| {
            let outcome = again(|| vcpu.fault(Gpa(BASE + page * K4), Access::Write));
            assert!(!matches!(outcome, Outcome::Retry(_)), "{plan:?}: {outcome:?}");
        });
    }
    assert_eq!(shared.free(), frames, "{plan:?}: a frame is leaked");
    let fired = plan.is_some() && PLAN.get().is_none();
    PLAN.set(None);
    fired
}

#[test]
fn a_panic_of_frames_leaves_every_page_usable_and_leaks_none() {
    forks(None);
    for callback in ["hpa", "copy", "zero", "freed"] {
        let fired = (0..).take_while(|&calls| forks(Some((callback, calls)))).count();
        assert_ne!(fired, 0, "{callback} is never called");
    }
}

#[test]
fn a_fetch_whose_copy_panics_is_fetched_again() {
    let memory = Memory4K { own: RefCell::default(), late: Cell::new(false) };
    let range = HvaRange { start: Hva(HOST), bytes: 64 * K4 };
    let late = PostCopy::new(memory, range, PageSize::SIZE_4K, PageSize::SIZE_2M).unwrap();
    let fetch = late.next(64).unwrap();
    let panics = || fetch.place(|_| std::panic::resume_unwind(Box::new(())));
    assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
    drop(fetch);
    let machine = CountingMachine::new();
    let config = Config::new(1, PageSize::SIZE_2M);
    let guest = Guest::new(Ept1G::default(), Vmid(1), 39, &*machine, late, config).unwrap();
    let mut worker = Worker::new(&guest).unwrap();
    // Waits for nobody: the fetch places nothing any more.
    let taken = worker.invalidate(range, |_| {});
    guest.backing().lose(range, &taken);
    drop(taken);
    let fetch = guest.backing().next(64).unwrap();
    assert_eq!((fetch.host(), fetch.place(|_| {})), (range, 64));
    // The wake-up panics after the pages have arrived.
    fetch.arrived(&mut worker);
    assert_eq!(guest.backing().counts().missing, 0);
}

#[test]
fn a_panic_in_any_callback_leaves_every_page_usable() {
    let both = [ExecuteHuge::Allowed, ExecuteHuge::Split];
    both.into_iter().for_each(|huge| _ = history(huge, None));
    for callback in CALLBACKS {
        let fired = both
            .map(|huge| (0..).take_while(|&calls| history(huge, Some((callback, calls)))).count());
        assert_ne!(fired, [0, 0], "{callback} is never called");
    }
}
