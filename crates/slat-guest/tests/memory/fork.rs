//! A fork of a guest: parent and child share frames until one of them writes.

use crate::fixture::*;
use crate::on_all;
use slat::{Access, Gpa, Hpa, PageSize, Vmid};
use slat_guest::*;
use slat_sim::Machine;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};

const PAGES: u64 = 64;
const BYTES: u64 = PAGES * K4;

type Callback = Box<dyn FnOnce() + Send>;

/// The content of the frames.
#[derive(Clone)]
struct Content {
    first: u64,
    frames: Arc<Mutex<HashMap<u32, u64>>>,
    /// The number of reports that a frame was freed.
    freed: Arc<AtomicU64>,
    /// What runs before the next copy.
    copying: Arc<Mutex<Option<Callback>>>,
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Content").finish_non_exhaustive()
    }
}

impl Content {
    fn new<C: Case>() -> Self {
        let (frames, freed, copying) = Default::default();
        Self { first: C::FIRST_HPA, frames, freed, copying }
    }

    fn number(&self, hpa: Hpa) -> u32 {
        ((hpa.0 - self.first) / K4) as u32
    }

    fn read(&self, frame: u32) -> u64 {
        self.frames.lock().unwrap().get(&frame).copied().unwrap_or(0)
    }

    fn write(&self, frame: u32, value: u64) {
        self.frames.lock().unwrap().insert(frame, value);
    }
}

impl Frames for Content {
    fn hpa(&self, frame: u32) -> Hpa {
        Hpa(self.first + u64::from(frame) * K4)
    }

    fn copy(&self, from: u32, to: u32) {
        if let Some(then) = self.copying.lock().unwrap().take() {
            then();
        }
        self.write(to, self.read(from));
    }

    fn zero(&self, frame: u32) {
        self.write(frame, 0);
    }

    fn freed(&self) {
        self.freed.fetch_add(1, Ordering::Relaxed);
    }
}

type ForkedGuest<'p, C> = Guest<'p, <C as Case>::F, Machine<<C as Case>::A>, Cow<'p, Content>>;
type ForkedVcpu<'w, C> = Vcpu<'w, <C as Case>::F, Machine<<C as Case>::A>, Cow<'w, Content>>;

fn new<'p, C: Case>(
    machine: &'p Machine<C::A>,
    memory: Cow<'p, Content>,
    vmid: Vmid,
) -> ForkedGuest<'p, C> {
    Guest::new(C::format(), vmid, BITS, machine, memory, config()).unwrap()
}

/// The CPU uses a page of the guest; returns its address.
fn touch<C: Case>(
    machine: &Machine<C::A>,
    vcpu: &mut ForkedVcpu<'_, C>,
    (cpu, page): (usize, u64),
    access: Access,
) -> Hpa {
    let gpa = BASE + page * K4;
    machine.here(cpu);
    for _ in 0..16 {
        let done = match access {
            Access::Write => machine.cpu(cpu).write(gpa),
            _ => machine.cpu(cpu).read(gpa),
        };
        if let Ok(hpa) = done {
            return hpa;
        }
        if let Outcome::Refused(reason) = vcpu.fault(Gpa(gpa), access) {
            panic!("{reason:?}");
        }
    }
    panic!("no progress at {gpa:#x}");
}

fn all(memory: &Cow<'_, Content>, content: &Content) -> Vec<u64> {
    let of = |page| memory.frame(Hva(HOST + page * K4)).map_or(0, |frame| content.read(frame));
    (0..PAGES).map(of).collect()
}

on_all! {
    fn parent_and_child_have_what_they_wrote_and_share_the_rest<C: Case>() {
        for seed in crate::seed::seeds(2) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let content = Content::new::<C>();
            let shared = SharedFrames::new(content.clone(), PageSize::SIZE_4K, 2 * PAGES as u32);
            let machine = C::machine(2).random(seed);
            give_all::<C>(&machine);
            let parent = Cow::new(&shared, host_range(HOST, BYTES)).unwrap();
            let parent = new::<C>(&machine, parent, VMID);
            let mut vcpu = Vcpu::new(&parent, 0).unwrap();
            machine.cpu(0).load(VMID, vcpu.root());
            vcpu.worker().set_memslot(memslot(BYTES)).unwrap();
            let mut expected = [vec![0; PAGES as usize], Vec::new()];
            for stamp in 1..60 {
                let page = rng.u64(..PAGES);
                let hpa = touch::<C>(&machine, &mut vcpu, (0, page), Access::Write);
                content.write(content.number(hpa), stamp);
                expected[0][page as usize] = stamp;
            }
            let before = shared.free();
            let child = parent.backing().fork(vcpu.worker()).unwrap();
            expected[1] = expected[0].clone();
            let (pages, both) = parent.backing().pages();
            assert_eq!((shared.free(), child.pages(), both), (before, (pages, pages), pages));

            let child = new::<C>(&machine, child, Vmid(9));
            let mut other = Vcpu::new(&child, 0).unwrap();
            machine.cpu(1).load(Vmid(9), other.root());
            other.worker().set_memslot(memslot(BYTES)).unwrap();
            for stamp in 100..300 {
                let (page, whose) = (rng.u64(..PAGES), rng.usize(..2));
                let access = if rng.bool() { Access::Write } else { Access::Read };
                let hpa = match whose {
                    0 => touch::<C>(&machine, &mut vcpu, (0, page), access),
                    _ => touch::<C>(&machine, &mut other, (1, page), access),
                };
                let frame = content.number(hpa);
                match access {
                    Access::Write => {
                        content.write(frame, stamp);
                        expected[whose][page as usize] = stamp;
                    }
                    _ => {
                        let known = expected[whose][page as usize];
                        assert_eq!(content.read(frame), known, "seed {seed}");
                    }
                }
            }
            assert_eq!(all(parent.backing(), &content), expected[0], "the parent, seed {seed}");
            assert_eq!(all(child.backing(), &content), expected[1], "the child, seed {seed}");
            let (of_parent, of_child) = (parent.backing().pages().0, child.backing().pages().0);
            let copied = parent.backing().copied() + child.backing().copied();
            assert!(copied > 0 && copied <= pages, "each pair of pages is parted once");
            // Own pages have one frame each; a shared page has one frame in both guests.
            let mut frames: Vec<_> = (0..PAGES)
                .map(|page| Hva(HOST + page * K4))
                .flat_map(|at| [parent.backing().frame(at), child.backing().frame(at)])
                .flatten()
                .collect();
            frames.sort_unstable();
            frames.dedup();
            assert_eq!(frames.len() as u32 + shared.free(), 2 * PAGES as u32);
            assert!(frames.len() as u64 <= of_parent + of_child);
            drop((vcpu, other));
            let found: Vec<_> = machine.finish().iter().map(ToString::to_string).collect();
            assert_eq!(found, [""; 0], "seed {seed}");
            drop(child);
            drop(parent);
            assert_eq!(shared.free(), 2 * PAGES as u32, "all frames came back");
        }
    }

    /// CPUs write at each step of the fork that the machine sees: writes after the fork are not in
    /// the child.
    fn no_write_of_the_parents_gets_into_the_child<C: Case>() {
        let content = Content::new::<C>();
        let shared = SharedFrames::new(content.clone(), PageSize::SIZE_4K, 2 * PAGES as u32);
        let machine = C::machine(2);
        give_all::<C>(&machine);
        let parent = Cow::new(&shared, host_range(HOST, BYTES)).unwrap();
        let parent = new::<C>(&machine, parent, VMID);
        let mut vcpu = Vcpu::new(&parent, 0).unwrap();
        machine.cpu(0).load(VMID, vcpu.root());
        machine.cpu(1).load(VMID, vcpu.root());
        vcpu.worker().set_memslot(memslot(BYTES)).unwrap();
        for page in 0..8 {
            touch::<C>(&machine, &mut vcpu, (0, page), Access::Write);
            _ = machine.cpu(1).write(BASE + page * K4);
        }
        let (frames, stamp) = (content.clone(), Arc::new(Mutex::new(0)));
        let stamps = stamp.clone();
        machine.meanwhile(move |machine, _| {
            for page in 0..8 {
                if let Ok(hpa) = machine.cpu(1).write(BASE + page * K4) {
                    let mut stamp = stamps.lock().unwrap();
                    *stamp += 1;
                    frames.write(frames.number(hpa), *stamp);
                }
            }
        });
        let child = parent.backing().fork(vcpu.worker()).unwrap();
        let at_fork = all(&child, &content);
        assert_eq!(at_fork, all(parent.backing(), &content));
        for page in 0..8 {
            touch::<C>(&machine, &mut vcpu, (0, page), Access::Write);
        }
        machine.undisturbed();
        assert_eq!(all(&child, &content), at_fork);
        assert_eq!(parent.backing().copied(), 8);
        drop(vcpu);
        assert!(machine.finish().is_empty());
    }
}

/// The write that needs a frame waits for one, and so does the next; mapped pages stay.
#[test]
fn a_write_that_lacks_a_frame_continues_once_one_is_freed() {
    let content = Content::new::<Intel>();
    let shared = SharedFrames::new(content.clone(), PageSize::SIZE_4K, 4);
    let machine = Intel::machine(1);
    give_all::<Intel>(&machine);
    let parent = Cow::new(&shared, host_range(HOST, BYTES)).unwrap();
    let parent = new::<Intel>(&machine, parent, VMID);
    let mut vcpu = Vcpu::new(&parent, 0).unwrap();
    machine.cpu(0).load(VMID, vcpu.root());
    vcpu.worker().set_memslot(memslot(BYTES)).unwrap();
    for page in 0..3 {
        let hpa = touch::<Intel>(&machine, &mut vcpu, (0, page), Access::Write);
        content.write(content.number(hpa), 10 + page);
    }
    let forks: [_; 2] = [(); 2].map(|()| parent.backing().fork(vcpu.worker()).unwrap());
    // This takes the last frame.
    touch::<Intel>(&machine, &mut vcpu, (0, 0), Access::Write);
    assert_eq!(shared.free(), 0);
    let waits = |vcpu: &mut ForkedVcpu<'_, Intel>, page| match vcpu
        .fault(Gpa(BASE + page * K4), Access::Write)
    {
        Outcome::Retry(Retry::Absent(Some(arrival))) => arrival,
        outcome => panic!("{outcome:?}"),
    };
    let copied = waits(&mut vcpu, 1);
    let fresh = waits(&mut vcpu, 9);
    assert_eq!(waits(&mut vcpu, 1), copied);
    // No content is lost, and it can be read.
    for page in 1..3 {
        let hpa = touch::<Intel>(&machine, &mut vcpu, (0, page), Access::Read);
        assert_eq!(content.read(content.number(hpa)), 10 + page);
    }
    assert_eq!((parent.backing().pages(), parent.backing().copied()), ((3, 2), 1));
    assert_eq!(vcpu.worker().prefault(range(BASE + K4, K4), Access::Write, || false).absent, K4);

    let told = || content.freed.load(Ordering::Relaxed);
    let [one, other] = forks;
    assert_eq!(told(), 0);
    drop(one);
    let (all, before) = (host_range(HOST, BYTES), told());
    assert!(before > 0, "of two forks one shares on: no frame is free, and it may be so");
    assert_eq!(parent.arrived(all), 1);
    assert_eq!(waits(&mut vcpu, 9), fresh, "it asks once more, and waits again");
    drop(other);
    assert!(told() > before);
    assert_eq!(parent.arrived(all), 1);
    assert!(vcpu.is_ready(&fresh) && vcpu.ready().is_some());
    for page in [1, 9] {
        let hpa = touch::<Intel>(&machine, &mut vcpu, (0, page), Access::Write);
        let was = if page == 1 { 11 } else { 0 };
        assert_eq!(content.read(content.number(hpa)), was);
    }
    assert_eq!((vcpu.waiting().count(), parent.backing().copied()), (0, 1), "not shared any more");
    let quiet = told();
    drop(vcpu);
    assert!(machine.finish().is_empty());
    drop(parent);
    assert_eq!((told(), shared.free()), (quiet, 4), "nobody asked in vain");
}

/// Guest and fork copy their last common page at the same time, and there is one frame for it.
#[test]
fn the_second_of_two_copiers_keeps_the_page_without_frames() {
    let content = Content::new::<Intel>();
    let shared = SharedFrames::new(content.clone(), PageSize::SIZE_4K, 2);
    let machine = Intel::machine(1);
    let parent = Cow::new(&shared, host_range(HOST, BYTES)).unwrap();
    let parent = new::<Intel>(&machine, parent, VMID);
    let mut worker = Worker::new(&parent).unwrap();
    let first = parent.backing().page(Hva(HOST), Access::Write).unwrap().hpa;
    content.write(content.number(first), 5);
    let child = parent.backing().fork(&mut worker).unwrap();
    let ((copies, copying), (go, goes_on)) = (mpsc::channel(), mpsc::channel());
    *content.copying.lock().unwrap() = Some(Box::new(move || {
        copies.send(()).unwrap();
        goes_on.recv().unwrap();
    }));
    std::thread::scope(|threads| {
        let child = &child;
        let copy = threads.spawn(move || child.page(Hva(HOST), Access::Write).unwrap().hpa);
        copying.recv().unwrap();
        let second = parent.backing().page(Hva(HOST), Access::Write);
        let told = content.freed.load(Ordering::Relaxed);
        go.send(()).unwrap();
        assert_eq!((second, told), (Err(NoPage::Absent), 0));
        assert_ne!(copy.join().unwrap(), first);
    });
    assert_eq!(content.freed.load(Ordering::Relaxed), 1, "the page is shared no more");
    let own = parent.backing().page(Hva(HOST), Access::Write).unwrap();
    assert_eq!((own.hpa, own.write, parent.backing().copied()), (first, true, 0));
    assert_eq!(child.frame(Hva(HOST)).map(|frame| content.read(frame)), Some(5));
}

#[test]
fn a_guest_whose_vcpus_have_tables_of_their_own_is_not_forked() {
    let shared = SharedFrames::new(Content::new::<ArmUncached>(), PageSize::SIZE_4K, 8);
    let machine = ArmUncached::machine(1);
    let memory = Cow::new(&shared, host_range(HOST, BYTES)).unwrap();
    let guest = new::<ArmUncached>(&machine, memory, VMID);
    let mut worker = Worker::new(&guest).unwrap();
    assert_eq!(guest.backing().fork(&mut worker).map(drop), Err(ForkError::Views));
    let page = PageSize::SIZE_4K;
    let unaligned = Cow::new(&shared, host_range(HOST + 1, K4)).map(drop);
    assert_eq!(unaligned, Err(ForkError::Unaligned { page }));
}

#[test]
fn what_devices_may_write_is_not_forked() {
    for devices in [false, true] {
        let content = Content::new::<Intel>();
        let shared = SharedFrames::new(content, PageSize::SIZE_4K, 2 * PAGES as u32);
        let machine = Intel::machine(1);
        give_all::<Intel>(&machine);
        let memory = Cow::new(&shared, host_range(HOST, BYTES)).unwrap();
        let config = Config { devices, ..config() };
        let parent = Guest::new(Intel::format(), VMID, BITS, &machine, memory, config).unwrap();
        let mut worker = Worker::new(&parent).unwrap();
        worker.set_memslot(memslot(BYTES)).unwrap();
        let pinned = worker.pin(range(BASE, K4)).unwrap();
        assert_eq!(parent.backing().fork(&mut worker).map(drop), Err(ForkError::Devices));
        drop(pinned);
        assert_eq!(parent.backing().fork(&mut worker).is_ok(), !devices);
    }
}

#[test]
fn pages_that_another_thread_pins_during_a_fork_are_not_forked() {
    let content = Content::new::<Intel>();
    let shared = SharedFrames::new(content, PageSize::SIZE_4K, 2 * PAGES as u32);
    let machine = Intel::machine(1);
    give_all::<Intel>(&machine);
    let memory = Cow::new(&shared, host_range(HOST, BYTES)).unwrap();
    let parent = new::<Intel>(&machine, memory, VMID);
    let mut vcpu = Vcpu::new(&parent, 0).unwrap();
    machine.cpu(0).load(VMID, vcpu.root());
    vcpu.worker().set_memslot(memslot(BYTES)).unwrap();
    touch::<Intel>(&machine, &mut vcpu, (0, 0), Access::Write);
    let mut pins = Worker::new(&parent).unwrap();
    let looks = Worker::new(&parent).unwrap();
    let page = range(BASE, K4);
    let ((begin, begun), (see, seen)) = (mpsc::channel(), mpsc::channel());
    let mut once = true;
    machine.meanwhile(move |_, _| {
        if std::mem::take(&mut once) {
            begin.send(()).unwrap();
            seen.recv().unwrap();
        }
    });
    std::thread::scope(|threads| {
        let (start, started) = mpsc::channel();
        let pinning = threads.spawn(move || {
            started.recv().unwrap();
            // The pin exists at once; the call returns when the fork has left the tables.
            pins.pin(page).unwrap()
        });
        threads.spawn(move || {
            begun.recv().unwrap();
            start.send(()).unwrap();
            while !looks.is_pinned(page) {
                std::thread::yield_now();
            }
            see.send(()).unwrap();
        });
        let forked = parent.backing().fork(vcpu.worker()).map(drop);
        assert_eq!(forked, Err(ForkError::Devices));
        drop(pinning.join().unwrap());
    });
    machine.undisturbed();
    touch::<Intel>(&machine, &mut vcpu, (0, 0), Access::Write);
    assert_eq!(parent.backing().pages(), (1, 0), "nothing is shared");
    assert!(parent.backing().fork(vcpu.worker()).is_ok());
    drop(vcpu);
    assert!(machine.finish().is_empty());
}
