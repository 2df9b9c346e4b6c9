// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/kvm/mmu.c
// leaves 2: kvm_arch_dirty_log_assert(kvm);
// leaves 3: kvm_arch_dirty_log_lock(kvm);
// leaves 3: kvm_arch_dirty_log_unlock(kvm);
// leaves 1: kvm_arch_dirty_log_resched(kvm);
// leaves 2: if (!kvm->arch.slat_read_lock)

@@
@@
 stage2_apply_range(...)
 {
 <...
-	cond_resched_rwlock_write(&kvm->mmu_lock);
+	if (fn == slat_kvm_pgtable_stage2_wrprotect)
+		kvm_arch_dirty_log_resched(kvm);
+	else
+		cond_resched_rwlock_write(&kvm->mmu_lock);
 ...>
 }

@@
identifier f = { kvm_mmu_split_huge_pages, kvm_mmu_split_memory_region,
		 kvm_mmu_wp_memory_region, kvm_arch_mmu_enable_log_dirty_pt_masked };
identifier kvm;
@@
 f(...)
 {
 <...
(
-	lockdep_assert_held_write(&kvm->mmu_lock);
+	kvm_arch_dirty_log_assert(kvm);
|
-	write_lock(&kvm->mmu_lock);
+	kvm_arch_dirty_log_lock(kvm);
|
-	write_unlock(&kvm->mmu_lock);
+	kvm_arch_dirty_log_unlock(kvm);
|
-	kvm_nested_s2_wp(kvm);
+	if (!kvm->arch.slat_read_lock)
+		kvm_nested_s2_wp(kvm);
)
 ...>
 }
