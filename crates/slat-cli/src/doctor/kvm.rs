//! Findings on the capabilities of the host's KVM, and on the parameters of its modules.

use super::Group::Kvm;
use super::processor::no_assistance;
use super::{Change, Evidence, Finding, For, Subject};
pub use crate::needs::KVM_DEVICE as DEVICE;
use slat_kvm::{Error, HostKvm};

/// Size of an entry of a dirty ring, in bytes.
const RING_ENTRY: u64 = 16;

const LOGS: For = For::Only(&["dirty-log", "migrate", "snapshot"]);

pub(super) fn findings(evidence: &Evidence) -> Vec<Finding> {
    vec![
        device(evidence),
        capacity(evidence),
        manual_protect(evidence),
        ring(evidence),
        tdp_mmu(evidence),
        eager_split(evidence),
        nx_huge_pages(evidence),
        pml(evidence),
        slot_zap(evidence),
    ]
}

fn device(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Kvm,
        DEVICE,
        For::Guests,
        "Guests run under it; without it there are the engine's scenarios, and slat emulate.",
    );
    match &evidence.kvm {
        Ok(kvm) if kvm.module.is_empty() => subject.ok("usable"),
        Ok(kvm) => subject.ok(format!("usable, by {}", kvm.module)),
        Err(Error::KvmPermission) => subject.missing(
            "there, and not for this user",
            match evidence.is_writable_by_group("dev/kvm") {
                true => Change::command("usermod -aG kvm \"$USER\"    # then log in again"),
                // The file's group may not write it, so joining the group would not help.
                false => Change::command("setfacl -m u:\"$USER\":rw /dev/kvm"),
            },
        ),
        Err(Error::NoKvm) => {
            let module = match () {
                () if evidence.has_flag("vmx") => Some("kvm_intel"),
                () if evidence.has_flag("svm") => Some("kvm_amd"),
                () => None,
            };
            let change = module.map_or_else(
                || no_assistance(evidence),
                |module| Change::command(format!("modprobe {module}")),
            );
            subject.missing("not there, or nothing behind it", change)
        }
        Err(error) => subject.missing(
            error.to_string(),
            Change::nothing("this is no KVM that is known; please report it"),
        ),
    }
}

/// Returns the finding of `look` if KVM can be used. Otherwise the finding refers to that on
/// [`DEVICE`].
fn with_kvm(
    evidence: &Evidence,
    subject: Subject,
    look: impl FnOnce(Subject, &HostKvm) -> Finding,
) -> Finding {
    match &evidence.kvm {
        Ok(kvm) => look(subject, kvm),
        Err(_) => subject.missing("not known without KVM", Change::See(DEVICE)),
    }
}

fn capacity(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Kvm,
        "vCPUs and memslots",
        For::Only(&["dirty-log", "memory-stress", "memslot", "migrate"]),
        "They bound --vcpus, and the slots that a guest's memory can be cut into.",
    );
    with_kvm(evidence, subject, |subject, kvm| {
        subject.ok(format!("at most {} vCPUs, {} memslots", kvm.max_vcpus, kvm.max_memslots))
    })
}

fn slot_zap(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Kvm,
        "memslots deleted alone",
        For::Only(&["memslot"]),
        "A VM that gives up KVM_X86_QUIRK_SLOT_ZAP_ALL keeps its other mappings when a slot moves \
         or goes.",
    );
    let x86 = evidence.host.cpu.architecture == "x86_64";
    with_kvm(evidence, subject, |subject, kvm| match kvm.slot_zap_quirk {
        true => subject.ok("a VM can choose (--disable-slot-zap-all)"),
        false if x86 => subject.limited(
            "each memslot that is moved or deleted takes all mappings with it",
            Change::nothing("a newer kernel has it: 6.12"),
        ),
        false => subject.ok("always so on this architecture"),
    })
}

fn manual_protect(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Kvm,
        "manual protect",
        LOGS,
        "KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2: a log is read and cleared by two calls, in chunks; \
         initially set: enabling it protects nothing.",
    );
    let newer = || Change::nothing("a newer kernel has it: 5.2, and 5.7 for initially set");
    with_kvm(evidence, subject, |subject, kvm| match (kvm.manual_protect, kvm.initially_set) {
        (true, true) => subject.ok("yes, with initially set"),
        (true, false) => subject.limited("yes, without initially set", newer()),
        (false, _) => subject.missing("no", newer()),
    })
}

fn ring(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Kvm,
        "dirty ring",
        LOGS,
        "KVM_CAP_DIRTY_LOG_RING: vCPUs name the pages they wrote, and nobody scans a bitmap.",
    );
    with_kvm(evidence, subject, |subject, kvm| match kvm.dirty_ring_bytes {
        0 => subject
            .missing("no", Change::nothing("a newer kernel has it: 5.11 on x86, 6.2 on arm64")),
        bytes => subject.ok(format!("up to {} entries a vCPU", bytes / RING_ENTRY)),
    })
}

/// Returns the change that sets a parameter of one of KVM's modules.
fn change_of(evidence: &Evidence, module: &str, name: &str, value: &str) -> Change {
    let file = format!("sys/module/{module}/parameters/{name}");
    if evidence.is_software_kvm() {
        return Change::nothing("a KVM without hardware virtualisation has no use for it");
    }
    if evidence.is_writable(&file) {
        return Change::command(format!("echo {value} > /{file}"));
    }
    let modules = match evidence.files().told("proc/modules") {
        // A kernel without modules has no such file.
        Ok(modules) => modules.unwrap_or_default(),
        Err(file) => {
            return Change::by_hand(format!(
                "KVM reads it as its module is loaded, or at boot if it is built in: \
                 {module}.{name}={value}; /{} does not tell which",
                file.display()
            ));
        }
    };
    let is_loaded = |name: &str| modules.lines().any(|line| line.split(' ').next() == Some(name));
    if !is_loaded(module) {
        return Change::nothing(format!(
            "KVM is built into this kernel, and reads it at boot: {module}.{name}={value}"
        ));
    }
    let user = ["kvm_intel", "kvm_amd"].into_iter().find(|user| is_loaded(user));
    Change::nothing(match user {
        Some(user) if user != module => format!(
            "KVM reads it as it is loaded; with no guest running: modprobe -r {user} {module} && \
             modprobe {module} {name}={value} && modprobe {user}"
        ),
        _ => format!(
            "KVM reads it as it is loaded; with no guest running: modprobe -r {module} && modprobe \
             {module} {name}={value}"
        ),
    })
}

/// Returns the finding on a boolean parameter that only KVM on x86 has.
fn switch(
    evidence: &Evidence,
    subject: Subject,
    [module, wanted]: [&'static str; 2],
    off: &str,
) -> Finding {
    let name = subject.name;
    with_kvm(evidence, subject, |subject, _| match evidence.parameter(module, name) {
        Some("Y" | "1") => subject.ok("on"),
        Some(_) => subject.limited(off, change_of(evidence, module, name, wanted)),
        None if evidence.has_parameter(module, name) => {
            subject.untold(format!("sys/module/{module}/parameters/{name}"))
        }
        None if evidence.host.cpu.architecture == "x86_64" => subject.limited(
            format!("{module} has no such parameter here"),
            Change::nothing("another kernel or processor has it"),
        ),
        None => subject.ok("of x86 only"),
    })
}

fn tdp_mmu(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Kvm,
        "tdp_mmu",
        For::Guests,
        "Faults and ageing in parallel, and splits ahead of writes, are the TDP MMU's; the other \
         is one lock.",
    );
    switch(evidence, subject, ["kvm", "Y"], "off")
}

fn eager_split(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Kvm,
        "eager_page_split",
        LOGS,
        "Off, huge pages are split in write faults while the guest is logged, not ahead of them.",
    );
    // KVM never splits shadow page tables eagerly, whatever the parameter says.
    if evidence.is_software_kvm() {
        return subject
            .limited("no TDP MMU, so it does nothing", change_of(evidence, "kvm", "", ""));
    }
    switch(evidence, subject, ["kvm", "Y"], "off")
}

fn nx_huge_pages(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Kvm,
        "nx_huge_pages",
        For::Only(&["execute"]),
        "On, an instruction fetch from a huge page splits it: what execute is there to measure.",
    );
    switch(evidence, subject, ["kvm", "force"], "off: fetches split nothing")
}

fn pml(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Kvm,
        "pml",
        LOGS,
        "Page-modification logging, of Intel's: the processor notes written pages, and small pages \
         are not write-protected.",
    );
    let has_intel = evidence.host.kvm.parameters.contains_key("kvm_intel");
    match &evidence.kvm {
        Ok(_) if !has_intel => subject.limited(
            "not this processor's: each first write to a page is a fault",
            Change::nothing("only Intel's processors have it, through kvm_intel"),
        ),
        _ => switch(evidence, subject, ["kvm_intel", "1"], "off: each first write is a fault"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_lab::fake::files as fake;

    #[test]
    fn modules_that_cannot_be_read_are_not_said_to_be_built_in() {
        let told = |files: &[(&str, &str)]| {
            let root = fake(files);
            let kvm = Ok(HostKvm::default());
            let mut evidence = Evidence::below(root.path().to_owned(), kvm, Vec::new());
            evidence.host.cpu.architecture = "aarch64".into();
            change_of(&evidence, "kvm", "tdp_mmu", "Y").sentence()
        };
        assert!(told(&[]).contains("built into this kernel"));
        assert!(told(&[("proc/modules", "kvm 1 0 - Live 0x0\n")]).contains("modprobe -r kvm"));
        // A folder in the file's place, as root may read any file.
        let unread = told(&[("proc/modules/x", "")]);
        assert!(unread.contains("/proc/modules does not tell"), "{unread}");
    }

    #[test]
    fn a_parameter_that_cannot_be_read_is_not_missing() {
        let found = |files: &[(&str, &str)]| {
            let root = fake(files);
            let kvm = Ok(HostKvm::default());
            let mut evidence = Evidence::below(root.path().to_owned(), kvm, Vec::new());
            evidence.host.cpu.architecture = "x86_64".into();
            tdp_mmu(&evidence).found
        };
        const FILE: &str = "sys/module/kvm/parameters/tdp_mmu";
        assert_eq!(found(&[(FILE, "Y\n")]), "on");
        assert!(found(&[]).contains("no such parameter"));
        assert!(found(&[(&format!("{FILE}/x"), "")]).contains("tdp_mmu does not tell"));
    }
}
