//! Guests that share pages: a fork beside writes, and frames that run short.

use crate::fixture::*;
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicU64, Ordering};
use slat::format::tiny::Tiny;
use slat::{Access, BreakBeforeMake, Gpa, Hpa, PageSize, Vmid};
use slat_guest::*;

/// Frames, each of which has one value.
struct ReportingFrames {
    /// The number of reports that a frame is free again.
    freed: AtomicU64,
    content: Mutex<[u64; 4]>,
}

type Memory = Cow<'static, ReportingFrames>;

impl Frames for ReportingFrames {
    fn hpa(&self, frame: u32) -> Hpa {
        Hpa(OLD + u64::from(frame) * PAGE)
    }

    fn copy(&self, from: u32, to: u32) {
        let mut content = self.content.lock().unwrap();
        content[to as usize] = content[from as usize];
    }

    fn zero(&self, frame: u32) {
        self.content.lock().unwrap()[frame as usize] = 0;
    }

    fn freed(&self) {
        self.freed.fetch_add(1, Ordering::AcqRel);
    }

    fn wait(&self) {
        loom::thread::yield_now();
    }
}

/// Makes memory of `pages` pages, with `frames` frames.
fn memory(pages: u64, frames: u32) -> (&'static SharedFrames<ReportingFrames>, Memory) {
    let memory = ReportingFrames { freed: AtomicU64::new(0), content: Mutex::new([0; 4]) };
    let page = PageSize::from_bytes(PAGE).unwrap();
    let shared: &SharedFrames<ReportingFrames> =
        Box::leak(Box::new(SharedFrames::new(memory, page, frames)));
    (shared, Cow::new(shared, HvaRange { start: Hva(HOST), bytes: pages * PAGE }).unwrap())
}

/// A guest and its fork share a page, with `frames` frames. Each writes; or, if `ends`, the fork
/// ends instead.
fn short(frames: u32, ends: bool) {
    let (shared, guests) = memory(1, frames);
    let host = Hva(HOST);
    guests.page(host, Access::Write).unwrap();
    let guest = guest(World::new(BreakBeforeMake::Never), Ram::new(PAGE), config());
    let forks = guests.fork(&mut worker(guest)).unwrap();
    let thread = spawn(move || {
        if ends {
            return None;
        }
        let answer = forks.page(host, Access::Write);
        Some((answer, forks))
    });
    let mut answers = vec![(guests.page(host, Access::Write), guests)];
    answers.extend(thread.join().unwrap());
    for (answer, memory) in &answers {
        match answer {
            Ok(page) => assert!(page.write),
            Err(NoPage::Absent) => {
                assert_ne!(shared.memory().freed.load(Ordering::Acquire), 0, "nobody tells it");
                assert!(memory.page(host, Access::Write).is_ok_and(|page| page.write));
            }
            Err(NoPage::Never) => panic!("there will be a frame"),
        }
    }
    if let [(_, one), (_, other)] = &answers[..] {
        assert_ne!(one.frame(host), other.frame(host), "each has its own");
    }
}

#[test]
fn a_thread_without_a_frame_is_notified_of_a_free_one() {
    bounded("two copy a page, one frame is free", 3, || short(2, false));
    bounded("one copies a page, no frame is free, and the other ends", 3, || short(1, true));
}

/// The VMM asks for a page, to write it later, beside a fork of the guest. An earlier child has the
/// page as well, or, if `alone`, had it.
fn ask_and_fork(alone: bool) {
    let (shared, guests) = memory(1, 4);
    let (guests, host): (&Memory, _) = (Box::leak(Box::new(guests)), Hva(HOST));
    guests.page(host, Access::Write).unwrap();
    let guest = guest(World::new(BreakBeforeMake::Never), Ram::new(PAGE), config());
    let mut forks = worker(guest);
    let first = Some(guests.fork(&mut forks).unwrap()).filter(|_| !alone);
    let thread = spawn(move || _ = guests.page(host, Access::Write).unwrap());
    let second = guests.fork(&mut forks).unwrap();
    thread.join().unwrap();
    assert!(guests.page(host, Access::Write).unwrap().write);
    let children = first.iter().chain([&second]);
    let mut all: Vec<_> = children.chain([guests]).map(|memory| memory.frame(host)).collect();
    assert!(!all[..all.len() - 1].contains(&all[all.len() - 1]), "a child has the page too");
    all.dedup();
    assert_eq!(shared.free() as usize, 4 - all.len(), "the frames in use are counted");
}

#[test]
fn a_page_asked_for_beside_a_fork_is_never_shared() {
    bounded("fork || a page that is shared no more, asked for", 3, || ask_and_fork(true));
    bounded("fork || a shared page, asked for", 3, || ask_and_fork(false));
}

type ForkedGuest = Guest<'static, Tiny, World, Memory>;

#[inline(never)]
fn forked(memory: Memory) -> &'static ForkedGuest {
    let world = World::new(BreakBeforeMake::Never);
    Box::leak(Box::new(Guest::new(tiny(), Vmid(1), BITS, world, memory, config()).unwrap()))
}

/// The vCPU writes a page, if it may within some faults; returns whether it has.
fn write_own(
    vcpu: &mut Vcpu<'static, Tiny, World, Memory>,
    told: &ReportingFrames,
    page: u64,
) -> bool {
    for _ in 0..3 {
        {
            // A write takes effect before the invalidation that takes the right completes, and who
            // reads the content afterwards waits for it.
            let mut content = told.content.lock().unwrap();
            let leaf = vcpu.worker().translate(Gpa(page * PAGE)).ok().flatten();
            if let Some(leaf) = leaf.filter(|leaf| leaf.attributes.write) {
                content[((leaf.hpa.0 - OLD) / PAGE) as usize] += 1;
                return true;
            }
        }
        vcpu.fault(Gpa(page * PAGE), Access::Write);
    }
    false
}

/// A guest that has written its first page, or none, writes both in order beside a fork.
fn write_and_fork(written: bool) {
    let (shared, memory) = memory(2, 4);
    let guest = forked(memory);
    let mut forks = Worker::new(guest).unwrap();
    forks.set_memslot(MemslotSpec::new(MemslotId(0), Gpa(0), 2 * PAGE, Hva(HOST))).unwrap();
    let mut vcpu = Vcpu::new(guest, 0).unwrap();
    let before = u64::from(written && write_own(&mut vcpu, shared.memory(), 0));
    assert_eq!(before, u64::from(written));
    let vcpu = SendCell(vcpu);
    let thread = spawn(move || {
        let mut vcpu = vcpu.get();
        let first = write_own(&mut vcpu, shared.memory(), 0);
        (first, first && write_own(&mut vcpu, shared.memory(), 1))
    });
    let child = guest.backing().fork(&mut forks).unwrap();
    let read = |memory: &Memory| {
        let content = shared.memory().content.lock().unwrap();
        let frame = |page| memory.frame(Hva(HOST + page * PAGE));
        [0, 1].map(|page| frame(page).map_or(0, |frame| content[frame as usize]))
    };
    let then = read(&child);
    assert!(then[0] >= before, "a write before the fork is missing");
    assert!(then[1] == 0 || then[0] > before, "it is of two moments");
    let (first, second) = thread.join().unwrap();
    assert_eq!(read(&child), then, "the parent wrote what the child has");
    let wrote = [before + u64::from(first), u64::from(second)];
    assert_eq!(read(guest.backing()), wrote, "the parent has what it wrote");
}

#[test]
fn a_child_has_the_memory_of_one_moment_and_nobody_writes_it() {
    bounded("fork || two writes", 2, || write_and_fork(false));
    bounded("fork || two writes, a page that is the guest's", 2, || write_and_fork(true));
}
