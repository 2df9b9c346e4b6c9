//! The job `crew`: all CPUs write stamps at once, each to pages of its own. The order of the stamps
//! shows whether a copy of the memory has the state of one moment.
//!
//! All threads have the same number of pages. A thread writes number `n` to its page `n`, modulo
//! their count, so its pages always hold its last numbers without a gap. Before each stamp, the
//! thread writes the last number of its neighbour next to it: a copy that has the stamp also has
//! that number of the neighbour. The program tells the hypervisor the frames of the pages, thread
//! after thread.

use crate::Verdict;
use crate::control::{Control, Event, LOOK_EVERY};
use crate::memory::Memory;
use crate::pages;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Index of the word in a page that is the stamp.
const STAMP: usize = 0;
/// Index of the word that is the number of the neighbour.
const SEEN: usize = 1;

/// A word of a page that was wrong.
#[derive(Debug, PartialEq, Eq)]
struct Mismatch {
    thread: usize,
    page: usize,
    word: usize,
    held: u64,
    expected: u64,
}

/// Returns a stamp. It is never 0, which lost memory holds.
const fn stamp(thread: usize, number: u64) -> u64 {
    (thread as u64 + 1) << 48 | number
}

/// State that all threads share.
struct Crew {
    memory: Memory,
    /// Number of pages of each thread.
    each: usize,
    /// The last number that each thread wrote.
    written: Vec<AtomicU64>,
}

impl Crew {
    /// Maps the memory, and stamps all pages with the first numbers of their threads.
    fn new(mib: usize, threads: usize) -> anyhow::Result<Self> {
        let memory = Memory::new(mib)?;
        pages::keep(&memory, pages::Size::Small);
        let each = memory.pages() / threads;
        for page in 0..each * threads {
            let number = (page % each) as u64;
            memory.word(page, STAMP).store(stamp(page / each, number), Ordering::Relaxed);
        }
        let written = (0..threads).map(|_| AtomicU64::new(each as u64 - 1)).collect();
        Ok(Self { memory, each, written })
    }

    /// Checks and writes pages as thread `thread` until `over` returns true, and then checks all of
    /// its pages. Returns the number of stamps that it wrote.
    fn write(&self, thread: usize, mut over: impl FnMut() -> bool) -> Result<u64, Mismatch> {
        let first = self.each as u64;
        let neighbour = &self.written[(thread + 1) % self.written.len()];
        // Expected values are kept outside the pages, so that a page that was lost or exchanged is
        // detected with any content.
        let mut seen = vec![0; self.each];
        let mut number = first;
        loop {
            let page = (number % first) as usize;
            self.check(thread, page, [stamp(thread, number - first), seen[page]])?;
            seen[page] = neighbour.load(Ordering::Acquire);
            let at = |word| self.memory.word(thread * self.each + page, word);
            at(SEEN).store(seen[page], Ordering::Relaxed);
            at(STAMP).store(stamp(thread, number), Ordering::Release);
            self.written[thread].store(number, Ordering::Release);
            number += 1;
            if number.is_multiple_of(LOOK_EVERY as u64) && over() {
                break;
            }
        }
        for last in number - first..number {
            let page = (last % first) as usize;
            self.check(thread, page, [stamp(thread, last), seen[page]])?;
        }
        Ok(number - first)
    }

    fn check(&self, thread: usize, page: usize, expected: [u64; 2]) -> Result<(), Mismatch> {
        for (word, expected) in [STAMP, SEEN].into_iter().zip(expected) {
            let held = self.memory.word(thread * self.each + page, word).load(Ordering::Relaxed);
            if held != expected {
                return Err(Mismatch { thread, page, word, held, expected });
            }
        }
        Ok(())
    }
}

/// Runs the job on all CPUs until the hypervisor stops it, or for some seconds. It declares the
/// number of pages of each thread.
///
/// # Errors
/// Returns an error if the memory cannot be mapped, or if its page frames cannot be found.
pub fn run(mib: usize, seconds: Option<u64>, control: &Control) -> anyhow::Result<Verdict> {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let crew = Crew::new(mib, threads)?;
    let frames = control.is_there().then(|| pages::frames(&crew.memory)).transpose()?;
    control.declare(crew.each as u32);
    for frame in frames.iter().flatten().take(crew.each * threads) {
        control.page(*frame);
    }
    control.tell(Event::Started);
    let until = control.until(seconds);
    let crew = &crew;
    let all: Vec<Result<u64, Mismatch>> = thread::scope(|scope| {
        let until = &until;
        let start = |thread| {
            scope.spawn(move || {
                pages::on_cpu(thread);
                crew.write(thread, || until.over())
            })
        };
        let running: Vec<_> = (0..threads).map(start).collect();
        running.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
    });
    if frames.is_some() && frames != Some(pages::frames(&crew.memory)?) {
        println!("work: crew: the kernel has moved pages");
    }
    let mut written = 0;
    for result in all {
        match result {
            Ok(stamps) => written += stamps,
            Err(wrong) => {
                println!("work: crew: {wrong:x?}");
                return Ok(Verdict::Wrong);
            }
        }
    }
    println!(
        "work: crew: {written} stamps of {threads} threads, {} pages right",
        crew.each * threads
    );
    Ok(Verdict::Right)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looks(times: u32) -> impl FnMut() -> bool {
        let mut looks = 0;
        move || {
            looks += 1;
            looks == times
        }
    }

    #[test]
    fn memory_that_nothing_else_writes_is_correct() {
        let crew = Crew::new(1, 3).unwrap();
        assert_eq!(crew.each, 85);
        thread::scope(|scope| {
            for thread in 0..3 {
                let crew = &crew;
                scope.spawn(move || assert!(crew.write(thread, looks(3)).unwrap() >= 2 * 1024));
            }
        });
    }

    #[test]
    fn a_stamp_that_was_lost_is_found_and_so_is_what_was_seen() {
        let crew = Crew::new(1, 2).unwrap();
        crew.write(1, looks(1)).unwrap();
        for (word, expected) in [(STAMP, stamp(0, 7)), (SEEN, 0)] {
            let place = crew.memory.word(7, word);
            let before = place.swap(77, Ordering::Relaxed);
            let lost = Mismatch { thread: 0, page: 7, word, held: 77, expected };
            assert_eq!(crew.write(0, looks(1)), Err(lost));
            // The thread has stamped the pages before it again.
            place.store(before, Ordering::Relaxed);
            for page in 0..7 {
                crew.memory.word(page, STAMP).store(stamp(0, page as u64), Ordering::Relaxed);
                crew.memory.word(page, SEEN).store(0, Ordering::Relaxed);
            }
        }
    }
}
