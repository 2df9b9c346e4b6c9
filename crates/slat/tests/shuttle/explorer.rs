//! Shuttle's part of the machine.

use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Reader slots of a machine.
pub const SLOTS: usize = 8;

/// Shared by each access of a CPU, and held alone by an invalidation, which so ends after every
/// access that began before it.
pub struct Bus {
    lock: RwLock<()>,
    step: AtomicU64,
}

impl Default for Bus {
    fn default() -> Self {
        Self { lock: RwLock::new(()), step: AtomicU64::new(0) }
    }
}

impl Bus {
    pub fn shared(&self) -> RwLockReadGuard<'_, ()> {
        self.lock.read().unwrap()
    }

    pub fn alone(&self, running: bool) -> Option<RwLockWriteGuard<'_, ()>> {
        if running {
            return Some(self.lock.write().unwrap());
        }
        // One step, at which the thread may be stopped.
        self.step.load(Ordering::SeqCst);
        None
    }
}
