// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests of `slat check`, with bugs/check-kvm:
//
//  18  pages that are unmapped are still counted (pages_4k, pages_2m)
//
// file: arch/x86/kvm/mmu.h
// leaves 1: slat_fault !=

@@
@@
+extern unsigned int slat_fault;
+
 kvm_update_page_stats(..., int count)
 {
-	atomic64_add(count, &kvm->stat.pages[level - 1]);
+	if (slat_fault != 18 || count > 0)
+		atomic64_add(count, &kvm->stat.pages[level - 1]);
 }
