//! What a host may lack that a scenario cannot do without, by the names of the doctor's findings.

/// KVM itself.
pub const KVM_DEVICE: &str = "/dev/kvm";

/// The architecture that guests have code for.
pub const GUEST_CODE: &str = "guest code";

/// Whether a guest that switches its caches off and on costs KVM anything.
pub const CACHES: &str = "caches that guests switch";

/// Idle page tracking.
pub const PAGE_IDLE: &str = "page_idle";

/// The interface of the multi-generational LRU in debugfs.
pub const MGLRU: &str = "MGLRU";

/// What every scenario of a guest needs.
pub const GUEST: &[&[&str]] = &[&[GUEST_CODE], &[KVM_DEVICE]];
