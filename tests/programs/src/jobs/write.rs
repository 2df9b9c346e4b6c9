//! The job `write`: writes stamps to memory repeatedly, and checks each before it is overwritten.

use crate::Verdict;
use crate::control::{Control, Event, LOOK_EVERY};
use crate::memory::Memory;

/// A page that was wrong.
#[derive(Debug, PartialEq, Eq)]
struct Mismatch {
    page: usize,
    held: u64,
    expected: u64,
}

/// Memory, and the expected stamp of each page.
#[derive(Debug)]
struct StampedMemory {
    memory: Memory,
    /// Expected stamps. They are kept outside the memory, so that a page that was lost or exchanged
    /// is detected with any content.
    expected: Vec<u64>,
}

impl StampedMemory {
    /// Maps the memory, and stamps all pages as pass 1.
    fn new(mib: usize) -> anyhow::Result<Self> {
        let memory = Memory::new(mib)?;
        let expected = vec![0; memory.pages()];
        let mut stamped = Self { memory, expected };
        for page in 0..stamped.memory.pages() {
            stamped.write(page, 1);
        }
        Ok(stamped)
    }

    fn write(&mut self, page: usize, pass: u32) {
        // A stamp is never 0, which lost memory holds.
        let stamp = (page as u64) << 32 | u64::from(pass);
        self.expected[page] = stamp;
        self.memory.store(page, stamp);
    }

    fn check(&self, page: usize) -> Result<(), Mismatch> {
        let (held, expected) = (self.memory.load(page), self.expected[page]);
        if held == expected { Ok(()) } else { Err(Mismatch { page, held, expected }) }
    }

    /// Runs passes over all pages in random order until `over` returns true. Returns the number of
    /// complete passes.
    fn passes(&mut self, mut over: impl FnMut() -> bool) -> Result<u32, Mismatch> {
        let mut order: Vec<u32> = (0..self.memory.pages() as u32).collect();
        let mut written = 0_usize;
        for pass in 2..u32::MAX {
            fastrand::shuffle(&mut order);
            for page in &order {
                self.check(*page as usize)?;
                self.write(*page as usize, pass);
                written += 1;
                if written.is_multiple_of(LOOK_EVERY) && over() {
                    return Ok((written / order.len()) as u32);
                }
            }
        }
        Ok(u32::MAX - 2)
    }

    fn check_all(&self) -> Result<(), Mismatch> {
        (0..self.memory.pages()).try_for_each(|page| self.check(page))
    }
}

/// Runs the job until the hypervisor stops it, or for some seconds.
///
/// # Errors
/// Returns an error if the memory cannot be mapped.
pub fn run(mib: usize, seconds: Option<u64>, control: &Control) -> anyhow::Result<Verdict> {
    let mut stamped = StampedMemory::new(mib)?;
    control.tell(Event::Started);
    let until = control.until(seconds);
    let passes = stamped.passes(|| until.over());
    Ok(match passes.and_then(|passes| stamped.check_all().map(|()| passes)) {
        Ok(passes) => {
            println!("work: write: {passes} passes, {} pages right", stamped.memory.pages());
            Verdict::Right
        }
        Err(Mismatch { page, held, expected }) => {
            println!("work: write: page {page} holds {held:#x}, not {expected:#x}");
            Verdict::Wrong
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_nothing_else_writes_is_correct() {
        let mut stamped = StampedMemory::new(8).unwrap();
        let mut looks = 0;
        let passes = stamped.passes(|| {
            looks += 1;
            looks == 5
        });
        assert_eq!(passes, Ok(2), "5 × 1024 pages of 2048");
        assert_eq!(stamped.check_all(), Ok(()));
    }

    #[test]
    fn a_lost_page_is_found_by_the_next_pass_and_the_last_check() {
        let mut stamped = StampedMemory::new(1).unwrap();
        stamped.memory.store(7, 0);
        let lost = Mismatch { page: 7, held: 0, expected: 7 << 32 | 1 };
        assert_eq!(stamped.check_all().as_ref(), Err(&lost));
        assert_eq!(stamped.passes(|| false), Err(lost));
    }

    #[test]
    fn a_page_that_holds_its_own_older_stamp_is_found() {
        let mut stamped = StampedMemory::new(1).unwrap();
        let old = stamped.memory.load(0);
        stamped.write(0, 2);
        stamped.memory.store(0, old);
        assert_eq!(stamped.check_all(), Err(Mismatch { page: 0, held: 1, expected: 2 }));
    }
}
