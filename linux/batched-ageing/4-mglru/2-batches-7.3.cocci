// SPDX-License-Identifier: GPL-2.0-only
//
// file: mm/vmscan.c
// leaves 1: clear_young_ptes_batched(&batch, args->vma, addr, end, cur_pte, ptent, nr,
// leaves 1: clear_young_ptes_batched(&batch, vma, addr, end, pte, ptent, nr,
// leaves 2: struct mmu_notifier_age batch = {};
// versions: 7.0..

@@
identifier walk, args, memcg, pgdat;
@@
 walk_pte_range(...)
 {
 ...
 struct lru_gen_mm_walk *walk = args->private;
+	struct mmu_notifier_age batch = {};
 struct mem_cgroup *memcg = lruvec_memcg(walk->lruvec);
 struct pglist_data *pgdat = lruvec_pgdat(walk->lruvec);
 <...
-	test_and_clear_young_ptes_notify(args->vma, addr, cur_pte, nr)
+	clear_young_ptes_batched(&batch, args->vma, addr, end, cur_pte, ptent, nr,
+				 memcg, pgdat)
 ...>
 }

// The page itself is asked about before the loop, with its neighbours' bits left alone.
@@
identifier vma, memcg, pgdat;
expression start;
@@
 lru_gen_look_around(...)
 {
 ...
 struct mem_cgroup *memcg;
+	struct mmu_notifier_age batch = {};
 struct pglist_data *pgdat = ...;
 ...
 for (i = 0, addr = start; ...; ...) {
 <...
-	test_and_clear_young_ptes_notify(vma, addr, pte, nr)
+	clear_young_ptes_batched(&batch, vma, addr, end, pte, ptent, nr,
+				 memcg, pgdat)
 ...>
 }
 ...
 }
