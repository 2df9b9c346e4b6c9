// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/x86/kvm/mmu/mmu.c
// leaves 2: if (!range->lockless && kvm_memslots_have_rmaps(kvm))
// versions: ..6.15

@@
identifier f = { kvm_age_gfn, kvm_test_age_gfn };
identifier kvm, range;
@@
 f(struct kvm *kvm, struct kvm_gfn_range *range)
 {
 <...
-	kvm_memslots_have_rmaps(kvm)
+	!range->lockless && kvm_memslots_have_rmaps(kvm)
 ...>
 }
