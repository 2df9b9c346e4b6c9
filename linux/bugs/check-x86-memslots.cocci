// SPDX-License-Identifier: GPL-2.0-only
//
// Bugs, for the tests of `slat check`, with bugs/check-kvm:
//
//  11  huge pages in a memslot whose host address lies otherwise in them than its guest address
//  12  a log that starts protects nothing
//
// file: arch/x86/kvm/x86.c
// leaves 2: slat_fault !=

@@
@@
+extern unsigned int slat_fault;
+
 kvm_alloc_memslot_metadata(...)
 {
 <...
 if (
-(slot->base_gfn ^ ugfn) & (KVM_PAGES_PER_HPAGE(level) - 1)
+slat_fault != 11 && (slot->base_gfn ^ ugfn) & (KVM_PAGES_PER_HPAGE(level) - 1)
 ) { ... }
 ...>
 }

@@
expression kvm, new;
@@
 kvm_mmu_slot_apply_flags(...)
 {
 <...
-	kvm_mmu_slot_remove_write_access(kvm, new, PG_LEVEL_4K);
+	if (slat_fault != 12)
+		kvm_mmu_slot_remove_write_access(kvm, new, PG_LEVEL_4K);
 ...>
 }
