//! A count of steps, for tests that bound what a call does: slots of swap, pages and words that it
//! looks at. Outside of unit tests nothing is counted.

#[cfg(test)]
std::thread_local! {
    static STEPS: core::cell::Cell<u64> = const { core::cell::Cell::new(0) };
}

/// Counts a step of the calling thread.
pub(crate) fn step() {
    #[cfg(test)]
    STEPS.with(|steps| steps.set(steps.get() + 1));
}

/// Returns how many steps `work` takes.
#[cfg(test)]
pub(crate) fn steps(work: impl FnOnce()) -> u64 {
    let before = STEPS.with(core::cell::Cell::get);
    work();
    STEPS.with(core::cell::Cell::get) - before
}
