// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/x86/kvm/mmu/tdp_mmu.c
// leaves 1: kvm_tdp_mmu_age_spte(kvm, iter);
// versions: ..6.15

@@
@@
 kvm_tdp_mmu_handle_gfn(...)
 {
 <...
(
-	rcu_read_lock();
|
-	rcu_read_unlock();
)
 ...>
 }

@@
identifier kvm, iter, new_spte;
@@
 age_gfn_range(struct kvm *kvm, struct tdp_iter *iter, ...)
 {
 ...
 if (spte_ad_enabled(iter->old_spte)) {
-	iter->old_spte = tdp_mmu_clear_spte_bits(...);
-	new_spte = ...;
+	kvm_tdp_mmu_age_spte(kvm, iter);
+	return true;
 } else { ... }
 ...
 }
