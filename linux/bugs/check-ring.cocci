// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests of `slat check`, with bugs/check-kvm:
//
//  9  a reset of a dirty ring does not protect the first page of a run
//
// file: virt/kvm/dirty_ring.c
// leaves 1: slat_fault ==

@@
@@
+extern unsigned int slat_fault;
+
 kvm_reset_dirty_gfn(..., u64 mask)
 {
 ...
+	if (slat_fault == 9)
+		mask &= mask - 1;
 if (!mask)
 	return;
 ...
 }
