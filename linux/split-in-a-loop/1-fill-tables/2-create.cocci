// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves 1: ret = stage2_set_prot_attr(pgt, prot, &attr);
// leaves 1: ret = stage2_fill_unlinked(mm_ops, pgtable, phys, attr, level + 1, mc,

@@
typedef kvm_pte_t;
identifier map_data, walker, data;
@@
 kvm_pgtable_stage2_create_unlinked(struct kvm_pgtable *pgt, u64 phys, s8 level,
 				    enum kvm_pgtable_prot prot, void *mc, bool force_pte)
 {
-	struct stage2_map_data map_data = { ... };
-	struct kvm_pgtable_walker walker = { ... };
-	struct kvm_pgtable_walk_data data = { ... };
 	struct kvm_pgtable_mm_ops *mm_ops = pgt->mm_ops;
 	kvm_pte_t *pgtable;
+	kvm_pte_t attr;
 	int ret;
 ...
-	ret = stage2_set_prot_attr(pgt, prot, &map_data.attr);
+	ret = stage2_set_prot_attr(pgt, prot, &attr);
 ...
-	ret = __kvm_pgtable_walk(...);
+	ret = stage2_fill_unlinked(mm_ops, pgtable, phys, attr, level + 1, mc, force_pte);
 ...
 }
