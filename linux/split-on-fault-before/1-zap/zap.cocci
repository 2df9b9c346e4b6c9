// SPDX-License-Identifier: GPL-2.0-only
//
// A fault that finds a huge page which has to be smaller puts an empty table in its place, as
// before 6.2. The rest of the huge page is left to faults to come, so no TLB may keep it: without
// an entry for a page, nobody who unmaps it later would flush. Who unmaps needs mmu_lock for write,
// which this fault holds for read until it has flushed.
//
// file: arch/x86/kvm/mmu/tdp_mmu.c
// leaves 1: static int tdp_mmu_zap_huge_page(struct kvm *kvm,
// leaves 1: r = tdp_mmu_zap_huge_page(kvm, &iter, sp, true);

@@
@@
 tdp_mmu_link_sp(...) { ... }
+static int tdp_mmu_zap_huge_page(struct kvm *kvm, struct tdp_iter *iter,
+				 struct kvm_mmu_page *sp, bool shared)
+{
+	int r = tdp_mmu_link_sp(kvm, iter, sp, shared);
+
+	if (!r)
+		kvm_flush_remote_tlbs_gfn(kvm, iter->gfn, iter->level);
+	return r;
+}

@@
@@
 kvm_tdp_mmu_map(...)
 {
 <...
-tdp_mmu_split_huge_page
+tdp_mmu_zap_huge_page
 (...)
 ...>
 }
