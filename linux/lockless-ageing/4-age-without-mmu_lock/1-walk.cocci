// SPDX-License-Identifier: GPL-2.0-only
//
// The hypervisor of pKVM ages too, under its own lock, and has no shared walks. A walk that goes on
// after -EAGAIN has to ask for it in later trees, and its caller warns of what is returned: a lost
// race is no error.
//
// file: arch/arm64/kvm/hyp/pgtable.c
// leaves 1: if (data->mkold)
// leaves 1: is_nvhe_hyp_code() ? 0 : KVM_PGTABLE_WALK_SHARED;

@@
identifier ctx, data, new;
@@
 stage2_age_walker(const struct kvm_pgtable_visit_ctx *ctx, ...)
 {
 ...
-	data->young = true;
-	if (data->mkold && !stage2_try_set_pte(ctx, new))
-		return -EAGAIN;
+	data->young = true;
+
+	/*
+	 * The caller may not hold mmu_lock. If the cmpxchg fails, the entry is
+	 * already young or gone. Nothing to do.
+	 */
+	if (data->mkold)
+		stage2_try_set_pte(ctx, new);
 ...
 }

@@
identifier data;
@@
 kvm_pgtable_stage2_test_clear_young(...)
 {
+	enum kvm_pgtable_walk_flags shared = is_nvhe_hyp_code() ? 0 : KVM_PGTABLE_WALK_SHARED;
 struct stage2_age_data data = ...;
 <...
-	KVM_PGTABLE_WALK_LEAF
+	KVM_PGTABLE_WALK_LEAF | shared
 ...>
 }
