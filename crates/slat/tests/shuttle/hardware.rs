//! CPUs that run a guest.

use crate::guest::Guest;
use crate::tlb::walk;
pub use crate::walked::Walked;

impl<F: Walked> Guest<'_, F> {
    /// The guest accesses `gpa`, by a CPU that uses the entries that it `held` or walks from the
    /// root; returns whether that faults.
    pub fn access(&self, gpa: u64, write: bool, held: bool) -> bool {
        let world = self.world;
        let _bus = world.running.get().then(|| world.bus.read().unwrap());
        let through = held.then(|| world.tlb.borrow().hit(world.loaded(), gpa, write)).flatten();
        let walked = through.is_none();
        let found = through.or_else(|| walk(&self.tables, gpa, write, held));
        self.trace(format_args!("uses {gpa:x}, write {write}, held {held}: {found:x?}"));
        if let Some(hpa) = found {
            world.ledger.used(gpa, hpa, write, walked);
        }
        found.is_none()
    }
}
