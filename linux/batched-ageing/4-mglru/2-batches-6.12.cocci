// SPDX-License-Identifier: GPL-2.0-only
//
// file: mm/vmscan.c
// leaves 2: struct mmu_notifier_age batch = {};
// versions: ..7.0

@@
identifier walk, args, memcg;
@@
 walk_pte_range(...)
 {
 ...
 struct lru_gen_mm_walk *walk = args->private;
+	struct mmu_notifier_age batch = {};
 struct mem_cgroup *memcg = lruvec_memcg(walk->lruvec);
 ...
 }

@@
identifier folio, memcg, can_swap;
@@
 lru_gen_look_around(...)
 {
 ...
 bool can_swap = !folio_is_file_lru(folio);
+	struct mmu_notifier_age batch = {};
 struct mem_cgroup *memcg = folio_memcg(folio);
 ...
 }
