//! Requirements of scenarios that a host may lack, under the names of `slat doctor`'s findings.

/// KVM's device.
pub const KVM_DEVICE: &str = "/dev/kvm";

/// Whether `slat-kvm` has guest code for the host's architecture.
pub const GUEST_CODE: &str = "guest code";

/// Whether KVM has to act when a guest switches its caches off and on.
pub const CACHES: &str = "caches that guests switch";

/// Idle page tracking.
pub const PAGE_IDLE: &str = "page_idle";

/// The interface of the multi-generational LRU in debugfs.
pub const MGLRU: &str = "MGLRU";

/// Requirements of every scenario that runs a guest.
pub const GUEST: &[&[&str]] = &[&[GUEST_CODE], &[KVM_DEVICE]];
