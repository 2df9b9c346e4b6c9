//! Reclaim allocates no memory that grows with what a guest does, beyond the allocations at the
//! start.
#![cfg(all(target_os = "linux", not(loom)))]

#[allow(dead_code, unused_imports, unused_macros, reason = "a part of it is for other tests")]
#[path = "overcommit/fixture.rs"]
mod fixture;

use fixture::*;
use slat::Access;
use slat_guest::Worker;
use slat_reclaim::*;
use slat_sim::Ept;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

struct Count;

static HEAP: AtomicI64 = AtomicI64::new(0);

// SAFETY: all calls go to the system's allocator, which keeps the contract, with the callers'
// arguments.
unsafe impl GlobalAlloc for Count {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HEAP.fetch_add(layout.size() as i64, Relaxed);
        // SAFETY: by the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HEAP.fetch_sub(layout.size() as i64, Relaxed);
        // SAFETY: by the same contract; `alloc` got the memory from the system's allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Count = Count;

/// Pages leave and come back before their turn, many times.
#[test]
fn a_balloon_filled_and_emptied_takes_no_host_memory() {
    let (idle, cycled) = (1024u64, 512u64);
    for policy in [Policy::Generations, Policy::TwoLists] {
        let mut setup = Setup::new(idle + cycled, idle + cycled);
        setup.reclaim.policy = policy;
        setup.run(ept(), Ept::default(), |bench| {
            let mut worker = Worker::new(bench.guest).unwrap();
            let mut pager = Pager::new(&mut worker);
            for page in 0..idle + cycled {
                pager.bring_in(bench.host(page), Access::Write).unwrap();
            }
            (0..6).for_each(|_| assert_eq!(pager.walk(), policy == Policy::Generations));
            let mut before = 0;
            for round in 0..210 {
                if round == 10 {
                    before = HEAP.load(Relaxed);
                }
                pager.discard(bench.hosts(idle, cycled));
                for page in idle..idle + cycled {
                    pager.bring_in(bench.host(page), Access::Write).unwrap();
                }
                pager.reclaim(1).unwrap();
            }
            // A hundred thousand pages came and went.
            let grown = HEAP.load(Relaxed) - before;
            assert!(grown < 16 << 10, "{policy:?}: {grown} bytes");
        });
    }
}
