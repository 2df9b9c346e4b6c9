// SPDX-License-Identifier: GPL-2.0-only
//
// Bugs, for the tests of `slat check`, with bugs/check-kvm:
//
//  15  the last of the pages that become private or shared stays mapped as it was
//  16  huge pages of shared memory where some of the pages are private
//
// file: arch/x86/kvm/mmu/mmu.c
// leaves 1: slat_fault == 15
// leaves 1: slat_fault != 16

@@
@@
+extern unsigned int slat_fault;
+
 hugepage_set_mixed(...)
 {
-	lpage_info_slot(gfn, slot, level)->disallow_lpage |= KVM_LPAGE_MIXED_FLAG;
+	if (slat_fault != 16)
+		lpage_info_slot(gfn, slot, level)->disallow_lpage |= KVM_LPAGE_MIXED_FLAG;
 }

@@
@@
 kvm_arch_pre_set_memory_attributes(...)
 {
 ...
+	if (slat_fault == 15)
+		range->end--;
 return kvm_unmap_gfn_range(kvm, range);
 }
