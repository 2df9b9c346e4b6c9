//! A machine whose calls cost next to nothing: it takes table pages from one piece of memory, and
//! does no invalidation and no barrier.

use slat::{BreakBeforeMake, Frame, Hpa, Invalidation, Platform, Pte, ReaderSlot, Readers};
use slat_guest::{Backing, Host, Hva, NoPage, Page};
use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes of table memory.
const BYTES: usize = 8 << 20;

/// Hands out table pages in order and never takes one back, so that each run has the same
/// addresses.
#[derive(Debug)]
pub struct Machine {
    memory: NonNull<u8>,
    used: AtomicUsize,
    breaks: BreakBeforeMake,
    readers: Readers<[ReaderSlot; 4]>,
}

// SAFETY: an atomic counter hands out the memory in disjoint parts.
unsafe impl Sync for Machine {}

impl Machine {
    /// Returns a machine that exists until the program ends.
    pub fn leaked(breaks: BreakBeforeMake) -> &'static Self {
        let layout = Layout::from_size_align(BYTES, 1 << 16).expect("a power of two");
        // SAFETY: the layout's size is not 0.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) });
        Box::leak(Box::new(Self {
            memory: memory.unwrap_or_else(|| handle_alloc_error(layout)),
            used: AtomicUsize::new(0),
            breaks,
            readers: Readers::new([const { ReaderSlot::new() }; 4]),
        }))
    }
}

// SAFETY: `allocate` returns memory of the requested size, aligned to it (sizes are powers of two,
// and each begins at a multiple of its own), that has no other owner. Its address is the frame's,
// and it is never freed. No CPU loads these tables. `readers` is a field.
unsafe impl Platform for Machine {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let taken = self.used.fetch_update(Relaxed, Relaxed, |used| {
            let end = used.next_multiple_of(bytes) + bytes;
            (end <= BYTES).then_some(end)
        });
        let start = taken.ok()?.next_multiple_of(bytes);
        // SAFETY: inside the memory, by the check above.
        let address = unsafe { self.memory.add(start) };
        // SAFETY: memory of that size and alignment without another owner, which `ptes` reaches.
        unsafe { Frame::from_hpa(Hpa(address.as_ptr() as u64)) }
    }

    unsafe fn free(&self, _frame: Frame, _bytes: usize) {}

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        // SAFETY: the engine passes only frames, and none is at address 0.
        unsafe { NonNull::new_unchecked(table.0 as *mut Pte) }
    }

    fn publish(&self) {}

    fn invalidate(&self, _what: &Invalidation) {}

    fn break_before_make(&self) -> BreakBeforeMake {
        self.breaks
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }
}

impl Host for Machine {
    fn now(&self) -> u64 {
        0
    }
}

/// Memory in one piece, in blocks of 2 MiB.
#[derive(Debug)]
pub struct OnePiece;

impl Backing for OnePiece {
    fn page(&self, host: Hva, _access: slat::Access) -> Result<Page, NoPage> {
        Ok(Page {
            hpa: Hpa((1 << 36) + host.0),
            block: slat::PageSize::SIZE_2M,
            write: true,
            execute: true,
            memory: slat::Memory::Normal,
        })
    }
}
