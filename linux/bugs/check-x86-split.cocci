// SPDX-License-Identifier: GPL-2.0-only
//
// Bugs, for the tests of `slat check`, with bugs/check-kvm:
//
//  10  a split of a huge page swaps neighbouring pages
//  17  a huge page that is split to execute from it lets all of its pages be written
//
// file: arch/x86/kvm/mmu/spte.c
// leaves 2: slat_fault ==

@@
identifier index;
@@
+extern unsigned int slat_fault;
+
 make_huge_page_split_spte(..., int index)
 {
+	index ^= slat_fault == 10;
 ...
 }

@@
@@
 make_huge_page_split_spte(...)
 {
 <...
-			child_spte = make_spte_executable(child_spte);
+			child_spte = make_spte_executable(child_spte) |
+				     (slat_fault == 17 ? PT_WRITABLE_MASK : 0);
 ...>
 }
