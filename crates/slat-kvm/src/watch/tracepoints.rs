//! Names of KVM's tracepoints.

pub(crate) const EXIT: &str = "kvm_exit";
pub(crate) const ENTRY: &str = "kvm_entry";
pub(crate) const USER_EXIT: &str = "kvm_userspace_exit";
pub(crate) const PUSH: &str = "kvm_dirty_ring_push";
pub(crate) const UNMAP: &str = "kvm_unmap_hva_range";
pub(crate) const AGE: &str = "kvm_age_hva";
pub(crate) const TEST_AGE: &str = "kvm_test_age_hva";
/// No event of its own: why no event tells which written pages were mapped and protected.
pub(crate) const PROTECTED: &str = "a written page's protection";
