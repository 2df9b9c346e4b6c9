// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests: a question that clears accessed bits only tests them.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves 1: if (false)

@@
identifier pages;
@@
 stage2_age_leaf(...)
 {
 <...
-	pages->clear
+	false
 ...>
 }
