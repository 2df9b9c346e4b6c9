// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests: Protects a page less than it is asked to.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves: size - PAGE_SIZE

@@
expression list rest;
@@
 kvm_pgtable_stage2_wrprotect(...)
 {
 <...
 stage2_update_leaf_attrs(pgt, addr,
-size
+size - PAGE_SIZE
 , rest)
 ...>
 }
