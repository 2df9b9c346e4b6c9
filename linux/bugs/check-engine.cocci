// SPDX-License-Identifier: GPL-2.0-only
//
// Bugs, for the tests of KVM on the engine, with slat-engine and bugs/check-kvm:
//
//  26  a flush on all CPUs does nothing, so that memory stays mapped after an unmap
//  27  a fault that made one page in 64 writable says that it did not: KVM does not mark it dirty
//  28  a fault on a page inside a block leaves the block, and gives rights to all of it
//
// file: arch/arm64/kvm/slat.c
// leaves 5: slat_fault ==

@@
@@
+extern unsigned int slat_fault;
+
 slat_c_flush_all(...)
 {
+	if (slat_fault == 26)
+		return;
 ...
 }

@@
@@
 slat_c_flush_range(...)
 {
+	if (slat_fault == 26)
+		return;
 ...
 }

@@
@@
 slat_c_flush_ipa(...)
 {
+	if (slat_fault == 26)
+		return;
 ...
 }

@@
identifier ret;
@@
 slat_kvm_pgtable_stage2_map(struct kvm_pgtable *pgt, u64 addr, u64 size, ...)
 {
 ...
+	if (slat_fault == 28 && size == PAGE_SIZE && !slat_kvm_relax(vm, addr, slat_prot(prot)))
+		return 0;
 ret = slat_kvm_map(...);
 ...
+	if (slat_fault == 27 && prot & KVM_PGTABLE_PROT_W && (addr >> PAGE_SHIFT & 63) == 5)
+		ret = -EAGAIN;
 return ret;
 }
