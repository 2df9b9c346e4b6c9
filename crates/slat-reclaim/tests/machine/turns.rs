//! Threads that take turns: one runs at a time, and a seed decides which one runs next, whenever a
//! thread calls [`Turns::moment`]. So a history of threads is the same in each run.

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

thread_local! {
    static ME: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Far more moments than a history takes: a thread that waits longer waits for ever.
const MOST: u64 = 20_000_000;

pub struct Turns {
    state: Mutex<State>,
    turn: Vec<Condvar>,
}

struct State {
    rng: fastrand::Rng,
    current: usize,
    left: Vec<bool>,
    /// Moments until another thread may run, and their greatest number.
    rest: u32,
    longest: u32,
    moments: u64,
    failure: Option<String>,
}

impl Turns {
    pub fn new(threads: usize, seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let longest = [3, 12, 60][rng.usize(..3)];
        let state = State {
            rng,
            current: 0,
            left: vec![false; threads],
            rest: 1,
            longest,
            moments: 0,
            failure: None,
        };
        Self { state: Mutex::new(state), turn: (0..threads).map(|_| Condvar::new()).collect() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does `work` as thread `me`, when it is its turn.
    pub fn run(&self, me: usize, work: impl FnOnce()) {
        struct Leave<'t>(&'t Turns, usize);
        impl Drop for Leave<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    self.0.fail(format!("thread {} has panicked", self.1));
                }
                ME.set(None);
                let mut state = self.0.state();
                state.left[self.1] = true;
                self.0.pass(&mut state);
            }
        }
        ME.set(Some(me));
        let _leave = Leave(self, me);
        drop(self.wait(self.state(), me));
        work();
    }

    fn pass(&self, state: &mut State) {
        state.rest = state.rng.u32(1..=state.longest);
        let there: Vec<_> = (0..state.left.len()).filter(|&thread| !state.left[thread]).collect();
        if let Some(next) = state.rng.choice(there) {
            state.current = next;
            self.turn[next].notify_one();
        }
    }

    fn wait<'s>(&self, mut state: MutexGuard<'s, State>, me: usize) -> MutexGuard<'s, State> {
        while state.current != me && state.failure.is_none() {
            state = self.turn[me].wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    fn step(&self, give_way: bool) {
        let Some(me) = ME.get() else { return };
        let mut state = self.state();
        if state.failure.is_some() {
            return;
        }
        state.moments += 1;
        if state.moments > MOST {
            drop(state);
            return self.fail("no end in sight".to_owned());
        }
        state.rest -= u32::from(state.rest != 0);
        if give_way || state.rest == 0 {
            self.pass(&mut state);
            drop(self.wait(state, me));
        }
    }

    /// Lets another thread run, if the seed says so.
    pub fn moment(&self) {
        self.step(false);
    }

    /// Lets another thread run, as the caller has to wait for one.
    ///
    /// # Panics
    /// If the history has failed: the thread that the caller waits for may be gone.
    pub fn wait_for_others(&self) {
        self.step(true);
        assert!(!self.failed() || std::thread::panicking(), "the history has failed");
    }

    /// Ends the history with a reason; the first of several counts.
    pub fn fail(&self, reason: String) {
        self.state().failure.get_or_insert(reason);
        self.turn.iter().for_each(Condvar::notify_all);
    }

    pub fn failed(&self) -> bool {
        self.state().failure.is_some()
    }

    pub fn failure(&self) -> Option<String> {
        self.state().failure.clone()
    }
}
