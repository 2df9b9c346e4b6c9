// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests: ageing without the lock stores an entry without looking whether another
// has changed it.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves 1: WRITE_ONCE(ctx->ptep[0], new);

@@
@@
 stage2_age_walker(...)
 {
 <...
-	stage2_try_set_pte(ctx, new);
+	WRITE_ONCE(ctx->ptep[0], new);
 ...>
 }
