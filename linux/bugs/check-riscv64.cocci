// SPDX-License-Identifier: GPL-2.0-only
//
// Bugs, for the tests of `slat check`, with bugs/check-kvm:
//
//  31  a log that starts protects nothing
//  32  the log does not protect the last page of those that it takes together
//  33  a memslot that is moved or deleted stays mapped
//  34  a write to a page that was read before is not marked as dirty
//
// file: arch/riscv/kvm/mmu.c
// leaves 2: slat_fault ==
// leaves 3: slat_fault !=

@@
@@
+extern unsigned int slat_fault;
+
 gstage_wp_memory_region(...)
 {
 ...
-	gstage_wp_range(kvm, start, end);
+	if (slat_fault != 31)
+		gstage_wp_range(kvm, start, end);
 ...
 }

@@
@@
 kvm_arch_mmu_enable_log_dirty_pt_masked(...)
 {
 ...
-	gstage_wp_range(kvm, start, end);
+	if (slat_fault != 32 || end - start > PAGE_SIZE)
+		gstage_wp_range(kvm, start, end -
+				(slat_fault == 32 ? PAGE_SIZE : 0));
 }

@@
@@
 kvm_arch_flush_shadow_memslot(...)
 {
 ...
+	if (slat_fault == 33)
+		return;
 spin_lock(&kvm->mmu_lock);
 ...
 }

@@
@@
 kvm_riscv_gstage_map(...)
 {
 int ret;
+	u32 level;
+	pte_t *old;
 <...
-	mark_page_dirty(kvm, gfn);
+	if (slat_fault != 34 || !gstage_get_leaf_entry(kvm, gpa, &old, &level))
+		mark_page_dirty(kvm, gfn);
 ...>
 }
