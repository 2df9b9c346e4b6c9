// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests: the answer for 64 pages is off by one page.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves 1: pages->young |= mask << 1 & pages->asked;

@@
identifier pages, mask;
@@
 stage2_age_leaf(...)
 {
 <...
-	pages->young |= mask;
+	pages->young |= mask << 1 & pages->asked;
 ...>
 }
