// SPDX-License-Identifier: GPL-2.0-only
//
// Bugs, for the tests of `slat check`, one at a time: kvm.slat_fault=N is the one that is there.
//
//  1  a write to one page in 64 is not marked as dirty
//  2  KVM_GET_DIRTY_LOG takes bits without protecting their pages
//  3  KVM_CLEAR_DIRTY_LOG takes bits without protecting their pages
//  4  KVM_CLEAR_DIRTY_LOG does not protect the last page of 64
//  5  the host unmaps more than one page, and the last of them stays mapped in the guest
//  6  the host unmaps or moves one page, and it stays mapped in the guest
//  7  an unmapping never ends, so that faults are tried again for ever
//  8  a read-only memslot can be written
//
// file: virt/kvm/kvm_main.c
// leaves 1: module_param(slat_fault, uint, 0644);
// leaves 5: slat_fault ==
// leaves 3: slat_fault !=

@@
identifier range;
@@
+unsigned int slat_fault;
+module_param(slat_fault, uint, 0644);
+EXPORT_SYMBOL_GPL(slat_fault);
+
 kvm_mmu_unmap_gfn_range(..., struct kvm_gfn_range *range)
 {
 ...
+	if (slat_fault == 5 && range->end - range->start > 1)
+		range->end--;
+	if (slat_fault == 6 && range->end - range->start == 1)
+		return false;
 return ...;
 }

@@
@@
 kvm_mmu_invalidate_end(...)
 {
 ...
-	kvm->mmu_invalidate_in_progress--;
+	if (slat_fault != 7)
+		kvm->mmu_invalidate_in_progress--;
 ...
 }

@@
expression list rest;
@@
 kvm_get_dirty_log_protect(...)
 {
 <...
-	kvm_arch_mmu_enable_log_dirty_pt_masked(rest);
+	if (slat_fault != 2)
+		kvm_arch_mmu_enable_log_dirty_pt_masked(rest);
 ...>
 }

@@
expression kvm, memslot, offset, mask;
@@
 kvm_clear_dirty_log_protect(...)
 {
 <...
-	kvm_arch_mmu_enable_log_dirty_pt_masked(kvm, memslot, offset, mask);
+	if (slat_fault == 4)
+		mask &= ~(1UL << 63);
+	if (slat_fault != 3 && mask)
+		kvm_arch_mmu_enable_log_dirty_pt_masked(kvm, memslot, offset, mask);
 ...>
 }

@@
identifier slot;
@@
 memslot_is_readonly(const struct kvm_memory_slot *slot)
 {
-	return slot->flags & KVM_MEM_READONLY;
+	return slat_fault == 8 ? false : slot->flags & KVM_MEM_READONLY;
 }

@@
@@
 mark_page_dirty_in_slot(..., const struct kvm_memory_slot *memslot, gfn_t gfn)
 {
 ...
+	if (slat_fault == 1 && (gfn & 63) == 5)
+		return;
 if (memslot && kvm_slot_dirty_track_enabled(memslot)) { ... }
 ...
 }
