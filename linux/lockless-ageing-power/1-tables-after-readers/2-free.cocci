// SPDX-License-Identifier: GPL-2.0-only
//
// `full` frees the tables of a VM that has no users: nobody walks in them.
//
// file: arch/powerpc/kvm/book3s_64_mmu_radix.c
// leaves 3: if (full)
// leaves 2: call_rcu(&replaced->rcu, kvmppc_free_replaced);
// leaves 1: kvmppc_unmap_free_pud_entry_table(kvm, pud, gpa, lpid,
// leaves 1: kvmppc_unmap_free_pmd_entry_table(kvm, pmd, gpa, lpid,
// leaves 1: kfree(replaced);

@@
identifier pte, full;
@@
 kvmppc_unmap_free_pte(struct kvm *kvm, pte_t *pte, bool full, ...)
 {
 ...
-	kvmppc_pte_free(pte);
+	/* Otherwise the caller does, after a grace period. */
+	if (full)
+		kvmppc_pte_free(pte);
 }

@@
identifier pmd, full, p;
@@
 kvmppc_unmap_free_pmd(struct kvm *kvm, pmd_t *pmd, bool full, ...)
 {
 <...
 kvmppc_unmap_free_pte(...);
-	pmd_clear(p);
+	if (full)
+		pmd_clear(p);
 ...>
-	kvmppc_pmd_free(pmd);
+	if (full)
+		kvmppc_pmd_free(pmd);
 }

@@
identifier kvm, pmd, pte, gpa, lpid;
@@
 kvmppc_unmap_free_pmd_entry_table(struct kvm *kvm, pmd_t *pmd, unsigned long gpa, u64 lpid
+	, struct kvmppc_replaced *replaced
 )
 {
 ...
 kvmppc_unmap_free_pte(kvm, pte, false, lpid);
+	replaced->pte = pte;
+	call_rcu(&replaced->rcu, kvmppc_free_replaced);
 }

@@
identifier kvm, pud, pmd, gpa, lpid;
@@
 kvmppc_unmap_free_pud_entry_table(struct kvm *kvm, pud_t *pud, unsigned long gpa, u64 lpid
+	, struct kvmppc_replaced *replaced
 )
 {
 ...
 kvmppc_unmap_free_pmd(kvm, pmd, false, lpid);
+	replaced->pmd = pmd;
+	call_rcu(&replaced->rcu, kvmppc_free_replaced);
 }

@@
identifier kvm, pgtable, pte, level, gpa, ret;
@@
 kvmppc_create_pte(struct kvm *kvm, pgd_t *pgtable, pte_t pte, unsigned long gpa,
 		   unsigned int level, ...)
 {
 ...
+	struct kvmppc_replaced *replaced = NULL;
 int ret;
 ...
 spin_unlock(&kvm->mmu_lock);
+	kfree(replaced);
 ...
 }

@@
identifier kvm, pud, gpa, lpid;
@@
+	ret = -ENOMEM;
+	if (!replaced)
+		goto out_unlock;
-	kvmppc_unmap_free_pud_entry_table(kvm, pud, gpa, lpid);
+	kvmppc_unmap_free_pud_entry_table(kvm, pud, gpa, lpid, replaced);
+	replaced = NULL;

@@
identifier kvm, pmd, gpa, lpid;
@@
+	ret = -ENOMEM;
+	if (!replaced)
+		goto out_unlock;
-	kvmppc_unmap_free_pmd_entry_table(kvm, pmd, gpa, lpid);
+	kvmppc_unmap_free_pmd_entry_table(kvm, pmd, gpa, lpid, replaced);
+	replaced = NULL;

@@
@@
 kvmppc_radix_exit(...)
 {
+	/* Replaced tables are still freed. */
+	rcu_barrier();
 ...
 }
