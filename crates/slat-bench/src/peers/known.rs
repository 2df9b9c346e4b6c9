//! Names that results of the engine beside Linux go by, for those who measure and those who print.

/// What the engine's entrant is called.
pub const SLAT: &str = "slat";

/// A way in which leaves of Linux and of the engine differ, and are both right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// What results count it by.
    pub name: &'static str,
    /// Why it is right.
    pub reason: &'static str,
}

/// Linux protects more.
pub const PROTECTED_IN_HULL: Difference = Difference {
    name: "leaves_protected_in_hull",
    reason: "Linux protects all pages between the first and the last that a word of the log names",
};

/// Linux makes pages young.
pub const MADE_YOUNG: Difference = Difference {
    name: "leaves_made_young",
    reason: "a split of Linux's makes all pages of a block young; the engine's keeps its age",
};

/// Bits that hardware ignores.
pub const SOFTWARE_BITS: Difference = Difference {
    name: "leaves_with_software_bits",
    reason: "bits 58 to 55 are each one's own; the engine keeps there what hardware has no bit for",
};

/// All of them.
pub const DIFFERENCES: [Difference; 3] = [PROTECTED_IN_HULL, MADE_YOUNG, SOFTWARE_BITS];
