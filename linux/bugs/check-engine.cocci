// SPDX-License-Identifier: GPL-2.0-only
//
// Bugs, for the tests of KVM on the engine, with slat-engine and bugs/check-kvm:
//
//  26  a fault that made one page in 64 writable says that it did not: KVM does not mark it dirty
//  27  a fault on a page inside a block leaves the block, and gives rights to all of it
//
// file: arch/arm64/kvm/slat.c
// leaves 2: slat_fault ==

@@
@@
+extern unsigned int slat_fault;
+
 slat_enter(...)
 {
 ...
 }

@@
@@
 slat_relax(void *vm, u64 addr, ...)
 {
+	int ret = slat_kvm_relax(vm, addr, slat_prot(prot));
+
+	return slat_fault == 26 && (addr >> PAGE_SHIFT & 63) == 5 ? -EAGAIN : ret;
-	return slat_kvm_relax(vm, addr, slat_prot(prot));
 }

@@
@@
 slat_kvm_pgtable_stage2_map(struct kvm_pgtable *pgt, u64 addr, u64 size, ...)
 {
 ...
 slat_assert_read(pgt);
+	if (slat_fault == 27 && size == PAGE_SIZE && !slat_kvm_relax(vm, addr, slat_prot(prot)))
+		return 0;
 ...
 }
