//! Points between the steps of an access where a test can run code.

/// A point inside a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Moment {
    /// The CPU has looked at the generation.
    Looked,
    /// A walk has found a leaf, which is not cached yet.
    Walked,
}

#[cfg(not(test))]
#[inline(always)]
pub(super) fn moment(_: Moment) {}

#[cfg(test)]
pub(super) use hook::{moment, next};

#[cfg(test)]
mod hook {
    use super::Moment;
    use std::cell::RefCell;

    type Hook = (Moment, Box<dyn FnOnce()>);

    thread_local! {
        static NEXT: RefCell<Option<Hook>> = const { RefCell::new(None) };
    }

    /// Calls `what` once, when this thread's CPU reaches `moment` next.
    pub fn next(moment: Moment, what: impl FnOnce() + 'static) {
        NEXT.set(Some((moment, Box::new(what))));
    }

    pub fn moment(now: Moment) {
        let due = NEXT.with_borrow_mut(|next| next.take_if(|(moment, _)| *moment == now));
        if let Some((_, what)) = due {
            what();
        }
    }
}
