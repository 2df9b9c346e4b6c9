// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests: Nothing ever becomes old.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves: false && !stage2_try_set_pte

@@

@@
 stage2_age_walker(...)
 {
 <...
-data->mkold
+false
 && !stage2_try_set_pte(ctx, new)
 ...>
 }
