//! The job `touch`: reads memory page after page, which is a working set of a known size.

use crate::Verdict;
use crate::control::{Control, Event, LOOK_EVERY};
use crate::memory::Memory;

/// Runs the job until the hypervisor stops it. It declares the number of pages of the set.
///
/// # Errors
/// Returns an error if the memory cannot be mapped.
pub fn run(mib: usize, control: &Control) -> anyhow::Result<Verdict> {
    let mut memory = Memory::new(mib)?;
    for page in 0..memory.pages() {
        memory.store(page, page as u64 + 1);
    }
    control.declare(memory.pages() as u32);
    control.tell(Event::Started);
    let until = control.until(None);
    let read = read(&memory, || control.size(), || until.over());
    Ok(match read {
        Ok(read) => {
            println!("work: touch: {} pages, {read} reads right", memory.pages());
            Verdict::Right
        }
        Err((page, held)) => {
            println!("work: touch: page {page} holds {held:#x}, not {:#x}", page + 1);
            Verdict::Wrong
        }
    })
}

/// Reads pages in turn until `over` returns true. Returns the number of reads, or the page that was
/// wrong and its content.
fn read(
    memory: &Memory,
    size: impl Fn() -> Option<usize>,
    mut over: impl FnMut() -> bool,
) -> Result<usize, (usize, u64)> {
    let (mut pages, mut page) = (memory.pages(), 0);
    for read in 1.. {
        let held = memory.load(page);
        if held != page as u64 + 1 {
            return Err((page, held));
        }
        if read % LOOK_EVERY == 0 {
            if over() {
                return Ok(read);
            }
            pages = size().map_or(memory.pages(), |size| size.min(memory.pages()));
        }
        page = if page + 1 < pages { page + 1 } else { 0 };
    }
    unreachable!("there are more numbers than reads")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_pages_of_a_smaller_set_are_read() {
        let mut memory = Memory::new(8).unwrap();
        for page in 0..100 {
            memory.store(page, page as u64 + 1);
        }
        // All other pages are wrong; only a set of all pages reads them.
        let wrong = read(&memory, || None, || false);
        assert_eq!(wrong, Err((100, 0)));
        for page in 100..LOOK_EVERY {
            memory.store(page, page as u64 + 1);
        }
        let mut looks = 0;
        let right = read(
            &memory,
            || Some(100),
            || {
                looks += 1;
                looks == 3
            },
        );
        assert_eq!(right, Ok(3 * LOOK_EVERY));
    }
}
