//! Programs that `slat emulate` runs: an emulator, and what fetches and unpacks a kernel for it.

use super::Group::Tools;
use super::{Change, EMULATE, Evidence, Finding, For, Subject};

/// The emulator of x86-64.
pub const QEMU_X86: &str = "qemu-system-x86_64";
/// The emulator of arm64.
pub const QEMU_ARM: &str = "qemu-system-aarch64";
/// Unpacks a kernel's package.
pub const DPKG_DEB: &str = "dpkg-deb";
/// Fetches it.
const APT: &str = "apt-get";

const TOOLS: For = For::Only(&[EMULATE]);

pub(super) fn findings(evidence: &Evidence) -> Vec<Finding> {
    let tools = [
        (QEMU_X86, "qemu-system-x86", "Emulates an x86-64 machine with NPT and its KVM."),
        (QEMU_ARM, "qemu-system-arm", "Emulates an arm64 machine with stage 2 and its KVM."),
        (DPKG_DEB, "dpkg", "Unpacks the kernel that the machine boots."),
        (APT, "apt", "Fetches it; a kernel that is there already needs no fetching."),
    ];
    tools.map(|(program, package, why)| tool(evidence, program, package, why)).into()
}

fn tool(evidence: &Evidence, program: &'static str, package: &str, why: &'static str) -> Finding {
    let subject = Subject::new(Tools, program, TOOLS, why);
    match evidence.program(program) {
        Some(path) => subject.ok(path.display().to_string()),
        None if evidence.program(APT).is_some() => {
            subject.missing("not found", Change::command(format!("apt-get install {package}")))
        }
        None => subject.missing(
            "not found",
            Change::by_hand(format!("install {program} with this system's package manager")),
        ),
    }
}
