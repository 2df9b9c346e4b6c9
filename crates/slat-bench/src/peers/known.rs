//! Names in results of the engine and Linux, shared by the code that measures and the reports.

/// Variant name of the engine's entrant.
pub const SLAT: &str = "slat";

/// A way in which leaves of Linux and of the engine differ, and both are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The name of its count in results.
    pub name: &'static str,
    /// The reason why it is right.
    pub reason: &'static str,
}

/// Linux protects more pages.
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

/// All allowed differences.
pub const DIFFERENCES: [Difference; 3] = [PROTECTED_IN_HULL, MADE_YOUNG, SOFTWARE_BITS];
