//! Whether a vCPU gets anywhere: one that faults for ever, since its tables and the hypervisor's
//! disagree, or since its handler faults itself, keeps its CPU from all else without a word.

/// How often a vCPU may fault in the same state. A guest may well poll what is not there; then its
/// registers change.
pub const PATIENCE: u32 = 10_000;

/// A vCPU at a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The virtual address.
    pub far: u64,
    /// The guest physical address.
    pub gpa: u64,
    /// The program counter.
    pub pc: u64,
    /// The processor's state.
    pub pstate: u64,
    /// The general registers.
    pub x: [u64; 31],
}

/// The last fault, and how often it came in a row.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    last: Option<Place>,
    again: u32,
}

impl Progress {
    /// Notes a fault. Whether it came too often in a row.
    pub fn faults_for_ever(&mut self, place: Place) -> bool {
        self.again = if self.last == Some(place) { self.again + 1 } else { 0 };
        self.last = Some(place);
        self.again >= PATIENCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place { far: 1, gpa: 2, pc: 3, pstate: 4, x: [5; 31] };

    #[test]
    fn the_same_fault_in_the_same_state_is_for_ever() {
        let mut progress = Progress::default();
        let faults = (0..=PATIENCE).map(|_| progress.faults_for_ever(PLACE));
        assert_eq!(faults.filter(|&for_ever| for_ever).count(), 1);
    }

    #[test]
    fn who_counts_gets_on() {
        let mut progress = Progress::default();
        let mut x = [0; 31];
        for count in 0..3 * u64::from(PATIENCE) {
            x[19] = count;
            assert!(!progress.faults_for_ever(Place { x, ..PLACE }));
        }
    }
}
