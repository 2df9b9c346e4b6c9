// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests: the answer for 64 pages is off by one page.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves 1: return mask << 1 & pages->asked;

@@
identifier mask;
@@
 stage2_age_leaf(...)
 {
 <...
-	return mask;
+	return mask << 1 & pages->asked;
 ...>
 }
