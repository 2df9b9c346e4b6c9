//! A guest that runs while its memory arrives. The machine detects an access to a page whose
//! content is not there yet.

use crate::fixture::*;
use crate::on_all;
use slat::{Access, Gpa, Hpa, PageSize};
use slat_guest::*;
use slat_sim::Machine;

type Late<'p, C> = Guest<'p, <C as Case>::F, Machine<<C as Case>::A>, PostCopy<Ram>>;

const BYTES: u64 = 2 * M2;
const PAGES: u64 = BYTES / K4;

/// Contiguous memory, of which the guest may access nothing yet.
fn memory<C: Case>(block: PageSize) -> (Ram, PostCopy<Ram>) {
    let ram = Ram::from(C::FIRST_HPA);
    ram.populate(HOST, BYTES, block);
    let (range, page) = (host_range(HOST, BYTES), PageSize::SIZE_4K);
    let late = PostCopy::new(ram.clone(), range, page, PageSize::SIZE_2M).unwrap();
    (ram, late)
}

fn new<'p, C: Case>(machine: &'p Machine<C::A>, late: PostCopy<Ram>) -> Late<'p, C> {
    Guest::new(C::format(), VMID, BITS, machine, late, config()).unwrap()
}

/// Makes a guest whose memory is late, and its first vCPU, which has loaded its tables.
macro_rules! with_late {
    ($C:ident, $machine:ident, $late:ident => $guest:ident, $vcpu:ident) => {
        let $guest = new::<$C>(&$machine, $late);
        let mut $vcpu = Vcpu::new(&$guest, 0).unwrap();
        $machine.cpu(0).load(VMID, $vcpu.root());
        $vcpu.worker().set_memslot(memslot(BYTES)).unwrap();
        let $late = $guest.backing();
    };
}

/// The content is fetched: the guest may access the pages.
fn land<C: Case>(machine: &Machine<C::A>, fetch: &Fetch<'_, Ram>, ram: &Ram) {
    let host = fetch.host();
    for at in (host.start.0..host.end().0).step_by(K4 as usize) {
        machine.give(Hpa(ram.get(at).unwrap().hpa), K4);
    }
}

/// Uses a page; returns `None` if it is not there.
fn touch<C: Case>(
    machine: &Machine<C::A>,
    vcpu: &mut Vcpu<'_, C::F, Machine<C::A>, PostCopy<Ram>>,
    page: u64,
) -> Result<Hpa, AsyncFault> {
    let gpa = BASE + page * K4;
    for _ in 0..16 {
        if let Ok(hpa) = machine.cpu(vcpu.id() as usize).write(gpa) {
            return Ok(hpa);
        }
        match vcpu.fault(Gpa(gpa), Access::Write) {
            Outcome::Retry(Retry::Absent(arrival)) => return Err(arrival.unwrap()),
            Outcome::Refused(reason) => panic!("{reason:?}"),
            _ => {}
        }
    }
    panic!("no progress at {gpa:#x}");
}

on_all! {
    /// Pages arrive in an order that faults and a random generator choose; the guest uses them all
    /// the time.
    fn no_leaf_reaches_beyond_what_is_there<C: Case>() {
        for seed in crate::seed::seeds(1) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let machine = C::machine(2).random(seed);
            let (ram, late) = memory::<C>(PageSize::SIZE_2M);
            with_late!(C, machine, late => guest, vcpu);
            let mut waits: Vec<AsyncFault> = Vec::new();
            while late.counts().missing != 0 {
                // Near the ends of blocks, most of the time.
                let page = match rng.u8(..8) {
                    0 => rng.u64(..PAGES),
                    _ => (rng.u64(..2) * 512 + rng.u64(..24)).saturating_sub(8),
                };
                match touch::<C>(&machine, &mut vcpu, page) {
                    Ok(hpa) => assert_eq!(hpa.0, ram.get(HOST + page * K4).unwrap().hpa),
                    Err(arrival) if waits.contains(&arrival) => {}
                    Err(arrival) => waits.push(arrival),
                }
                if rng.u8(..3) == 0 || waits.len() == 16 {
                    let fetch = late.next(rng.u64(1..64)).unwrap();
                    assert_eq!(fetch.asked(), !waits.is_empty(), "faults first, seed {seed}");
                    if rng.u8(..8) == 0 && waits.len() < 16 {
                        continue;
                    }
                    if !waits.is_empty() {
                        assert_eq!(fetch.host().start, waits.remove(0).host, "in their order");
                    }
                    land::<C>(&machine, &fetch, &ram);
                    fetch.arrived(vcpu.worker());
                    while vcpu.ready().is_some() {}
                }
            }
            assert!(waits.is_empty() && vcpu.waiting().count() == 0);
            let PostCopyCounts { asked, background, blocks, .. } = late.counts();
            assert_eq!((asked + background, blocks), (PAGES, BYTES / M2));
            assert_eq!(late.next(1).map(|fetch| fetch.host()), None);
            let stats = guest.stats();
            assert!(stats.late.count >= asked.min(1), "{asked}: {stats:?}");
            // Blocks again: all mapped memory was collapsed.
            let sizes = vcpu.worker().leaves_by_size();
            let small = sizes.iter().filter(|(size, _)| *size < PageSize::SIZE_2M);
            let pages: u64 = small.map(|it| it.1).sum();
            assert_eq!(pages, 0, "{sizes:?}");
            drop(vcpu);
            let found: Vec<_> = machine.finish().iter().map(ToString::to_string).collect();
            assert_eq!(found, [""; 0], "seed {seed}");
        }
    }

    fn a_fault_maps_as_much_as_is_there_around_it<C: Case>() {
        let machine = C::machine(2);
        let (ram, late) = memory::<C>(PageSize::SIZE_2M);
        with_late!(C, machine, late => guest, vcpu);
        // All of the first block except one page; then that page as well.
        let mut held = None;
        for _ in 0..8 {
            let fetch = late.next(64).unwrap();
            land::<C>(&machine, &fetch, &ram);
            match fetch.host().start.0 == HOST + 448 * K4 {
                true => held = Some(fetch),
                false => fetch.arrived(vcpu.worker()),
            }
        }
        assert_eq!(vcpu.fault(Gpa(BASE), Access::Read), Outcome::Mapped(PageSize::SIZE_4K));
        held.unwrap().arrived(vcpu.worker());
        assert_eq!(late.counts().blocks, 1, "put together, with what the guest had not touched");
        let leaf = vcpu.worker().translate(Gpa(BASE + 448 * K4)).unwrap().unwrap();
        assert_eq!(leaf.size, PageSize::SIZE_2M);
        // The second arrives whole before it is used: no page is mapped meanwhile.
        while let Some(fetch) = late.next(64) {
            land::<C>(&machine, &fetch, &ram);
            fetch.arrived(vcpu.worker());
        }
        let all = PostCopyCounts { background: PAGES, blocks: 1, ..Default::default() };
        assert_eq!(late.counts(), all);
        assert_eq!(vcpu.fault(Gpa(BASE + M2), Access::Read), Outcome::Mapped(PageSize::SIZE_2M));
        drop(vcpu);
        assert!(machine.finish().is_empty());
    }

    /// Pages that are given back are fetched again, first of all if a fault asked for them
    /// meanwhile.
    fn a_fetch_that_fails_loses_nothing<C: Case>() {
        let machine = C::machine(2);
        let (ram, late) = memory::<C>(PageSize::SIZE_4K);
        let guest = new::<C>(&machine, late);
        let mut vcpu = Vcpu::new(&guest, 0).unwrap();
        let mut other = Worker::new(&guest).unwrap();
        machine.cpu(0).load(VMID, vcpu.root());
        vcpu.worker().set_memslot(memslot(BYTES)).unwrap();
        let late = guest.backing();
        let background = late.next(8).unwrap();
        assert_eq!(background.host(), host_range(HOST, 8 * K4));
        let first = touch::<C>(&machine, &mut vcpu, 100).unwrap_err();
        let second = touch::<C>(&machine, &mut vcpu, 3).unwrap_err();
        let asked = late.next(8).unwrap();
        assert_eq!(asked.host().start, first.host);
        // A thread already fetches the other page, and gives it back.
        let next = late.next(8).unwrap();
        assert!(!next.asked());
        drop((background, asked, next));
        for arrival in [first, second] {
            let fetch = late.next(8).unwrap();
            assert!(fetch.asked());
            assert_eq!(fetch.host(), HvaRange { start: arrival.host, bytes: K4 });
            land::<C>(&machine, &fetch, &ram);
            fetch.arrived(&mut other);
            assert_eq!(vcpu.ready(), Some(arrival));
        }
        let counts = late.counts();
        assert_eq!((counts.asked, counts.missing), (2, PAGES - 2));
        drop(vcpu);
        assert!(machine.finish().is_empty());
    }

    /// A running guest goes back to a snapshot, page by page.
    fn what_is_lost_under_a_running_guest_is_fetched_again<C: Case>() {
        let machine = C::machine(2);
        let (ram, mut late) = memory::<C>(PageSize::SIZE_2M);
        late.have(host_range(HOST, BYTES));
        give_all::<C>(&machine);
        with_late!(C, machine, late => guest, vcpu);
        assert_eq!(late.counts().missing, 0);
        touch::<C>(&machine, &mut vcpu, 0).unwrap();
        touch::<C>(&machine, &mut vcpu, 512).unwrap();
        let lost = host_range(HOST + M2, M2);
        let taken = vcpu.worker().invalidate(lost, |_| {});
        late.lose(lost, &taken);
        machine.take_back(Hpa(ram.get(HOST + M2).unwrap().hpa), M2);
        drop(taken);
        assert_eq!(late.counts().missing, 512);
        touch::<C>(&machine, &mut vcpu, 0).unwrap();
        let arrival = touch::<C>(&machine, &mut vcpu, 700).unwrap_err();
        let fetch = late.next(1).unwrap();
        assert_eq!((fetch.asked(), fetch.host().start), (true, arrival.host));
        land::<C>(&machine, &fetch, &ram);
        fetch.arrived(vcpu.worker());
        touch::<C>(&machine, &mut vcpu, 700).unwrap();
        while let Some(fetch) = late.next(64) {
            land::<C>(&machine, &fetch, &ram);
            fetch.arrived(vcpu.worker());
        }
        assert_eq!((late.counts().missing, late.counts().blocks), (0, 1));
        drop(vcpu);
        assert!(machine.finish().is_empty());
    }
}

#[test]
fn memory_that_comes_late_begins_and_ends_at_pages() {
    let (page, block) = (PageSize::SIZE_4K, PageSize::SIZE_2M);
    let new = |start, bytes, block| {
        PostCopy::new(Ram::new(), host_range(start, bytes), page, block).map(drop)
    };
    let unaligned = Err(PostCopyError::Unaligned { page });
    assert_eq!(new(HOST + 1, K4, block), unaligned);
    assert_eq!(new(HOST, K4 + 1, block), unaligned);
    assert_eq!(new(u64::MAX - K4 + 1, 2 * K4, block), unaligned);
    assert_eq!(new(HOST, K4, PageSize::from_bytes(1 << 11).unwrap()), unaligned);
    assert_eq!(new(HOST + 511 * K4, 2 * K4, block), Ok(()));
    assert_eq!(new(HOST, 0, block), Ok(()));
}

#[test]
fn private_memory_is_the_inner_backings_and_never_late() {
    let (ram, late) = memory::<ArmDirty>(PageSize::SIZE_4K);
    ram.populate_private(0, K4, PageSize::SIZE_4K);
    assert_eq!(late.private_page(PrivateAt(0)), Ok(ram.private(0).unwrap()));
    assert_eq!(late.private_page(PrivateAt(K4)), Err(NoPage::Never));
}

#[test]
fn half_a_page_that_came_before_is_to_be_fetched() {
    let (_, mut late) = memory::<Intel>(PageSize::SIZE_2M);
    for (start, bytes, here) in [(0, K4 / 2, 0), (K4 / 2, K4, 0), (K4 / 2, 2 * K4, 1)] {
        let before = late.counts().missing;
        late.have(host_range(HOST + start, bytes));
        assert_eq!(before - late.counts().missing, here, "{bytes:#x} bytes from {start:#x} on");
    }
    late.have(host_range(HOST, BYTES));
    assert_eq!(late.counts().missing, 0);
}

/// The balloon takes a page that is late; the caller empties it, and the guest uses it again.
fn discard<C: Case>(
    machine: &Machine<C::A>,
    (guest, ram): (&Late<'_, C>, &Ram),
    vcpu: &mut Vcpu<'_, C::F, Machine<C::A>, PostCopy<Ram>>,
    page: u64,
) {
    let host = host_range(HOST + page * K4, K4);
    let taken = vcpu.worker().invalidate(host, |_| {});
    guest.backing().discard(host, &taken);
    machine.give(Hpa(ram.get(host.start.0).unwrap().hpa), K4);
    drop(taken);
    guest.arrived(host);
}

on_all! {
    fn a_page_discarded_before_its_fetch_is_not_fetched<C: Case>() {
        let machine = C::machine(2);
        let (ram, late) = memory::<C>(PageSize::SIZE_2M);
        with_late!(C, machine, late => guest, vcpu);
        let waits = touch::<C>(&machine, &mut vcpu, 3).unwrap_err();
        for page in [3, 4] {
            discard::<C>(&machine, (&guest, &ram), &mut vcpu, page);
        }
        assert!(vcpu.is_ready(&waits), "the vCPU that waits for it goes on");
        touch::<C>(&machine, &mut vcpu, 3).unwrap();
        touch::<C>(&machine, &mut vcpu, 4).unwrap();
        assert_eq!(late.counts().missing, PAGES - 2);
        while let Some(fetch) = late.next(64) {
            let host = fetch.host();
            assert!(host.end().0 <= HOST + 3 * K4 || host.start.0 >= HOST + 5 * K4, "{host:?}");
            land::<C>(&machine, &fetch, &ram);
            fetch.arrived(vcpu.worker());
        }
        assert_eq!(late.counts().missing, 0);
        drop(vcpu);
        assert!(machine.finish().is_empty());
    }

    fn a_fetch_finds_out_which_of_its_pages_were_discarded<C: Case>() {
        let machine = C::machine(2);
        let (ram, late) = memory::<C>(PageSize::SIZE_2M);
        with_late!(C, machine, late => guest, vcpu);
        let fetch = late.next(64).unwrap();
        discard::<C>(&machine, (&guest, &ram), &mut vcpu, 5);
        touch::<C>(&machine, &mut vcpu, 5).unwrap();
        let (mut parts, placed) = (Vec::new(), late.counts().missing);
        assert_eq!(fetch.place(|part| parts.push(part)), 63);
        assert_eq!(parts, [host_range(HOST, 5 * K4), host_range(HOST + 6 * K4, 58 * K4)]);
        land::<C>(&machine, &fetch, &ram);
        fetch.arrived(vcpu.worker());
        let counts = late.counts();
        assert_eq!((counts.missing, counts.background), (placed - 63, 63));
        drop(vcpu);
        assert!(machine.finish().is_empty());
    }

    /// The fetch is of what the page was before; a fault waits for it.
    fn what_is_lost_while_it_is_fetched_is_fetched_once_more<C: Case>() {
        let machine = C::machine(2);
        let (_, late) = memory::<C>(PageSize::SIZE_2M);
        with_late!(C, machine, late => guest, vcpu);
        let page = host_range(HOST + 7 * K4, K4);
        for then_given_back in [false, true] {
            touch::<C>(&machine, &mut vcpu, 7).unwrap_err();
            let old = late.next(0).unwrap();
            assert_eq!(old.host(), page);
            late.lose(page, &vcpu.worker().invalidate(page, |_| {}));
            assert!(late.next(0).is_none(), "no two fetches of one page");
            assert_eq!(old.place(|part| panic!("{part:?} is out of date")), 0);
            match then_given_back {
                true => drop(old),
                false => old.arrived(vcpu.worker()),
            }
            touch::<C>(&machine, &mut vcpu, 7).unwrap_err();
            let fetch = late.next(0).expect("a vCPU waits for it");
            assert_eq!((fetch.asked(), fetch.host()), (true, page));
            drop(fetch);
        }
        drop(vcpu);
        assert!(machine.finish().is_empty());
    }
}

#[test]
fn a_thread_that_discards_waits_until_no_fetch_places_the_page() {
    type C = Intel;
    let machine = C::machine(2);
    let (ram, late) = memory::<C>(PageSize::SIZE_2M);
    let guest = new::<C>(&machine, late);
    let mut vcpu = Vcpu::new(&guest, 0).unwrap();
    vcpu.worker().set_memslot(memslot(BYTES)).unwrap();
    let late = guest.backing();
    let fetch = late.next(64).unwrap();
    let mut worker = Worker::new(&guest).unwrap();
    let host = host_range(HOST, K4);
    let taken = worker.invalidate(host, |_| {});
    let placed = std::sync::atomic::AtomicBool::new(false);
    let order = std::sync::atomic::Ordering::SeqCst;
    let meet = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        let (waits, placed, taken) = (&meet, &placed, &taken);
        let discards = move || {
            waits.wait();
            late.discard(host, taken);
            assert!(placed.load(order), "the thread still writes the page");
        };
        let thread = scope.spawn(discards);
        fetch.place(|_| {
            waits.wait();
            // The other thread waits by now, or comes later.
            let before = ram.state().waits;
            while ram.state().waits == before {
                std::thread::yield_now();
            }
            placed.store(true, order);
        });
        thread.join().unwrap();
    });
    drop((fetch, taken));
}
