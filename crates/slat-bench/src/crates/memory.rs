//! Memory for tables, lent by the caller.

use std::cell::RefCell;
use std::mem;
use std::ptr::{self, NonNull};

/// Bytes of a frame.
pub(crate) const FRAME: usize = 4096;

/// Host addresses, including those of tables, are below 1 << this, the smallest limit of the
/// formats.
pub(crate) const HOST_BITS: u32 = 48;

/// Frames of 4 KiB, whose physical address is their virtual one.
///
/// Frames that were never used are handed out in ascending order; frames that were given back are
/// handed out last in, first out, from a list inside the frames. Nothing is zeroed here, because
/// most of the crates do that themselves, and a second pass would be timed.
#[derive(Debug)]
pub struct Memory {
    next: usize,
    end: usize,
    /// The frame given back last, whose first word is the address of the one before; 0 for none.
    free: usize,
    free_count: usize,
}

impl Memory {
    const NONE: Self = Self { next: 0, end: 0, free: 0, free_count: 0 };

    /// Takes `bytes` at `start` as frames, with any content.
    ///
    /// # Safety
    /// Until this and the tables made of it are dropped, the bytes stay allocated, readable and
    /// writable, and nothing else uses them.
    ///
    /// # Errors
    /// If the memory is not whole frames, or reaches beyond 1 << 48.
    pub unsafe fn new(start: NonNull<u8>, bytes: usize) -> Result<Self, String> {
        let next = start.as_ptr().expose_provenance();
        if !next.is_multiple_of(FRAME) || !bytes.is_multiple_of(FRAME) {
            return Err(format!("{bytes:#x} bytes at {next:#x} are not whole frames of 4 KiB"));
        }
        let end = next + bytes;
        if end > 1 << HOST_BITS {
            return Err(format!("table memory ends at {end:#x}, beyond {HOST_BITS} bits"));
        }
        Ok(Self { next, end, free: 0, free_count: 0 })
    }

    /// Takes a frame with any content, if one is left.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<usize> {
        if self.free != 0 {
            let frame = self.free;
            // SAFETY: a frame on the list is one of this memory; `give` has written its first word,
            // and nothing has used it since.
            self.free = unsafe { at(frame).cast::<usize>().read() };
            self.free_count -= 1;
            return Some(frame);
        }
        (self.next < self.end).then(|| {
            let frame = self.next;
            self.next += FRAME;
            frame
        })
    }

    /// Takes a frame back.
    ///
    /// # Safety
    /// The frame came from `take` of this memory, was not given back since, and is not used again.
    #[inline]
    pub(crate) unsafe fn give(&mut self, frame: usize) {
        // SAFETY: a frame of this memory is writable and aligned, and nothing else uses it now.
        unsafe { at(frame).cast::<usize>().write(self.free) };
        self.free = frame;
        self.free_count += 1;
    }

    /// Returns the number of frames that are left.
    pub(crate) fn left(&self) -> usize {
        (self.end - self.next) / FRAME + self.free_count
    }

    /// Does `work` while [`Lent`] hands out this memory on this thread.
    #[inline]
    pub(crate) fn lend<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let _return = Return::swapped(self);
        work()
    }
}

/// Returns a pointer to a frame: addresses are virtual ones, of memory whose provenance was
/// exposed.
#[inline]
pub(crate) fn at(frame: usize) -> *mut u8 {
    ptr::with_exposed_provenance_mut(frame)
}

thread_local! {
    static LENT: RefCell<Memory> = const { RefCell::new(Memory::NONE) };
}

/// The memory that is lent to an operation on this thread, for crates whose allocator has no state.
#[derive(Clone, Copy)]
pub(crate) struct Lent;

impl Lent {
    /// As [`Memory::take`].
    pub(crate) fn take() -> Option<usize> {
        LENT.with_borrow_mut(Memory::take)
    }

    /// As [`Memory::give`].
    ///
    /// # Safety
    /// As for [`Memory::give`] of the memory that is lent.
    pub(crate) unsafe fn give(frame: usize) {
        // SAFETY: as the caller promises.
        LENT.with_borrow_mut(|memory| unsafe { memory.give(frame) });
    }
}

/// Takes lent memory back, even if the work panics.
struct Return<'a>(&'a mut Memory);

impl<'a> Return<'a> {
    fn swapped(memory: &'a mut Memory) -> Self {
        LENT.with_borrow_mut(|lent| mem::swap(lent, memory));
        Self(memory)
    }
}

impl Drop for Return<'_> {
    fn drop(&mut self) {
        LENT.with_borrow_mut(|lent| mem::swap(lent, self.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crates::tests::Pages;

    #[test]
    fn frames_ascend_and_come_back_last_in_first_out() {
        let pages = Pages::new(3);
        let mut memory = pages.memory();
        let first = memory.take().unwrap();
        let second = memory.take().unwrap();
        assert_eq!(second, first + FRAME);
        assert_eq!(memory.left(), 1);
        for frame in [first, second] {
            // SAFETY: each is from `take`, given back once and not used again.
            unsafe { memory.give(frame) };
        }
        assert_eq!(memory.left(), 3);
        assert_eq!(memory.take(), Some(second));
        assert_eq!(memory.take(), Some(first));
        assert_eq!(memory.take(), Some(second + FRAME));
        assert_eq!(memory.take(), None);
    }

    #[test]
    fn memory_that_is_not_whole_frames_is_refused() {
        let start = NonNull::without_provenance(8usize.try_into().unwrap());
        // SAFETY: nothing is taken of it.
        let error = unsafe { Memory::new(start, FRAME) }.unwrap_err();
        assert_eq!(error, "0x1000 bytes at 0x8 are not whole frames of 4 KiB");
    }

    #[test]
    fn what_is_lent_comes_back_even_from_a_panic() {
        let pages = Pages::new(2);
        let mut memory = pages.memory();
        let lent = memory.lend(Lent::take);
        assert!(lent.is_some());
        assert_eq!(memory.left(), 1);
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            memory.lend(|| {
                Lent::take().unwrap();
                std::panic::resume_unwind(Box::new(()));
            })
        }));
        assert!(panic.is_err());
        assert_eq!(memory.left(), 0);
        assert_eq!(Lent::take(), None);
    }
}
