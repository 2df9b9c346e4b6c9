//! Checks whether tests that need a guest can run here.

use slat_kvm::{HostKvm, probe};

/// Returns the host's KVM, or prints the reason to stderr and returns `None`.
///
/// With `SLAT_REQUIRE_KVM=1` it panics instead, so that a host that must have KVM cannot pass by
/// skipping all tests.
pub fn kvm_or_skip() -> Option<HostKvm> {
    match probe() {
        Ok(host)
            if cfg!(any(
                target_arch = "x86_64",
                target_arch = "aarch64",
                target_arch = "riscv64"
            )) =>
        {
            Some(host)
        }
        Ok(_) => skip("no guest code for this architecture"),
        Err(error) => skip(&error.to_string()),
    }
}

fn skip(reason: &str) -> Option<HostKvm> {
    let required = std::env::var("SLAT_REQUIRE_KVM").is_ok_and(|value| value == "1");
    assert!(!required, "SLAT_REQUIRE_KVM=1, and no guest can run: {reason}");
    eprintln!("skipped: {reason}");
    None
}
