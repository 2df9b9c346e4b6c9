//! The machine as the engine's platform.

use crate::arch::Arch;
use crate::machine::{Machine, Moment};
use crate::state::{Eye, State};
use crate::violation::Kind;
use slat::{BreakBeforeMake, Frame, Hpa, Invalidation, Maintenance, Platform, Pte, Readers};
use slat_guest::{DeviceTables, Host, PrivateHooks};
use std::ptr::NonNull;

impl State {
    /// Reports every CPU that may still reach a frame that is freed.
    fn check_free(&mut self, hpa: u64) {
        let mut reached = Vec::new();
        for (cpu, state) in self.cpus.iter().enumerate() {
            if state.root.is_some_and(|root| root.table == hpa) {
                reached.push((Kind::BadFree, cpu, 0, "it is loaded as a root"));
            }
            if let Some(walk) = state.walks.everywhere().find(|walk| walk.table == hpa) {
                reached.push((Kind::FreedTable, cpu, walk.start, "a walk cache links to it"));
            }
        }
        for cpu in 0..self.cpus.len() {
            let Some(root) = self.cpus[cpu].root else { continue };
            let start = self.start(root);
            let (_, links) = self.explore(Eye { late: true, ..Eye::GOD }, vec![start]);
            if let Some(link) = links.iter().find(|link| link.table == hpa) {
                reached.push((Kind::FreedTable, cpu, link.start, "a walk from the root finds it"));
            }
        }
        for (kind, cpu, gpa, expected) in reached {
            let used = format!("the table at {hpa:#x} is freed");
            self.log.report(kind, Some(cpu), Some(gpa), used, expected);
        }
    }
}

// SAFETY:
// 1. Frames are allocations of the size and alignment asked for. Their addresses, which are not
//    those of the allocations, are aligned alike and are used once.
// 2. `ptes` looks the frame up: it returns the same allocation each time, which is kept until the
//    machine is dropped.
// 3. `invalidate` is done by the firmware. A test may give it one that does less than it should: a
//    CPU of this machine that uses what was invalidated reports that, and reaches no memory but
//    frames, which stay allocated.
// 4. `readers` and `declared` are fields, which do not change.
// 5. `fill` stores the sequence before it runs the test's hook.
// 6. No method unwinds while the engine keeps its own rules, unless a hook or firmware of a test
//    panics.
unsafe impl<A: Arch> Platform for Machine<A> {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let mut state = self.state();
        let hpa = state.memory.allocate(bytes)?;
        // SAFETY: `ptes` reaches it, it is of that size and alignment, and no other code has it.
        // It is below 2^40 until half a TiB was allocated, or where the test put it by
        // `frames_from`.
        unsafe { Frame::from_hpa(Hpa(hpa)) }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        let hpa = frame.hpa().0;
        let mut state = self.state();
        state.check_free(hpa);
        if let Err(expected) = state.memory.free(hpa, bytes) {
            let used = format!("the frame at {hpa:#x} is freed with {bytes:#x} bytes");
            state.log.report(Kind::BadFree, None, None, used, expected);
        }
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        self.moment(Moment::Table);
        let mut state = self.state();
        if let Some((start, frame)) = state.memory.around(table.0) {
            let (live, words) = (frame.live, frame.words());
            if !live {
                let used = format!("software walks the table at {table}");
                let expected = "it was freed before: a walk ends before the grace period";
                state.log.report(Kind::FreedTable, None, None, used, expected);
            }
            // SAFETY: `table` lies inside the frame.
            return unsafe { words.byte_add((table.0 - start) as usize) };
        }
        let used = format!("software walks {table}");
        state.log.report(Kind::Reserved, None, None, used, "no frame is there");
        // Returns some frame, so that the engine can continue: the violation fails the test.
        let scratch = state.memory.allocate(1 << 16).expect("a frame of nobody's");
        state.memory.get(scratch).expect("just allocated").words()
    }

    fn publish(&self) {
        self.moment(Moment::Publish);
        (self.firmware.publish)(self);
    }

    fn invalidate(&self, what: &Invalidation) {
        self.moment(Moment::Invalidate);
        (self.firmware.invalidate)(self, what);
        self.moment(Moment::Invalidated);
    }

    fn invalidate_local(&self, what: &Invalidation) {
        (self.firmware.invalidate_local)(self, what);
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        self.declared
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }

    fn maintain(&self, memory: Hpa, bytes: u64, what: Maintenance) {
        (self.firmware.maintain)(self, memory, bytes, what);
    }

    fn fill(&self, ptes: &mut [Pte], first: u64, step: u64) {
        let words = ptes.iter_mut().zip((0..).map(|n| first.wrapping_add(step.wrapping_mul(n))));
        words.for_each(|(pte, raw)| pte.set(raw));
        self.moment(Moment::Fill);
    }
}

impl<A: Arch> Host for Machine<A> {
    /// Advances with each event.
    fn now(&self) -> u64 {
        self.state().tick()
    }

    fn device_tables(&self) -> &dyn DeviceTables {
        self
    }

    fn private_hooks(&self) -> &dyn PrivateHooks {
        self
    }

    fn wait(&self) {
        std::thread::yield_now();
    }
}
