//! Counts calls of the kernel's functions. A second machine counts them, because a kprobe takes
//! hundreds of instructions, which would be added to those of the phases.

use super::CommandEnd;
use crate::cli::EmulateArgs;
use slat_kernel::vm::Architecture;
use slat_kvm::probes::CALLS;
use slat_lab::failure::no_report;

/// Functions whose calls are visits of page-table entries, flushes, TLB invalidations and locks. A
/// kernel may lack those that end in `?`.
const ARM: [&str; 13] = [
    "stage2_map_walker?",
    "stage2_unmap_walker?",
    "stage2_attr_walker?",
    "stage2_age_walker?",
    "stage2_split_walker?",
    "stage2_flush_walker?",
    "stage2_flush_vm?",
    "__kvm_tlb_flush_vmid?",
    "__kvm_tlb_flush_vmid_ipa?",
    "__kvm_tlb_flush_vmid_range?",
    "_raw_write_lock?",
    "_raw_read_lock?",
    "queued_write_lock_slowpath?",
];
const RISCV: [&str; 6] = [
    "kvm_riscv_gstage_map?",
    "kvm_riscv_hfence_gvma_vmid_gpa?",
    "kvm_riscv_hfence_gvma_vmid_all?",
    "kvm_flush_remote_tlbs?",
    "kvm_flush_remote_tlbs_range?",
    "_raw_spin_lock?",
];
const X86: [&str; 9] = [
    "tdp_mmu_split_huge_page?",
    "tdp_mmu_link_sp?",
    "tdp_mmu_zap_spte_atomic?",
    "kvm_tdp_mmu_map?",
    "kvm_flush_remote_tlbs?",
    "kvm_flush_remote_tlbs_range?",
    "_raw_write_lock?",
    "_raw_read_lock?",
    "queued_write_lock_slowpath?",
];

/// Returns the functions to count: those that were asked for, or with `--count-instructions` the
/// default list of the architecture.
pub fn asked(args: &EmulateArgs, words: &[String], arch: Architecture) -> Vec<String> {
    // Only `bench` has the option `--probe`.
    if words.first().is_none_or(|word| word != "bench") {
        return Vec::new();
    }
    match &args.probe[..] {
        [none] if none == "none" => Vec::new(),
        [] if args.count_instructions => match arch {
            Architecture::Aarch64 => ARM.map(str::to_owned).to_vec(),
            Architecture::Riscv64 => RISCV.map(str::to_owned).to_vec(),
            // No command runs there that counts by itself.
            Architecture::Ppc64le => Vec::new(),
            Architecture::X86_64 => X86.map(str::to_owned).to_vec(),
        },
        asked => asked.to_vec(),
    }
}

/// Returns the words of the command that counts calls of these functions.
pub fn words(words: &[String], probes: &[String]) -> Vec<String> {
    let mut words = words.to_vec();
    words.extend(["--probe".to_owned(), probes.join(",")]);
    words
}

/// Adds the calls that one run counted to the results of another.
///
/// # Errors
/// [`Failure::NoReport`](slat_lab::failure::Failure::NoReport) if the run that counted calls
/// failed.
pub fn merge(mut ended: CommandEnd, counted: CommandEnd) -> anyhow::Result<CommandEnd> {
    if counted.exit_code != 0 {
        return Err(no_report(format!(
            "calls could not be counted (--probe none counts none):\n{}",
            counted.stderr
        )));
    }
    let (Some(report), Some(counted)) = (&mut ended.report, counted.report) else {
        return Ok(ended);
    };
    report.add(&counted, CALLS)?;
    Ok(ended)
}
