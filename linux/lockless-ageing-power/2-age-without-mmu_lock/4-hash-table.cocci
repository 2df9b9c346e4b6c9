// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/powerpc/kvm/book3s_64_mmu_hv.c
// leaves 1: static void kvmppc_lock_hpt(

@@
typedef bool;
@@
-bool kvm_age_gfn_hv(struct kvm *kvm, struct kvm_gfn_range *range)
-{
-	...
-}

@@
@@
-bool kvm_test_age_gfn_hv(struct kvm *kvm, struct kvm_gfn_range *range)
-{
-	...
-}

@@
@@
 kvmppc_core_flush_memslot_hv(...) { ... }
+
+static void kvmppc_lock_hpt(struct kvm *kvm, struct kvm_gfn_range *range)
+{
+	/* mmu_lock keeps the hash table. */
+	if (range->lockless)
+		spin_lock(&kvm->mmu_lock);
+}
+
+static void kvmppc_unlock_hpt(struct kvm *kvm, struct kvm_gfn_range *range)
+{
+	if (range->lockless)
+		spin_unlock(&kvm->mmu_lock);
+}
