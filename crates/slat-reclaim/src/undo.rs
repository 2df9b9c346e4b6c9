//! What is undone if a callback unwinds, or an operation ends early.

/// Calls a function when it is dropped, unless [`Undo::done`] was called.
pub(crate) struct Undo<F: Fn()>(F);

impl<F: Fn()> Undo<F> {
    pub const fn new(undo: F) -> Self {
        Self(undo)
    }

    /// Nothing is to be undone any more.
    pub fn done(self) {
        core::mem::forget(self);
    }
}

impl<F: Fn()> Drop for Undo<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
