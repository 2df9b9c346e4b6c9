// SPDX-License-Identifier: GPL-2.0-only
//
// Bugs, for the tests of `slat check`, with bugs/check-kvm:
//
//  21  huge pages in a memslot whose host address lies otherwise in them than its guest address
//  22  a write to a page that was read before is not marked as dirty
//  23  the log does not protect the last page of those that it takes together
//  24  a memslot that is moved or deleted stays mapped
//  25  a log that starts protects nothing
//
// file: arch/arm64/kvm/mmu.c
// leaves 4: slat_fault ==
// leaves 2: slat_fault !=

@@
identifier map_size;
@@
 fault_supports_stage2_huge_mapping(..., unsigned long map_size)
 {
 <...
 if (
-map_size == PAGE_SIZE
+map_size == PAGE_SIZE || slat_fault == 21
 )
 	return true;
 ...>
 }

@@
@@
 user_mem_abort(...)
 {
 ...
 if (
-writable && !ret
+writable && !ret && !(slat_fault == 22 && fault_is_perm)
 ) { ... mark_page_dirty_in_slot(...); ... }
 ...
 }

@@
@@
 kvm_arch_mmu_enable_log_dirty_pt_masked(...)
 {
 ...
-	kvm_stage2_wp_range(&kvm->arch.mmu, start, end);
+	if (slat_fault != 23 || end - start > PAGE_SIZE)
+		kvm_stage2_wp_range(&kvm->arch.mmu, start,
+				    end - (slat_fault == 23 ? PAGE_SIZE : 0));
 ...
 }

@@
@@
+extern unsigned int slat_fault;
+
 kvm_mmu_wp_memory_region(...)
 {
 ...
-	kvm_stage2_wp_range(&kvm->arch.mmu, start, end);
+	if (slat_fault != 25)
+		kvm_stage2_wp_range(&kvm->arch.mmu, start, end);
 ...
 }

@@
@@
 kvm_arch_flush_shadow_memslot(...)
 {
 ...
+	if (slat_fault == 24)
+		return;
 write_lock(&kvm->mmu_lock);
 ...
 }
