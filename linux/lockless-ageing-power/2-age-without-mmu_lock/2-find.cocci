// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/powerpc/kvm/book3s_64_mmu_radix.c
// leaves 1: static pte_t *kvmppc_radix_find_young(struct kvm *kvm

@@
typedef bool;
typedef pte_t;
@@
-bool kvm_age_radix(struct kvm *kvm, struct kvm_memory_slot *memslot, unsigned long gfn)
-{
-	...
-}

@@
@@
-bool kvm_test_age_radix(struct kvm *kvm, struct kvm_memory_slot *memslot, unsigned long gfn)
-{
-	...
-}

@@
@@
 kvmppc_hv_handle_set_rc(...) { ... }
+
+static pte_t *kvmppc_radix_find_young(struct kvm *kvm, unsigned long gpa,
+				      unsigned int *shift, pte_t *old)
+{
+	pte_t *ptep;
+
+	/*
+	 * The caller may not hold mmu_lock, but is in an RCU read-side critical
+	 * section, which keeps the tables. The leaf can change at any time; *old
+	 * is what was read. If the guest has got a hash table, the tree is freed
+	 * after a grace period.
+	 */
+	if (!smp_load_acquire(&kvm->arch.radix))
+		return NULL;
+	ptep = find_kvm_secondary_pte_unlocked(kvm, gpa, shift);
+	if (!ptep)
+		return NULL;
+
+	/* A large page may have become a link to a table since. */
+	*old = READ_ONCE(*ptep);
+	if (!pte_present(*old) || !(pte_val(*old) & _PAGE_PTE) || !pte_young(*old))
+		return NULL;
+	return ptep;
+}
