//! The switches: one for each kind of laziness.

/// The kinds of laziness that the machine uses, of all that its architecture allows.
///
/// With all switches on, a machine is as lazy as it may be. For each switch, there is a bug that
/// the machine does not find without it: see `tests/machine/laziness.rs`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lazy {
    /// TLBs keep translations of the second stage until an invalidation covers them.
    pub tlb: bool,
    /// TLBs also keep translations of both stages, found by virtual address. An invalidation by
    /// guest physical address leaves these (Arm; elsewhere an invalidation takes both).
    pub combined: bool,
    /// Walk caches keep links to tables, and the rights gathered on the way (EPT), until an
    /// invalidation covers them that is not for leaves alone.
    pub walk_cache: bool,
    /// Until a barrier, a walk may read what an entry held at the barrier before (Arm, RISC-V).
    pub late_stores: bool,
    /// An invalidation takes effect no earlier than the barrier that waits for it. Several that one
    /// barrier waits for take effect in the worst order (Arm).
    pub late_invalidation: bool,
    /// Each CPU walks to all that it can reach when the engine fills a table, publishes stores or
    /// invalidates, and at each barrier.
    pub speculation: bool,
    /// A translation cached as dirty serves writes without another walk.
    pub silent_writes: bool,
    /// A translation cached without a right continues to fault after the tables grant it (Arm,
    /// RISC-V). On RISC-V without Svadu, so does one cached without the accessed or dirty bit.
    pub stale_faults: bool,
    /// An entry that a walk found invalid continues to fault after it was filled, until the hart
    /// itself executes an invalidation (RISC-V without Svvptc).
    pub invalid_entries: bool,
    /// Two sizes of one page in a TLB raise a conflict abort (Arm, FEAT_BBM level 2).
    pub conflict_aborts: bool,
    /// Lines stay in the data cache, dirty or old, until maintenance (Arm without FWB).
    pub data_cache: bool,
    /// Instruction fetches see memory as it was before the host wrote it, until maintenance (Arm
    /// without CTR_EL0.DIC).
    pub instruction_cache: bool,
}

impl Lazy {
    /// Everything that the architecture allows.
    pub const ALL: Self = Self {
        tlb: true,
        combined: true,
        walk_cache: true,
        late_stores: true,
        late_invalidation: true,
        speculation: true,
        silent_writes: true,
        stale_faults: true,
        invalid_entries: true,
        conflict_aborts: true,
        data_cache: true,
        instruction_cache: true,
    };

    /// A machine without caches, which sees every store at once.
    pub const NONE: Self = Self {
        tlb: false,
        combined: false,
        walk_cache: false,
        late_stores: false,
        late_invalidation: false,
        speculation: false,
        silent_writes: false,
        stale_faults: false,
        invalid_entries: false,
        conflict_aborts: false,
        data_cache: false,
        instruction_cache: false,
    };
}

impl Default for Lazy {
    fn default() -> Self {
        Self::ALL
    }
}

/// How a CPU chooses among the entries that it may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    /// The oldest translation, the deepest and oldest cached link, and the older of two values: for
    /// tests of one case.
    Stalest,
    /// Any of them, at random from the machine's seed: for random histories.
    Random,
}
