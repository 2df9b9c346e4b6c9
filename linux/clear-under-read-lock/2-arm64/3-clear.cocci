// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/kvm/mmu.c
// leaves 1: kvm_pgtable_stage2_wrprotect_shared, false);

@@
identifier kvm, start, end;
@@
 kvm_arch_mmu_enable_log_dirty_pt_masked(...)
 {
 ...
+	if (kvm_arch_clears_dirty_log_shared(kvm)) {
+		lockdep_assert_held(&kvm->mmu_lock);
+		stage2_apply_range(&kvm->arch.mmu, start, end,
+				   kvm_pgtable_stage2_wrprotect_shared, false);
+		return;
+	}
+
 	lockdep_assert_held_write(&kvm->mmu_lock);
 ...
 kvm_stage2_wp_range(&kvm->arch.mmu, start, end);
 ...
 }
