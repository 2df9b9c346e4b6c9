// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/kvm/mmu.c
// leaves 1: slat_kvm_wp_masked(kvm, base_gfn, mask);

@@
@@
 kvm_arch_mmu_enable_log_dirty_pt_masked(...)
 {
 ...
-	kvm_stage2_wp_range(&kvm->arch.mmu, start, end);
+	slat_kvm_wp_masked(kvm, base_gfn, mask);
 ...
 }
