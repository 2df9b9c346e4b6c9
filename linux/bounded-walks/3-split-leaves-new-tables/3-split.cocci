// SPDX-License-Identifier: GPL-2.0-only
//
// The visitor builds down to pages if the cache has pages for it. That is so for the whole walk if
// it has them for one block of level 1, and the range lies in one entry of level 1: it holds that
// block, or blocks of level 2, which take one page each.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves 1: .skip_new = mc->nobjs > PTRS_PER_PTE &&
// leaves 1: (addr ^ (addr + size - 1)) < kvm_granule_size(1),

@@
identifier walker, addr, size, mc;
@@
 kvm_pgtable_stage2_split(struct kvm_pgtable *pgt, u64 addr, u64 size, struct kvm_mmu_memory_cache *mc)
 {
 ...
 struct kvm_pgtable_walker walker = {
 	.cb = stage2_split_walker,
+	.skip_new = mc->nobjs > PTRS_PER_PTE &&
+		    (addr ^ (addr + size - 1)) < kvm_granule_size(1),
 };
 ...
 }
