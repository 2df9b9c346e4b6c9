// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests of `slat check`, with bugs/check-kvm:
//
//  10  a split of a huge page swaps neighbouring pages
//
// file: arch/x86/kvm/mmu/spte.c
// leaves 1: slat_fault ==

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
