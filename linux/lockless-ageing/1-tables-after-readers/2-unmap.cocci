// SPDX-License-Identifier: GPL-2.0-only
//
// The hypervisor of pKVM has no shared walks, and no such operation.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves 1: mm_ops->put_table(childp);

@@
identifier childp, mm_ops;
@@
 stage2_unmap_walker(...)
 {
 <...
 if (childp)
-	mm_ops->put_page(childp);
+{
+	if (mm_ops->put_table)
+		mm_ops->put_table(childp);
+	else
+		mm_ops->put_page(childp);
+}
 ...>
 }
