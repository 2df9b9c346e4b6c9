// SPDX-License-Identifier: GPL-2.0-only
//
// Trees from 6.15 on have it.
//
// file: virt/kvm/kvm_main.c
// leaves 1: bool lockless;
// leaves 2: .lockless = IS_ENABLED(CONFIG_KVM_MMU_LOCKLESS_AGING),
// leaves 2: !range->lockless
// versions: ..6.15

@@
@@
 struct kvm_mmu_notifier_range {
 	...
 	bool may_block;
+	bool lockless;
 };

@@
iterator name kvm_for_each_memslot_in_hva_range;
identifier range, kvm, r;
@@
 __kvm_handle_hva_range(struct kvm *kvm, const struct kvm_mmu_notifier_range *range)
 {
 <...
(
+	/* Lockless ranges use neither on_lock() nor a NULL handler. */
+	if (!range->lockless) {
 	KVM_MMU_LOCK(kvm);
+	}
|
-	if (r.found_memslot)
+	if (r.found_memslot && !range->lockless)
 	KVM_MMU_UNLOCK(kvm);
)
 ...>
 }

@@
identifier range, f;
@@
 f(...)
 {
 <...
 const struct kvm_mmu_notifier_range range = {
 	.on_lock = (void *)kvm_null_fn,
+	.lockless = IS_ENABLED(CONFIG_KVM_MMU_LOCKLESS_AGING),
 };
 ...>
 }
