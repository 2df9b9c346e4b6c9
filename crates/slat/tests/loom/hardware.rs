//! A CPU that runs a guest, as lazily as it may.

use crate::guest::On;
use crate::machine::PAGE;
use crate::tlb::walk;
pub use crate::walked::Walked;
use slat::Hpa;

/// How a CPU uses the entries that it holds.
#[derive(Clone, Copy, PartialEq)]
pub enum Use {
    /// Whenever possible.
    Always,
    /// Never: it walks each time.
    Never,
}

impl<F: Walked> On<F> {
    /// The guest accesses `gpa`; `None` if that faults.
    pub fn access(&self, gpa: u64, write: bool, held: Use) -> Option<Hpa> {
        let world = self.world;
        assert!(world.running.get(), "no CPU runs");
        let _bus = world.bus.lock().unwrap();
        let held = held == Use::Always;
        let hit = held.then(|| world.tlb.borrow().hit(world.loaded(), gpa, write)).flatten();
        let hpa = hit.or_else(|| walk(self.tables(), gpa, write, held))?;
        let taken = world.taken.borrow();
        assert!(!taken.iter().any(|taken| taken.contains(&hpa)), "the guest reached freed memory");
        let held_back = world.protected.borrow().contains(&(gpa & !(PAGE - 1)));
        assert!(!write || !held_back, "the guest wrote to protected memory");
        world.used(gpa & !(PAGE - 1), write);
        Some(Hpa(hpa))
    }

    /// A write by a CPU that always walks.
    pub fn write(&self, gpa: u64) -> bool {
        self.access(gpa, true, Use::Never).is_some()
    }
}
