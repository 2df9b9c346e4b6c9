//! The job `private`: pages are converted to private and back to shared while threads use them.
//! Each thread asks for conversions of its own pages; the hypervisor converts others by itself.
//!
//! A page has a content for each of the two kinds, and the guest reaches that of the page's present
//! kind. Private memory that was never written holds [`NEVER`].

use crate::Verdict;
use crate::control::{Control, Event};
use crate::memory::Memory;
use crate::pages;
use anyhow::{Context, ensure};
use std::sync::atomic::Ordering;
use std::thread;

/// Content of private memory that was never written.
pub const NEVER: u64 = 0x6e65_7665_7220_7365;

/// Results of a conversion, other than 0.
mod answer {
    /// The machine is busy; the program tries again.
    pub const BUSY: u32 = 1;
    /// The page must not be converted.
    pub const FIRM: u32 = 2;
    /// The page cannot be private.
    pub const NOT_PRIVATE: u32 = 3;
}

/// Page frames that cannot be converted, with the expected result: the device tree's and the
/// control page's.
const REFUSED: [(u32, u32); 2] = [(0x4_8000, answer::FIRM), (0xb000, answer::NOT_PRIVATE)];

/// One of this many pages is converted by a thread; the hypervisor converts the others.
const OWN: usize = 8;
/// Reads of pages that the hypervisor converts, for each conversion of a thread's own page.
const LOOKS: usize = 64;

/// The pages that a thread converts itself.
struct Own<'m> {
    memory: &'m Memory,
    pages: Vec<Page>,
}

/// A page that a thread converts.
struct Page {
    number: usize,
    frame: u32,
    private: bool,
    /// Its content while it is shared, and while it is private.
    holds: [u64; 2],
}

/// Reason why the job fails.
#[derive(Debug, PartialEq, Eq)]
enum Wrong {
    Content {
        page: usize,
        private: bool,
        held: u64,
        expected: u64,
    },
    /// The conversion of a page was refused.
    Refused {
        page: usize,
        answer: u32,
    },
}

/// Counts of what was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Done {
    conversions: u64,
    busy: u64,
    /// Reads of pages that the hypervisor converts, while they were shared, and while they were
    /// private.
    looks: [u64; 2],
}

impl Own<'_> {
    fn check(&self, at: usize) -> Result<(), Wrong> {
        let Page { number, private, ref holds, .. } = self.pages[at];
        let held = self.memory.word(number, 0).load(Ordering::Relaxed);
        let expected = holds[usize::from(private)];
        if held == expected {
            return Ok(());
        }
        Err(Wrong::Content { page: number, private, held, expected })
    }

    /// Converts a page to its other kind, and checks its content.
    fn turn(
        &mut self,
        at: usize,
        convert: &impl Fn(u32, bool) -> u32,
        done: &mut Done,
    ) -> Result<(), Wrong> {
        let page = &mut self.pages[at];
        loop {
            match convert(page.frame, !page.private) {
                0 => break,
                answer::BUSY => done.busy += 1,
                answer => return Err(Wrong::Refused { page: page.number, answer }),
            }
        }
        page.private = !page.private;
        done.conversions += 1;
        self.check(at)
    }

    /// Checks, writes and converts pages in turn until `over` returns true; after each conversion,
    /// `look` checks other pages. At the end all pages become shared.
    fn work(
        &mut self,
        convert: impl Fn(u32, bool) -> u32,
        mut look: impl FnMut(&mut Done) -> Result<(), Wrong>,
        mut over: impl FnMut() -> bool,
    ) -> Result<Done, Wrong> {
        let mut done = Done::default();
        for step in 0_u64.. {
            let at = fastrand::usize(..self.pages.len());
            self.check(at)?;
            let page = &mut self.pages[at];
            let stamp = (page.number as u64) << 32 | (step + 1) << 1 | u64::from(page.private);
            page.holds[usize::from(page.private)] = stamp;
            self.memory.word(page.number, 0).store(stamp, Ordering::Relaxed);
            self.turn(at, &convert, &mut done)?;
            look(&mut done)?;
            if over() {
                break;
            }
        }
        for at in 0..self.pages.len() {
            self.check(at)?;
            if self.pages[at].private {
                self.turn(at, &convert, &mut done)?;
            }
        }
        Ok(done)
    }
}

/// Returns the content of a page while it is shared, before a thread writes to it.
const fn shared(page: usize) -> u64 {
    (page as u64 + 1) << 32
}

/// Runs the job on all CPUs until the hypervisor stops it.
///
/// # Errors
/// Returns an error if the memory cannot be mapped, if its page frames cannot be found, or if there
/// is no hypervisor that converts pages.
pub fn run(mib: usize, control: &Control) -> anyhow::Result<Verdict> {
    ensure!(control.is_there(), "nobody is there who could convert pages");
    for (frame, expected) in REFUSED {
        let answer = control.convert(frame, true).context("no answer")?;
        ensure!(answer == expected, "page frame {frame:#x}: {answer}, not {expected}");
    }
    let memory = Memory::new(mib)?;
    pages::keep(&memory, pages::Size::Huge);
    for page in 0..memory.pages() {
        memory.word(page, 0).store(shared(page), Ordering::Relaxed);
    }
    let frames = pages::frames(&memory)?;
    let threads = thread::available_parallelism().map_or(1, usize::from);
    // Threads have the last pages, so that the pages before are in blocks which the hypervisor
    // alone converts.
    let first_own = memory.pages() - memory.pages() / OWN;
    for frame in &frames[..first_own] {
        control.page(*frame);
    }
    let each = (memory.pages() - first_own) / threads;
    control.tell(Event::Started);
    let until = control.until(None);
    let (memory, frames) = (&memory, &frames);
    let all: Vec<Result<Done, Wrong>> = thread::scope(|scope| {
        let until = &until;
        let start = |thread: usize| {
            scope.spawn(move || {
                pages::on_cpu(thread);
                let own = first_own + thread * each..first_own + (thread + 1) * each;
                let page = |number| Page {
                    number,
                    frame: frames[number],
                    private: false,
                    holds: [shared(number), NEVER],
                };
                let mut own = Own { memory, pages: own.map(page).collect() };
                let convert = |frame, to| control.convert(frame, to).unwrap_or(u32::MAX);
                own.work(convert, |done| look(memory, first_own, done), || until.over())
            })
        };
        let running: Vec<_> = (0..threads).map(start).collect();
        running.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
    });
    let mut sum = Done::default();
    for result in all {
        match result {
            Ok(done) => sum.add(&done),
            Err(wrong) => {
                println!("work: private: {wrong:x?}");
                return Ok(Verdict::Wrong);
            }
        }
    }
    // The hypervisor has converted all of its pages to shared.
    for page in 0..first_own {
        let (held, expected) = (memory.word(page, 0).load(Ordering::Relaxed), shared(page));
        if held != expected {
            println!("work: private: at the end page {page} holds {held:#x}, not {expected:#x}");
            return Ok(Verdict::Wrong);
        }
    }
    ensure!(pages::frames(memory)? == *frames, "the kernel has moved pages");
    let Done { conversions, busy, looks } = sum;
    println!(
        "work: private: {conversions} conversions, {busy} refused for a while, {} looks at shared \
         and {} at private pages of the hypervisor's, {} pages right",
        looks[0],
        looks[1],
        memory.pages()
    );
    Ok(Verdict::Right)
}

impl Done {
    fn add(&mut self, other: &Self) {
        self.conversions += other.conversions;
        self.busy += other.busy;
        for (all, looks) in self.looks.iter_mut().zip(other.looks) {
            *all += looks;
        }
    }
}

/// Checks pages that the hypervisor converts at the same time: each has the content of one of its
/// two kinds.
fn look(memory: &Memory, pages: usize, done: &mut Done) -> Result<(), Wrong> {
    for _ in 0..LOOKS {
        let page = fastrand::usize(..pages);
        let held = memory.word(page, 0).load(Ordering::Relaxed);
        let private = held == NEVER;
        if !private && held != shared(page) {
            return Err(Wrong::Content { page, private, held, expected: shared(page) });
        }
        done.looks[usize::from(private)] += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    /// A host for tests, where page frames have the numbers of the pages. It keeps the content of
    /// the kind that a page does not have at present.
    struct Host<'m> {
        memory: &'m Memory,
        hidden: RefCell<Vec<u64>>,
        asked: Cell<u64>,
        /// Number of the conversion that wrongly keeps the content.
        carries: u64,
    }

    impl<'m> Host<'m> {
        fn new(memory: &'m Memory, carries: u64) -> Self {
            let hidden = RefCell::new(vec![NEVER; memory.pages()]);
            Self { memory, hidden, asked: Cell::new(0), carries }
        }

        fn convert(&self, frame: u32, _to: bool) -> u32 {
            self.asked.set(self.asked.get() + 1);
            if self.asked.get().is_multiple_of(5) {
                return answer::BUSY;
            }
            let (word, hidden) =
                (self.memory.word(frame as usize, 0), &mut *self.hidden.borrow_mut());
            let before = word.swap(hidden[frame as usize], Ordering::Relaxed);
            hidden[frame as usize] = before;
            if self.asked.get() == self.carries {
                word.store(before, Ordering::Relaxed);
            }
            0
        }
    }

    fn work(carries: u64) -> Result<Done, Wrong> {
        let memory = Memory::new(1).unwrap();
        let page = |number| {
            memory.word(number, 0).store(shared(number), Ordering::Relaxed);
            Page { number, frame: number as u32, private: false, holds: [shared(number), NEVER] }
        };
        let mut own = Own { memory: &memory, pages: (0..8).map(page).collect() };
        let (host, mut steps) = (Host::new(&memory, carries), 0);
        own.work(
            |frame, to| host.convert(frame, to),
            |_| Ok(()),
            || {
                steps += 1;
                steps == 500
            },
        )
    }

    #[test]
    fn pages_that_keep_what_they_hold_in_each_kind_are_right() {
        let done = work(0).unwrap();
        assert!(done.conversions >= 500 && done.busy >= 100, "{done:?}");
    }

    #[test]
    fn a_content_that_is_carried_over_is_found() {
        assert!(matches!(work(251), Err(Wrong::Content { .. })));
    }

    #[test]
    fn pages_of_the_hypervisors_hold_one_of_two_things() {
        let memory = Memory::new(1).unwrap();
        for page in 0..256 {
            let held = if page % 2 == 0 { shared(page) } else { NEVER };
            memory.word(page, 0).store(held, Ordering::Relaxed);
        }
        let mut done = Done::default();
        look(&memory, 256, &mut done).unwrap();
        assert_eq!(done.looks[0] + done.looks[1], LOOKS as u64);
        (0..256).for_each(|page| memory.word(page, 0).store(0, Ordering::Relaxed));
        assert!(look(&memory, 256, &mut done).is_err());
    }
}
