// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests: a split keeps a reference too many, so that tables are never given back.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves: mm_ops->get_page(childp);

@@
identifier childp, new;
@@
 stage2_split_walker(...)
 {
 ...
 new = kvm_init_table_pte(childp, mm_ops);
+mm_ops->get_page(childp);
 ...
 }
