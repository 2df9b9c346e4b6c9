// SPDX-License-Identifier: GPL-2.0-only
//
// The test stands where a table is entered, once for a table, and covers the root and tables that
// are not linked. The visitor of the entry above, before and after, does not notice.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves 1: if (level > KVM_PGTABLE_LAST_LEVEL - data->walker->skip_levels) {

@@
identifier data, level;
statement S;
@@
 __kvm_pgtable_walk(struct kvm_pgtable_walk_data *data, ..., s8 level)
 {
 ...
 if (WARN_ON_ONCE(...)) S
+
+	/* Do not enter this level: skip the range that the table maps. */
+	if (level > KVM_PGTABLE_LAST_LEVEL - data->walker->skip_levels) {
+		data->addr = ALIGN(data->addr + 1, kvm_granule_size(level - 1));
+		return 0;
+	}
 ...
 }
