// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests: the answer for 64 pages says that unmapped pages were accessed.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves 1: if (kvm_pte_valid(ctx->old) && new == ctx->old)

@@
identifier ctx, new;
@@
 stage2_age_pages_walker(...)
 {
 <...
-	!kvm_pte_valid(ctx->old) || new == ctx->old
+	kvm_pte_valid(ctx->old) && new == ctx->old
 ...>
 }
