// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests: the answer for 64 pages says that unmapped pages were accessed.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves 1: if (!mask || (kvm_pte_valid(old) && new == old))

@@
identifier old, new, mask;
@@
 stage2_age_leaf(...)
 {
 <...
-	!mask || !kvm_pte_valid(old) || new == old
+	!mask || (kvm_pte_valid(old) && new == old)
 ...>
 }
