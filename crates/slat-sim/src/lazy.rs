//! The switches: each kind of laziness on its own.

/// What the machine makes use of, of all that its architecture allows.
///
/// With all switches on, a machine is as lazy as it may be. With one off, there is a bug that it
/// does not see: `tests/machine/laziness.rs` has one for each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lazy {
    /// TLBs keep translations of the second stage until an invalidation names them.
    pub tlb: bool,
    /// TLBs keep translations of both stages together, found by virtual address: an invalidation
    /// by guest physical address leaves them (Arm; elsewhere an invalidation takes both).
    pub combined: bool,
    /// Walk caches keep links to tables, and the rights gathered on the way (EPT), until an
    /// invalidation names them that is not of leaves alone.
    pub walk_cache: bool,
    /// Until a barrier, a walk may read what a slot held at the barrier before (Arm, RISC-V).
    pub late_stores: bool,
    /// An invalidation takes effect no earlier than the barrier that waits for it, and several that
    /// one barrier waits for take effect in the worst order (Arm).
    pub late_invalidation: bool,
    /// At every moment that the machine sees, each CPU walks to everything that it could reach.
    pub speculation: bool,
    /// A translation cached as dirty lets writes through without another look at the tables.
    pub silent_writes: bool,
    /// A translation cached without a right goes on faulting after the tables grant it (Arm,
    /// RISC-V); on RISC-V without Svadu also one without the accessed or dirty bit.
    pub stale_faults: bool,
    /// A slot that a walk found invalid goes on faulting after it was filled, until an invalidation
    /// of the hart's own (RISC-V without Svvptc).
    pub invalid_entries: bool,
    /// Two sizes of one page in a TLB raise a conflict abort where the CPU may (Arm, FEAT_BBM
    /// level 2).
    pub conflict_aborts: bool,
    /// Lines of memory stay in the data cache, dirty or old, until maintenance (Arm without FWB).
    pub data_cache: bool,
    /// Instructions are fetched as they were before the host wrote them, until maintenance (Arm
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

/// How a CPU chooses among what it may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    /// The oldest translation, the deepest and oldest walk, the older of two values: what a named
    /// test wants.
    Stalest,
    /// Anything, by the machine's seed: what histories want.
    Random,
}
