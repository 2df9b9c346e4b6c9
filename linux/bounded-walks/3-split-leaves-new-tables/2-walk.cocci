// SPDX-License-Identifier: GPL-2.0-only
//
// Where the entry is a table now and a visitor was called, the visitor of a leaf put it there.
// Entries that are no table do not come to the second test.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves 1: if (!table || (reload && data->walker->skip_new)) {

@@
identifier data, table, reload;
statement S;
@@
 __kvm_pgtable_visit(struct kvm_pgtable_walk_data *data, ...)
 {
 ...
 if (reload) { ... }
 ...
-if (!table)
+if (!table || (reload && data->walker->skip_new))
 S
 ...
 }
