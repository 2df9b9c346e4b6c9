//! Findings on the programs that `slat emulate` needs: an emulator, and programs that fetch and
//! unpack a kernel.

use super::Group::Tools;
use super::{Change, EMULATE, Evidence, Finding, For, Subject};
use slat_kernel::vm::qemu::{AARCH64, X86_64};

/// Program that unpacks the package of a kernel.
pub const DPKG_DEB: &str = "dpkg-deb";
/// Program that fetches the package of a kernel.
const APT: &str = "apt-get";

const TOOLS: For = For::Only(&[EMULATE]);

pub(super) fn findings(evidence: &Evidence) -> Vec<Finding> {
    let tools = [
        (X86_64.program, X86_64.package, "Emulates an x86-64 machine with NPT and its KVM."),
        (AARCH64.program, AARCH64.package, "Emulates an arm64 machine with stage 2 and its KVM."),
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
