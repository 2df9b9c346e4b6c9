// SPDX-License-Identifier: GPL-2.0-only
//
// file: virt/kvm/kvm_main.c
// leaves 1: gfn_range.lockless = range->lockless;
// versions: ..6.15

@@
iterator name kvm_for_each_memslot_in_hva_range;
identifier kvm, range, gfn_range;
@@
 __kvm_handle_hva_range(struct kvm *kvm, const struct kvm_mmu_notifier_range *range)
 {
 <...
 gfn_range.may_block = range->may_block;
+gfn_range.lockless = range->lockless;
 ...>
 }
