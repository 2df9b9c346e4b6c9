//! Guests on a host, memory and swap that first call a function, which may count, block or unwind.

use crate::fixture::*;
use slat::format::ept::Ept1G;
use slat::{Hpa, PageSize, Platform, Vmid};
use slat_guest::*;
use slat_reclaim::*;
use slat_sim::Ept;
use slat_sim::fast::FastMachine;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// A callback of reclaim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    RamRead,
    RamWrite,
    SwapWrite,
    SwapRead,
    SwapForget,
    Wait,
}

/// What unwinds out of a callback.
pub struct Unwound;

pub type Hook<'k> = &'k (dyn Fn(Call) + Sync);

pub struct HookWrapper<'k, T> {
    pub inner: T,
    hook: Hook<'k>,
}

impl Ram for HookWrapper<'_, Mem<'_, Ept>> {
    fn read(&self, hpa: Hpa, page: &mut [u8]) {
        (self.hook)(Call::RamRead);
        self.inner.read(hpa, page);
    }

    fn write(&self, hpa: Hpa, page: &[u8]) {
        (self.hook)(Call::RamWrite);
        self.inner.write(hpa, page);
    }
}

impl Swap for HookWrapper<'_, Flaky> {
    fn slots(&self) -> u32 {
        self.inner.slots()
    }

    fn page(&self) -> u64 {
        self.inner.page()
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), SwapError> {
        (self.hook)(Call::SwapWrite);
        self.inner.write(slot, page)
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), SwapError> {
        (self.hook)(Call::SwapRead);
        self.inner.read(slot, page)
    }

    fn forget(&self, slots: std::ops::Range<u32>) -> Result<(), SwapError> {
        (self.hook)(Call::SwapForget);
        self.inner.forget(slots)
    }
}

// SAFETY: the machine keeps the contract.
unsafe impl Platform for HookWrapper<'_, &FastMachine<Ept>> {
    slat_sim::forward!(
        inner: allocate free entries publish invalidate break_before_make readers maintain
    );
}

impl Host for HookWrapper<'_, &FastMachine<Ept>> {
    fn now(&self) -> u64 {
        Host::now(self.inner)
    }

    fn wait(&self) {
        (self.hook)(Call::Wait);
        self.inner.wait();
    }
}

pub type ThePool<'h> = Pool<HookWrapper<'h, Mem<'h, Ept>>, &'h HookWrapper<'h, Flaky>>;
pub type Memory<'h> = PagedMemory<'h, HookWrapper<'h, Mem<'h, Ept>>, &'h HookWrapper<'h, Flaky>>;
pub type Thread<'w, 'h> = Worker<'w, Ept1G, HookWrapper<'h, &'h FastMachine<Ept>>, &'h Memory<'h>>;

/// Makes guests of these numbers of pages on one pool, and two workers for each, and calls `work`.
/// Then checks that all accounts add up, and that nothing is left of the guests.
pub fn hooked(
    hook: Hook<'_>,
    frames: u64,
    slots: u32,
    guests: &[(u64, slat_reclaim::Config)],
    work: impl for<'w, 'h> FnOnce(&ThePool<'h>, &Flaky, Vec<[Thread<'w, 'h>; 2]>),
) {
    let (page, block) = (PageSize::SIZE_4K, PageSize::SIZE_2M);
    let bytes = |pages: u64| pages << page.shift();
    let machine = FastMachine::new(Ept::default(), 1, bytes(frames), 32 << 20).unwrap();
    let layout = Layout { base: machine.memory_base(), bytes: bytes(frames), page, block };
    let swap = HookWrapper { inner: Flaky::new(slots, page), hook };
    let host = HookWrapper { inner: &machine, hook };
    let pool = Pool::new(HookWrapper { inner: Mem(&machine), hook }, layout, &swap).unwrap();
    let new =
        |&(pages, config): &(u64, _)| PagedMemory::new(&pool, Hva(HOST), bytes(pages), config, 0);
    let memory: Vec<_> = guests.iter().map(|guest| new(guest).unwrap()).collect();
    let new = |(index, paged)| {
        let config = slat_guest::Config::new(1, block);
        Guest::new(ept(), Vmid(index as u16 + 1), 39, &host, paged, config).unwrap()
    };
    let those: Vec<_> = memory.iter().enumerate().map(new).collect();
    let threads = those.iter().zip(guests).map(|(guest, (pages, _))| {
        let mut workers = [(); 2].map(|()| Worker::new(guest).unwrap());
        workers[0].set_memslot(slot(bytes(*pages), false)).unwrap();
        workers
    });
    work(&pool, &swap.inner, threads.collect());
    check_accounts(&pool, &memory.iter().collect::<Vec<_>>());
    for guest in those {
        // SAFETY: no CPU has loaded its tables.
        unsafe { guest.destroy() };
    }
    let mut unwound = false;
    for paged in memory {
        // SAFETY: its guest is destroyed.
        let release = || unsafe { paged.release() };
        if let Err(reason) = catch_unwind(AssertUnwindSafe(release)) {
            // Another panic is no callback's.
            if !reason.is::<Unwound>() {
                resume_unwind(reason);
            }
            unwound = true;
        }
    }
    assert_eq!((pool.free(), pool.swapped()), (pool.total(), 0), "what ended guests had");
    assert!(unwound || swap.inner.holds() == 0, "old content");
}
