// SPDX-License-Identifier: GPL-2.0-only
//
// A bug, for the tests: Nothing ever becomes old.
//
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
