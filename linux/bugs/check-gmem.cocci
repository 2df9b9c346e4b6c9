// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests of `slat check`, with bugs/check-kvm:
//
//  14  of a hole in a guest_memfd, the last page stays mapped in the guest
//
// file: virt/kvm/guest_memfd.c
// leaves 1: slat_fault ==

@@
@@
+extern unsigned int slat_fault;
+
 kvm_gmem_invalidate_begin(..., pgoff_t end)
 {
 ...
 unsigned long index;
+
+	if (slat_fault == 14 && end - start > 1)
+		end--;
 ...
 }
