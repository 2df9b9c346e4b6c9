// SPDX-License-Identifier: GPL-2.0-only
//
// The bugs of bugs/check-engine on RISC-V:
//
//  26  KVM does not mark one page in 64 as dirty, although a fault made it writable
//  27  a fault on a page inside a block leaves the block, and gives rights to all of it
//
// file: arch/riscv/kvm/slat.c
// leaves 1: slat_fault == 27
// leaves 1: slat_fault != 26

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
 slat_map_fault(...)
 {
 <...
(
-	!logging
+	(!logging || slat_fault == 27)
 &&	pfn_valid(pfn)
|
-	mark_page_dirty_in_slot(kvm, slot, gfn);
+	if (slat_fault != 26 || (gfn & 63) != 5)
+		mark_page_dirty_in_slot(kvm, slot, gfn);
)
 ...>
 }
