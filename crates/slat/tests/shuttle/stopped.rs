//! One thread is stopped at each of its steps, in turn, while another completes its operation on
//! the same entries; then the first goes on.

use crate::guest::{End, Guest, Op, SharedRef, range};
use crate::hardware::{Use, WalkedFormat};
use crate::machine::{ALL, BIG, BLOCK, CLEAN, PAGE, RAM, World};
use crate::run;
use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};
use slat::format::tiny::{Tiny, TinyEpt};
use slat::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

const FIRST: usize = 1;
const OTHER: usize = 2;
/// No operation on eight pages takes more steps than this, whichever thread is stopped.
const BOUND: usize = 4_000;

/// Runs the first thread for a number of steps, one more each time; then the other to its end; then
/// the first to its own.
struct Stop {
    after: usize,
    taken: usize,
    others: usize,
    most: Arc<AtomicUsize>,
    /// The first thread ended before it was stopped: it has no more steps.
    ended: bool,
    other_began: bool,
}

impl Scheduler for Stop {
    fn new_execution(&mut self) -> Option<Schedule> {
        if self.ended {
            return None;
        }
        (self.after, self.taken, self.others) = (self.after + 1, 0, 0);
        self.other_began = false;
        Some(Schedule::new(0))
    }

    fn next_task(&mut self, runnable: &[&Task], _: Option<TaskId>, _: bool) -> Option<TaskId> {
        let find =
            |wanted| runnable.iter().map(|task| task.id()).find(|id| usize::from(*id) == wanted);
        // Both exist once the main thread waits for them.
        if let Some(main) = find(0) {
            return Some(main);
        }
        if let Some(first) = find(FIRST).filter(|_| self.taken < self.after) {
            self.taken += 1;
            return Some(first);
        }
        if let Some(other) = find(OTHER) {
            self.ended |= !self.other_began && self.taken < self.after;
            self.other_began = true;
            self.others += 1;
            self.most.fetch_max(self.others, Relaxed);
            assert!(self.others <= BOUND, "the other thread does not come to an end");
            return Some(other);
        }
        find(FIRST)
    }

    fn next_u64(&mut self) -> u64 {
        0
    }
}

/// The initial state: two pages that could be a block, a block, two halves of one, a single page.
fn before(guest: &Guest<'_, impl WalkedFormat>, first: Op) {
    let mut reader = Reader::register(guest.world).unwrap();
    let map = |start, end, attributes, largest| Op::Map {
        at: range(start, end),
        attributes,
        largest,
        each: false,
        fold: false,
        frames: 4,
    };
    let mut all = vec![
        map(0, BLOCK, CLEAN, PAGE),
        map(BLOCK, BIG, RAM, BLOCK),
        map(BIG, BIG + PAGE, CLEAN, PAGE),
    ];
    all.extend([(0, true), (BIG, false)].map(|(gpa, write)| Op::Touch {
        gpa,
        write,
        held: Use::Always,
    }));
    match first {
        Op::Relax { access: Access::Write, .. } => {
            all.push(Op::Protect { at: range(0, ALL), complete: true });
        }
        // A table to give back.
        Op::Reclaim => all.push(Op::Unmap { at: range(BIG, ALL) }),
        _ => {}
    }
    for op in all {
        assert_eq!(guest.perform(&mut reader, op), End::Done, "{op:?}");
    }
}

fn others() -> Vec<Op> {
    let all = range(0, ALL);
    let mut others = operations().into_iter().map(|(_, op)| op).collect::<Vec<_>>();
    others.extend((0..ALL).step_by(BLOCK as usize).map(|gpa| Op::Translate { gpa }));
    others.extend([0, BLOCK, BIG].map(|gpa| Op::Touch { gpa, write: true, held: Use::Always }));
    others.extend([
        Op::Unmap { at: range(0, PAGE) },
        Op::Split { at: all, to: PAGE, frames: 4, complete: true },
        Op::Relax { at: range(0, PAGE), access: Access::Write, complete: true },
        Op::Fault { gpa: PAGE, largest: BIG, fold: false, frames: 4 },
    ]);
    others
}

/// Each operation that is stopped, by name.
fn operations() -> Vec<(&'static str, Op)> {
    let (all, lower) = (range(0, ALL), range(0, BIG));
    let age = |skip| Op::Age {
        at: all,
        how: AgeOptions { clear: true, table_bits: skip, flush_tlb: false },
    };
    let map = |start, end| Op::Map {
        at: range(start, end),
        attributes: RAM,
        largest: BLOCK,
        each: false,
        fold: false,
        frames: 4,
    };
    vec![
        ("map a page", map(BIG + PAGE, BIG + BLOCK)),
        ("map, building a table", map(BIG + PAGE, ALL)),
        ("unmap", Op::Unmap { at: all }),
        ("write_protect", Op::Protect { at: all, complete: true }),
        ("relax for a write", Op::Relax { at: lower, access: Access::Write, complete: true }),
        ("relax for a read", Op::Relax { at: all, access: Access::Read, complete: true }),
        ("split", Op::Split { at: lower, to: PAGE, frames: 4, complete: true }),
        ("collapse", Op::Collapse { at: lower, to: BLOCK }),
        ("age, every leaf", age(TableBits::Ignored)),
        ("age, exactly", age(TableBits::Exact)),
        ("harvest", Op::Harvest { at: all }),
        (
            "reserve and commit",
            Op::Fault { gpa: ALL - PAGE, largest: BLOCK, fold: false, frames: 4 },
        ),
        ("reclaim", Op::Reclaim),
    ]
}

/// The operations that never hold others up, wherever they are stopped.
fn hampers<F: WalkedFormat>(name: &str, bbm: BreakBeforeMake) -> bool {
    match name {
        // Entries of a table that is being retired.
        "unmap" => true,
        // Sealed leaves and, with a break, frozen blocks.
        "collapse" => true,
        "split" => bbm.breaks_size_change(),
        _ => false,
    }
}

fn everywhere<F: WalkedFormat>(bbm: BreakBeforeMake) {
    let most = Arc::new(AtomicUsize::new(0));
    let mut places = 0;
    for (name, first) in operations() {
        let contended = Arc::new(AtomicBool::new(false));
        for other in others() {
            let scheduler = Stop {
                after: 0,
                taken: 0,
                others: 0,
                most: most.clone(),
                ended: false,
                other_began: false,
            };
            let contended = contended.clone();
            places += run::explore(scheduler, move || {
                let world = World::new(bbm, true);
                let guest = Guest::<F>::new(&world);
                before(&guest, first);
                let run = |op: Op| {
                    let guest = SharedRef::new(&guest);
                    move || {
                        let mut reader = Reader::register(guest.get().world).unwrap();
                        guest.get().perform(&mut reader, op)
                    }
                };
                let (first, second) = shuttle::thread::scope(|scope| {
                    let first = scope.spawn(run(first));
                    let second = scope.spawn(run(other));
                    let second = second.join().unwrap();
                    (first.join().unwrap(), second)
                });
                // No thread holds it up any more.
                assert_eq!(first, End::Done, "the thread that was stopped");
                contended.fetch_or(second == End::Contended, Relaxed);
                guest.finish();
            });
        }
        let contended = contended.load(Relaxed);
        assert_eq!(contended, hampers::<F>(name, bbm), "{name}: whether others were contended");
        eprintln!(
            "  {name}: {}",
            if contended { "others may be contended" } else { "hampers nobody" }
        );
    }
    eprintln!(
        "{}, {bbm:?}: stopped at {places} places; others took at most {} steps",
        F::NAME,
        most.load(Relaxed)
    );
}

#[test]
fn a_stopped_thread_lets_others_finish_if_all_changes_break() {
    everywhere::<Tiny>(BreakBeforeMake::Always);
}

#[test]
fn a_stopped_thread_lets_others_finish_if_sizes_never_break() {
    everywhere::<Tiny>(BreakBeforeMake::Never);
}

#[test]
fn a_stopped_thread_lets_others_finish_with_rights_in_tables() {
    everywhere::<TinyEpt>(BreakBeforeMake::Never);
}
