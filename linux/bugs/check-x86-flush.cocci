// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests of `slat check`, with bugs/check-kvm:
//
//  13  a memslot that is moved or deleted stays mapped
//
// file: arch/x86/kvm/mmu/mmu.c
// leaves 1: slat_fault ==

@@
@@
+extern unsigned int slat_fault;
+
 kvm_arch_flush_shadow_memslot(...)
 {
 ...
+	if (slat_fault == 13)
+		return;
 write_lock(&kvm->mmu_lock);
 ...
 }
