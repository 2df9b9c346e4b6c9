//! Times of the engine's operations, beside those of the machine that limit them. They are
//! printed; nothing is claimed.

use super::cases::{GuardOf, MEMORY, range, with_tables};
use super::cpu::{self, Does, Tree, VCPUS, Vcpu};
use super::machine::{Memory, Serial};
use super::platform::Machine;
use core::arch::asm;
use core::fmt::Write;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use slat::{Access, AgeBitmaps, AgeOptions, Attributes, Hpa, PageSize, TableCache, UnmapEntry};

/// The best of so many is printed.
const ROUNDS: usize = 16;
/// A table's worth.
const PAGES: u64 = 512;
const AT: u64 = 1 << 30;
const BLOCK: u64 = AT + (4 << 20);

static STORES: Memory<4096> = Memory::new();

/// Reads the time-stamp counter between the instructions before and after.
fn now() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: reads a counter.
    unsafe { asm!("mfence", "lfence", "rdtsc", "lfence", out("eax") low, out("edx") high) };
    u64::from(high) << 32 | u64::from(low)
}

/// A name, how many units the work has, and the fewest ticks that it took.
struct Best(&'static str, u64, u64);

impl Best {
    fn time<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let begin = now();
        let result = work();
        self.2 = self.2.min(now() - begin);
        result
    }

    fn print(&self) {
        let Self(name, units, ticks) = self;
        let tenths = ticks * 10 / units;
        let _ = writeln!(Serial, "time: {name}: {}.{} ticks", tenths / 10, tenths % 10);
    }
}

/// Times all.
pub fn run() {
    let Some(format) = cpu::format(false) else { return };
    with_tables(format, |_, tables, mut guard, mut cache| {
        let (low, at) = (range(0, 0x10_000), Hpa(MEMORY.hpa()));
        guard.map(low, at, Attributes::RAM, PageSize::SIZE_4K, &mut cache).expect("frames");
        cpu::prepare(&MEMORY);
        VCPUS[0].create(&tables.guest_root());
        time(&VCPUS[0], guard, cache);
    });
}

fn time<'p>(vcpu: &Vcpu, mut guard: GuardOf<'_, 'p>, mut cache: TableCache<'p, Tree, Machine>) {
    let at = Hpa(MEMORY.hpa());
    let never = u64::MAX;
    let [mut store, mut exchange, mut entry, mut flushed] = [
        Best("limit: a store of an entry", PAGES, never),
        Best("limit: a locked exchange of an entry", PAGES, never),
        Best("limit: an entry of the guest, a read, an exit", 1, never),
        Best("limit: the same with an invalidation", 1, never),
    ];
    let [mut map, mut protect, mut relax, mut clean] = [
        Best("map, a page of 512", PAGES, never),
        Best("write_protect, a page of 512", PAGES, never),
        Best("relax for a write, one page", 1, never),
        Best("clean, a page of 512", PAGES, never),
    ];
    let [mut age, mut unmap, mut split, mut collapse] = [
        Best("age, a page of 512", PAGES, never),
        Best("unmap, a page of 512", PAGES, never),
        Best("split of a block of 2m, a page", PAGES, never),
        Best("collapse to a block of 2m, a page", PAGES, never),
    ];
    let words = STORES.hpa();
    let word = |n: u64| {
        // SAFETY: an aligned word of the page, which nothing else uses.
        unsafe { &*((words + 8 * n) as *const AtomicU64) }
    };
    let (pages, block) = (range(AT, PAGES * 4096), range(BLOCK, 2 << 20));
    guard
        .map(block, Hpa(at.0 + (2 << 20)), Attributes::RAM, PageSize::SIZE_2M, &mut cache)
        .expect("frames");
    for _ in 0..ROUNDS {
        store.time(|| (0..PAGES).for_each(|n| word(n).store(n, Relaxed)));
        exchange.time(|| {
            for n in 0..PAGES {
                let _ = word(n).compare_exchange(n, n + 1, SeqCst, SeqCst);
            }
        });
        entry.time(|| vcpu.run(Does::Read(0x8000), false));
        flushed.time(|| vcpu.run(Does::Read(0x8000), true));
        cache.fill(8).expect("frames");
        // All of them map the guest's first memory, over and over; no guest uses them.
        map.time(|| guard.map(pages, at, Attributes::RAM, PageSize::SIZE_4K, &mut cache))
            .expect("frames");
        clean.time(|| guard.clean(pages)).expect("mapped");
        let mut young = [0; 8];
        let mut unanswered = [0; 8];
        let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
        age.time(|| guard.age(pages, &mut ages, AgeOptions::LEAVES)).expect("mapped");
        protect.time(|| guard.write_protect(pages)).expect("mapped");
        relax.time(|| guard.relax(range(AT, 4096), Access::Write)).expect("mapped").flush_local();
        let mut places = [UnmapEntry::EMPTY; 512];
        let mut batch = guard.unmap_batch(&mut places);
        unmap.time(|| guard.unmap(pages, &mut batch)).expect("room");
        batch.complete().for_each(drop);
        split.time(|| guard.split(block, PageSize::SIZE_4K, &mut cache)).expect("frames");
        guard.invalidate();
        collapse.time(|| guard.collapse(block, PageSize::SIZE_2M)).expect("uniform");
        guard.invalidate();
    }
    cpu::off();
    let limits = [store, exchange, entry, flushed];
    let operations = [map, protect, relax, clean, age, unmap, split, collapse];
    limits.iter().chain(&operations).for_each(Best::print);
}
