//! Findings on the processor, and on its support for KVM.

use super::Group::Processor;
use super::{Change, Evidence, Finding, For, Subject};
pub use crate::needs::{CACHES, GUEST_CODE};
use slat_kvm::HostKvm;

pub(super) fn findings(evidence: &Evidence) -> Vec<Finding> {
    vec![
        guest_code(evidence),
        below(evidence),
        assistance(evidence),
        paging(evidence),
        caches(evidence),
    ]
}

fn caches(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Processor,
        CACHES,
        For::Only(&["boot-caches"]),
        "KVM maintains all of a guest's memory each time one of its vCPUs switches its caches, on \
         an Arm CPU without FEAT_S2FWB.",
    );
    match &*evidence.host.cpu.architecture {
        // The kernel does not tell user space whether the CPU has FEAT_S2FWB.
        "aarch64" => {
            subject.ok("yes, unless this CPU has FEAT_S2FWB: then it costs next to nothing")
        }
        _ => subject.missing(
            "of Arm only",
            Change::command(
                "slat emulate --arch aarch64 --cpu cortex-a76 -- bench boot-caches --memory 16m",
            ),
        ),
    }
}

fn guest_code(evidence: &Evidence) -> Finding {
    let cpu = &evidence.host.cpu;
    let subject = Subject::new(
        Processor,
        GUEST_CODE,
        For::Guests,
        "The guest's program is machine code, written for each architecture.",
    );
    let found = format!("{}, {}", cpu.architecture, cpu.model);
    match &*cpu.architecture {
        "x86_64" | "aarch64" => subject.ok(found),
        _ => subject.missing(
            found,
            Change::nothing("guests are x86-64 and arm64 only; the engine's scenarios run here"),
        ),
    }
}

fn below(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Processor,
        "hypervisor below",
        For::All,
        "Times of a host that is itself a guest are those of two hypervisors.",
    );
    let virtualisation = &evidence.host.virtualisation;
    let product = virtualisation.product.0.as_ref().map(|product| format!(" ({product})"));
    let product = product.unwrap_or_default();
    match virtualisation.hypervisor.0 {
        Some(false) => subject.ok(format!("none{product}")),
        Some(true) => subject.limited(
            format!("this host is itself a guest{product}"),
            Change::nothing("compare within one run only, or take a bare-metal host"),
        ),
        None => subject.limited(
            format!("this processor does not tell{product}"),
            Change::by_hand("ask `systemd-detect-virt`"),
        ),
    }
}

fn assistance(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Processor,
        "hardware virtualisation",
        For::Guests,
        "With it an exit takes a microsecond or less, and guests run any code natively.",
    );
    match () {
        () if evidence.has_flag("vmx") => subject.ok("vmx (Intel VT-x)"),
        () if evidence.has_flag("svm") => subject.ok("svm (AMD-V)"),
        () if evidence.host.cpu.architecture != "x86_64" && evidence.kvm.is_ok() => {
            subject.ok("KVM works, so the processor has it")
        }
        () if evidence.is_software_kvm() => subject.limited(
            format!("neither vmx nor svm: {} runs guests in software", module(evidence)),
            Change::nothing("the hypervisor below gives this host no nested virtualisation"),
        ),
        () if evidence.host.cpu.architecture != "x86_64" => {
            subject.missing("not known without KVM", Change::See(super::kvm::DEVICE))
        }
        () if evidence.flags().is_none() => subject.untold("proc/cpuinfo"),
        () => subject.missing("neither vmx nor svm", no_assistance(evidence)),
    }
}

/// Returns the change that makes hardware virtualisation available to this host.
pub(super) fn no_assistance(evidence: &Evidence) -> Change {
    match evidence.is_guest() {
        true => Change::by_hand(
            "switch nested virtualisation on in the hypervisor below (a cloud: another type of \
             instance)",
        ),
        false if evidence.host.cpu.architecture == "x86_64" => {
            Change::by_hand("switch VT-x or SVM on in the firmware's setup")
        }
        false => {
            Change::by_hand("boot a kernel that has KVM, at the level of a hypervisor (Arm: EL2)")
        }
    }
}

fn paging(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Processor,
        "two-dimensional paging",
        For::Guests,
        "It decides which tables are measured: EPT or NPT, or shadow tables, where a guest's own \
         page tables cost faults, too.",
    );
    let kinds = [("kvm_intel", "ept", "EPT"), ("kvm_amd", "npt", "NPT")];
    for (module, name, kind) in kinds {
        let Some(value) = evidence.parameter(module, name) else { continue };
        return match value {
            "Y" | "1" => subject.ok(kind),
            _ => subject.limited(
                format!("{kind} is off: shadow tables"),
                Change::command(format!("modprobe -r {module} && modprobe {module} {name}=1")),
            ),
        };
    }
    match &evidence.kvm {
        Ok(_) if evidence.is_software_kvm() => subject.limited(
            "shadow tables",
            Change::nothing(format!("{} has no other tables", module(evidence))),
        ),
        Ok(_) if evidence.host.cpu.architecture == "x86_64" => subject.limited(
            "the kernel does not tell",
            Change::nothing("KVM's modules show no parameters here"),
        ),
        Ok(_) => subject.ok("stage 2"),
        Err(_) => subject.missing("not known without KVM", Change::See(super::kvm::DEVICE)),
    }
}

fn module(evidence: &Evidence) -> &str {
    let named = |kvm: &HostKvm| !kvm.module.is_empty();
    match &evidence.kvm {
        Ok(kvm) if named(kvm) => &kvm.module,
        _ => "KVM",
    }
}
