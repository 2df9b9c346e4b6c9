// SPDX-License-Identifier: GPL-2.0-only
//
// file: mm/vmscan.c
// leaves 1: struct lru_gen_answer answer = {};
// leaves 1: current->reclaim_state->answer = &answer;
// leaves 1: current->reclaim_state->answer = NULL;

@@
@@
 evict_folios(...)
 {
 ...
 struct lru_gen_mm_walk *walk;
+	struct lru_gen_answer answer = {};
 ...
+	current->reclaim_state->answer = &answer;
 reclaimed = shrink_folio_list(...);
+	current->reclaim_state->answer = NULL;
 ...
 }
