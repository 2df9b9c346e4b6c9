//! Detects a vCPU that makes no progress. A vCPU may fault forever, because stage 2 refuses what
//! the hypervisor considers mapped, or because the guest's exception handler faults itself. It
//! would occupy its CPU without any message.

/// How often in a row a vCPU may fault in the same state. A guest that polls an absent device
/// faults repeatedly too, but its registers change.
pub const PATIENCE: u32 = 10_000;

/// The state of a vCPU at a fault.
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

/// The last fault of a vCPU, and how often it was repeated.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    last: Option<Place>,
    again: u32,
}

impl Progress {
    /// Records a fault. Returns whether the same fault came too often in a row.
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
    fn a_vcpu_that_counts_makes_progress() {
        let mut progress = Progress::default();
        let mut x = [0; 31];
        for count in 0..3 * u64::from(PATIENCE) {
            x[19] = count;
            assert!(!progress.faults_for_ever(Place { x, ..PLACE }));
        }
    }
}
