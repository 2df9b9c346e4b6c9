// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests: a split in a loop maps its pages for writing, so that the log misses what
// is written to them.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves 1: attr | KVM_PTE_LEAF_ATTR_LO_S2_S2AP_W

@@
@@
 stage2_fill_unlinked(...)
 {
 <...
 kvm_init_valid_leaf_pte(phys,
-			 attr,
+			 attr | KVM_PTE_LEAF_ATTR_LO_S2_S2AP_W,
 level)
 ...>
 }
